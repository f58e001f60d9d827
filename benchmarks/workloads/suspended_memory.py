"""Memory of suspended runs in the worker: those that were evicted, and those that are still in its cache.

An evicted run is in the store and nowhere else, so that it should cost nothing. One in the cache costs its coroutine
and what it has waited for, and saves a replay. Measured on SQLite, once as the system sees it, less what SQLite says of
itself, and once by Python's count of its own objects, which has less noise but slows everything (`traced`). SQLite's
page cache is bounded, but grows with the file until it is full; where nothing is expected it is filled before. What is
left there is noise: some 80 KB either way at any number of runs, so that there are many of them.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from functools import partial

import apsw

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.machine_info import resident_bytes
from benchmarks.waiting_workflows import fall_asleep, sleeper
from perdure import Engine, EngineConfig
from perdure.stores.sqlite.store import SqliteStore

AT_ONCE = 50


def measure(setting: Setting, *, evicted: bool, traced: bool) -> Measures:
    if traced:
        tracemalloc.start()
    return asyncio.run(_measure(setting, evicted, traced))


async def _measure(setting: Setting, evicted: bool, traced: bool) -> Measures:
    runs = setting.sizes["evicted" if evicted else "resident"]
    warm_up = setting.sizes["fill_cache" if evicted and not traced else "warm_up"]
    config = EngineConfig(resident_runs=2 * AT_ONCE if evicted else 10 * (runs + warm_up))
    name = f"{'evicted' if evicted else 'resident'}{'-traced' if traced else ''}.db"
    async with Engine(SqliteStore(str(setting.folder / name)), workflows=[sleeper], config=config) as engine:
        await _start(engine, warm_up)
        before = _memory(traced)
        await _start(engine, runs)
        return {"bytes_per_run": (_memory(traced) - before) / runs}


async def _start(engine: Engine, runs: int) -> None:
    for _ in range(0, runs, AT_ONCE):
        await fall_asleep(engine, AT_ONCE)


def _memory(traced: bool) -> int:
    if not traced:
        return resident_bytes() - apsw.memory_used()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _bytes(subject: str, measured: Round) -> float:
    return measured[subject]["bytes_per_run"]


WORKLOAD = Workload(
    title="memory of suspended runs in the worker",
    subjects={
        "evicted": partial(measure, evicted=True, traced=False),
        "evicted, traced": partial(measure, evicted=True, traced=True),
        "resident": partial(measure, evicted=False, traced=False),
        "resident, traced": partial(measure, evicted=False, traced=True),
    },
    figures=[
        Figure("an evicted run, Python's count", "bytes", partial(_bytes, "evicted, traced"), at_most=16),
        Figure("an evicted run, as the system sees it", "bytes", partial(_bytes, "evicted")),
        Figure("a resident run, Python's count", "bytes", partial(_bytes, "resident, traced")),
        Figure("a resident run, as the system sees it", "bytes", partial(_bytes, "resident")),
    ],
    sizes={"evicted": 10_000, "resident": 3_000, "warm_up": 2_000, "fill_cache": 28_000},
    quick={"evicted": 100, "resident": 100, "warm_up": 100, "fill_cache": 100},
)
