"""Many sleeping runs: a store with a million of them against an empty one; and ten thousand that wake at once.

A run that sleeps for a year is a row and a place in an index. A worker that opens such a store must begin to work as
soon as on an empty one, and must not hold anything for each of them.

    <store>, empty      open an engine on an empty store, until the first step of a new run begins
    <store>, sleepers   the same on a store full of sleeping runs, and the memory of the worker then
    <store>, wake       open an engine on a store whose sleeping runs are all due, until the last of them has ended

The sleeping runs are copies of a real one: what the engine writes for a run that sleeps, written again under other ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, time

from msgspec.structs import replace

from benchmarks.harness import Figure, Measures, Round, Setting, Subject, Workload
from benchmarks.machine_info import resident_bytes
from benchmarks.recording_stores import Recording, WatchedStore
from benchmarks.waiting_workflows import fall_asleep, sleeper, woken
from perdure import Context, Engine, EngineConfig, RunStatus, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.model.ids import shard_of
from perdure.stores.protocol import Store
from perdure.stores.writes import CommitTurn, CreateRun

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}
SHARDS = EngineConfig().shards
BATCH = 2_000
BEGINNINGS: list[float] = []


@step
async def mark() -> None:
    BEGINNINGS.append(perf_counter())


@workflow
async def newcomer(ctx: Context) -> None:
    await mark()


# --- stores full of them -------------------------------------------------------------------------------------------


def prepare(setting: Setting) -> Measures:
    asyncio.run(_fill_all(setting))
    return {}


async def _fill_all(setting: Setting) -> None:
    """All stores at once: most of the work is done by their servers."""
    recording = await _record_one(setting.folder / "model.db")
    await asyncio.gather(
        *(
            _fill(_url(store, name, setting.folder, setting.urls, careless=True), recording, runs)
            for store in STORES
            if store == "sqlite" or store in setting.urls
            for name, runs in (("empty", 0), ("sleepers", setting.sizes["runs"]))
        )
    )


def _url(store: str, name: str, folder: Path, urls: Mapping[str, str], *, careless: bool = False) -> str:
    """Where the sleepers of this name are. What is only filled need not wait for the disk."""
    if store == "sqlite":
        return f"sqlite:///{folder / name}.db" + ("?synchronous=off" if careless else "")
    if store == "postgres":
        return f"{urls[store]}&schema={name}" + ("&synchronous_commit=off" if careless else "")
    return f"{urls[store]}?prefix={name}"


async def _record_one(path: Path) -> Recording:
    """What the engine writes for a run that falls asleep."""
    store = WatchedStore(str(path), synchronous="off", remember=True)
    async with Engine(store, workflows=[sleeper]) as engine:
        await fall_asleep(engine, 1)
    assert store.recording is not None
    return store.recording


async def _fill(url: str, recording: Recording, runs: int, due_at: float | None = None) -> None:
    store = open_store(url, SYSTEM_CLOCK)
    await store.open(shards=SHARDS)
    assert recording.worker is not None
    await store.join(recording.worker)
    creations, turns = _copies(recording, runs, due_at)
    while batch := list(islice(creations, BATCH)):
        await store.commit(batch)
        await store.commit(list(islice(turns, BATCH)))
    await store.remove_worker(recording.worker.id)
    await store.close()


def _copies(recording: Recording, runs: int, due_at: float | None) -> tuple[Iterator[CreateRun], Iterator[CommitTurn]]:
    model, turn = (batch[0] for batch in recording.batches)
    assert isinstance(model, CreateRun)
    assert isinstance(turn, CommitTurn)
    assert turn.patch is not None
    assert turn.patch.status is RunStatus.SUSPENDED
    if due_at is not None:
        entries = tuple(replace(entry, due_at=due_at) for entry in turn.entries)
        turn = replace(turn, entries=entries, patch=replace(turn.patch, wake_at=due_at))
    ids = [f"{number:07}-{model.record.id}" for number in range(runs)]
    creations = (
        CreateRun(replace(model.record, id=id, created_by=id, shard=shard_of(id, SHARDS), seed=number))
        for number, id in enumerate(ids)
    )
    turns = (replace(turn, run_id=id, turn_id=f"{turn.turn_id}/{id}") for id in ids)
    return creations, turns


# --- what is measured ----------------------------------------------------------------------------------------------


def begin_to_work(store: str, name: str, setting: Setting) -> Measures:
    url = _url(store, name, setting.prepared, setting.urls)
    return asyncio.run(_begin_to_work(open_store(url, SYSTEM_CLOCK), setting))


async def _begin_to_work(store: Store, setting: Setting) -> Measures:
    """Open an engine, time the way to the first step of a new run, then let its duties go round a few times."""
    config = EngineConfig(sweep_interval=0.1)
    began = perf_counter()
    async with Engine(store, workflows=[sleeper, newcomer], config=config) as engine:
        await engine.execute(newcomer)
        await asyncio.sleep(setting.sizes["settle_ms"] / 1000)
        memory = resident_bytes()
    return {"first_step_ms": 1000 * (BEGINNINGS[0] - began), "memory": memory, "runs": setting.sizes["runs"]}


def wake(store: str, setting: Setting) -> Measures:
    runs = setting.sizes["woken"]
    recording = asyncio.run(_record_one(setting.folder / f"{store}-model.db"))
    place = f"wake_{setting.folder.name.replace('-', '_')}".lower()
    asyncio.run(_fill(_url(store, place, setting.folder, setting.urls, careless=True), recording, runs, time()))
    return asyncio.run(_wake(open_store(_url(store, place, setting.folder, setting.urls), SYSTEM_CLOCK), runs))


async def _wake(store: Store, runs: int) -> Measures:
    all_are_awake = woken(runs)
    began = perf_counter()
    async with Engine(store, workflows=[sleeper]) as engine:
        last = await all_are_awake
        await engine.get(last).result()
        seconds = perf_counter() - began
    return {"wake_s": seconds, "woken_per_s": runs / seconds}


# --- figures -------------------------------------------------------------------------------------------------------


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _slower(store: str, measured: Round) -> float:
    return measured[f"{store}, sleepers"]["first_step_ms"] / measured[f"{store}, empty"]["first_step_ms"]


def _memory(store: str, measured: Round) -> float:
    return measured[f"{store}, sleepers"]["memory"] / 2**20


def _extra_bytes_per_run(store: str, measured: Round) -> float:
    full, empty = measured[f"{store}, sleepers"], measured[f"{store}, empty"]
    return (full["memory"] - empty["memory"]) / full["runs"]


def _subjects() -> Iterator[tuple[str, Subject]]:
    for store in STORES:
        yield f"{store}, empty", partial(begin_to_work, store, "empty")
        yield f"{store}, sleepers", partial(begin_to_work, store, "sleepers")
        yield f"{store}, wake", partial(wake, store)


def _figures() -> Iterator[Figure]:
    for store, title in STORES.items():
        full = f"{store}, sleepers"
        yield Figure(f"{title}: first step of a new run, empty", "ms", partial(_of, f"{store}, empty", "first_step_ms"))
        yield Figure(f"{title}: first step of a new run, sleepers", "ms", partial(_of, full, "first_step_ms"))
        yield Figure(f"{title}: sleepers over empty", "x", partial(_slower, store), at_most=2)
        yield Figure(f"{title}: memory of the worker", "MiB", partial(_memory, store), at_most=150)
        yield Figure(f"{title}: more than on an empty store, per run", "bytes", partial(_extra_bytes_per_run, store))
        yield Figure(f"{title}: wake all", "s", partial(_of, f"{store}, wake", "wake_s"))


WORKLOAD = Workload(
    title="{runs:,} sleeping runs, against an empty store; {woken:,} that wake at once",
    prepare=prepare,
    subjects=dict(_subjects()),
    needs={subject: (store,) for subject, _ in _subjects() if (store := subject.partition(",")[0]) != "sqlite"},
    figures=list(_figures()),
    sizes={"runs": 1_000_000, "woken": 10_000, "settle_ms": 1_000},
    quick={"runs": 1_000, "woken": 100, "settle_ms": 100},
)
