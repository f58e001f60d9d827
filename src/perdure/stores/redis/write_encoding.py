"""Writes as Lua takes them, and its answers as the records that the engine expects.

A write becomes an array: its name, then what the function of that name in `lua/course.lua` or `lua/writes.lua` unpacks.
Nothing in it is None, which Lua's arrays cannot hold: empty text, -1 or False stand for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.model.records import DeadLetter, Entry, Message, RunStatus, Subscription
from perdure.model.turns import TurnExtras
from perdure.stores import semantics as rules
from perdure.stores.redis.encoding import (
    EMPTY,
    born,
    encode,
    ending_of,
    entry_value,
    item_write,
    marker,
    message_value,
    moment,
    raw,
    run_of,
    standing,
)
from perdure.stores.results import (
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    Created,
    DeadLetterMissing,
    EventPublished,
    IdTaken,
    LimitReached,
    MessageDelivered,
    ObserverAdded,
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import (
    AppendStream,
    CommitTurn,
    ContinueAs,
    CreateRun,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    ObserveRunEnd,
    PublishEvent,
    RedirectedEvent,
    ReleaseRun,
    ReplayDeadLetter,
    RewindRun,
    RunPatch,
    SupersedeStream,
    Write,
)

Array = tuple[Any, ...]
SliceOf = Callable[[str], int]
"""Which slice a run's id or a topic's name belongs to."""


def name_of(write: Write) -> str:
    """The run's id or the topic's name, by which a write finds its slice."""
    match write:
        case CreateRun():
            return write.record.id
        case PublishEvent():
            return write.event.topic
        case FanOut():
            return write.topic
        case ReplayDeadLetter():
            return name_of(write.send)
        case _:
            return write.run_id


def reaches_topics(write: Write) -> bool:
    """Whether a write waits for other slices: the writes after it must find what it did there."""
    match write:
        case PublishEvent() | FanOut() | EndRun() | RewindRun() | ReplayDeadLetter():
            return True
        case FinalizeRun():
            return not rules.only_marks_notified(write)
        case CommitTurn():
            return write.extras is not None or write.restart is not None or bool(write.consumed) or _ends(write)
        case CreateRun():
            return bool(write.inbox)
        case _:
            return False


def _ends(turn: CommitTurn) -> bool:
    return turn.patch is not None and turn.patch.status.terminal


# --- to Lua ----------------------------------------------------------------------------------------------------------


def array_of(write: Write, slice_of: SliceOf) -> Array:
    match write:
        case CommitTurn():
            return _turn(write, slice_of)
        case CreateRun():
            return _create(write, slice_of)
        case DeliverMessage():
            message = write.message
            value = raw(message_value(message, slice_of(message.name)))
            limit = -1 if write.limit is None else write.limit
            return ("deliver", write.run_id, message.id, message.kind, value, moment(write.now), limit)
        case EndRun():
            return _end(write)
        case ReleaseRun():
            return ("release", write.run_id, write.worker, moment(write.now))
        case ObserveRunEnd():
            return ("observe", write.run_id, write.observer, write.target)
        case RewindRun():
            return _rewind(write, slice_of)
        case FinalizeRun():
            told = [(observer.run_id, observer.target) for observer in write.notified]
            if rules.only_marks_notified(write):
                return ("tell", write.run_id, told)
            letters = _letters(write.dead_letters)
            mail = (write.consumed, write.returned)
            moved = [_moved(each, slice_of) for each in write.moved]
            return ("settle", write.run_id, moment(write.now), told, *mail, letters, write.orphans, moved)
        case PublishEvent():
            return _publish(write)
        case FanOut():
            return ("fan_out", write.topic, write.offset, moment(write.now), write.page)
        case ReplayDeadLetter():
            sending = (moment(write.send.now), slice_of(name_of(write)), array_of(write.send, slice_of))
            return ("replay", write.letter_id, sent_as(write), *sending)
        case AppendStream():
            first = -1 if write.first is None else write.first
            return ("append", write.run_id, write.worker, [item_write(item) for item in write.items], first)
        case SupersedeStream():
            return ("supersede", write.run_id, write.location, write.writer)


def _create(write: CreateRun, slice_of: SliceOf) -> Array:
    record = write.record
    entries = _rows("", 0, write.entries) if write.entries else []
    inbox = []
    for message in write.inbox:
        topic_slice = slice_of(message.name)
        topic = (message.name, topic_slice, message.offset)
        inbox.append((message.id, message.kind, raw(message_value(message, topic_slice)), *topic))
    created_at = moment(record.created_at)
    due_at = created_at if record.wake_at is None else moment(record.wake_at)
    made = (record.id, record.created_by, record.owner or "", created_at, due_at)
    observer = [] if write.observer is None else [write.observer.run_id, write.observer.target]
    return ("create", *made, born(record, raw), entries, inbox, observer)


def _turn(turn: CommitTurn, slice_of: SliceOf) -> Array:
    restart, patch, extras, id = turn.restart, turn.patch, turn.extras, turn.turn_id
    kept = turn.entries if restart is None else restart.entries
    made = (turn.run_id, turn.base, id, turn.worker, turn.owned, turn.seen, _rows(id, turn.base, kept))
    if patch is None and restart is None and extras is None and not turn.consumed:
        return ("step", *made)
    full = (
        *(moment(turn.now), turn.base + max(1, len(turn.entries), len(kept)), turn.consumed),
        patch is not None and _patch(turn, patch),
        restart is not None and _restart(restart),
        extras is not None and _extras(extras, slice_of),
        restart is not None or _ends(turn),
    )
    return ("turn", *made, full)


def _rows(turn_id: str, base: int, entries: Sequence[Entry]) -> list[Any]:
    """Position, value, position, value ...; the first row has the id."""
    added: list[Any] = []
    for position, entry in enumerate(entries, base + 1):
        added += (str(position), raw(entry_value("" if added else turn_id, entry)))
    return added or [str(base + 1), raw(marker(turn_id))]


def _patch(turn: CommitTurn, patch: RunPatch) -> Array:
    return (
        *(patch.status.value, patch.owner or "", moment(patch.wake_at)),
        raw(standing(patch.waits, patch.held, patch.result, patch.error)),
        *(patch.held.kind if patch.held else "", raw(encode(patch.drift)), str(patch.recoveries)),
        *(moment(patch.ended_at), moment(patch.prune_at), rules.ignores_messages(turn, patch)),
    )


def _restart(restart: ContinueAs) -> list[Any]:
    fields = [
        *("workflow", restart.workflow, "version", str(restart.version), "input", raw(restart.input)),
        *("first_executed_at", moment(restart.first_executed_at), "run_attempt", str(restart.run_attempt)),
    ]
    return fields if restart.pool is None else [*fields, "pool", restart.pool]


def _extras(extras: TurnExtras, slice_of: SliceOf) -> Array:
    return (
        extras.dropped,
        extras.unsubscribe,
        extras.released_assignments,
        [(subscription.target, _by_slice(subscription, slice_of)) for subscription in extras.subscribe],
        [(value.key, raw(encode(value)), moment(value.expires_at)) for value in extras.published],
        [item_write(item) for item in extras.streamed],
        _letters(extras.dead_letters),
    )


def _by_slice(subscription: Subscription, slice_of: SliceOf) -> list[list[int | str]]:
    """The topics, those of a slice together behind its number."""
    groups: dict[int, list[int | str]] = {}
    for topic in dict.fromkeys(subscription.topics):
        number = slice_of(topic)
        groups.setdefault(number, [number]).append(topic)
    return list(groups.values())


def sent_as(write: ReplayDeadLetter) -> str:
    """The name under which a slice remembers what became of it."""
    return f"replay/{write.send.event.id if isinstance(write.send, PublishEvent) else write.send.message.id}"


def _moved(moved: RedirectedEvent, slice_of: SliceOf) -> Array:
    event = moved.to.event
    letter = _letters((moved.otherwise,))[0]
    return (moved.number, slice_of(event.topic), f"moved/{event.id}", _publish(moved.to), letter)


def _letters(letters: Sequence[DeadLetter]) -> list[Array]:
    return [(letter.id, raw(encode(letter))) for letter in letters]


def _end(write: EndRun) -> Array:
    now = moment(write.now)
    prune_at = moment(None if write.prune_after is None else write.now + write.prune_after)
    fields = [
        *("status", write.status.value, "owner", "", "wake_at", "", "mailed", "0", "standing", ""),
        *("held_kind", "", "ended_at", now, "updated_at", now, "prune_at", prune_at),
    ]
    return ("end", write.run_id, write.turn_id, now, write.only_if_not_started, raw(marker(write.turn_id)), fields)


def _rewind(write: RewindRun, slice_of: SliceOf) -> Array:
    now = moment(write.now)
    fields = [
        *("owner", "", "mailed", "0", "wake_at", now, "updated_at", now, "ended_at", "", "prune_at", ""),
        *("standing", "", "held_kind", "", "recoveries", "0", "drift", raw(EMPTY)),
        *("orphans", "0", "unsettled", "0"),
        *("deadline_at", "" if write.deadline_at is None else moment(write.deadline_at)),
    ]
    returned = [_returned(message, slice_of) for message in write.returned]
    place = ("rewind", write.run_id, write.base, write.turn_id, now)
    return (*place, write.dropped, _rows(write.turn_id, write.base, write.entries), returned, fields)


def _returned(message: Message, slice_of: SliceOf) -> Array:
    value = raw(message_value(message, slice_of(message.name)))
    return (message.number, message.id, message.kind, value, raw(encode(message.body)))


def _publish(write: PublishEvent) -> Array:
    event = write.event
    sent = (event.delivery, event.consume, moment(event.sent_at), moment(event.expires_at), event.sender or "")
    limit = -1 if write.limit is None else write.limit
    kept = (moment(write.now), limit, write.page, event.event_id or "")
    return ("publish", event.topic, event.id, *sent, raw(encode(event.body)), *kept)


# --- from Lua --------------------------------------------------------------------------------------------------------


_YES = (Committed(), Committed(has_messages=True), Created(owned=False), Created(owned=True))


def answer_of(given: Any) -> WriteResult:
    if isinstance(given, int):
        return _YES[given]
    match given:
        case [b"superseded"]:
            return Superseded()
        case [b"missing"]:
            return RunMissing()
        case [b"ended", status]:
            return AlreadyEnded(RunStatus(status.decode()))
        case [b"ended", status, standing]:
            how = RunStatus(status.decode())
            return AlreadyEnded(how, ending_of(how, standing))
        case [b"exists", pairs]:
            return IdTaken(run_of(pairs))
        case [b"delivered", number, fresh, owner]:
            return MessageDelivered(number, fresh=bool(fresh), owner=owner.decode() or None)
        case [b"full", pending]:
            return LimitReached(pending)
        case [b"begun"]:
            return AlreadyStarted()
        case [b"gone"]:
            return DeadLetterMissing()
        case [b"observing"]:
            return ObserverAdded()
        case [b"published", place, woken, more, fresh]:
            return EventPublished(place, woken, more=bool(more), fresh=bool(fresh))
        case _:
            raise AssertionError(f"the Lua script answered {given!r}")
