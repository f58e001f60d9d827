"""Throughput: workflows of ten steps that do nothing, 100 at a time, on SQLite with `synchronous=FULL`.

The steps cost nothing, so that what is left is the engine: deciding, encoding, committing, starting the next step. It
says how many durable steps a second a single process can do, and the subjects say where the rest goes:

    sqlite   the whole engine
    memory   the engine on a store that keeps nothing: what deciding costs
    store    the same batches of writes given to the SQLite store without an engine: what judging and keeping costs
    raw      the same rows in the same transactions through apsw alone: what SQLite and the disk cost
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.raw import rows_of, through_the_store, write_raw
from benchmarks.watched import Recording, WatchedStore
from perdure import Context, Engine, step, workflow
from perdure.store.base import Store
from perdure.store.memory import MemoryStore

STEPS = 10


@step
async def noop(n: int) -> int:
    return n


@workflow
async def ten_steps(ctx: Context, n: int) -> int:
    for _ in range(STEPS):
        n = await noop(n)
    return n


def sqlite(setting: Setting) -> Measures:
    store = WatchedStore(str(setting.folder / "sqlite.db"))
    seconds = asyncio.run(_execute(store, setting, warmed_up=store.forget))
    runs = setting.sizes["runs"]
    return {
        "steps_per_s": runs * STEPS / seconds,
        "commits": store.calls["commit"],
        "batch": store.writes / store.calls["commit"],
        "other_calls_per_run": (store.calls["all"] - store.calls["commit"]) / runs,
    }


def memory(setting: Setting) -> Measures:
    seconds = asyncio.run(_execute(MemoryStore(), setting))
    return {"steps_per_s": setting.sizes["runs"] * STEPS / seconds}


def store(setting: Setting) -> Measures:
    seconds = asyncio.run(through_the_store(_record(setting, "store"), setting.folder / "store.db"))
    return {"steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds)}


def raw(setting: Setting) -> Measures:
    recording = _record(setting, "raw")
    transactions = asyncio.run(rows_of(recording, setting.folder / "raw-traced.db"))
    seconds = asyncio.run(write_raw(transactions, setting.folder / "raw.db"))
    return {
        "steps_per_s": setting.sizes["runs"] * STEPS / sum(seconds),
        "rows_per_s": sum(len(rows) for transaction in transactions for _, rows in transaction) / sum(seconds),
        "batch": sum(map(len, recording.batches)) / len(recording.batches),
    }


def _record(setting: Setting, name: str) -> Recording:
    """What the engine commits when it does this workload, untimed."""
    watched = WatchedStore(str(Path(setting.folder) / f"{name}-recorded.db"), remember=True)
    asyncio.run(_execute(watched, setting, warmed_up=watched.forget))
    assert watched.recording is not None
    return watched.recording


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


def _share_of(subject: str, measured: Round) -> float:
    return 100 * measured["sqlite"]["steps_per_s"] / measured[subject]["steps_per_s"]


WORKLOAD = Workload(
    title="10 steps that do nothing, {at_once} runs at a time",
    subjects={"sqlite": sqlite, "memory": memory, "store": store, "raw": raw},
    figures=[
        Figure("durable steps, SQLite", "steps/s", partial(_of, "sqlite", "steps_per_s"), at_least=15_000),
        Figure("the raw rate: same rows, same batches", "steps/s", partial(_of, "raw", "steps_per_s")),
        Figure("share of the raw rate", "%", partial(_share_of, "raw"), at_least=10),
        Figure("same batches, the store alone", "steps/s", partial(_of, "store", "steps_per_s")),
        Figure("steps in memory (the engine alone)", "steps/s", partial(_of, "memory", "steps_per_s")),
        Figure("commits", "", partial(_of, "sqlite", "commits")),
        Figure("writes per commit", "", partial(_of, "sqlite", "batch")),
        Figure("writes per commit, raw", "", partial(_of, "raw", "batch")),
        Figure("other store calls per run", "", partial(_of, "sqlite", "other_calls_per_run")),
    ],
    sizes={"runs": 3_000, "at_once": 100, "warm_up": 200},
    quick={"runs": 30, "at_once": 10, "warm_up": 10},
)
