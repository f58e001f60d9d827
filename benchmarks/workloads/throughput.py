"""Throughput: workflows of ten steps that do nothing, 100 at a time.

The steps cost nothing, so the measured cost is that of the engine: advancing runs, encoding, committing, starting the
next step. For every engine, the figure is the number of durable steps per second in a single process. For perdure,
these subjects show where the time is spent:

    memory          the engine on the in-memory store: the cost of the engine
    store           the same batches of writes through the SQLite store without an engine: checking and writing
    raw, sqlite     the same rows in the same transactions through apsw alone: the cost of SQLite and the disk
    raw, postgres   the same through asyncpg alone
    raw, redis      the same bytes through redis-py alone

The raw subjects first record a run of the engine, so that they write the rows and batches of this workload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.comparison import Comparison
from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.raw_servers import RecordingPostgresStore, RecordingRedisStore, write_raw_postgres, write_raw_redis
from benchmarks.raw_sqlite import commit_recording, trace_rows, write_raw
from benchmarks.recording_stores import CountingSqliteStore, Recording
from perdure import Context, Engine, step, workflow
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store

STEPS = 10


@step
async def noop(n: int) -> int:
    return n


@workflow
async def ten_steps(ctx: Context, n: int) -> int:
    for _ in range(STEPS):
        n = await noop(n)
    return n


def memory(setting: Setting) -> Measures:
    seconds = asyncio.run(_execute(MemoryStore(), setting))
    return {"steps_per_s": setting.sizes["runs"] * STEPS / seconds}


def store(setting: Setting) -> Measures:
    seconds = asyncio.run(commit_recording(_record(setting, "store"), setting.folder / "store.db"))
    return {"steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds)}


def raw(setting: Setting) -> Measures:
    store = _record_run(setting, "raw")
    assert store.recording is not None
    transactions = asyncio.run(trace_rows(store.recording, setting.folder / "raw-traced.db"))
    seconds = asyncio.run(write_raw(transactions, setting.folder / "raw.db"))
    runs = setting.sizes["runs"]
    return {
        "steps_per_s": runs * STEPS / sum(seconds),
        "batch": store.writes / store.calls["commit"],
        "other_calls_per_run": (store.calls["all"] - store.calls["commit"]) / runs,
    }


def raw_postgres(setting: Setting) -> Measures:
    url = setting.urls["postgres"]
    store = RecordingPostgresStore(f"{url}&schema=recorded")
    asyncio.run(_execute(store, setting, after_warm_up=store.clear))
    seconds = asyncio.run(write_raw_postgres(url, store.recording.batches, "recorded"))
    return _raw_measures(setting, store.recording, seconds)


def raw_redis(setting: Setting) -> Measures:
    url = setting.urls["redis"]
    store = RecordingRedisStore(f"{url}?prefix=recorded")
    asyncio.run(_execute(store, setting, after_warm_up=store.clear))
    seconds = asyncio.run(write_raw_redis(url, store.recording.batches))
    return _raw_measures(setting, store.recording, seconds)


def _raw_measures(setting: Setting, recording: Recording, seconds: list[float]) -> Measures:
    return {
        "steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds),
        "batch": sum(map(len, recording.batches)) / len(recording.batches),
    }


def _record(setting: Setting, name: str) -> Recording:
    """Return the batches that the engine commits in this workload."""
    recording = _record_run(setting, name).recording
    assert recording is not None
    return recording


def _record_run(setting: Setting, name: str) -> CountingSqliteStore:
    store = CountingSqliteStore(str(Path(setting.folder) / f"{name}-recorded.db"), record=True)
    asyncio.run(_execute(store, setting, after_warm_up=store.clear))
    return store


async def _execute(store: Store, setting: Setting, after_warm_up: Callable[[], None] = lambda: None) -> float:
    """Execute all runs with fixed concurrency. Return the seconds from the first start to the last result."""
    at_once = setting.sizes["at_once"]
    async with Engine(store, workflows=[ten_steps]) as engine:
        await _run_concurrently(engine, setting.sizes["warm_up"], at_once)
        after_warm_up()
        started_at = perf_counter()
        await _run_concurrently(engine, setting.sizes["runs"], at_once)
        return perf_counter() - started_at


async def _run_concurrently(engine: Engine, runs: int, at_once: int) -> None:
    numbers = iter(range(runs))

    async def run_sequentially() -> None:
        for number in numbers:
            assert await engine.execute(ten_steps, number) == number

    await asyncio.gather(*(run_sequentially() for _ in range(at_once)))


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _share_of_raw(store: str, measured: Round) -> float:
    return 100 * measured[f"perdure-{store}"]["steps_per_s"] / measured[f"raw, {store}"]["steps_per_s"]


WORKLOAD = Workload(
    title="10 steps that do nothing, {at_once} runs at a time",
    compared=[
        Comparison(
            "steps_per_s",
            "durable steps",
            "steps/s",
            targets={
                ("sqlite", "dbos"): 60,
                ("sqlite", "restate"): 10,
                ("sqlite", "rivet"): 5,
                ("postgres", "dbos"): 40,
                ("postgres", "restate"): 8,
                ("postgres", "absurd"): 8,
                ("redis", "perdure"): 1,
            },
        )
    ],
    subjects={
        "memory": memory,
        "store": store,
        "raw, sqlite": raw,
        "raw, postgres": raw_postgres,
        "raw, redis": raw_redis,
    },
    needs={"raw, postgres": ("postgres",), "raw, redis": ("redis",)},
    figures=[
        Figure("raw rate (same rows, same batches), SQLite", "steps/s", partial(_of, "raw, sqlite", "steps_per_s")),
        Figure("share of the raw rate, SQLite", "%", partial(_share_of_raw, "sqlite"), at_least=10),
        Figure("raw rate, PostgreSQL", "steps/s", partial(_of, "raw, postgres", "steps_per_s")),
        Figure("share of the raw rate, PostgreSQL", "%", partial(_share_of_raw, "postgres"), at_least=15),
        Figure("raw rate, Redis", "steps/s", partial(_of, "raw, redis", "steps_per_s")),
        Figure("share of the raw rate, Redis", "%", partial(_share_of_raw, "redis"), at_least=15),
        Figure("store alone (same batches), SQLite", "steps/s", partial(_of, "store", "steps_per_s")),
        Figure("engine alone, in memory", "steps/s", partial(_of, "memory", "steps_per_s")),
        Figure("writes per commit, SQLite", "", partial(_of, "raw, sqlite", "batch")),
        Figure("writes per commit, PostgreSQL", "", partial(_of, "raw, postgres", "batch")),
        Figure("writes per commit, Redis", "", partial(_of, "raw, redis", "batch")),
        Figure("other store calls per run", "", partial(_of, "raw, sqlite", "other_calls_per_run")),
    ],
    sizes={"runs": 1_500, "at_once": 100, "warm_up": 200, "measured_ms": 2_000, "warm_up_ms": 500},
    quick={"runs": 30, "at_once": 10, "warm_up": 10, "measured_ms": 50, "warm_up_ms": 10},
)
