"""Memory of suspended runs in the worker: evicted runs, and runs in its cache.

An evicted run is only in the store, so it should cost no memory. A cached run costs its coroutine and the objects that
it waits for, and saves a replay. Measured on SQLite in two ways. One is the memory of the process minus SQLite's own.
The other is Python's count of its objects (`traced`), which has less noise but slows everything down. SQLite's page
cache is bounded, but grows with the file until it is full. The cache is therefore filled before evicted runs are
measured. The remaining noise is about 80 KB in either direction at any number of runs, so there are many runs.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from functools import partial

import apsw

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.machine_info import process_memory_bytes
from benchmarks.waiting_workflows import sleeper, start_suspended
from perdure import Engine, EngineConfig
from perdure.stores.sqlite.store import SqliteStore

AT_ONCE = 50


def measure(setting: Setting, *, evicted: bool, traced: bool) -> Measures:
    if traced:
        tracemalloc.start()
    return asyncio.run(_measure(setting, evicted, traced))


async def _measure(setting: Setting, evicted: bool, traced: bool) -> Measures:
    runs = setting.sizes["evicted" if evicted else "cached"]
    warm_up = setting.sizes["fill_cache" if evicted and not traced else "warm_up"]
    config = EngineConfig(resident_runs=2 * AT_ONCE if evicted else 10 * (runs + warm_up))
    name = f"{'evicted' if evicted else 'cached'}{'-traced' if traced else ''}.db"
    async with Engine(SqliteStore(str(setting.folder / name)), workflows=[sleeper], config=config) as engine:
        await _start(engine, warm_up)
        before = _memory(traced)
        await _start(engine, runs)
        return {"bytes_per_run": (_memory(traced) - before) / runs}


async def _start(engine: Engine, runs: int) -> None:
    for _ in range(0, runs, AT_ONCE):
        await start_suspended(engine, AT_ONCE)


def _memory(traced: bool) -> int:
    if not traced:
        return process_memory_bytes() - apsw.memory_used()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _bytes(subject: str, measured: Round) -> float:
    return measured[subject]["bytes_per_run"]


WORKLOAD = Workload(
    title="memory of suspended runs in the worker",
    subjects={
        "evicted": partial(measure, evicted=True, traced=False),
        "evicted, traced": partial(measure, evicted=True, traced=True),
        "cached": partial(measure, evicted=False, traced=False),
        "cached, traced": partial(measure, evicted=False, traced=True),
    },
    figures=[
        Figure("an evicted run, Python's count", "bytes", partial(_bytes, "evicted, traced"), at_most=16),
        Figure("an evicted run, process memory", "bytes", partial(_bytes, "evicted")),
        Figure("a cached run, Python's count", "bytes", partial(_bytes, "cached, traced")),
        Figure("a cached run, process memory", "bytes", partial(_bytes, "cached")),
    ],
    sizes={"evicted": 10_000, "cached": 3_000, "warm_up": 2_000, "fill_cache": 28_000},
    quick={"evicted": 100, "cached": 100, "warm_up": 100, "fill_cache": 100},
)
