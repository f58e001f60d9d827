"""The runs of the memory store, and the indexes over them that keep every question from looking at all runs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.records import Entry, Message, RunRecord
from perdure.store import rules
from perdure.store.base import Claim, Snapshot, StoredEntry
from perdure.store.memory_due import Due
from perdure.store.pages import Key


class Row(Struct, frozen=True):
    """One position of a history: an entry, or the marker of a turn that had none. A turn's first row has its id."""

    turn_id: str | None
    entry: Entry | None


class MemoryRun(Struct):
    """A run with all that it owns."""

    record: RunRecord
    position: int = 0
    rows: dict[int, Row] = field(default_factory=dict)  # by position, in order
    inbox: dict[int, Message] = field(default_factory=dict)  # unread, by number
    numbers: dict[str, int] = field(default_factory=dict)  # of every message ever accepted, by its id
    mailed: bool = False
    prune_at: float | None = None

    def standing(self) -> rules.Standing:
        record = self.record
        return rules.Standing(
            status=record.status,
            owner=record.owner,
            position=self.position,
            inbox_last=record.inbox_last,
            wake_at=record.wake_at,
            mailed=self.mailed,
            held=record.held is not None,
            begun=record.begun_at is not None or record.generation > 0,
        )

    def turn_at(self, position: int) -> str | None:
        row = self.rows.get(position)
        return row.turn_id if row else None


class MemoryRuns:
    """All runs by id. `put` is the only way to change a row: it keeps the indexes in step."""

    def __init__(self) -> None:
        self._runs: dict[str, MemoryRun] = {}
        self._due: dict[tuple[str, str, int], Due] = defaultdict(Due)  # by pool, workflow and version
        self._prunable = Due()
        self._held: dict[str, None] = {}
        self.owned: dict[str, set[str]] = defaultdict(set)
        self.mailed: dict[str, set[str]] = defaultdict(set)
        self.by_age: list[Key] = []

    def __getitem__(self, id: str) -> MemoryRun:
        return self._runs[id]

    def get(self, id: str) -> MemoryRun | None:
        return self._runs.get(id)

    # changing

    def add(self, record: RunRecord) -> None:
        self._runs[record.id] = MemoryRun(record)
        insort(self.by_age, (record.created_at, record.id))
        self._index(self._runs[record.id])

    def put(self, run: MemoryRun, record: RunRecord, *, mailed: bool = False) -> None:
        """Give the run this row. Unless said otherwise its owner, if any, has no mail to look at."""
        self._unindex(run)
        run.record = record
        run.mailed = mailed
        self._index(run)

    def release(self, run: MemoryRun, now: float, *, recovered: bool = False) -> None:
        """Take the run from its owner and make it due."""
        record = run.record
        self.put(
            run,
            replace(
                record,
                owner=None,
                status=rules.status_released(run.standing().begun),
                wake_at=now,
                recoveries=record.recoveries + recovered,
                updated_at=now,
            ),
        )

    def prune(self, now: float, limit: int) -> int:
        """Forget up to `limit` finished runs whose time has come."""
        pruned = 0
        while pruned < limit and (head := self._prunable.head()) is not None and head[0] <= now:
            run = self._runs.pop(head[1])
            self._unindex(run)
            del self.by_age[bisect_left(self.by_age, (run.record.created_at, run.record.id))]
            pruned += 1
        return pruned

    def _unindex(self, run: MemoryRun) -> None:
        record = run.record
        self._due[record.pool, record.workflow, record.version].put(record.id, None)
        self._prunable.put(record.id, None)
        self._held.pop(record.id, None)
        if record.owner is not None:
            self.owned[record.owner].discard(record.id)
            self.mailed[record.owner].discard(record.id)

    def _index(self, run: MemoryRun) -> None:
        record = run.record
        if record.owner is not None:
            self.owned[record.owner].add(record.id)
            if run.mailed:
                self.mailed[record.owner].add(record.id)
        elif not record.status.terminal:
            self._due[record.pool, record.workflow, record.version].put(record.id, record.wake_at)
            if record.held is not None:
                self._held[record.id] = None
        if record.status.terminal:
            self._prunable.put(record.id, run.prune_at)

    # asking

    def take_due(self, claim: Claim) -> list[str]:
        """The ids of due runs that fit the claim, earliest first."""
        queues = [self._due[claim.pool, workflow, version] for workflow, version in set(claim.workflows)]
        taken: list[str] = []
        passed: list[tuple[Due, float, str]] = []
        while len(taken) < claim.limit:
            heads = [(*head, queue) for queue in queues if (head := queue.head()) is not None]
            at, id, queue = min(heads, key=lambda head: head[:2], default=(claim.now + 1.0, "", Due()))
            if at > claim.now:
                break
            queue.put(id, None)
            if claim.shards is None or self._runs[id].record.shard in claim.shards:
                taken.append(id)
            else:
                passed.append((queue, at, id))
        for queue, at, id in passed:
            queue.put(id, at)
        return taken

    def next_wake(self, pool: str) -> float | None:
        heads = (due.head() for (of_pool, _, _), due in self._due.items() if of_pool == pool)
        return min((head[0] for head in heads if head is not None), default=None)

    def held_for(self, kind: str, workflows: frozenset[tuple[str, int]]) -> list[MemoryRun]:
        """Runs that nobody owns and that are held for this reason."""
        return [run for run in map(self._runs.__getitem__, self._held) if _held_for(run.record, kind, workflows)]

    def snapshot(self, id: str) -> Snapshot | None:
        run = self._runs.get(id)
        if run is None:
            return None
        return Snapshot(run.record, run.position, _entries(run.rows.values()), tuple(run.inbox.values()))

    def history(self, id: str, after: int) -> list[StoredEntry]:
        run = self._runs.get(id)
        rows = run.rows.items() if run else ()
        return [StoredEntry(at, row.entry) for at, row in rows if at > after and row.entry is not None]


def _held_for(record: RunRecord, kind: str, workflows: frozenset[tuple[str, int]]) -> bool:
    return record.held is not None and record.held.kind == kind and (record.workflow, record.version) in workflows


def _entries(rows: Iterable[Row]) -> tuple[Entry, ...]:
    return tuple(row.entry for row in rows if row.entry is not None)
