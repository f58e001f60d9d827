"""Latency: a run of one step, one at a time, from its start to its result.

Commits are not shared here, so a run of perdure pays for two: its start, and its step together with its end. The raw
figure is those two commits alone, the same rows through apsw. The memory figure is everything except the commits.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from benchmarks.comparison import Comparison
from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.raw_sqlite import trace_rows, write_raw
from benchmarks.recording_stores import CountingSqliteStore
from perdure import Context, Engine, step, workflow
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store

COMMITS_PER_RUN = 2


@step
async def noop(n: int) -> int:
    return n


@workflow
async def one_step(ctx: Context, n: int) -> int:
    return await noop(n)


def memory(setting: Setting) -> Measures:
    return _percentiles(asyncio.run(_execute(MemoryStore(), setting)))


def raw(setting: Setting) -> Measures:
    store = CountingSqliteStore(str(setting.folder / "raw-recorded.db"), record=True)
    asyncio.run(_execute(store, setting, after_warm_up=store.clear))
    assert store.recording is not None
    transactions = asyncio.run(trace_rows(store.recording, setting.folder / "raw-traced.db"))
    seconds = asyncio.run(write_raw(transactions, setting.folder / "raw.db"))
    raw_seconds = [sum(seconds[first : first + COMMITS_PER_RUN]) for first in range(0, len(seconds), COMMITS_PER_RUN)]
    return {**_percentiles(raw_seconds), "commits_per_run": store.calls["commit"] / setting.sizes["runs"]}


async def _execute(store: Store, setting: Setting, after_warm_up: Callable[[], None] = lambda: None) -> list[float]:
    """Return the seconds of each run."""
    seconds = []
    async with Engine(store, workflows=[one_step]) as engine:
        for number in range(setting.sizes["warm_up"]):
            await engine.execute(one_step, number)
        after_warm_up()
        for number in range(setting.sizes["runs"]):
            started_at = perf_counter()
            await engine.execute(one_step, number)
            seconds.append(perf_counter() - started_at)
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
        Figure("two raw commits, SQLite, p50", "ms", partial(_of, "raw", "p50_ms")),
        Figure("two raw commits, SQLite, p99", "ms", partial(_of, "raw", "p99_ms")),
        Figure("run over its raw commits, SQLite, p50", "x", _over_raw),
        Figure("in memory, p50", "ms", partial(_of, "memory", "p50_ms")),
        Figure("in memory, p99", "ms", partial(_of, "memory", "p99_ms")),
        Figure("commits per run", "", partial(_of, "raw", "commits_per_run"), at_most=2),
    ],
    sizes={"runs": 500, "warm_up": 20, "warm_up_ms": 1_000, "most_ms": 1_500},
    quick={"runs": 20, "warm_up": 5, "warm_up_ms": 20, "most_ms": 100},
)
