"""Test helpers: an engine that skips time, step mocks, history replay, crash injection, and the store contract.

docs/testing.md shows how to use them. The pytest plugin is the separate module `perdure_pytest`, so that pytest can
load the plugin without importing perdure.
"""

from perdure.testing.clock import VirtualClock
from perdure.testing.crash_everywhere import Crash, CrashReport, crash_everywhere
from perdure.testing.engine import Recorded, TestEngine
from perdure.testing.faults import FaultyStore
from perdure.testing.harness import Execution, Harness, WatchedEngine, on_virtual_time
from perdure.testing.mocks import MockCall, StepMock
from perdure.testing.replay import replay
from perdure.testing.store_contract import StoreContract

__all__ = [
    "Crash",
    "CrashReport",
    "Execution",
    "FaultyStore",
    "Harness",
    "MockCall",
    "Recorded",
    "StepMock",
    "StoreContract",
    "TestEngine",
    "VirtualClock",
    "WatchedEngine",
    "crash_everywhere",
    "on_virtual_time",
    "replay",
]
