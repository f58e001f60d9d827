"""Random batches of queue writes have the same results on the memory store and on every other store.

The memory store is the reference; its counts are computed again after each batch. Numbers of places and versions differ
between stores, so only their order is compared.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from perdure.model.queue_records import (
    PartitionOverride,
    Place,
    PlaceRecord,
    QueueOverride,
    QueuePause,
    QueueSettings,
    Take,
)
from perdure.model.records import RunRecord, RunStatus
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import Admitted, Committed, IdTaken, Snapshot
from perdure.stores.writes import (
    Admit,
    CommitTurn,
    ConfigurePartition,
    ConfigureQueue,
    CreateRun,
    EndRun,
    LeaveQueue,
    Observer,
    Predecessor,
    ReleaseRun,
    Requeue,
    RewindRun,
    RunPatch,
    TagRun,
    Write,
)
from perdure.testing import VirtualClock
from perdure.testing.contract.builders import claim, deliver, entry, run, worker
from perdure.testing.contract.queue_traces import check_counts
from tests.engine.store_matrix import STORES, make_store
from tests.repetitions import repetitions
from tests.servers import postgres_schemas as schemas
from tests.servers import redis_prefixes as prefixes

RUNS = ("r", "s", "t", "u", "v")
QUEUES = ("q", "p")
PARTITIONS = ("", "x", "y")
WORKFLOWS = (("flow", 1), ("other", 1))


class Start(Struct, frozen=True):
    """A start of a run; `replaces`: it replaces the ended run of this id, as it is before the batch."""

    write: CreateRun
    replaces: bool


class Replay(Struct, frozen=True):
    """A repetition of a write of an earlier batch, as after a lost response: the write at this index from the end."""

    back: int


Step = Write | Start | Replay

ids = st.sampled_from(RUNS)
queues = st.sampled_from(QUEUES)
partitions = st.sampled_from(PARTITIONS)
times = st.integers(100, 110).map(float)
small = st.integers(0, 3)
calls = st.integers(0, 10**9).map(lambda n: f"call-{n}")
base = st.sampled_from([0, 0, 0, 0, -1])  # relative to the last position or version; see `Script.resolve`
places = st.builds(
    Place,
    queue=st.sampled_from(["q", "q", "q", "p", "missing"]),
    partition=partitions,
    priority=st.sampled_from([0, 0, 1, -1]),
    eligible_at=st.none() | st.none() | times,
    expires_at=st.none() | st.none() | times,
)
keyed_places = st.builds(
    lambda place, key, on_duplicate, debounce, latest_at: replace(
        place,
        dedupe=key,
        on_duplicate=on_duplicate,
        debounce=debounce and place.eligible_at is not None,
        latest_at=latest_at,
    ),
    places,
    st.sampled_from("kl"),
    st.sampled_from(["existing", "refuse", "replace"]),
    st.booleans(),
    st.none() | times,
)
starts = st.builds(
    lambda id, place, replaces, observer, **fields: Start(
        replace(run(id, **fields), place=place, observer=observer), replaces
    ),
    ids,
    st.one_of(places, places, keyed_places, keyed_places, st.none()),
    st.booleans(),
    st.none() | st.none() | st.just(Observer("above", "0/x")),
    created_by=calls,
    created_at=times,
    workflow=st.sampled_from(["flow", "flow", "other"]),
    pool=st.sampled_from(["default", "default", "gpu"]),
    input=st.binary(max_size=2),
    shard=small,
    owner=st.sampled_from([None, None, "a"]),
)
takes = st.lists(
    st.builds(
        Take,
        partition=partitions,
        count=st.sampled_from([0, 1, 1, 2]),
        turn=st.integers(0, 9),
        state=st.binary(max_size=1),
        limit=st.none() | small,
        ready_at=st.none() | times,
        keep_until=st.none() | times,
    ),
    max_size=3,
    unique_by=lambda take: take.partition,
).map(tuple)
admissions = st.builds(
    Admit,
    queue=st.sampled_from(["q", "q", "q", "p", "missing"]),
    base=base,
    now=times,
    state=st.binary(max_size=1),
    takes=takes,
    serves=st.sampled_from(
        [
            (("flow", 1, "default"), ("other", 1, "default"), ("flow", 1, "gpu"), ("other", 1, "gpu")),
            (("flow", 1, "default"),),
        ]
    ),
    gate=st.booleans(),
    full=st.sampled_from([False, False, False, True]),
    promote=small,
    scan=st.sampled_from([1, 2, 200]),
)
patches = st.sampled_from(
    [
        RunPatch(status=RunStatus.SUCCEEDED, ended_at=105.0, prune_at=106.0),
        RunPatch(status=RunStatus.FAILED, ended_at=105.0),
        RunPatch(status=RunStatus.SUSPENDED, wake_at=107.0),
        RunPatch(status=RunStatus.SUSPENDED),
        RunPatch(status=RunStatus.RUNNING, owner="a"),
    ]
)
settings_writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(
        ConfigureQueue,
        name=queues,
        base=base,
        declared=st.builds(QueueSettings, concurrency=st.none() | small, partitioned=st.just(True)),
        override=st.builds(QueueOverride, concurrency=st.none() | small),
        paused=st.sampled_from([None, QueuePause("ada", "why", 1.0)]),
    ),
    st.builds(
        ConfigurePartition,
        queue=queues,
        partition=partitions,
        override=st.none() | st.builds(PartitionOverride, weight=st.integers(1, 2)),
    ),
)
of_runs: st.SearchStrategy[Write] = st.one_of(
    st.builds(EndRun, run_id=ids, turn_id=calls, now=times, only_if_not_started=st.booleans(), prune_after=times),
    st.builds(LeaveQueue, run_id=ids, queue=queues, now=times),
    st.builds(Requeue, run_id=ids, queue=queues, priority=st.sampled_from([-1, 0, 1])),
    st.builds(
        lambda id, message, kind, now: deliver(message, id=id, kind=kind, now=now),
        ids,
        calls,
        st.sampled_from(["event", "pause", "resume", "cancel"]),
        times,
    ),
    st.builds(
        RewindRun, run_id=ids, base=base, turn_id=calls, now=times, dropped=st.just(()), place=st.none() | places
    ),
    st.builds(TagRun, run_id=ids, tags=st.just({"n": 1})),
    st.builds(ReleaseRun, run_id=ids, worker=st.sampled_from("ab"), now=times),
)
turns: st.SearchStrategy[Write] = st.builds(
    CommitTurn,
    run_id=ids,
    base=base,
    turn_id=calls,
    worker=st.sampled_from("ab"),
    owned=st.booleans(),
    now=times,
    entries=st.just(()) | st.just((entry(),)),
    patch=patches,
    seen=st.just(0) | st.just(99),
)
steps: st.SearchStrategy[Step] = st.one_of(
    *(starts, starts, starts, admissions, admissions, turns, of_runs, of_runs, settings_writes),
    st.builds(Replay, st.integers(1, 6)),
)
claims = st.builds(
    claim,
    st.sampled_from("ab"),
    times,
    workflows=st.just(WORKFLOWS),
    pool=st.sampled_from(["default", "default", "gpu"]),
    limit=st.integers(1, 3),
    shards=st.none() | st.just(frozenset((0, 1))),
    gates=st.sampled_from([(), (("q", 1),), (("q", 2), ("p", 1))]),
)
prunes = times.map(lambda now: ("prune", now))
releases = times.map(lambda now: ("release", now))
scripts = st.lists(
    st.one_of(
        *[st.lists(steps, min_size=1, max_size=5)] * 5,
        *(claims, claims, prunes, releases),
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=repetitions(60, 600))
@given(scripts)
def test_every_store_agrees_with_the_reference_about_queues(kind: str, script: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(_compare(make_store(kind, Path(folder), VirtualClock()), script))
        finally:
            schemas.release_all()
            prefixes.release_all()


async def _compare(other: Store, script: list[Any]) -> None:
    reference = MemoryStore(VirtualClock())
    try:
        for store in (reference, other):
            await store.open(shards=16)
            await store.join(worker("a"))
            await store.join(worker("b"))
            await store.commit([ConfigureQueue(name="q", base=0, declared=QueueSettings(partitioned=True))])
            await store.commit([ConfigureQueue(name="p", base=0, declared=QueueSettings())])
        plays = Play(reference), Play(other)
        for step in script:
            expected, got = [await play.apply(step) for play in plays]
            assert got == expected, step
            assert await _state(other) == await _state(reference), step
            await check_counts(other, QUEUES)
    finally:
        await other.close()


class Play:
    """A script applied to one store. Bases are relative to the positions and versions of this store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written: list[Write] = []

    async def apply(self, step: Any) -> Any:
        """Apply a call of the script and return its result without versions."""
        if isinstance(step, Claim):
            return [each.id for each in await self._store.claim(step)]
        if isinstance(step, tuple):
            name, now = step
            if name == "prune":
                return sorted(await self._store.prune(now))
            return sorted(await self._store.release_runs("a", now, recovered=True))
        batch = [write for each in step for write in await self._resolve(each)]
        results = await self._store.commit(batch)
        self._written += batch
        return list(map(_comparable, results))

    async def _resolve(self, step: Step) -> list[Write]:
        """Return the write of a step with the positions and versions that this store has now."""
        match step:
            case Replay():
                return self._written[-step.back :][:1]
            case Start():
                found = await self._row(step.write.record.id)
                if not step.replaces or found is None:
                    return [step.write]
                return [replace(step.write, replaces=Predecessor(found.created_by, found.generation))]
            case Admit() | ConfigureQueue():
                view = await self._store.queue_view(step.queue if isinstance(step, Admit) else step.name, 0.0)
                return [replace(step, base=step.base + (0 if view is None else view.version))]
            case CommitTurn() | RewindRun():
                (snapshot,) = await self._store.load([step.run_id])
                position = snapshot.position if isinstance(snapshot, Snapshot) else 0
                return [replace(step, base=max(0, position + step.base))]
            case _:
                return [step]

    async def _row(self, id: str) -> RunRecord | None:
        (found,) = await self._store.records([id])
        return found if isinstance(found, RunRecord) else None


def _comparable(result: Any) -> Any:
    """Remove versions, and rows that a store may read after the batch."""
    if isinstance(result, Committed | Admitted):
        return replace(result, version=0)
    return IdTaken(run(result.record.id).record) if isinstance(result, IdTaken) else result


def _ranked(places: Sequence[PlaceRecord]) -> list[PlaceRecord]:
    """Replace the numbers of places by their ranks."""
    numbers = sorted(place.number for place in places)
    return [replace(place, number=numbers.index(place.number)) for place in places]


async def _state(store: Store) -> list[Any]:
    """Read everything about the runs and queues of the test."""
    found: list[Any] = [
        await store.load(RUNS),
        [replace(each, version=0) for each in await store.queues()],
        _ranked([place for id in RUNS if (place := await store.place(id)) is not None]),
        [await store.places_ahead(id) for id in RUNS],
        [await store.next_wake(pool) for pool in ("default", "gpu")],
        [await store.next_wake("default", gates) for gates in ((), ("q",))],
        [await store.owned(id) for id in "ab"],
        [each.record.id for each in await store.unfinalized()],
    ]
    for name in QUEUES:
        for now, limit in ((99.0, 100), (104.0, 100), (111.0, 1), (111.0, 100)):
            view = await store.queue_view(name, now, limit)
            assert view is not None
            found.append(replace(view, version=0))
        for held in (False, True):
            listed = await store.places(name, held=held)
            found.append([place.run_id for place in listed])
            for place in listed:
                following = await store.places(name, place.partition, place.cursor, limit=2, held=held)
                found.append([each.run_id for each in following])
    return found
