"""Fan-out: one run that starts 1,000 children at once and waits for them, and one run with 1,000 concurrent steps."""

from benchmarks.comparison import Comparison
from benchmarks.harness import Workload

_SERVER = {"dbos": 20, "restate": 4}

WORKLOAD = Workload(
    title="one run, {width:,} children; one run, {width:,} concurrent steps",
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
        Comparison("parallel_s", "concurrent steps", "s", more_is_better=False),
    ],
    subjects={},
    figures=[],
    sizes={"width": 1_000, "warm_up": 10},
    quick={"width": 20, "warm_up": 2},
)
