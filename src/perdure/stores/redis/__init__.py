"""Redis store."""
