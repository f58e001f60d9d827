"""Real servers for tests, started by the suite itself. A server that only happens to listen is never used."""
