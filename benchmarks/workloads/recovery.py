"""Recovery: a process is killed (SIGKILL) with 1,000 runs in the middle; a new one is started at once and ends them.

Each run has done five steps and waits in the sixth. The time is from the kill to the last result, with the start of the
new process and its imports. Databases, and the server of an engine that has one, live on.
"""

from benchmarks.comparison import Comparison
from benchmarks.harness import Workload

_SERVER = {"dbos": 20, "restate": 3}

WORKLOAD = Workload(
    title="{runs:,} runs in the middle of a process that is killed",
    compared=[
        Comparison(
            "recovery_s",
            "until all are done",
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
