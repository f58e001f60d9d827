"""A batch of writes as one statement with its arguments, and its rows as answers.

All writes travel as JSON, payloads in it as base64. A write that is alone in its batch is carried out by itself
(`commit_write`). Of several (`commit_batch`) most are turns that append entries, read mail and perhaps change the run's
row: those are encoded as they are, without a step of Python for each, and the server judges and writes all of them at
once; so it does with new runs, with mail, and with ticking off who was told of an end. All others are carried out one
by one, in their order, as if each were alone. What is done at once overtakes the others, because no other write of its
batch concerns its run, but for more mail; behind one that may, by assigning events, nothing does but new runs.

Arrays, a column each, would be less for the server to read; but the driver takes 1 us for each of their elements, some
20 for a step, which is a fifth of all that a step costs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from perdure.model.records import RunResult
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.write_encoding import Json, as_json, mail, new_run, told
from perdure.stores.results import (
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    Created,
    DeadLetterMissing,
    EventPublished,
    LimitReached,
    MessageDelivered,
    ObserverAdded,
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import (
    CommitTurn,
    CreateRun,
    DeliverMessage,
    FanOut,
    FinalizeRun,
    PublishEvent,
    ReplayDeadLetter,
    Write,
)

COMMIT_WRITE = "SELECT * FROM {schema}.commit_write($1)"
COMMIT_BATCH = "SELECT * FROM {schema}.commit_batch($1, $2, $3, $4, $5, $6, $7, $8, $9)"

_encode = msgspec.json.Encoder().encode
_COMMITTED = Committed()
_MADE = Created(owned=True)


def call(batch: Sequence[Write]) -> tuple[str, list[Any]]:
    """The statement that carries the batch out, and what it is given; the writes must have been checked."""
    if len(batch) == 1 and is_carried_out_alone(batch[0]):
        return COMMIT_WRITE, [_encode(as_json(batch[0])).decode()]
    gathered = _BatchPlan(batch)
    if not gathered.readable:
        gathered = _BatchPlan(batch, group_turns=False)
    return COMMIT_BATCH, gathered.arguments()


def is_carried_out_alone(write: Write) -> bool:
    """Whether a write that is alone needs no lock but that of its run, as most do.

    As a batch of one it would take up to twice as long: arrays and joins cost the server more than they spare. (In
    thousands of instructions: 550 for a new run, 500 for a step, 820 for a step that ends its run; 780, 870 and 1,370
    as a batch.)
    """
    return not _touches_topics(write)


class _BatchPlan:
    """The writes of a batch, sorted by the way in which they travel."""

    def __init__(self, batch: Sequence[Write], *, group_turns: bool = True) -> None:
        self._plainly = group_turns
        self._topics: set[str] = set()
        self._topical = False  # nothing but new runs overtakes a write that may assign events
        self._times = Counter(map(rules.run_of, batch))
        self._mailed = self._only_mailed(batch)
        self._locked: set[str] = set()  # runs, besides those of plain turns
        self._workers: set[str] = set()  # those that may own a run by a plain turn: none must be forgotten meanwhile
        self._met: set[rules.Key] = set()
        self._creates: list[Json] = []
        self._mail: list[Json] = []
        self._settles: list[Json] = []
        self._writes: list[Json] = []
        self._turns: list[CommitTurn] = []
        self._turns_at: list[int] = []
        for at, write in enumerate(batch):
            self._add(at, write)
        self._creates.sort(key=itemgetter("id"))  # the order in which two batches may meet in them
        self._document = _document(self._turns)

    @property
    def readable(self) -> bool:
        """Whether the server can read the turns: it stumbles over a NUL even where it passes it on as it is."""
        return self._document is None or "\\u0000" not in self._document

    def _add(self, at: int, write: Write) -> None:
        if isinstance(write, CommitTurn) and self._is_plain(write):
            self._turns.append(write)
            self._turns_at.append(at)
            if write.patch is not None and write.patch.owner is not None:
                self._workers.add(write.patch.owner)
            return
        key = rules.run_of(write)
        self._topics.update(_topics_of(write))
        self._topical = self._topical or _touches_topics(write)
        if isinstance(write, CreateRun) and key not in self._met and not (write.entries or write.inbox):
            self._creates.append(new_run(at, write))
        elif isinstance(write, DeliverMessage) and (self._is_alone(write.run_id) or self._is_only_mailed(write.run_id)):
            self._mail.append(mail(at, write))
        elif isinstance(write, FinalizeRun) and rules.only_marks_notified(write) and self._is_alone(write.run_id):
            self._settles += told(at, write)
        else:
            self._writes.append({**as_json(write), "at": at})
        self._met.add(key)
        if isinstance(key, str) and not isinstance(write, CreateRun):
            self._locked.add(key)

    def arguments(self) -> list[Any]:
        return [
            sorted(self._workers) or None,
            sorted(self._topics) if self._topical else None,
            list(self._locked),
            _document(self._creates),
            _document(self._mail),
            _document(self._writes),
            _document(self._turns_at),
            self._document,
            _document(self._settles),
        ]

    def _only_mailed(self, batch: Sequence[Write]) -> frozenset[str]:
        """Runs that get several messages and nothing else, which cannot matter to each other."""
        ids: dict[str, set[str]] = {}
        for write in batch:
            if isinstance(write, DeliverMessage) and self._times[write.run_id] > 1 and rules.is_unbounded(write):
                ids.setdefault(write.run_id, set()).add(write.message.id)
        return frozenset(run_id for run_id, messages in ids.items() if len(messages) == self._times[run_id])

    def _is_plain(self, turn: CommitTurn) -> bool:
        return self._plainly and turn.restart is None and turn.extras is None and self._is_alone(turn.run_id)

    def _is_alone(self, run_id: str) -> bool:
        """Whether no other write of the batch can matter to one to this run."""
        return self._times[run_id] == 1 and not self._topical

    def _is_only_mailed(self, run_id: str) -> bool:
        return run_id in self._mailed and not self._topical


def _document(writes: Sequence[Json | CommitTurn | int]) -> str | None:
    return _encode(writes).decode() if writes else None


# --- what must be locked ---------------------------------------------------------------------------------------------


def _touches_topics(write: Write) -> bool:
    """Whether a write may give mail to other runs, or needs the lock of a topic for its own."""
    match write:
        case PublishEvent() | FanOut():
            return True
        case CommitTurn():
            return write.extras is not None and bool(write.extras.subscribe or write.extras.released_assignments)
        case FinalizeRun():
            return bool(write.returned or write.moved)
        case ReplayDeadLetter():
            return _touches_topics(write.send)
        case _:
            return False


def _topics_of(write: Write) -> Iterable[str]:
    """The topics that a write names; those of what it returns are known to the server."""
    match write:
        case PublishEvent():
            yield write.event.topic
        case FanOut():
            yield write.topic
        case FinalizeRun():
            yield from (moved.to.event.topic for moved in write.moved)
        case ReplayDeadLetter():
            yield from _topics_of(write.send)
        case CommitTurn() if write.extras is not None:
            for subscription in write.extras.subscribe:
                yield from subscription.topics


# --- answers ---------------------------------------------------------------------------------------------------------

EXISTS = "exists"
"""The verdict on a new run whose id was taken: who has it must be asked for."""
CREATED = "created"
"""The verdict on a new run that the same call had made before."""


class Answers(msgspec.Struct):
    """The answers, the runs that others want to hear of, and what of the batch is still to be done.

    Where the answer must be `Exists`, and which runs were there already and are still to be observed.
    """

    given: list[WriteResult]
    changed: frozenset[str]
    taken: list[int]
    unobserved: list[int]


def answers(statement: str, batch: Sequence[Write], found: Sequence[rows.Row]) -> Answers:
    """What the statement of a `call` found, as answers: what is simply done as it was asked for has no row."""
    given: list[WriteResult] = [_MADE if isinstance(write, CreateRun) else _COMMITTED for write in batch]
    changed: list[str] = []
    taken: list[int] = []
    unobserved: list[int] = []
    for row in _rows_of_one(found[0]) if statement == COMMIT_WRITE else found:
        at = row[0]
        if at < 0:
            changed.append(row[4])
        elif row[1] == EXISTS:
            taken.append(at)
        else:
            given[at] = _answer(*row[1:])
            if row[1] == CREATED and isinstance(write := batch[at], CreateRun) and write.observer is not None:
                unobserved.append(at)
    return Answers(given, frozenset(changed), taken, unobserved)


def _rows_of_one(found: rows.Row) -> Iterable[rows.Row]:
    """The answer to one write, and the runs that changed by it, in rows as those of a batch."""
    yield (0, *found[:6])
    for run_id in found[6] or ():
        yield (-1, None, None, None, run_id, None, None)


def _answer(verdict: str, number: int, flag: bool, label: str, body: bytes | None, note: str | None) -> WriteResult:
    match verdict:
        case "committed" | "again":
            return Committed(has_messages=bool(flag))
        case "superseded":
            return Superseded()
        case "delivered":
            return MessageDelivered(number, fresh=flag, owner=label)
        case "made" | "created":
            return Created(owned=flag)
        case "ended":
            return AlreadyEnded(rows.run_status(label))
        case "ended so":
            status = rows.run_status(label)
            return AlreadyEnded(status, RunResult(status, body, rows.error_of(note)))
        case "published" | "known":
            return EventPublished(number, int(label), more=flag, fresh=verdict == "published")
        case "full":
            return LimitReached(number)
        case "observing":
            return ObserverAdded()
        case "begun":
            return AlreadyStarted()
        case "gone":
            return DeadLetterMissing()
        case _:
            assert verdict == "missing", verdict
            return RunMissing()
