"""For those who test: a clock moved by hand, stores that fail on demand, crashes everywhere, the contract of stores."""

from perdure.testing.clock import VirtualClock
from perdure.testing.crashes import Crash, CrashReport, crash_everywhere
from perdure.testing.faults import FaultyStore
from perdure.testing.harness import Execution, Harness, WatchedEngine, on_virtual_time
from perdure.testing.store_contract import StoreContract

__all__ = [
    "Crash",
    "CrashReport",
    "Execution",
    "FaultyStore",
    "Harness",
    "StoreContract",
    "VirtualClock",
    "WatchedEngine",
    "crash_everywhere",
    "on_virtual_time",
]
