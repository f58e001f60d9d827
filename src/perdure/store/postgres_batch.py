"""A batch of writes as the arguments of one statement, `commit_batch`, and its rows as answers.

All writes travel as JSON, payloads in it as base64. Most are turns that append entries, read mail and perhaps change
the run's row: those are encoded as they are, without a step of Python for each, and the server judges and writes all of
them at once; so it does with new runs, with mail, and with ticking off who was told of an end. All others are carried
out one by one, in their order. What is done at once overtakes the others, because no other write of its batch concerns
its run, but for more mail; behind one that may, by assigning events, nothing does but new runs.

Arrays, a column each, would be less for the server to read; but the driver takes 1 us for each of their elements, some
20 for a step, which is a fifth of all that a step costs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from perdure.records import DeadLetter, Ending, Entry, Message, RunRecord, TurnExtras
from perdure.store import rows, rules
from perdure.store.base import (
    Answer,
    AppendStream,
    Begun,
    Committed,
    CommitTurn,
    Created,
    CreateRun,
    Deliver,
    Delivered,
    Ended,
    EndRun,
    FanOut,
    Full,
    Gone,
    Missing,
    Moved,
    Observe,
    Observing,
    Publish,
    Published,
    ReleaseRun,
    Replay,
    Restart,
    RewindRun,
    RunPatch,
    Settle,
    Superseded,
    SupersedeStream,
    Write,
)

Json = dict[str, Any]

COMMIT = "SELECT * FROM {schema}.commit_batch($1, $2, $3, $4, $5, $6, $7, $8, $9)"

_encode = msgspec.json.Encoder().encode
_COMMITTED = Committed()


def arguments(batch: Sequence[Write]) -> list[Any]:
    """What `COMMIT` is called with; the writes must have been checked."""
    gathered = _Gathered(batch)
    if not gathered.readable:
        gathered = _Gathered(batch, plainly=False)
    return gathered.arguments()


class _Gathered:
    """The writes of a batch, sorted by the way in which they travel."""

    def __init__(self, batch: Sequence[Write], *, plainly: bool = True) -> None:
        self._plainly = plainly
        self._topics: set[str] = set()
        self._topical = False  # nothing but new runs overtakes a write that may assign events
        self._times = Counter(map(rules.run_of, batch))
        self._mailed = self._only_mailed(batch)
        self._locked: set[str] = set()  # runs, besides those of plain turns
        self._workers: set[str] = set()
        self._met: set[rules.Key] = set()
        self._creates: list[Json] = []
        self._mail: list[Json] = []
        self._settles: list[Json] = []
        self._writes: list[Json] = []
        self._turns: list[CommitTurn] = []
        self._turns_at: list[int] = []
        for at, write in enumerate(batch):
            self._add(at, write)
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
        self._topical = self._topical or _is_topical(write)
        if isinstance(write, CreateRun) and key not in self._met and not (write.entries or write.inbox):
            self._creates.append(_new_run(at, write))
        elif isinstance(write, Deliver) and (self._is_alone(write.run_id) or self._is_only_mailed(write.run_id)):
            self._mail.append(_mail(at, write))
        elif isinstance(write, Settle) and rules.only_tells(write) and self._is_alone(write.run_id):
            self._settles += _told(at, write)
        else:
            self._writes.append({**as_json(write), "at": at})
        self._met.add(key)
        if isinstance(key, str) and not isinstance(write, CreateRun):
            self._locked.add(key)
        self._workers.update(_owners_of(write))

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
            if isinstance(write, Deliver) and self._times[write.run_id] > 1 and rules.is_unbounded(write):
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


def _mail(at: int, write: Deliver) -> Json:
    return {**_message(write.message), "at": at, "run_id": write.run_id, "now": write.now, "room": write.limit}


def _told(at: int, write: Settle) -> list[Json]:
    run = {"at": at, "run_id": write.run_id}
    return [{**run, "observer": each.run_id, "target": each.target} for each in write.told] or [run]


def _entry_row(entry: Entry) -> rows.Row:
    """An entry's columns, in the order of `rows.ENTRY_COLUMNS`."""
    return (
        entry.location,
        entry.kind,
        entry.name,
        entry.status,
        entry.asked,
        entry.ordinal,
        entry.seq,
        entry.value,
        None if entry.error is None else rows.as_json(entry.error),
        entry.attempts,
        entry.generation,
        entry.started_at,
        entry.settled_at,
        entry.due_at,
        entry.fingerprint,
        entry.detail,
    )


def _patch_row(patch: RunPatch) -> rows.Row:
    return (
        patch.status,
        patch.owner,
        patch.wake_at,
        rows.as_json(patch.waits),
        rows.as_json(patch.held),
        patch.held.kind if patch.held is not None else None,
        rows.as_json(patch.drift),
        patch.recoveries,
        patch.result,
        rows.as_json(patch.error),
        patch.ended_at,
        patch.prune_at,
    )


# --- what must be locked ---------------------------------------------------------------------------------------------


def _is_topical(write: Write) -> bool:
    """Whether a write may give mail to other runs, or needs the lock of a topic for its own."""
    match write:
        case Publish() | FanOut():
            return True
        case CommitTurn():
            return write.extras is not None and bool(write.extras.subscribe or write.extras.returned)
        case Settle():
            return bool(write.returned or write.moved)
        case Replay():
            return _is_topical(write.send)
        case _:
            return False


def _topics_of(write: Write) -> Iterable[str]:
    """The topics that a write names; those of what it returns are known to the server."""
    match write:
        case Publish():
            yield write.event.topic
        case FanOut():
            yield write.topic
        case Settle():
            yield from (moved.to.event.topic for moved in write.moved)
        case Replay():
            yield from _topics_of(write.send)
        case CommitTurn() if write.extras is not None:
            for subscription in write.extras.subscribe:
                yield from subscription.topics


def _owners_of(write: Write) -> Iterable[str]:
    """Workers that may own a run through this write: none of them must be forgotten meanwhile."""
    if isinstance(write, CreateRun) and write.record.owner is not None:
        yield write.record.owner
    elif isinstance(write, CommitTurn) and write.patch is not None and write.patch.owner is not None:
        yield write.patch.owner


# --- writes as JSON --------------------------------------------------------------------------------------------------


def as_json(write: Write) -> Json:
    """A write as `carry_out` takes it: what is empty is left out."""
    match write:
        case CommitTurn():
            return _turn(write)
        case CreateRun():
            history = _given(entries=_entries(write.entries), inbox=_messages(write.inbox))
            return {"kind": "create", **_new_run(0, write), **history}
        case Deliver():
            return _tagged("mail", write, message=_message(write.message))
        case EndRun():
            return _tagged("end", write)
        case ReleaseRun():
            return _tagged("release", write)
        case Observe():
            return _tagged("observe", write)
        case RewindRun():
            return _tagged("rewind", write, entries=_entries(write.entries), returned=_messages(write.returned))
        case Settle():
            return _tagged("settle", write, moved=_moved(write.moved), dead_letters=_letters(write.dead_letters))
        case Publish():
            return _tagged("publish", write, event=_fields(write.event))
        case FanOut():
            return _tagged("fan_out", write)
        case Replay():
            return _tagged("replay", write, send=as_json(write.send))
        case AppendStream():
            return _tagged("append_stream", write)
        case SupersedeStream():
            return _tagged("supersede_stream", write)


def _tagged(kind: str, write: msgspec.Struct, **replaced: Any) -> Json:
    return {"kind": kind, **_given(**{**_fields(write), **replaced})}


def _fields(struct: msgspec.Struct) -> Json:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _given(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None and value != ()}


def _turn(turn: CommitTurn) -> Json:
    return _tagged(
        "turn",
        turn,
        entries=_entries(turn.entries),
        patch=_patch(turn.patch) if turn.patch is not None else None,
        restart=_restart(turn.restart) if turn.restart is not None else None,
        extras=_extras(turn.extras) if turn.extras is not None else None,
    )


_PATCHED = "status, owner, wake_at, waits, held, held_kind, drift, recoveries, result, error, ended_at, prune_at"
_PATCH_NAMES = _PATCHED.split(", ")


def _patch(patch: RunPatch) -> Json:
    return _given(**dict(zip(_PATCH_NAMES, _patch_row(patch), strict=True)))


def _restart(restart: Restart) -> Json:
    return _given(**{**_fields(restart), "entries": _entries(restart.entries)})


def _extras(extras: TurnExtras) -> Json:
    return _given(**{**_fields(extras), "dead_letters": _letters(extras.dead_letters)})


_ENTRY_NAMES = rows.ENTRY_COLUMNS.split(", ")


def _entries(entries: Sequence[Entry]) -> tuple[Json, ...]:
    return tuple(dict(zip(_ENTRY_NAMES, _entry_row(entry), strict=True)) for entry in entries)


def _messages(messages: Sequence[Message]) -> tuple[Json, ...]:
    return tuple(_message(message) for message in messages)


def _message(message: Message) -> Json:
    return _given(**_fields(message))


def _letters(letters: Sequence[DeadLetter]) -> tuple[Json, ...]:
    """The reason is for people, and may quote anything; a NUL is the one thing that PostgreSQL cannot hold."""
    return tuple(
        {**_fields(letter), "reason": letter.reason.replace("\0", "\N{REPLACEMENT CHARACTER}")} for letter in letters
    )


def _moved(moved: Sequence[Moved]) -> tuple[Json, ...]:
    return tuple(
        {"number": each.number, "to": as_json(each.to), "otherwise": _letters((each.otherwise,))[0]} for each in moved
    )


_GIVEN_TO_NEW_RUNS = (
    "id, workflow, version, input, created_at, created_by, pool, shard, generation, epoch, run_attempt, "
    "first_workflow, first_input, parent, attached, tags, wake_at, owner, deadline_at, retention"
)
_NEW_RUN = _GIVEN_TO_NEW_RUNS.split(", ")
_given_to_a_new_run = attrgetter(*_NEW_RUN)


def _new_run(at: int, write: CreateRun) -> Json:
    record: RunRecord = write.record
    observer = write.observer
    observed = {} if observer is None else {"observer": observer.run_id, "target": observer.target}
    given = zip(_NEW_RUN, _given_to_a_new_run(record), strict=True)
    return {"at": at, "seed": str(record.seed), **dict(given), **observed}


# --- answers ---------------------------------------------------------------------------------------------------------

EXISTS = "exists"
"""The verdict on a new run whose id was taken: who has it must be asked for."""
CREATED = "created"
"""The verdict on a new run that the same call had made before."""


class Answers(msgspec.Struct):
    """The answers, the runs that others want to hear of, and what of the batch is still to be done.

    Where the answer must be `Exists`, and which runs were there already and are still to be observed.
    """

    given: list[Answer]
    changed: frozenset[str]
    taken: list[int]
    unobserved: list[int]


def answers(batch: Sequence[Write], found: Iterable[rows.Row]) -> Answers:
    given: list[Answer] = [_COMMITTED] * len(batch)
    changed: list[str] = []
    taken: list[int] = []
    unobserved: list[int] = []
    for row in found:
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


def _answer(verdict: str, number: int, flag: bool, label: str, body: bytes | None, note: str | None) -> Answer:
    match verdict:
        case "committed" | "again":
            return Committed(mail=bool(flag))
        case "superseded":
            return Superseded()
        case "delivered":
            return Delivered(number, fresh=flag, owner=label)
        case "made" | "created":
            return Created(owned=flag)
        case "ended":
            return Ended(rows.run_status(label))
        case "ended so":
            status = rows.run_status(label)
            return Ended(status, Ending(status, body, rows.error_of(note)))
        case "published" | "known":
            return Published(number, int(label), more=flag, fresh=verdict == "published")
        case "full":
            return Full(number)
        case "observing":
            return Observing()
        case "begun":
            return Begun()
        case "gone":
            return Gone()
        case _:
            assert verdict == "missing", verdict
            return Missing()
