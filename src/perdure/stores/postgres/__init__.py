"""The PostgreSQL store: a schema of a database behind the `Store` protocol."""
