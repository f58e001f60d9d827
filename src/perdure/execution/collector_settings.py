"""Settings of the garbage collector for a process that only executes runs. `perdure worker` applies them.

A full collection visits every object of the process. Runs break their own reference cycles, so it finds next to nothing
in them; with a thousand runs in memory it stops the event loop for 100 ms. A library must not configure the collector
of an application, so `Engine` and `Worker` do not.
"""

from __future__ import annotations

import gc

# Objects created before the youngest generation is collected, and collections of a generation before the next older one
# is collected. Cycles of user code are found by the first two; a full collection is rare.
THRESHOLDS = (2_000, 5, 1_000)


def tune_collector() -> None:
    """Exclude all objects that exist now from collections, and make full collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
