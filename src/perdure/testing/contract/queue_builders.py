"""Builders for the contract cases of queues: settings, runs with a place, admissions, and short reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from perdure.model.queue_records import Place, PlaceRecord, QueueSettings, QueueSummary, QueueView, Take
from perdure.stores.protocol import Store
from perdure.stores.results import Admitted, Committed, WriteResult
from perdure.stores.writes import Admit, ConfigureQueue, CreateRun, LeaveQueue, Requeue, RewindRun
from perdure.testing.contract.builders import record, run

SERVED = (("flow", 1, "default"),)
"""What the live workers of the cases execute: the default workflow in the default pool."""

PLACE_FIELDS = frozenset(Place.__struct_fields__)


def configure(name: str = "q", base: int = 0, **settings: Any) -> ConfigureQueue:
    """Build a change of a queue's settings; `override` and `paused` are those of the write."""
    others = {field: settings.pop(field) for field in ("override", "paused") if field in settings}
    return ConfigureQueue(name=name, base=base, declared=QueueSettings(**settings), **others)


def queued(id: str = "r", queue: str = "q", **fields: Any) -> CreateRun:
    """Build a new run that waits in a queue. The fields of `Place` are those of its place, all others of its row."""
    place = Place(queue=queue, **{name: fields.pop(name) for name in PLACE_FIELDS & set(fields)})
    return replace(run(id, **fields), place=place)


def admit(base: int, *takes: Take | int, queue: str = "q", now: float = 200.0, **fields: Any) -> Admit:
    """Build an admission. A number is a take of so many runs from the partition of a queue without partitions."""
    of = tuple(Take(partition="", count=each) if isinstance(each, int) else each for each in takes)
    return Admit(queue=queue, base=base, now=now, takes=of, **{"state": b"", "serves": SERVED, **fields})


def take(partition: str, count: int = 1, **fields: Any) -> Take:
    """Build what an admission does with one partition."""
    return Take(partition=partition, count=count, **fields)


def requeue_ended(base: int, turn_id: str = "rewind", *, id: str = "r", now: float = 170.0, **fields: Any) -> RewindRun:
    """Build the rewind of a run to its beginning. Without `place` it has one in queue "q"."""
    given = {"place": Place(queue="q"), "dropped": (), **fields}
    return RewindRun(run_id=id, base=base, turn_id=turn_id, now=now, **given)


def leave(id: str, queue: str, now: float) -> LeaveQueue:
    """Build the departure of an open run from its queue."""
    return LeaveQueue(run_id=id, queue=queue, now=now)


def move(id: str, queue: str, priority: int) -> Requeue:
    """Build a change of a waiting run's priority."""
    return Requeue(run_id=id, queue=queue, priority=priority)


# --- reads -----------------------------------------------------------------------------------------------------------


async def view_of(store: Store, name: str = "q", now: float = 200.0, limit: int = 100) -> QueueView:
    """Return the view of a queue, which must exist."""
    found = await store.queue_view(name, now, limit)
    assert found is not None, f"queue {name!r} is missing"
    return found


async def summary_of(store: Store, name: str = "q") -> QueueSummary:
    """Return the summary of a queue, which must exist."""
    (found,) = [each for each in await store.queues() if each.name == name]
    return found


async def place_of(store: Store, id: str = "r") -> PlaceRecord:
    """Return the place of a run, which must have one."""
    found = await store.place(id)
    assert found is not None, f"run {id!r} has no place"
    return found


async def admit_now(store: Store, *takes: Take | int, queue: str = "q", now: float = 200.0, **fields: Any) -> list[str]:
    """Admit runs, based on the present version of the queue, and return their ids."""
    version = (await view_of(store, queue, now)).version
    (result,) = await store.commit([admit(version, *takes, queue=queue, now=now, **fields)])
    assert isinstance(result, Admitted), f"the admission was not applied: {result}"
    assert result.version > version
    return list(result.runs)


async def waiting_ids(store: Store, name: str = "q", **fields: Any) -> list[str]:
    """Return the runs that wait in a queue, in order."""
    return [place.run_id for place in await store.places(name, **fields)]


async def holders(store: Store, name: str = "q") -> list[str]:
    """Return the runs that hold a slot of a queue, in order of id."""
    return sorted(place.run_id for place in await store.places(name, held=True))


async def check_waits(store: Store, id: str = "r") -> None:
    """Check that the run waits: it is not due, has no owner, and its place holds no slot."""
    row, place = await record(store, id), await place_of(store, id)
    assert (row.waiting, row.wake_at, row.owner, row.gate) == (True, None, None, "")
    assert (row.queue, row.partition, row.priority) == (place.queue, place.partition, place.priority)
    assert (place.held, place.admitted_at) == (False, None)


async def check_has_no_place(store: Store, id: str = "r") -> None:
    """Check that the run has no place in any list, and no field of its row says so."""
    row = await record(store, id)
    assert (row.waiting, row.gate) == (False, "")
    assert await store.place(id) is None
    for each in await store.queues():
        assert id not in await waiting_ids(store, each.name) + await holders(store, each.name)


def versions(results: Sequence[WriteResult]) -> list[int]:
    """Return the versions in results that are all `Committed`."""
    assert all(isinstance(result, Committed) for result in results), results
    return [result.version for result in results if isinstance(result, Committed)]
