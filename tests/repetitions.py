"""How often tests repeat a scenario: a sample in `make test`, everything in `make test-long`.

A test that repeats a scenario many times (a crash at every commit, a kill again and again) is marked `long`.
`make test` runs it with a sample of the repetitions. `make test-long` sets PERDURE_TEST_LONG and runs the marked tests
with all of them.
"""

import os

LONG = os.environ.get("PERDURE_TEST_LONG") == "1"

# Odd numbers: crash points alternate between before and after a commit, so that a sample has both kinds.
_CRASH_INTERVALS = {"memory": 1, "sqlite": 3, "postgres": 7, "redis": 7}


def crash_interval(kind: str) -> int:
    """Return n if a test on this kind of store crashes at every n-th crash point."""
    return 1 if LONG else _CRASH_INTERVALS[kind]


def repetitions(sample: int, everything: int) -> int:
    """Return the number of repetitions: `sample` in `make test`, `everything` in `make test-long`."""
    return everything if LONG else sample
