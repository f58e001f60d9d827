"""Encode a batch of writes as one statement with its arguments, and decode its rows as results.

All writes are JSON, payloads in it base64. A single write is applied by `commit_write`. In a larger batch
(`commit_batch`) most writes are turns that append entries, consume messages and perhaps patch the run's row. They are
encoded as they are, without Python code per turn, and the server checks and applies all of them together. New runs,
messages and notified observers are grouped in the same way. All other writes are applied one by one, in their order,
as if each were single.

Grouped writes are applied before the others. That is safe because no other write of the batch is about the same run,
except for further messages. After a write that may assign events to other runs, only new runs are grouped.

Arrays, one per column, would be cheaper for the server to read. But asyncpg takes 1 us per element, about 20 us for a
step, which is a fifth of the cost of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from perdure.model.records import RunResult
from perdure.stores import semantics
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.write_encoding import Json, as_json, message, new_run, notified_rows
from perdure.stores.results import (
    Admitted,
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    Created,
    DeadLetterMissing,
    EventPublished,
    Joined,
    LimitReached,
    MessageDelivered,
    NotQueued,
    ObserverAdded,
    QueueMissing,
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import (
    CommitTurn,
    ConfigureQueue,
    CreateRun,
    DeliverMessage,
    FanOut,
    FinalizeRun,
    PublishEvent,
    PutDocument,
    ReplayDeadLetter,
    Write,
)

COMMIT_WRITE = "SELECT * FROM {schema}.commit_write($1)"
COMMIT_BATCH = "SELECT * FROM {schema}.commit_batch($1, $2, $3, $4, $5, $6, $7, $8, $9)"

_encode = msgspec.json.Encoder().encode
_COMMITTED = Committed()
_CREATED = Created(owned=True)
_CREATED_WAITING = Created(owned=False)
_names = msgspec.json.Decoder(tuple[str, ...])

HOLD_MESSAGES = frozenset(("pause", "resume", "cancel"))
"""Kinds of messages that hold or resume a run that waits in a queue. They are not grouped."""


def call(batch: Sequence[Write]) -> tuple[str, list[Any]]:
    """Return the statement that applies a batch of checked writes, and its arguments."""
    if len(batch) == 1 and needs_only_run_lock(batch[0]):
        return COMMIT_WRITE, [_encode(as_json(batch[0])).decode()]
    plan = _BatchPlan(batch)
    if not plan.is_readable:
        plan = _BatchPlan(batch, group_turns=False)
    return COMMIT_BATCH, plan.arguments()


def needs_only_run_lock(write: Write) -> bool:
    """Whether a single write needs no lock except that of its run, so that `commit_write` can apply it.

    As a batch of one it would take up to twice as long, because arrays and joins cost the server more than they save.
    (In thousands of instructions: 550 for a new run, 500 for a step, 820 for a step that ends its run; 780, 870 and
    1,370 as a batch.)
    """
    return not _touches_topics(write)


class _BatchPlan:
    """The writes of a batch, sorted by how `commit_batch` applies them."""

    def __init__(self, batch: Sequence[Write], *, group_turns: bool = True) -> None:
        self._group_turns = group_turns
        self._topics: set[str] = set()
        self._assigns_events = False  # then only new runs may still be grouped
        self._writes_per_run = Counter(map(semantics.run_of, batch))
        self._only_messages = self._find_runs_with_only_messages(batch)
        self._locked: set[str] = set()  # runs, except those of grouped turns
        self._workers: set[str] = set()  # new owners by grouped turns: they must not be removed meanwhile
        self._seen: set[semantics.Key] = set()
        self._creates: list[Json] = []
        self._queued: list[Json] = []  # new runs with a place
        self._configured: set[str] = set()  # queues whose settings an earlier write changes
        self._has_keys = any(_dedupe_key(write) is not None for write in batch)
        self._messages: list[Json] = []
        self._finalizes: list[Json] = []
        self._writes: list[Json] = []
        self._documents: list[tuple[str, str, Json]] = []
        self._turns: list[CommitTurn] = []
        self._turns_at: list[int] = []
        for at, write in enumerate(batch):
            self._add(at, write)
        self._creates.sort(key=itemgetter("id"))  # two batches that create the same runs lock them in one order
        self._documents.sort(key=itemgetter(0, 1))  # as for runs; documents concern no other write
        if self._queued:
            self._queued.sort(key=itemgetter("id"))
            self._writes.insert(0, {"queues": "place", "creates": self._queued})
        self._writes += [document for _, _, document in self._documents]
        self._document = _document(self._turns)

    @property
    def is_readable(self) -> bool:
        """Whether the server can read the grouped turns. It refuses an escaped NUL even in text that it only copies."""
        return self._document is None or "\\u0000" not in self._document

    def _add(self, at: int, write: Write) -> None:
        if isinstance(write, CommitTurn) and self._can_be_grouped(write):
            self._turns.append(write)
            self._turns_at.append(at)
            if write.patch is not None and write.patch.owner is not None:
                self._workers.add(write.patch.owner)
            return
        if isinstance(write, PutDocument):
            self._documents.append((write.kind, write.id, {**as_json(write), "at": at}))
            return
        key = semantics.run_of(write)
        self._topics.update(_topics_of(write))
        self._assigns_events = self._assigns_events or _touches_topics(write)
        if isinstance(write, ConfigureQueue):
            self._configured.add(write.name)
        if isinstance(write, CreateRun) and key not in self._seen and not self._is_created_alone(write):
            (self._creates if write.place is None else self._queued).append(new_run(at, write))
        elif (
            isinstance(write, DeliverMessage)
            and write.message.kind not in HOLD_MESSAGES
            and (self._is_only_write(write.run_id) or self._gets_only_messages(write.run_id))
        ):
            self._messages.append(message(at, write))
        elif (
            isinstance(write, FinalizeRun)
            and semantics.only_marks_notified(write)
            and self._is_only_write(write.run_id)
        ):
            self._finalizes += notified_rows(at, write)
        else:
            self._writes.append({**as_json(write), "at": at})
        self._seen.add(key)
        if isinstance(key, str) and not (isinstance(write, CreateRun) and write.replaces is None):
            self._locked.add(key)

    def arguments(self) -> list[Any]:
        return [
            sorted(self._workers) or None,
            sorted(self._topics) if self._assigns_events else None,
            list(self._locked),
            _document(self._creates),
            _document(self._messages),
            _document(self._writes),
            _document(self._turns_at),
            self._document,
            _document(self._finalizes),
        ]

    def _find_runs_with_only_messages(self, batch: Sequence[Write]) -> frozenset[str]:
        """Return runs that get several messages and no other write, if the messages cannot affect each other."""
        ids: dict[str, set[str]] = {}
        for write in batch:
            if (
                isinstance(write, DeliverMessage)
                and self._writes_per_run[write.run_id] > 1
                and write.message.kind not in HOLD_MESSAGES
                and semantics.is_unbounded(write)
            ):
                ids.setdefault(write.run_id, set()).add(write.message.id)
        return frozenset(run_id for run_id, messages in ids.items() if len(messages) == self._writes_per_run[run_id])

    def _can_be_grouped(self, turn: CommitTurn) -> bool:
        if self._has_keys and turn.patch is not None and turn.patch.status.terminal:
            return False  # its end may free a key
        return (
            self._group_turns and turn.continue_as is None and turn.extras is None and self._is_only_write(turn.run_id)
        )

    def _is_created_alone(self, write: CreateRun) -> bool:
        place = write.place
        if place is not None and (place.dedupe is not None or place.queue in self._configured):
            return True
        return write.by is not None or is_created_alone(write)

    def _is_only_write(self, run_id: str) -> bool:
        """Whether no other write of the batch can affect this run."""
        return self._writes_per_run[run_id] == 1 and not self._assigns_events

    def _gets_only_messages(self, run_id: str) -> bool:
        return run_id in self._only_messages and not self._assigns_events


def _document(writes: Sequence[Json | CommitTurn | int]) -> str | None:
    return _encode(writes).decode() if writes else None


def is_created_alone(write: CreateRun) -> bool:
    """Return whether more than the row of a new run, its observer and its place are written."""
    return bool(write.entries or write.inbox or write.received or write.replaces)


def _dedupe_key(write: Write) -> str | None:
    return write.place.dedupe if isinstance(write, CreateRun) and write.place is not None else None


# --- what must be locked --------------------------------------------------------------------------------------------


def _touches_topics(write: Write) -> bool:
    """Whether a write may assign events to other runs, or needs the lock of a topic for its own run."""
    match write:
        case PublishEvent() | FanOut():
            return True
        case CommitTurn():
            return write.extras is not None and bool(write.extras.subscribe or write.extras.released_assignments)
        case FinalizeRun():
            return bool(write.returned or write.redirected)
        case ReplayDeadLetter():
            return _touches_topics(write.send)
        case _:
            return False


def _topics_of(write: Write) -> Iterable[str]:
    """Return the topics that a write names. The server looks up those of released assignments."""
    match write:
        case PublishEvent():
            yield write.event.topic
        case FanOut():
            yield write.topic
        case FinalizeRun():
            yield from (event.to.event.topic for event in write.redirected)
        case ReplayDeadLetter():
            yield from _topics_of(write.send)
        case CommitTurn() if write.extras is not None:
            for subscription in write.extras.subscribe:
                yield from subscription.topics


# --- results --------------------------------------------------------------------------------------------------------

EXISTS = "exists"
"""The result kind of a new run whose id is taken. The record of the other run must be read separately."""
CREATED_BEFORE = "created_before"
"""The result kind of a new run that an earlier, equal call has created."""


class BatchResults(msgspec.Struct):
    """The results of a batch, the changed runs, and what the store must still do for the batch.

    `ids_taken` are indexes of new runs whose result must be `IdTaken`. `unobserved` are indexes of runs that an earlier
    call created and that are still to be observed.
    """

    results: list[WriteResult]
    changed: frozenset[str]
    ids_taken: list[int]
    unobserved: list[int]


def read_results(statement: str, batch: Sequence[Write], found: Sequence[rows.Row]) -> BatchResults:
    """Decode the rows of a statement of `call`. A write without a row was applied as requested."""
    results = [_expected_result(write) for write in batch]
    changed: list[str] = []
    ids_taken: list[int] = []
    unobserved: list[int] = []
    for row in _rows_of_single_write(found[0]) if statement == COMMIT_WRITE else found:
        at = row[0]
        if at < 0:
            changed.append(row[4])
        elif row[1] == EXISTS:
            ids_taken.append(at)
        else:
            results[at] = _read_result(*row[1:])
            if row[1] == CREATED_BEFORE and isinstance(write := batch[at], CreateRun) and write.observer is not None:
                unobserved.append(at)
    return BatchResults(results, frozenset(changed), ids_taken, unobserved)


def _expected_result(write: Write) -> WriteResult:
    if not isinstance(write, CreateRun):
        return _COMMITTED
    return _CREATED if write.place is None else _CREATED_WAITING


def _rows_of_single_write(found: rows.Row) -> Iterable[rows.Row]:
    """Convert the row of `commit_write` to rows of `commit_batch`: its result, then the changed runs."""
    yield (0, *found[:6])
    for run_id in found[6] or ():
        yield (-1, None, None, None, run_id, None, None)


def _read_result(kind: str, number: int, flag: bool, label: str, body: bytes | None, note: str | None) -> WriteResult:
    match kind:
        case "committed" | "committed_before":
            return Committed(has_messages=bool(flag))
        case "stored":
            return Committed(version=number)
        case "superseded":
            return Superseded()
        case "delivered":
            return MessageDelivered(number, fresh=flag, owner=label)
        case "created" | "created_before":
            return Created(owned=flag)
        case "ended":
            return AlreadyEnded(rows.run_status(label))
        case "ended_with_result":
            status = rows.run_status(label)
            return AlreadyEnded(status, RunResult(status, body, rows.error_of(note)))
        case "published" | "published_before":
            return EventPublished(number, int(label), more=flag, fresh=kind == "published")
        case "full":
            return LimitReached(number)
        case "observing":
            return ObserverAdded()
        case "already_started":
            return AlreadyStarted()
        case "dead_letter_missing":
            return DeadLetterMissing()
        case "joined":
            return Joined(label, replaced=flag, waiting=note == "waiting")
        case "admitted":
            return Admitted(_names.decode(note or "[]"), int(label), number)
        case "queue_missing":
            return QueueMissing()
        case "not_queued":
            return NotQueued()
        case _:
            assert kind == "missing", kind
            return RunMissing()
