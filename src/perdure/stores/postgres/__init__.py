"""PostgreSQL store."""
