"""Latency: a run of one step, one at a time, from its start to its result.

Nothing shares a commit here, so that a run of ours pays for two of its own: its start, and its step together with its
end. The raw figure is those two commits alone, the same rows through apsw; the memory figure is everything but them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from benchmarks.comparison import Comparison
from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.raw_sqlite import rows_of, write_raw
from benchmarks.recording_stores import WatchedStore
from perdure import Context, Engine, step, workflow
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store

COMMITS = 2  # of each run


@step
async def noop(n: int) -> int:
    return n


@workflow
async def one_step(ctx: Context, n: int) -> int:
    return await noop(n)


def memory(setting: Setting) -> Measures:
    return _percentiles(asyncio.run(_execute(MemoryStore(), setting)))


def raw(setting: Setting) -> Measures:
    watched = WatchedStore(str(setting.folder / "raw-recorded.db"), remember=True)
    asyncio.run(_execute(watched, setting, warmed_up=watched.forget))
    assert watched.recording is not None
    transactions = asyncio.run(rows_of(watched.recording, setting.folder / "raw-traced.db"))
    seconds = asyncio.run(write_raw(transactions, setting.folder / "raw.db"))
    raw_seconds = [sum(seconds[at : at + COMMITS]) for at in range(0, len(seconds), COMMITS)]
    return {**_percentiles(raw_seconds), "commits_per_run": watched.calls["commit"] / setting.sizes["runs"]}


async def _execute(store: Store, setting: Setting, warmed_up: Callable[[], None] = lambda: None) -> list[float]:
    """The seconds that each run took."""
    seconds = []
    async with Engine(store, workflows=[one_step]) as engine:
        for number in range(setting.sizes["warm_up"]):
            await engine.execute(one_step, number)
        warmed_up()
        for number in range(setting.sizes["runs"]):
            began = perf_counter()
            await engine.execute(one_step, number)
            seconds.append(perf_counter() - began)
    return seconds


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1000 * hundredths[49], "p99_ms": 1000 * hundredths[98]}


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _over_raw(measured: Round) -> float:
    return measured["perdure-sqlite"]["p50_ms"] / measured["raw"]["p50_ms"]


WORKLOAD = Workload(
    title="a run of one step, one at a time",
    compared=[
        Comparison(
            "p50_ms",
            "p50",
            "ms",
            more_is_better=False,
            targets={
                ("sqlite", "dbos"): 8,
                ("sqlite", "rivet"): 1,
                ("postgres", "dbos"): 4,
                ("postgres", "restate"): 4,
                ("redis", "dbos"): 8,
                ("redis-everysec", "dbos"): 8,
            },
        ),
        Comparison("p99_ms", "p99", "ms", more_is_better=False),
    ],
    subjects={"raw": raw, "memory": memory},
    figures=[
        Figure("its two commits, raw, SQLite, p50", "ms", partial(_of, "raw", "p50_ms")),
        Figure("its two commits, raw, SQLite, p99", "ms", partial(_of, "raw", "p99_ms")),
        Figure("a run over its commits, SQLite, p50", "x", _over_raw),
        Figure("in memory, p50", "ms", partial(_of, "memory", "p50_ms")),
        Figure("in memory, p99", "ms", partial(_of, "memory", "p99_ms")),
        Figure("commits per run", "", partial(_of, "raw", "commits_per_run"), at_most=2),
    ],
    sizes={"runs": 500, "warm_up": 20, "warm_up_ms": 1_000, "most_ms": 1_500},
    quick={"runs": 20, "warm_up": 5, "warm_up_ms": 20, "most_ms": 100},
)
