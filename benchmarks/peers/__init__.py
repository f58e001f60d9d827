"""One file per engine that is compared. `benchmarks/engines.py` says what has to be in it."""
