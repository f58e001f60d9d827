"""One file per compared engine. `benchmarks/peer_protocol.py` defines its contents."""
