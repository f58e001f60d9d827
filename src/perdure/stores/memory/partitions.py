"""The partitions of one queue in memory, and the index of those that are ready.

A partition is ready by its counts, its limit and its `ready_at` alone. So a slot that is returned between a view and
its admission makes the partition ready after it. `reindex` is called after each change of one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import nsmallest
from itertools import chain, islice
from typing import Any

from msgspec import Struct, field

from perdure.model.queue_records import COUNT_CAP, PartitionOverride, PartitionView, Take
from perdure.stores import queue_rules as rules

WaitingKey = tuple[int, int, str]
"""Priority, number and run of an eligible waiting place."""

LAST = chr(0x10FFFF)  # follows every name


class MemoryPartition(Struct):
    """One partition: the keys of its eligible waiting places in order, its slots, and what the last take stored."""

    name: str
    turn: int
    waiting: list[WaitingKey] = field(default_factory=list)
    delayed: int = 0
    held: int = 0
    taken: int = 0
    state: bytes = b""
    limit: int | None = None
    ready_at: float | None = None
    keep_until: float | None = None
    override: PartitionOverride | None = None
    indexed: tuple[float | None, int] | None = None  # its ready_at and turn in the index; None: it is in no index

    def store(self, take: Take, taken: int) -> None:
        """Store the result of a take."""
        self.turn, self.state, self.taken = take.turn, take.state, taken
        self.limit, self.ready_at, self.keep_until = take.limit, take.ready_at, take.keep_until

    def view(self) -> PartitionView:
        """Return what an admission is planned from."""
        return PartitionView(
            partition=self.name,
            waiting=min(len(self.waiting), COUNT_CAP),
            held=self.held,
            turn=self.turn,
            state=self.state,
            taken=self.taken,
            override=self.override,
        )


class MemoryPartitions:
    """All partitions of a queue by name. `last_turn` is the highest turn that a take has set."""

    def __init__(self) -> None:
        self._partitions: dict[str, MemoryPartition] = {}
        self._ready: list[tuple[int, str]] = []  # turn and name; without a ready_at
        self._timed: list[tuple[float, int, str]] = []  # ready_at, turn and name; ready from that time on
        self._unused: dict[str, None] = {}  # names of partitions without places and override
        self.last_turn = 0

    def get(self, name: str) -> MemoryPartition:
        """Return the partition; add it behind all others if it is new."""
        if name not in self._partitions:
            self._partitions[name] = MemoryPartition(name, self.last_turn + 1)
            self._unused[name] = None
        return self._partitions[name]

    def find(self, name: str) -> MemoryPartition | None:
        """Return the partition, or None if it is unknown."""
        return self._partitions.get(name)

    def clear_limits(self) -> None:
        """Remove the limit and ready_at of every partition: the settings of the queue have changed."""
        for partition in self._partitions.values():
            partition.limit = partition.ready_at = None
            self.reindex(partition)

    def reindex(self, partition: MemoryPartition) -> None:
        """Update the indexes after a change of the partition's counts, limit, times, turn or override."""
        if partition.waiting or partition.delayed or partition.held or partition.override is not None:
            self._unused.pop(partition.name, None)
        else:
            self._unused[partition.name] = None
        is_listed = rules.lacks_only_time(len(partition.waiting), partition.held, partition.limit)
        key = (partition.ready_at, partition.turn) if is_listed else None
        if key != partition.indexed:
            self._unindex(partition)
            self._index(partition, key)

    def _index(self, partition: MemoryPartition, key: tuple[float | None, int] | None) -> None:
        partition.indexed = key
        if key is None:
            return
        ready_at, turn = key
        if ready_at is None:
            insort(self._ready, (turn, partition.name))
        else:
            insort(self._timed, (ready_at, turn, partition.name))

    def _unindex(self, partition: MemoryPartition) -> None:
        if partition.indexed is None:
            return
        ready_at, turn = partition.indexed
        if ready_at is None:
            discard_key(self._ready, (turn, partition.name))
        else:
            discard_key(self._timed, (ready_at, turn, partition.name))

    def prune(self, now: float) -> None:
        """Delete partitions without places and override whose state is not needed any more."""
        for name in list(self._unused):
            partition = self._partitions[name]
            if rules.may_prune_partition(partition.state, partition.keep_until, now):
                del self._partitions[name], self._unused[name]

    # reading

    @property
    def needs_admission(self) -> bool:
        """True if a partition is ready and has no `ready_at`."""
        return bool(self._ready)

    @property
    def next_at(self) -> float | None:
        """The earliest `ready_at` of a partition that lacks nothing else."""
        return self._timed[0][0] if self._timed else None

    def ready(self, now: float, limit: int) -> Iterator[MemoryPartition]:
        """Yield the first ready partitions in the order of (turn, name)."""
        timed = islice(self._timed, bisect_right(self._timed, (now, 2**63, LAST)))
        keys = chain(islice(self._ready, limit), ((turn, name) for _, turn, name in timed))
        return (self._partitions[name] for _, name in nsmallest(limit, keys))


def discard_key(keys: list[Any], key: Any) -> None:
    """Remove a key from a sorted list, if it is there."""
    at = bisect_left(keys, key)
    if at < len(keys) and keys[at] == key:
        del keys[at]
