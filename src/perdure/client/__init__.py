"""Client: calls about runs, without executing any."""
