"""Throughput: workflows of ten steps that do nothing, 100 at a time.

The steps cost nothing, so that what is left is the engine: deciding, encoding, committing, starting the next step. It
says how many durable steps a second a single process can do, for every engine; and where the rest goes, for ours:

    memory          the engine on a store that keeps nothing: what deciding costs
    store           the same batches of writes given to the SQLite store without an engine: judging and keeping
    raw, sqlite     the same rows in the same transactions through apsw alone: what SQLite and the disk cost
    raw, postgres   the same through asyncpg alone, and
    raw, redis      the same bytes through redis-py alone

The raw subjects record a run of the engine before they write, so that rows and batches are those of this very workload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.comparison import Comparison
from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.raw_servers import RememberingPostgres, RememberingRedis, write_raw_postgres, write_raw_redis
from benchmarks.raw_sqlite import rows_of, through_the_store, write_raw
from benchmarks.recording_stores import Recording, WatchedStore
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
    seconds = asyncio.run(through_the_store(_record(setting, "store"), setting.folder / "store.db"))
    return {"steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds)}


def raw(setting: Setting) -> Measures:
    watched = _recorded(setting, "raw")
    assert watched.recording is not None
    transactions = asyncio.run(rows_of(watched.recording, setting.folder / "raw-traced.db"))
    seconds = asyncio.run(write_raw(transactions, setting.folder / "raw.db"))
    runs = setting.sizes["runs"]
    return {
        "steps_per_s": runs * STEPS / sum(seconds),
        "batch": watched.writes / watched.calls["commit"],
        "other_calls_per_run": (watched.calls["all"] - watched.calls["commit"]) / runs,
    }


def raw_postgres(setting: Setting) -> Measures:
    url = setting.urls["postgres"]
    store = RememberingPostgres(f"{url}&schema=recorded")
    asyncio.run(_execute(store, setting, warmed_up=store.forget))
    seconds = asyncio.run(write_raw_postgres(url, store.recording.batches, "recorded"))
    return _raw_measures(setting, store.recording, seconds)


def raw_redis(setting: Setting) -> Measures:
    url = setting.urls["redis"]
    store = RememberingRedis(f"{url}?prefix=recorded")
    asyncio.run(_execute(store, setting, warmed_up=store.forget))
    seconds = asyncio.run(write_raw_redis(url, store.recording.batches))
    return _raw_measures(setting, store.recording, seconds)


def _raw_measures(setting: Setting, recording: Recording, seconds: list[float]) -> Measures:
    return {
        "steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds),
        "batch": sum(map(len, recording.batches)) / len(recording.batches),
    }


def _record(setting: Setting, name: str) -> Recording:
    """What the engine commits when it does this workload, untimed."""
    recording = _recorded(setting, name).recording
    assert recording is not None
    return recording


def _recorded(setting: Setting, name: str) -> WatchedStore:
    watched = WatchedStore(str(Path(setting.folder) / f"{name}-recorded.db"), remember=True)
    asyncio.run(_execute(watched, setting, warmed_up=watched.forget))
    return watched


async def _execute(store: Store, setting: Setting, warmed_up: Callable[[], None] = lambda: None) -> float:
    """All runs, some at a time; the seconds from the first start to the last result."""
    at_once = setting.sizes["at_once"]
    async with Engine(store, workflows=[ten_steps]) as engine:
        await _some_at_a_time(engine, setting.sizes["warm_up"], at_once)
        warmed_up()
        began = perf_counter()
        await _some_at_a_time(engine, setting.sizes["runs"], at_once)
        return perf_counter() - began


async def _some_at_a_time(engine: Engine, runs: int, at_once: int) -> None:
    numbers = iter(range(runs))

    async def one_after_the_other() -> None:
        for number in numbers:
            assert await engine.execute(ten_steps, number) == number

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _share_of(store: str, measured: Round) -> float:
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
        Figure("the raw rate: same rows, same batches, SQLite", "steps/s", partial(_of, "raw, sqlite", "steps_per_s")),
        Figure("share of the raw rate, SQLite", "%", partial(_share_of, "sqlite"), at_least=10),
        Figure("the raw rate, PostgreSQL", "steps/s", partial(_of, "raw, postgres", "steps_per_s")),
        Figure("share of the raw rate, PostgreSQL", "%", partial(_share_of, "postgres"), at_least=15),
        Figure("the raw rate, Redis", "steps/s", partial(_of, "raw, redis", "steps_per_s")),
        Figure("share of the raw rate, Redis", "%", partial(_share_of, "redis"), at_least=15),
        Figure("same batches, the store alone, SQLite", "steps/s", partial(_of, "store", "steps_per_s")),
        Figure("steps in memory (the engine alone)", "steps/s", partial(_of, "memory", "steps_per_s")),
        Figure("writes per commit, SQLite", "", partial(_of, "raw, sqlite", "batch")),
        Figure("writes per commit, PostgreSQL", "", partial(_of, "raw, postgres", "batch")),
        Figure("writes per commit, Redis", "", partial(_of, "raw, redis", "batch")),
        Figure("other store calls per run", "", partial(_of, "raw, sqlite", "other_calls_per_run")),
    ],
    sizes={"runs": 1_500, "at_once": 100, "warm_up": 200, "measured_ms": 2_000, "warm_up_ms": 500},
    quick={"runs": 30, "at_once": 10, "warm_up": 10, "measured_ms": 50, "warm_up_ms": 10},
)
