"""Many sleeping runs: a store with a million of them compared with an empty one, and ten thousand that are due at once.

A run that sleeps for a year is a row and an index entry. A worker that opens such a store must start working as soon as
on an empty one, and must not hold memory for each of them.

    <store>, empty      open an engine on an empty store, until the first step of a new run starts
    <store>, sleepers   the same on a store full of sleeping runs, and the memory of the worker then
    <store>, wake       open an engine on a store whose sleeping runs are all due, until the last of them has ended

The sleeping runs are copies of a real one: the writes of the engine for a sleeping run, with other ids.
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
from benchmarks.machine_info import process_memory_bytes
from benchmarks.recording_stores import CountingSqliteStore, Recording
from benchmarks.waiting_workflows import sleeper, start_suspended, wait_for_activations
from perdure import Context, Engine, EngineConfig, RunStatus, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.model.ids import shard_of
from perdure.stores.protocol import Store
from perdure.stores.writes import CommitTurn, CreateRun

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}
SHARDS = EngineConfig().shards
BATCH = 2_000
STARTED_AT: list[float] = []


@step
async def mark() -> None:
    STARTED_AT.append(perf_counter())


@workflow
async def new_run(ctx: Context) -> None:
    await mark()


# --- stores full of sleeping runs -------------------------------------------------------------------------------------


def prepare(setting: Setting) -> Measures:
    asyncio.run(_fill_all(setting))
    return {}


async def _fill_all(setting: Setting) -> None:
    """Fill all stores concurrently: their servers do most of the work."""
    recording = await _record_one(setting.folder / "model.db")
    await asyncio.gather(
        *(
            _fill(_url(store, name, setting.folder, setting.urls, durable_off=True), recording, runs)
            for store in STORES
            if store == "sqlite" or store in setting.urls
            for name, runs in (("empty", 0), ("sleepers", setting.sizes["runs"]))
        )
    )


def _url(store: str, name: str, folder: Path, urls: Mapping[str, str], *, durable_off: bool = False) -> str:
    """Return the URL of a store by name. With `durable_off`, writes do not wait for the disk."""
    if store == "sqlite":
        return f"sqlite:///{folder / name}.db" + ("?synchronous=off" if durable_off else "")
    if store == "postgres":
        return f"{urls[store]}&schema={name}" + ("&synchronous_commit=off" if durable_off else "")
    return f"{urls[store]}?prefix={name}"


async def _record_one(path: Path) -> Recording:
    """Record the writes of the engine for a run that suspends."""
    store = CountingSqliteStore(str(path), synchronous="off", record=True)
    async with Engine(store, workflows=[sleeper]) as engine:
        await start_suspended(engine, 1)
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
    runs_only = (CreateRun, CommitTurn)  # a worker also publishes the schema of its workflow
    model, turn = (write for batch in recording.batches for write in batch if isinstance(write, runs_only))
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


def measure_first_step(store: str, name: str, setting: Setting) -> Measures:
    url = _url(store, name, setting.prepared, setting.urls)
    return asyncio.run(_measure_first_step(open_store(url, SYSTEM_CLOCK), setting))


async def _measure_first_step(store: Store, setting: Setting) -> Measures:
    """Measure the time until the first step of a new run, then the memory after some rounds of periodic tasks."""
    config = EngineConfig(sweep_interval=0.1)
    started_at = perf_counter()
    async with Engine(store, workflows=[sleeper, new_run], config=config) as engine:
        await engine.execute(new_run)
        await asyncio.sleep(setting.sizes["settle_ms"] / 1000)
        memory = process_memory_bytes()
    return {"first_step_ms": 1000 * (STARTED_AT[0] - started_at), "memory": memory, "runs": setting.sizes["runs"]}


def wake(store: str, setting: Setting) -> Measures:
    runs = setting.sizes["woken"]
    recording = asyncio.run(_record_one(setting.folder / f"{store}-model.db"))
    name = f"wake_{setting.folder.name.replace('-', '_')}".lower()
    asyncio.run(_fill(_url(store, name, setting.folder, setting.urls, durable_off=True), recording, runs, time()))
    return asyncio.run(_wake(open_store(_url(store, name, setting.folder, setting.urls), SYSTEM_CLOCK), runs))


async def _wake(store: Store, runs: int) -> Measures:
    all_activated = wait_for_activations(runs)
    started_at = perf_counter()
    async with Engine(store, workflows=[sleeper]) as engine:
        last = await all_activated
        await engine.get(last).result()
        seconds = perf_counter() - started_at
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
        yield f"{store}, empty", partial(measure_first_step, store, "empty")
        yield f"{store}, sleepers", partial(measure_first_step, store, "sleepers")
        yield f"{store}, wake", partial(wake, store)


def _figures() -> Iterator[Figure]:
    for store, title in STORES.items():
        full = f"{store}, sleepers"
        yield Figure(f"{title}: first step of a new run, empty", "ms", partial(_of, f"{store}, empty", "first_step_ms"))
        yield Figure(f"{title}: first step of a new run, sleepers", "ms", partial(_of, full, "first_step_ms"))
        yield Figure(f"{title}: sleepers over empty", "x", partial(_slower, store), at_most=2)
        yield Figure(f"{title}: memory of the worker", "MiB", partial(_memory, store), at_most=150)
        yield Figure(f"{title}: additional memory per sleeping run", "bytes", partial(_extra_bytes_per_run, store))
        yield Figure(f"{title}: all due runs, until the last has ended", "s", partial(_of, f"{store}, wake", "wake_s"))


WORKLOAD = Workload(
    title="{runs:,} sleeping runs, compared with an empty store; {woken:,} due at once",
    prepare=prepare,
    subjects=dict(_subjects()),
    needs={subject: (store,) for subject, _ in _subjects() if (store := subject.partition(",")[0]) != "sqlite"},
    figures=list(_figures()),
    sizes={"runs": 1_000_000, "woken": 10_000, "settle_ms": 1_000},
    quick={"runs": 1_000, "woken": 100, "settle_ms": 100},
)
