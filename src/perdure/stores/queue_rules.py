"""Pure functions for the rules of queue writes, used by the stores that check writes in Python (memory and SQLite).

They decide about duplicates, readiness and which places an admission takes, and build the rows of runs. This module
knows no storage and no rule of admission: how many runs a queue admits is planned by `perdure.queues`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.queue_records import ON_DUPLICATE, Place
from perdure.model.records import Hold, RunRecord
from perdure.stores.results import Joined
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, LeaveQueue, Requeue

PAUSED_IN_QUEUE = Hold("paused", "paused while it waits in its queue")
"""The hold of a waiting run with an unread pause. The message has the reason; the run applies it when it executes."""

QueueWrite = Admit | ConfigureQueue | ConfigurePartition | Requeue | LeaveQueue


class KeyedPlace(Struct, frozen=True):
    """A place that has a dedupe key: the fields that decide what another start with this key does.

    `joined_by` is the `created_by` of the last start that changed the place by joining it.
    """

    run_id: str
    number: int
    held: bool
    eligible_at: float | None
    latest_at: float | None
    joined_by: str | None


class Join(Struct, frozen=True):
    """What a start does with the place that has its key. `changes`: it is stored as the place's `joined_by`."""

    run_id: str
    changes: bool
    replaces: bool
    eligible_at: float | None
    result: Joined


# --- duplicates --------------------------------------------------------------------------------------------------


def find_duplicate(place: Place, created_by: str, places: Iterable[KeyedPlace]) -> Join | None:
    """Return how a start joins one of these places, which have its dedupe key; None if it creates a run.

    A repeated call finds its own id and changes nothing, also if the place was admitted meanwhile.
    """
    candidates = sorted(places, key=lambda each: (each.held, -each.number))  # the one that waits, then the latest
    replaces = place.on_duplicate == "replace"
    for each in candidates:
        if each.joined_by == created_by:
            return _join(each, each.eligible_at, replaces=replaces, changes=False)
    if not candidates or (candidates[0].held and (replaces or place.debounce)):
        return None
    found = candidates[0]
    eligible_at = debounced_until(place, found) if place.debounce else found.eligible_at
    return _join(found, eligible_at, replaces=replaces, changes=replaces or place.debounce)


def debounced_until(place: Place, found: KeyedPlace) -> float | None:
    """Return until when a debounced start delays the place that it joins. A place that is not delayed stays so."""
    if found.eligible_at is None or place.eligible_at is None:
        return None
    return place.eligible_at if found.latest_at is None else min(place.eligible_at, found.latest_at)


def _join(found: KeyedPlace, eligible_at: float | None, *, replaces: bool, changes: bool) -> Join:
    result = Joined(found.run_id, replaced=replaces, waiting=not found.held)
    return Join(found.run_id, changes, replaces and changes, eligible_at, result)


# --- admission ---------------------------------------------------------------------------------------------------


def lacks_only_time(waiting: int, held: int, limit: int | None) -> bool:
    """Return whether a partition is ready as soon as its `ready_at` has passed."""
    return waiting > 0 and (limit is None or held < limit)


def is_admissible(record: RunRecord, expires_at: float | None, write: Admit) -> bool:
    """Return whether an admission may take the eligible place of this run; otherwise it skips the place."""
    expired = expires_at is not None and expires_at <= write.now
    return not expired and record.held is None and (record.workflow, record.version, record.pool) in write.serves


def is_clock_wrong(write: Admit, store_now: float) -> bool:
    """Return whether the admission was planned with a time that the store refuses."""
    return write.tolerance is not None and abs(write.now - store_now) > write.tolerance


def may_prune_partition(state: bytes, keep_until: float | None, now: float) -> bool:
    """Return whether the row of a partition without places and override may be deleted."""
    return not state if keep_until is None else keep_until <= now


# --- rows of runs ------------------------------------------------------------------------------------------------


def held_while_waiting(held: Hold | None, message_kind: str) -> Hold | None:
    """Return the hold of a waiting run after it got a message of this kind."""
    if message_kind == "pause":
        return PAUSED_IN_QUEUE
    return None if message_kind in ("resume", "cancel") else held


def placed(record: RunRecord, place: Place) -> RunRecord:
    """Return the row of a run that begins to wait in a queue."""
    return replace(
        record,
        owner=None,
        wake_at=None,
        queue=place.queue,
        partition=place.partition,
        priority=place.priority,
        waiting=True,
        gate="",
    )


def with_payload_of(record: RunRecord, new: RunRecord) -> RunRecord:
    """Return the row of a waiting run that gets the payload of another start."""
    return replace(
        record,
        workflow=new.workflow,
        version=new.version,
        pool=new.pool,
        input=new.input,
        updated_at=new.created_at,
    )


def admitted(record: RunRecord, write: Admit) -> RunRecord:
    """Return the row of a run that got its slot."""
    gate = write.queue if write.gate else ""
    return replace(record, waiting=False, wake_at=write.now, gate=gate, updated_at=write.now)


def without_place(record: RunRecord, now: float) -> RunRecord:
    """Return the row of an open run that left its queue: due if it waited. Its unread pause holds it then."""
    if not record.waiting:
        return replace(record, gate="", updated_at=now)
    return replace(record, gate="", waiting=False, held=None, wake_at=now, updated_at=now)


# --- before anything is stored -----------------------------------------------------------------------------------


def check_queue_write(write: QueueWrite) -> None:
    """Raise `StoreError` for a malformed write."""
    match write:
        case Admit():
            _check_admit(write)
        case ConfigureQueue():
            _check_name("the name of a queue", write.name)
        case ConfigurePartition():
            _check_name("the name of a queue", write.queue)
            _check_partition(write.partition)
        case Requeue() | LeaveQueue():
            _check_name("a run id", write.run_id)
            _check_name("the name of a queue", write.queue)


def check_place(run_id: str, place: Place) -> None:
    """Raise `StoreError` for a malformed place of a new run."""
    _check_name("the name of a queue", place.queue)
    _check_partition(place.partition)
    if place.dedupe is not None:
        _check_name(f"the dedupe key of run {run_id!r}", place.dedupe)
    if place.on_duplicate not in ON_DUPLICATE:
        raise StoreError(
            f"on_duplicate of run {run_id!r} must be one of {', '.join(ON_DUPLICATE)}, not {place.on_duplicate!r}"
        )
    if place.debounce and (place.dedupe is None or place.eligible_at is None):
        raise StoreError(f"the debounced place of run {run_id!r} must have a dedupe key and an eligible_at")


def check_place_of_rewind(run_id: str, place: Place) -> None:
    """Raise `StoreError` for a malformed place of a rewound run."""
    check_place(run_id, place)
    if place.dedupe is not None:
        raise StoreError(f"run {run_id!r} is rewound and cannot take dedupe key {place.dedupe!r} again; use no key")


def _check_admit(write: Admit) -> None:
    _check_name("the name of a queue", write.queue)
    partitions = [take.partition for take in write.takes]
    for partition in partitions:
        _check_partition(partition)
    if len(set(partitions)) != len(partitions):
        raise StoreError(f"an admission of queue {write.queue!r} must take from each partition once")
    counts: Sequence[tuple[str, int, int]] = (
        ("scan", write.scan, 1),
        ("promote", write.promote, 0),
        *(("count", take.count, 0) for take in write.takes),
    )
    for name, count, least in counts:
        if count < least:
            raise StoreError(f"{name} of an admission of queue {write.queue!r} must be at least {least}, not {count!r}")


def _check_partition(partition: object) -> None:
    if not isinstance(partition, str):
        raise StoreError(f"a partition must be a string, not {partition!r}")


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise StoreError(f"{what} must be a non-empty string, not {name!r}")
