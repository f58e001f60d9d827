"""One file per engine that is compared. `benchmarks/peer_protocol.py` says what has to be in it."""
