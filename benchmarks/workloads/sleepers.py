"""Many sleeping runs: a SQLite file with 100,000 of them, against an empty one.

A run that sleeps for a year is a row and a place in an index. A worker that opens such a file must begin to work as
soon as on an empty one, and must not hold anything for each of them.

The sleeping runs are copies of a real one: what the engine writes for a run that sleeps, written again under other ids.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.machine import resident_bytes
from benchmarks.sleeping import fall_asleep, sleeper
from benchmarks.watched import Recording, WatchedStore
from perdure import Context, Engine, EngineConfig, RunStatus, step, workflow
from perdure.ids import shard_of
from perdure.store.base import CommitTurn, CreateRun, Store
from perdure.store.sqlite import SqliteStore

SHARDS = EngineConfig().shards
BATCH = 2_000
BEGINNINGS: list[float] = []


@step
async def mark() -> None:
    BEGINNINGS.append(perf_counter())


@workflow
async def newcomer(ctx: Context) -> None:
    await mark()


def prepare(setting: Setting) -> Measures:
    recording = asyncio.run(_record_one(setting.folder / "model.db"))
    for name, runs in (("empty", 0), ("sleepers", setting.sizes["runs"])):
        asyncio.run(_fill(setting.folder / f"{name}.db", recording, runs))
    return {}


async def _record_one(path: Path) -> Recording:
    """What the engine writes for a run that falls asleep."""
    store = WatchedStore(str(path), synchronous="off", remember=True)
    async with Engine(store, workflows=[sleeper]) as engine:
        await fall_asleep(engine, 1)
    assert store.recording is not None
    return store.recording


async def _fill(path: Path, recording: Recording, runs: int) -> None:
    store = SqliteStore(str(path), synchronous="off")
    await store.open(shards=SHARDS)
    assert recording.worker is not None
    await store.renew(recording.worker)
    creations, turns = _copies(recording, runs)
    while batch := list(islice(creations, BATCH)):
        await store.commit(batch)
        await store.commit(list(islice(turns, BATCH)))
    await store.retire(recording.worker.id)
    await store.close()


def _copies(recording: Recording, runs: int) -> tuple[Iterator[CreateRun], Iterator[CommitTurn]]:
    model, turn = (batch[0] for batch in recording.batches)
    assert isinstance(model, CreateRun)
    assert isinstance(turn, CommitTurn)
    assert turn.patch is not None
    assert turn.patch.status is RunStatus.SUSPENDED
    ids = [f"{number:06}-{model.record.id}" for number in range(runs)]
    creations = (
        CreateRun(replace(model.record, id=id, created_by=id, shard=shard_of(id, SHARDS), seed=number))
        for number, id in enumerate(ids)
    )
    turns = (replace(turn, run_id=id, turn_id=f"{turn.turn_id}/{id}") for id in ids)
    return creations, turns


def empty(setting: Setting) -> Measures:
    return asyncio.run(_begin_to_work("empty", setting))


def sleepers(setting: Setting) -> Measures:
    return asyncio.run(_begin_to_work("sleepers", setting))


async def _begin_to_work(name: str, setting: Setting) -> Measures:
    """Open an engine, time the way to the first step of a new run, then let its duties go round a few times."""
    path = setting.folder / f"{name}.db"
    shutil.copy(setting.prepared / f"{name}.db", path)
    store: Store = SqliteStore(str(path))
    config = EngineConfig(sweep_interval=0.1)
    began = perf_counter()
    async with Engine(store, workflows=[sleeper, newcomer], config=config) as engine:
        await engine.execute(newcomer)
        await asyncio.sleep(setting.sizes["settle_ms"] / 1000)
        memory = resident_bytes()
    return {"first_step_ms": 1000 * (BEGINNINGS[0] - began), "memory": memory, "runs": setting.sizes["runs"]}


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _slower(measured: Round) -> float:
    return measured["sleepers"]["first_step_ms"] / measured["empty"]["first_step_ms"]


def _extra_memory(measured: Round) -> float:
    return (measured["sleepers"]["memory"] - measured["empty"]["memory"]) / 2**20


def _extra_bytes_per_run(measured: Round) -> float:
    return (measured["sleepers"]["memory"] - measured["empty"]["memory"]) / measured["sleepers"]["runs"]


WORKLOAD = Workload(
    title="{runs:,} sleeping runs in a SQLite file, against an empty one",
    prepare=prepare,
    subjects={"empty": empty, "sleepers": sleepers},
    figures=[
        Figure("first step of a new run, empty file", "ms", partial(_of, "empty", "first_step_ms")),
        Figure("first step of a new run, sleepers", "ms", partial(_of, "sleepers", "first_step_ms")),
        Figure("sleepers over empty", "x", _slower, at_most=2),
        Figure("more memory than on an empty file", "MiB", _extra_memory),
        Figure("the same for each sleeping run", "bytes", _extra_bytes_per_run),
    ],
    sizes={"runs": 100_000, "settle_ms": 1_000},
    quick={"runs": 1_000, "settle_ms": 100},
)
