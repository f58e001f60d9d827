"""Recovery: a process with 1,000 unfinished runs is killed (SIGKILL), and a new process finishes them.

Each run has done five steps and waits in the sixth. The time is from the kill to the last result, including the start
of the new process and its imports. Databases, and the server of an engine that has one, keep running.
"""

from benchmarks.comparison import Comparison
from benchmarks.harness import Workload

_SERVER = {"dbos": 20, "restate": 3}

WORKLOAD = Workload(
    title="{runs:,} unfinished runs of a killed process",
    compared=[
        Comparison(
            "recovery_s",
            "until all have ended",
            "s",
            more_is_better=False,
            targets={
                ("sqlite", "dbos"): 20,
                ("sqlite", "rivet"): 2,
                **{(store, peer): times for store in ("postgres", "redis") for peer, times in _SERVER.items()},
            },
        )
    ],
    subjects={},
    figures=[],
    sizes={"runs": 1_000},
    quick={"runs": 20},
)
