"""Membership of workers: who is alive, takeover from dead workers, assignment of shards. Knows the store, not runs."""
