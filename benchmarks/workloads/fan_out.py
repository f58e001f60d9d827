"""Fan-out: one run with 1,000 children that it starts at once and waits for, and one with 1,000 steps at once."""

from benchmarks.comparison import Comparison
from benchmarks.harness import Workload

_SERVER = {"dbos": 20, "restate": 4}

WORKLOAD = Workload(
    title="one run, {width:,} children; one run, {width:,} steps at once",
    compared=[
        Comparison(
            "children_s",
            "children",
            "s",
            more_is_better=False,
            targets={
                ("sqlite", "dbos"): 30,
                **{(store, peer): times for store in ("postgres", "redis") for peer, times in _SERVER.items()},
            },
        ),
        Comparison("parallel_s", "steps at once", "s", more_is_better=False),
    ],
    subjects={},
    figures=[],
    sizes={"width": 1_000, "warm_up": 10},
    quick={"width": 20, "warm_up": 2},
)
