"""The queues of the memory store: places by order, key, time and partition, so that no read scans them.

A place waits or holds a slot. The waiting ones are delayed, or in the order of their partition. Writes come from
`queue_writes`; this module keeps the indexes consistent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.model.queue_records import (
    COUNT_CAP,
    Place,
    PlaceCursor,
    PlaceRecord,
    QueueOverride,
    QueuePause,
    QueueSettings,
    QueueSummary,
    QueueView,
)
from perdure.stores import queue_rules as rules
from perdure.stores.memory.partitions import LAST, MemoryPartition, MemoryPartitions, discard_key
from perdure.stores.memory.runs import MemoryRuns


class MemoryPlace(Struct):
    """A place, and what a start that joins it needs."""

    row: PlaceRecord
    latest_at: float | None = None
    joined_by: str | None = None

    def keyed(self) -> rules.KeyedPlace:
        """Return what decides about a start with the key of this place."""
        row = self.row
        return rules.KeyedPlace(row.run_id, row.number, row.held, row.eligible_at, self.latest_at, self.joined_by)


class MemoryQueue(Struct):
    """One queue: its settings and version, what the last admission stored, and its places."""

    name: str
    declared: QueueSettings
    override: QueueOverride
    paused: QueuePause | None
    version: int = 1
    state: bytes = b""
    taken: int = 0
    full: bool = False
    partitions: MemoryPartitions = field(default_factory=MemoryPartitions)
    waiting: dict[str, None] = field(default_factory=dict)  # runs that wait, delayed ones included
    held: dict[str, None] = field(default_factory=dict)  # runs that hold a slot
    delayed: list[tuple[float, int, str]] = field(default_factory=list)  # eligible_at, number and run
    expiring: list[tuple[float, str]] = field(default_factory=list)  # expires_at and run, of waiting places
    keys: dict[str, dict[str, None]] = field(default_factory=dict)  # runs by dedupe key

    @property
    def next_at(self) -> float | None:
        """When the next delayed or expiring place, or a partition, needs an admission."""
        times = (
            self.delayed[0][0] if self.delayed else None,
            self.expiring[0][0] if self.expiring else None,
            self.partitions.next_at,
        )
        return min((at for at in times if at is not None), default=None)


class MemoryQueues:
    """All queues by name and all places by run. Only `add`, `move` and `remove` change a place's row."""

    def __init__(self, runs: MemoryRuns) -> None:
        self._runs = runs
        self._queues: dict[str, MemoryQueue] = {}
        self._places: dict[str, MemoryPlace] = {}
        self._last_number = 0

    # queues

    def get(self, name: str) -> MemoryQueue | None:
        return self._queues.get(name)

    def create(self, queue: MemoryQueue) -> None:
        """Add a new queue."""
        self._queues[queue.name] = queue

    # places

    def place(self, run_id: str) -> MemoryPlace | None:
        """Return the place of a run, or None."""
        return self._places.get(run_id)

    def add(self, queue: MemoryQueue, run_id: str, requested: Place, since: float) -> None:
        """Add the place of a run that begins to wait."""
        row = PlaceRecord(
            run_id=run_id,
            queue=queue.name,
            partition=requested.partition,
            priority=requested.priority,
            number=self.next_number(),
            since=since,
            eligible_at=requested.eligible_at,
            expires_at=requested.expires_at,
            dedupe=requested.dedupe,
        )
        self._places[run_id] = MemoryPlace(row, requested.latest_at)
        if row.dedupe is not None:
            queue.keys.setdefault(row.dedupe, {})[run_id] = None
        self._index(queue, row)

    def move(self, place: MemoryPlace, row: PlaceRecord) -> None:
        """Replace the row of a place."""
        queue = self._queues[row.queue]
        self._unindex(queue, place.row)
        place.row = row
        self._index(queue, row)

    def remove(self, run_id: str) -> PlaceRecord | None:
        """Delete the place of a run and return it; None if the run has none."""
        place = self._places.pop(run_id, None)
        if place is None:
            return None
        queue, row = self._queues[place.row.queue], place.row
        self._unindex(queue, row)
        if row.dedupe is not None:
            del queue.keys[row.dedupe][run_id]
            if not queue.keys[row.dedupe]:
                del queue.keys[row.dedupe]
        return row

    def next_number(self) -> int:
        """Return the number of a new place; it is higher than all before."""
        self._last_number += 1
        return self._last_number

    def with_key(self, queue: MemoryQueue, key: str) -> list[MemoryPlace]:
        """Return the places that have this dedupe key."""
        return [self._places[run_id] for run_id in queue.keys.get(key, ())]

    def _index(self, queue: MemoryQueue, row: PlaceRecord) -> None:
        partition = queue.partitions.get(row.partition)
        if row.held:
            queue.held[row.run_id] = None
            partition.held += 1
        else:
            queue.waiting[row.run_id] = None
            if row.expires_at is not None:
                insort(queue.expiring, (row.expires_at, row.run_id))
            if row.eligible_at is None:
                insort(partition.waiting, (row.priority, row.number, row.run_id))
            else:
                partition.delayed += 1
                insort(queue.delayed, (row.eligible_at, row.number, row.run_id))
        queue.partitions.reindex(partition)

    def _unindex(self, queue: MemoryQueue, row: PlaceRecord) -> None:
        partition = queue.partitions.get(row.partition)
        if row.held:
            del queue.held[row.run_id]
            partition.held -= 1
        else:
            del queue.waiting[row.run_id]
            if row.expires_at is not None:
                discard_key(queue.expiring, (row.expires_at, row.run_id))
            if row.eligible_at is None:
                discard_key(partition.waiting, (row.priority, row.number, row.run_id))
            else:
                partition.delayed -= 1
                discard_key(queue.delayed, (row.eligible_at, row.number, row.run_id))
        queue.partitions.reindex(partition)

    def prune(self, now: float) -> None:
        """Delete the partitions that are not used any more."""
        for queue in self._queues.values():
            queue.partitions.prune(now)

    # reading

    def summaries(self) -> list[QueueSummary]:
        """Return all queues in order of name."""
        return [_summarize(self._queues[name]) for name in sorted(self._queues)]

    def view(self, name: str, now: float, limit: int) -> QueueView | None:
        """Return the input of an admission, or None if the queue is unknown."""
        queue = self._queues.get(name)
        if queue is None:
            return None
        return QueueView(
            name=name,
            version=queue.version,
            state=queue.state,
            declared=queue.declared,
            override=queue.override,
            paused=queue.paused,
            held=len(queue.held),
            active=sum(self._is_active(run_id, now) for run_id in queue.held),
            taken=queue.taken,
            partitions=tuple(partition.view() for partition in queue.partitions.ready(now, limit)),
            eligible=min(limit, bisect_right(queue.delayed, (now, 2**63, LAST))),
            expired=tuple(run_id for _, run_id in queue.expiring[: bisect_right(queue.expiring, (now, LAST))][:limit]),
            next_at=queue.next_at,
        )

    def _is_active(self, run_id: str, now: float) -> bool:
        record = self._runs[run_id].record
        return record.owner is not None or (record.wake_at is not None and record.wake_at <= now)

    def places(
        self, name: str, partition: str | None, after: PlaceCursor | None, limit: int, *, held: bool
    ) -> list[PlaceRecord]:
        """Return a page of the queue's waiting or held places, in order."""
        queue = self._queues.get(name)
        if queue is None:
            return []
        rows = (self._places[run_id].row for run_id in (queue.held if held else queue.waiting))
        last = None if after is None else _order(after)
        keys = ((_order(row), row) for row in rows if partition in (None, row.partition))
        following = sorted((key, row.run_id) for key, row in keys if last is None or key > last)
        return [self._places[run_id].row for _, run_id in following[:limit]]

    def places_ahead(self, run_id: str, cap: int) -> int:
        """Return how many eligible places of its queue and partition precede that of the run, at most `cap`."""
        place = self._places.get(run_id)
        if place is None or place.row.held:
            return 0
        row = place.row
        partition = self._queues[row.queue].partitions.get(row.partition)
        return min(cap, bisect_left(partition.waiting, (row.priority, row.number, row.run_id)))

    def first_places(self, partition: MemoryPartition, scan: int) -> list[MemoryPlace]:
        """Return the first eligible waiting places of a partition, in order."""
        return [self._places[run_id] for _, _, run_id in islice(partition.waiting, scan)]

    def due_places(self, queue: MemoryQueue, now: float, limit: int) -> list[MemoryPlace]:
        """Return delayed places whose time has come, in the order of (eligible_at, number)."""
        due = queue.delayed[: min(limit, bisect_right(queue.delayed, (now, 2**63, LAST)))]
        return [self._places[run_id] for _, _, run_id in due]

    def promote(self, places: Iterable[MemoryPlace]) -> None:
        """Make delayed places eligible; they get new numbers, in this order."""
        for place in places:
            self.move(place, replace(place.row, eligible_at=None, number=self.next_number()))


def _order(row: PlaceRecord | PlaceCursor) -> tuple[str, int, int]:
    return (row.partition, row.priority, row.number)


def _summarize(queue: MemoryQueue) -> QueueSummary:
    return QueueSummary(
        name=queue.name,
        version=queue.version,
        state=queue.state,
        declared=queue.declared,
        override=queue.override,
        paused=queue.paused,
        waiting=min(len(queue.waiting), COUNT_CAP),
        held=min(len(queue.held), COUNT_CAP),
        needs_admission=queue.partitions.needs_admission,
        full=queue.full,
        next_at=queue.next_at,
    )
