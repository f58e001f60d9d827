"""Apply the writes of queues to the memory store's data: arrivals, joins, admissions, settings and departures."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.model.queue_records import COUNT_CAP, Place, PlaceRecord, QueueOverride, QueuePause, QueueSettings, Take
from perdure.model.records import queue_hint
from perdure.stores import queue_rules as rules
from perdure.stores.memory.queues import MemoryPlace, MemoryQueue
from perdure.stores.memory.state import MemoryState
from perdure.stores.results import (
    Admitted,
    Committed,
    LimitReached,
    NotQueued,
    QueueMissing,
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, CreateRun, LeaveQueue, Requeue

# --- places ------------------------------------------------------------------------------------------------------


def refuse_place(state: MemoryState, write: CreateRun, place: Place) -> WriteResult | None:
    """Return why a new run gets no place: it joins another, or its queue is unknown or full. None: it may arrive."""
    queue = state.queues.get(place.queue)
    if queue is None:
        return QueueMissing()
    if place.dedupe is not None:
        found = [each.keyed() for each in state.queues.with_key(queue, place.dedupe)]
        join = rules.find_duplicate(place, write.record.created_by, found)
        if join is not None:
            _join(state, write, join)
            return join.result
    if queue.full:
        return LimitReached(min(len(queue.waiting), COUNT_CAP))
    return None


def _join(state: MemoryState, write: CreateRun, join: rules.Join) -> None:
    """Apply a start to the place that it joins."""
    place, run = state.queues.place(join.run_id), state.runs[join.run_id]
    assert place is not None
    if not join.changes:
        return
    place.joined_by = write.record.created_by
    if join.eligible_at != place.row.eligible_at:
        state.queues.move(place, replace(place.row, eligible_at=join.eligible_at))
        state.runs.changed.add(queue_hint(place.row.queue))
    if join.replaces:
        state.runs.put(run, rules.with_payload_of(run.record, write.record))


def arrive(state: MemoryState, run_id: str, place: Place, now: float) -> None:
    """Add the place of a run whose row says that it waits."""
    queue = state.queues.get(place.queue)
    assert queue is not None
    state.queues.add(queue, run_id, place, now)
    state.runs.changed.add(queue_hint(place.queue))


def depart(state: MemoryState, run_id: str) -> PlaceRecord | None:
    """Delete the place of a run, if it has one: its slot is free. Return the place."""
    row = state.queues.remove(run_id)
    if row is not None and row.held:
        state.runs.changed.add(queue_hint(row.queue))
    return row


def requeue(state: MemoryState, write: Requeue) -> WriteResult:
    """Give a waiting run another priority."""
    run, place = state.runs.get(write.run_id), state.queues.place(write.run_id)
    if run is None:
        return RunMissing()
    if place is None or place.row.queue != write.queue or (place.row.held and place.row.priority != write.priority):
        return NotQueued()
    if place.row.priority != write.priority:
        state.queues.move(place, replace(place.row, priority=write.priority))
        state.runs.put(run, replace(run.record, priority=write.priority))
        state.runs.changed.add(queue_hint(write.queue))
    return Committed()


def leave_queue(state: MemoryState, write: LeaveQueue) -> WriteResult:
    """Take a run out of its queue."""
    run, place = state.runs.get(write.run_id), state.queues.place(write.run_id)
    if run is None:
        return RunMissing()
    if place is None or place.row.queue != write.queue:
        return NotQueued()
    depart(state, write.run_id)
    state.runs.put(run, rules.without_place(run.record, write.now), has_messages=run.has_messages)
    state.runs.changed.add(write.run_id)
    return Committed()


# --- settings ----------------------------------------------------------------------------------------------------

Settings = tuple[QueueSettings, QueueOverride, QueuePause | None]


def configure_queue(state: MemoryState, write: ConfigureQueue) -> WriteResult:
    """Create a queue or replace its settings. All its partitions forget their limits."""
    queue = state.queues.get(write.name)
    if queue is None:
        if write.base != 0:
            return Superseded()
        state.queues.create(MemoryQueue(write.name, write.declared, write.override, write.paused))
        state.runs.changed.add(queue_hint(write.name))
        return Committed(version=1)
    settings: Settings = (write.declared, write.override, write.paused)
    if settings == (queue.declared, queue.override, queue.paused):
        return Committed(version=queue.version)
    if write.base != queue.version:
        return Superseded()
    queue.declared, queue.override, queue.paused = settings
    queue.version += 1
    queue.partitions.clear_limits()
    state.runs.changed.add(queue_hint(write.name))
    return Committed(version=queue.version)


def configure_partition(state: MemoryState, write: ConfigurePartition) -> WriteResult:
    """Set or remove the override of one partition."""
    queue = state.queues.get(write.queue)
    if queue is None:
        return QueueMissing()
    found = queue.partitions.find(write.partition)
    if write.override == (None if found is None else found.override):
        return Committed(version=queue.version)
    partition = queue.partitions.get(write.partition)
    partition.override, partition.limit, partition.ready_at = write.override, None, None
    queue.partitions.reindex(partition)
    queue.version += 1
    state.runs.changed.add(queue_hint(write.queue))
    return Committed(version=queue.version)


# --- admission ---------------------------------------------------------------------------------------------------


def admit(state: MemoryState, write: Admit) -> WriteResult:
    """Admit waiting runs as planned, if the queue has not changed since."""
    queue = state.queues.get(write.queue)
    if queue is None:
        return QueueMissing()
    if queue.version != write.base or rules.is_clock_wrong(write, state.clock.now()):
        return Superseded()
    due = state.queues.due_places(queue, write.now, write.promote)
    state.queues.promote(due)
    admitted = [run_id for take in write.takes for run_id in _take(state, queue, take, write)]
    queue.state, queue.taken, queue.full = write.state, len(admitted), write.full
    queue.version += 1
    return Admitted(tuple(admitted), len(due), queue.version)


def _take(state: MemoryState, queue: MemoryQueue, take: Take, write: Admit) -> list[str]:
    """Admit the first runs of a partition that may be admitted, and store its state."""
    partition = queue.partitions.get(take.partition)
    examined = state.queues.first_places(partition, write.scan)
    admissible = [each for each in examined if _is_admissible(state, each, write)]
    taken = [_admit_run(state, each, write) for each in admissible[: take.count]]
    partition.store(take, len(taken))
    queue.partitions.last_turn = max(queue.partitions.last_turn, take.turn)
    queue.partitions.reindex(partition)
    return taken


def _is_admissible(state: MemoryState, place: MemoryPlace, write: Admit) -> bool:
    return rules.is_admissible(state.runs[place.row.run_id].record, place.row.expires_at, write)


def _admit_run(state: MemoryState, place: MemoryPlace, write: Admit) -> str:
    run = state.runs[place.row.run_id]
    state.queues.move(place, replace(place.row, held=True, admitted_at=write.now))
    state.runs.put(run, rules.admitted(run.record, write))
    state.runs.changed.add(run.record.id)
    return run.record.id
