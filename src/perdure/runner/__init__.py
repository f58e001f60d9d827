"""The pure core: interpreting a workflow. History and inputs in, a Turn out.

No clock, no store, no network, no other run. `Runner` (runner.py) is the door; behind it a deterministic event loop
(loop.py), the calls behind the context (facade.py), what was asked for (ledger.py) against what is recorded
(history.py), the names of things (locations.py), what is due when (alarms.py), and how a run is dropped from memory
(closing.py).
"""
