"""Real servers for tests, each started by the suite itself: never one that merely happens to listen somewhere."""
