"""The runs of the memory store and the indexes over them, so that no query scans all runs."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.model.records import Entry, Hold, Message, PublishedValue, RunRecord, queue_hint
from perdure.stores import queue_rules
from perdure.stores import semantics as rules
from perdure.stores.memory.due_queue import DueQueue
from perdure.stores.memory.run_index import RunIndex
from perdure.stores.memory.streams import RunOutputs
from perdure.stores.protocol import Claim
from perdure.stores.results import Committed, RunMissing, RunRetained, Snapshot, StoredEntry, UnfinalizedRun
from perdure.stores.writes import Observer

FINALIZATION_PAGE = 500
"""Maximum number of observers, and of unread events, that `unfinalized` returns per run."""


class HistoryRow(Struct, frozen=True):
    """One position of a history: an entry, or None for a turn without entries. A turn's first row has its id."""

    turn_id: str | None
    entry: Entry | None


class ActiveSubscription(Struct, frozen=True):
    """A subscription that waits for an event. `number` orders it by age among subscriptions and events."""

    number: int
    run_id: str
    target: str
    topics: tuple[str, ...]


class MemoryInbox(dict[int, Message]):
    """The unread messages of a run by number, in order. `events` counts events and assignments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[str, int] = {}

    def __setitem__(self, number: int, message: Message) -> None:
        if number not in self and message.kind in rules.EVENTS:
            self.events[message.name] = self.events.get(message.name, 0) + 1
        super().__setitem__(number, message)

    def __delitem__(self, number: int) -> None:
        message = self[number]
        super().__delitem__(number)
        if message.kind in rules.EVENTS:
            self.events[message.name] -= 1
            if not self.events[message.name]:
                del self.events[message.name]

    def restore(self, messages: Iterable[Message]) -> None:
        """Make messages unread again, in their order."""
        unread = dict(self) | {message.number: message for message in messages}
        self.clear()
        self.events.clear()
        for number in sorted(unread):
            self[number] = unread[number]


class MemoryRun(Struct):
    """A run with its history, inbox, observers, subscriptions and outputs."""

    record: RunRecord
    position: int = 0
    rows: dict[int, HistoryRow] = field(default_factory=dict)  # by position, in order
    inbox: MemoryInbox = field(default_factory=MemoryInbox)
    numbers: dict[str, int] = field(default_factory=dict)  # of every message ever accepted, by its id
    has_messages: bool = False  # it has an owner, which has not seen some of its messages
    prune_at: float | None = None
    observers: dict[Observer, None] = field(default_factory=dict)
    orphaned_children: bool = False  # it was terminated, and its attached children are still to be ended
    subscriptions: dict[str, ActiveSubscription] = field(default_factory=dict)  # by target
    outputs: RunOutputs = field(default_factory=RunOutputs)

    def state(self) -> rules.RunState:
        """Return the fields that decide whether a write is accepted."""
        record = self.record
        return rules.RunState(
            status=record.status,
            owner=record.owner,
            position=self.position,
            last_message_no=record.last_message_no,
            wake_at=record.wake_at,
            has_messages=self.has_messages,
            held=record.held is not None,
            has_executed=record.first_executed_at is not None or record.generation > 0,
            awaits_first_turn=record.first_executed_at is None,
            waiting=record.waiting,
        )

    def turn_at(self, position: int) -> str | None:
        """Return the id of the turn that starts at this position, or None."""
        row = self.rows.get(position)
        return row.turn_id if row else None

    def append(self, base: int, turn_id: str | None, entries: Iterable[Entry]) -> None:
        """Write these entries at the positions after `base`, or a marker if there are none."""
        self.rows[base + 1] = HistoryRow(turn_id, None)
        for at, entry in enumerate(entries, base + 1):
            self.rows[at] = HistoryRow(turn_id if at == base + 1 else None, entry)

    def unread_events(self) -> list[Message]:
        """Return the unread events and assignments in order of number."""
        return [message for message in self.inbox.values() if message.kind in rules.EVENTS]

    @property
    def needs_finalization(self) -> bool:
        """True if the run has ended and has observers, children or unread events to process."""
        return self.record.status.terminal and bool(self.observers or self.orphaned_children or self.inbox.events)


class MemoryRuns:
    """All runs by id. Only `put` changes a row: it keeps the indexes consistent.

    `changed` collects the runs for the next change hint.
    """

    def __init__(self) -> None:
        self._runs: dict[str, MemoryRun] = {}
        self._due: dict[tuple[str, str, str, int], DueQueue] = defaultdict(DueQueue)  # pool, gate, workflow, version
        self._prunable = DueQueue()
        self._unfinalized: set[str] = set()
        self._held: dict[str, None] = {}
        self._children: dict[str, set[str]] = defaultdict(set)  # attached and open, by parent
        # Time, run, creator of the run and id of every consumed event. A later run of the same id has another creator.
        self._consumed: list[tuple[float, str, str, str]] = []
        self._expiring: list[tuple[float, str, str]] = []  # time, run and key of published values
        self.owned: dict[str, set[str]] = defaultdict(set)
        self.owned_with_messages: dict[str, set[str]] = defaultdict(set)
        self.index = RunIndex(lambda id: self._runs[id].record.created_at)
        self.changed: set[str] = set()

    def __getitem__(self, id: str) -> MemoryRun:
        return self._runs[id]

    def get(self, id: str) -> MemoryRun | None:
        return self._runs.get(id)

    # changing

    def add(self, record: RunRecord) -> MemoryRun:
        """Add a new run with this row and return it."""
        run = self._runs[record.id] = MemoryRun(record)
        self.index.add(record)
        self._index(run)
        return run

    def put(self, run: MemoryRun, record: RunRecord, *, has_messages: bool = False) -> None:
        """Replace the run's row. `has_messages`: its owner has unseen messages."""
        self._unindex(run)
        self.index.replace(run.record, record)
        run.record = record
        run.has_messages = has_messages
        self._index(run)

    def release(self, run: MemoryRun, now: float, *, recovered: bool = False) -> None:
        """Release the run, due at once; count a recovery if `recovered`."""
        record = run.record
        self.put(
            run,
            replace(
                record,
                owner=None,
                status=rules.status_released(run.state().has_executed),
                wake_at=now,
                recoveries=record.recoveries + recovered,
                updated_at=now,
            ),
        )

    def deliver(self, run: MemoryRun, message: Message, now: float) -> int:
        """Put a message into the run's inbox, wake the run, and return the message's number."""
        number = run.record.last_message_no + 1
        woken = rules.wakes(message, run.state())
        run.inbox[number] = replace(message, number=number)
        run.numbers[message.id] = number
        wake_at = rules.earliest(run.record.wake_at, now) if woken else run.record.wake_at
        has_messages = run.has_messages or (woken and run.record.owner is not None)
        held = run.record.held
        if run.record.waiting:
            held = queue_rules.held_while_waiting(held, message.kind)
            self._note_resumed(run.record, held)
        record = replace(run.record, last_message_no=number, wake_at=wake_at, held=held)
        self.put(run, record, has_messages=has_messages)
        self.changed.add(run.record.id)
        return number

    def _note_resumed(self, record: RunRecord, held: Hold | None) -> None:
        """Notify the queue of a waiting run that is not held any more."""
        if record.held is not None and held is None and record.queue is not None:
            self.changed.add(queue_hint(record.queue))

    def consume(self, run: MemoryRun, number: int, now: float) -> Message | None:
        """Remove a message from the inbox and return it, or None. Its id is retained until it is pruned."""
        message = run.inbox.get(number)
        if message is not None:
            del run.inbox[number]
        if message is not None and message.kind == "event":
            heapq.heappush(self._consumed, (now, run.record.id, run.record.created_by, message.id))
        return message

    def publish(self, run: MemoryRun, value: PublishedValue) -> None:
        """Replace the run's published value of this key."""
        run.outputs.publish(value)
        if value.expires_at is not None:
            heapq.heappush(self._expiring, (value.expires_at, run.record.id, value.key))

    def take_changed(self) -> set[str]:
        """Return the runs that changed since the last call."""
        changed, self.changed = self.changed, set()
        return changed

    def _unindex(self, run: MemoryRun) -> None:
        record = run.record
        self._due[record.pool, record.gate, record.workflow, record.version].put(record.id, None)
        self._prunable.put(record.id, None)
        self._unfinalized.discard(record.id)
        self._held.pop(record.id, None)
        if record.owner is not None:
            _discard(self.owned, record.owner, record.id)
            _discard(self.owned_with_messages, record.owner, record.id)
        if record.attached and record.parent is not None:
            _discard(self._children, record.parent, record.id)

    def _index(self, run: MemoryRun) -> None:
        record = run.record
        if record.status.terminal:
            if run.needs_finalization:
                self._unfinalized.add(record.id)
            else:
                self._prunable.put(record.id, run.prune_at)
            return
        if record.attached and record.parent is not None:
            self._children[record.parent].add(record.id)
        if record.owner is not None:
            self.owned[record.owner].add(record.id)
            if run.has_messages:
                self.owned_with_messages[record.owner].add(record.id)
        else:
            self._due[record.pool, record.gate, record.workflow, record.version].put(record.id, record.wake_at)
            if record.held is not None and not record.waiting:
                self._held[record.id] = None

    # deleting

    def prune(self, now: float, limit: int) -> list[str]:
        """Delete up to `limit` finalized runs that have expired and whose parent is not open; return their ids."""
        pruned: list[str] = []
        skipped: list[tuple[float, str]] = []
        while len(pruned) < limit and (head := self._prunable.head()) is not None and head[0] <= now:
            self._prunable.put(head[1], None)
            if self._has_open_parent(self._runs[head[1]].record):
                skipped.append(head)
            else:
                self.remove(self._runs[head[1]])
                pruned.append(head[1])
        for at, id in skipped:
            self._prunable.put(id, at)
        return pruned

    def delete(self, id: str) -> Committed | RunMissing | RunRetained:
        """Delete an ended run, or return why it is retained."""
        run = self._runs.get(id)
        if run is None:
            return RunMissing()
        if not run.record.status.terminal:
            return RunRetained("open")
        if run.needs_finalization:
            return RunRetained("unfinalized")
        if self._has_open_parent(run.record):
            return RunRetained("parent_open")
        self.remove(run)
        return Committed()

    def _has_open_parent(self, record: RunRecord) -> bool:
        parent = self._runs.get(record.parent) if record.parent is not None else None
        return parent is not None and not parent.record.status.terminal

    def remove(self, run: MemoryRun) -> None:
        """Delete a run with all that it owns."""
        del self._runs[run.record.id]
        self._unindex(run)
        self.index.remove(run.record)

    def delete_expired_values(self, now: float) -> None:
        """Delete published values that have expired."""
        while self._expiring and self._expiring[0][0] <= now:
            _, run_id, key = heapq.heappop(self._expiring)
            if (run := self._runs.get(run_id)) is not None:
                run.outputs.delete_expired(key, now)

    def delete_consumed_ids(self, until: float) -> None:
        """Delete the ids of events that were consumed before or at this time."""
        while self._consumed and self._consumed[0][0] <= until:
            _, run_id, created_by, message_id = heapq.heappop(self._consumed)
            run = self._runs.get(run_id)
            if run is None or run.record.created_by != created_by:
                continue  # the run was deleted
            if run.numbers.get(message_id) not in run.inbox:  # else a rewind returned it
                run.numbers.pop(message_id, None)

    # reading

    def take_due(self, claim: Claim) -> list[str]:
        """Remove due runs that match the claim from the queues and return their ids, earliest first."""
        free = {"": claim.limit, **dict(claim.gates)}  # by gate
        pairs = set(claim.workflows)
        queues = [(gate, self._due[claim.pool, gate, *pair]) for gate in free for pair in pairs]
        due_by = claim.now if claim.due_by is None else claim.due_by
        due: list[str] = []
        skipped: list[tuple[DueQueue, float, str]] = []
        while len(due) < claim.limit:
            heads = [(*head, *each) for each in queues if free[each[0]] > 0 and (head := each[1].head()) is not None]
            at, id, gate, queue = min(heads, key=lambda head: head[:2], default=(due_by + 1.0, "", "", DueQueue()))
            if at > due_by:
                break
            queue.put(id, None)
            if gate or claim.shards is None or self._runs[id].record.shard in claim.shards:
                due.append(id)
                free[gate] -= 1
            else:
                skipped.append((queue, at, id))
        for queue, at, id in skipped:
            queue.put(id, at)
        return due

    def next_wake(self, pool: str, gates: Sequence[str] | None) -> float | None:
        """Return when the earliest run without an owner in this pool, behind one of the gates, is due, or None."""
        counted = None if gates is None else {"", *gates}
        queues = (
            due
            for (of_pool, gate, *_), due in self._due.items()
            if of_pool == pool and (counted is None or gate in counted)
        )
        heads = map(DueQueue.head, queues)
        return min((head[0] for head in heads if head is not None), default=None)

    def held_for(self, kind: str, workflows: frozenset[tuple[str, int]]) -> list[MemoryRun]:
        """Return the runs without an owner that are held for this reason."""
        return [run for run in map(self._runs.__getitem__, self._held) if _held_for(run.record, kind, workflows)]

    def unfinalized(self, limit: int) -> list[UnfinalizedRun]:
        """Return runs that need finalization, in the order in which they ended."""
        first = heapq.nsmallest(limit, ((self._runs[id].record.ended_at or 0.0, id) for id in self._unfinalized))
        return [_pending_finalization(self._runs[id]) for _, id in first]

    def open_children(self, parent: str, limit: int, after: str | None) -> list[str]:
        """Return a page of the ids of attached children that have not ended."""
        return heapq.nsmallest(limit, (id for id in self._children.get(parent, ()) if after is None or id > after))

    def snapshot(self, id: str) -> Snapshot | None:
        """Return the run with its history and inbox, or None."""
        run = self._runs.get(id)
        if run is None:
            return None
        return Snapshot(run.record, run.position, _entries(run.rows.values()), tuple(run.inbox.values()))

    def history(self, id: str, after: int, limit: int | None) -> list[StoredEntry]:
        """Return up to `limit` entries after this position, without markers."""
        run = self._runs.get(id)
        rows = run.rows.items() if run else ()
        found = (StoredEntry(at, row.entry) for at, row in rows if at > after and row.entry is not None)
        return list(islice(found, limit))


def _held_for(record: RunRecord, kind: str, workflows: frozenset[tuple[str, int]]) -> bool:
    return record.held is not None and record.held.kind == kind and (record.workflow, record.version) in workflows


def _pending_finalization(run: MemoryRun) -> UnfinalizedRun:
    observers, messages = tuple(run.observers)[:FINALIZATION_PAGE], tuple(run.unread_events())[:FINALIZATION_PAGE]
    return UnfinalizedRun(run.record, observers, messages, run.orphaned_children)


def _entries(rows: Iterable[HistoryRow]) -> tuple[Entry, ...]:
    return tuple(row.entry for row in rows if row.entry is not None)


def _discard(sets: dict[str, set[str]], key: str, item: str) -> None:
    """Remove an item from the set of this key, and the set with its last item."""
    found = sets.get(key)
    if found is not None:
        found.discard(item)
        if not found:
            del sets[key]
