"""Encoding of writes as Lua takes them, and decoding of its results.

A write becomes an array: its name, then the arguments that the function of that name in `lua/run_writes.lua` or
`lua/other_writes.lua` unpacks. No element is None, which Lua's arrays cannot hold: empty text, -1 or False replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.model.records import DeadLetter, Entry, Message, RunStatus, Subscription
from perdure.model.tags import TagValue
from perdure.model.turns import TurnExtras
from perdure.stores import semantics
from perdure.stores.queue_rules import PAUSED_IN_QUEUE
from perdure.stores.redis.encoding import (
    EMPTY,
    as_lua_string,
    decode_run,
    decode_run_result,
    encode,
    encode_entry,
    encode_marker,
    encode_message,
    encode_new_run,
    encode_stored_tags,
    encode_stream_item,
    encode_tag,
    encode_time,
    encode_turn_state,
)
from perdure.stores.redis.queue_encoding import encode_place, encode_queue_write
from perdure.stores.results import (
    Admitted,
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    Created,
    DeadLetterMissing,
    EventPublished,
    IdTaken,
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
    Admit,
    AppendStream,
    CommitTurn,
    ConfigurePartition,
    ConfigureQueue,
    ContinueAs,
    CreateRun,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    LeaveQueue,
    ObserveRunEnd,
    PublishEvent,
    PutDocument,
    RedirectedEvent,
    ReleaseRun,
    ReplayDeadLetter,
    Requeue,
    RewindRun,
    RunPatch,
    SupersedeStream,
    TagRun,
    Write,
    subject_of,
)

Array = tuple[Any, ...]
_PAUSED_IN_QUEUE = as_lua_string(encode_turn_state((), PAUSED_IN_QUEUE, None, None))
PartitionOf = Callable[[str], int]
"""Returns the partition of a run id or a topic name."""


def has_effects_elsewhere(write: Write) -> bool:
    """Return whether a write may change other partitions. Later writes of the batch must see those changes."""
    match write:
        case PublishEvent() | FanOut() | EndRun() | RewindRun() | ReplayDeadLetter():
            return True
        case FinalizeRun():
            return not semantics.only_marks_notified(write)
        case CommitTurn():
            return write.extras is not None or write.continue_as is not None or bool(write.consumed) or _ends(write)
        case CreateRun():
            return bool(write.inbox) or write.replaces is not None
        case _:
            return False


def _ends(turn: CommitTurn) -> bool:
    return turn.patch is not None and turn.patch.status.terminal


# --- to Lua ----------------------------------------------------------------------------------------------------------


def encode_write(write: Write, partition_of: PartitionOf) -> Array:
    match write:
        case CommitTurn():
            return _encode_turn(write, partition_of)
        case CreateRun():
            return _encode_create(write, partition_of)
        case DeliverMessage():
            message = write.message
            value = as_lua_string(encode_message(message, partition_of(message.name)))
            limit = -1 if write.limit is None else write.limit
            paused = () if message.kind != "pause" else (_PAUSED_IN_QUEUE,)
            return ("deliver", write.run_id, message.id, message.kind, value, encode_time(write.now), limit, *paused)
        case EndRun():
            return _encode_end(write)
        case ReleaseRun():
            return ("release", write.run_id, write.worker, encode_time(write.now))
        case ObserveRunEnd():
            return ("observe", write.run_id, write.observer, write.target)
        case RewindRun():
            return _encode_rewind(write, partition_of)
        case FinalizeRun():
            notified = [(observer.run_id, observer.target) for observer in write.notified]
            if semantics.only_marks_notified(write):
                return ("mark_notified", write.run_id, notified)
            dead_letters = _encode_dead_letters(write.dead_letters)
            messages = (write.consumed, write.returned)
            redirected = [_encode_redirected(each, partition_of) for each in write.redirected]
            now = encode_time(write.now)
            return (
                "finalize",
                write.run_id,
                now,
                notified,
                *messages,
                dead_letters,
                write.orphaned_children,
                redirected,
            )
        case PublishEvent():
            return _encode_publish(write)
        case FanOut():
            return ("fan_out", write.topic, write.offset, encode_time(write.now), write.page)
        case ReplayDeadLetter():
            sending = (
                encode_time(write.send.now),
                partition_of(subject_of(write)),
                encode_write(write.send, partition_of),
            )
            return ("replay", write.dead_letter_id, replay_name(write), *sending)
        case AppendStream():
            first = -1 if write.first is None else write.first
            return ("append", write.run_id, write.worker, [encode_stream_item(item) for item in write.items], first)
        case SupersedeStream():
            return ("supersede", write.run_id, write.location, write.writer)
        case TagRun():
            return ("tag", write.run_id, _encode_tag_changes(write.tags))
        case PutDocument():
            return _encode_document(write)
        case Admit() | ConfigureQueue() | ConfigurePartition() | Requeue() | LeaveQueue():
            return encode_queue_write(write)


def _encode_create(write: CreateRun, partition_of: PartitionOf) -> Array:
    record = write.record
    entries = _encode_rows("", 0, write.entries) if write.entries else []
    messages = []
    for message in write.inbox:
        topic_partition = partition_of(message.name)
        topic = (message.name, topic_partition, message.offset)
        messages.append((message.id, message.kind, as_lua_string(encode_message(message, topic_partition)), *topic))
    created_at = encode_time(record.created_at)
    due_at = created_at if record.wake_at is None else encode_time(record.wake_at)
    head = (record.id, record.created_by, record.owner or "", created_at, due_at)
    observer = [] if write.observer is None else [write.observer.run_id, write.observer.target]
    replaces = [] if write.replaces is None else [write.replaces.created_by, str(write.replaces.generation)]
    fields = ["workflow", record.workflow, *encode_new_run(record, as_lua_string)]
    if record.tags:
        fields += ("tags", as_lua_string(encode_stored_tags(record.tags)))
    place = encode_place(write.place)
    return ("create", *head, fields, entries, messages, observer, write.received, replaces, place, write.by or "")


def _encode_turn(turn: CommitTurn, partition_of: PartitionOf) -> Array:
    restart, patch, extras, id = turn.continue_as, turn.patch, turn.extras, turn.turn_id
    entries = turn.entries if restart is None else restart.entries
    head = (turn.run_id, turn.base, id, turn.worker, turn.owned, turn.seen, _encode_rows(id, turn.base, entries))
    if patch is None and restart is None and extras is None and not turn.consumed:
        return ("step", *head)
    full = (
        *(encode_time(turn.now), turn.base + max(1, len(turn.entries), len(entries)), turn.consumed),
        patch is not None and _encode_patch(turn, patch),
        restart is not None and _encode_restart(restart),
        extras is not None and _encode_extras(extras, partition_of),
        restart is not None or _ends(turn),
    )
    return ("turn", *head, full)


def _encode_rows(turn_id: str, base: int, entries: Sequence[Entry]) -> list[Any]:
    """Return position, value, position, value ...; the first row has the turn id."""
    added: list[Any] = []
    for position, entry in enumerate(entries, base + 1):
        added += (str(position), as_lua_string(encode_entry("" if added else turn_id, entry)))
    return added or [str(base + 1), as_lua_string(encode_marker(turn_id))]


def _encode_patch(turn: CommitTurn, patch: RunPatch) -> Array:
    return (
        *(patch.status.value, patch.owner or "", encode_time(patch.wake_at)),
        as_lua_string(encode_turn_state(patch.waits, patch.held, patch.result, patch.error)),
        *(patch.held.kind if patch.held else "", as_lua_string(encode(patch.drift)), str(patch.recoveries)),
        *(encode_time(patch.ended_at), encode_time(patch.prune_at), semantics.ignores_messages(turn, patch)),
        patch.error.type if patch.error else "",
    )


def _encode_restart(restart: ContinueAs) -> list[Any]:
    fields = [
        *("workflow", restart.workflow, "version", str(restart.version), "input", as_lua_string(restart.input)),
        *("first_executed_at", encode_time(restart.first_executed_at), "run_attempt", str(restart.run_attempt)),
    ]
    return fields if restart.pool is None else [*fields, "pool", restart.pool]


def _encode_extras(extras: TurnExtras, partition_of: PartitionOf) -> Array:
    return (
        extras.dropped,
        extras.unsubscribe,
        extras.released_assignments,
        [(subscription.target, _group_by_partition(subscription, partition_of)) for subscription in extras.subscribe],
        [(value.key, as_lua_string(encode(value)), encode_time(value.expires_at)) for value in extras.published],
        [encode_stream_item(item) for item in extras.streamed],
        _encode_dead_letters(extras.dead_letters),
        [str(position) for position in extras.replaced],
        bool(extras.tags) and _encode_tag_changes(extras.tags),
    )


def _encode_tag_changes(tags: Mapping[str, TagValue | None]) -> dict[str, Any]:
    return {key: value is not None and encode_tag(key, value) for key, value in tags.items()}


def _encode_document(write: PutDocument) -> Array:
    body = write.body is not None and as_lua_string(write.body)
    times = (encode_time(write.due_at), encode_time(write.expires_at))
    dead_letters = _encode_dead_letters(write.dead_letters)
    return ("document", write.kind, write.id, write.base, body, write.write_id, *times, dead_letters)


def _group_by_partition(subscription: Subscription, partition_of: PartitionOf) -> list[list[int | str]]:
    """Return the topics grouped by partition: the number of the partition, then its topics."""
    groups: dict[int, list[int | str]] = {}
    for topic in dict.fromkeys(subscription.topics):
        number = partition_of(topic)
        groups.setdefault(number, [number]).append(topic)
    return list(groups.values())


def replay_name(write: ReplayDeadLetter) -> str:
    """Return the name under which the target partition records the result of a replay."""
    return f"replay/{write.send.event.id if isinstance(write.send, PublishEvent) else write.send.message.id}"


def _encode_redirected(redirected: RedirectedEvent, partition_of: PartitionOf) -> Array:
    event = redirected.to.event
    dead_letter = _encode_dead_letters((redirected.otherwise,))[0]
    publish = _encode_publish(redirected.to)
    return (redirected.number, partition_of(event.topic), f"redirected/{event.id}", publish, dead_letter)


def _encode_dead_letters(dead_letters: Sequence[DeadLetter]) -> list[Array]:
    return [(dead_letter.id, as_lua_string(encode(dead_letter))) for dead_letter in dead_letters]


def _encode_end(write: EndRun) -> Array:
    now = encode_time(write.now)
    prune_at = encode_time(None if write.prune_after is None else write.now + write.prune_after)
    fields = [
        *("status", write.status.value, "owner", "", "wake_at", "", "has_new_messages", "0", "turn_state", ""),
        *("held_kind", "", "ended_at", now, "updated_at", now, "prune_at", prune_at),
    ]
    marker = as_lua_string(encode_marker(write.turn_id))
    return ("end", write.run_id, write.turn_id, now, write.only_if_not_started, marker, fields)


def _encode_rewind(write: RewindRun, partition_of: PartitionOf) -> Array:
    now = encode_time(write.now)
    fields = [
        *("owner", "", "has_new_messages", "0", "wake_at", now, "updated_at", now, "ended_at", "", "prune_at", ""),
        *("turn_state", "", "held_kind", "", "recoveries", "0", "drift", as_lua_string(EMPTY)),
        *("orphaned_children", "0", "unfinalized", "0"),
        *("deadline_at", "" if write.deadline_at is None else encode_time(write.deadline_at)),
    ]
    returned = [_encode_returned(message, partition_of) for message in write.returned]
    head = ("rewind", write.run_id, write.base, write.turn_id, now)
    rows = _encode_rows(write.turn_id, write.base, write.entries)
    return (*head, write.dropped, rows, returned, fields, encode_place(write.place))


def _encode_returned(message: Message, partition_of: PartitionOf) -> Array:
    value = as_lua_string(encode_message(message, partition_of(message.name)))
    return (message.number, message.id, message.kind, value, as_lua_string(encode(message.body)))


def _encode_publish(write: PublishEvent) -> Array:
    event = write.event
    times = (encode_time(event.sent_at), encode_time(event.expires_at))
    limit = -1 if write.limit is None else write.limit
    options = (encode_time(write.now), limit, write.page, event.event_id or "")
    head = ("publish", event.topic, event.id, event.delivery, event.consume, *times, event.sender or "")
    return (*head, as_lua_string(encode(event.body)), *options)


# --- from Lua --------------------------------------------------------------------------------------------------------


_FREQUENT_RESULTS = (Committed(), Committed(has_messages=True), Created(owned=False), Created(owned=True))


def decode_result(given: Any) -> WriteResult:
    if isinstance(given, int):
        return _FREQUENT_RESULTS[given]
    match given:
        case [b"superseded"]:
            return Superseded()
        case [b"missing"]:
            return RunMissing()
        case [b"ended", status]:
            return AlreadyEnded(RunStatus(status.decode()))
        case [b"ended_with_result", status, turn_state]:
            ended_as = RunStatus(status.decode())
            return AlreadyEnded(ended_as, decode_run_result(ended_as, turn_state))
        case [b"exists", pairs]:
            return IdTaken(decode_run(pairs))
        case [b"delivered", number, fresh, owner]:
            return MessageDelivered(number, fresh=bool(fresh), owner=owner.decode() or None)
        case [b"full", pending]:
            return LimitReached(pending)
        case [b"already_started"]:
            return AlreadyStarted()
        case [b"dead_letter_missing"]:
            return DeadLetterMissing()
        case [b"observing"]:
            return ObserverAdded()
        case [b"versioned", version]:
            return Committed(version=version)
        case [b"joined", run_id, replaced, waiting]:
            return Joined(run_id.decode(), replaced=bool(replaced), waiting=bool(waiting))
        case [b"admitted", ids, promoted, version]:
            return Admitted(tuple(id.decode() for id in ids), promoted, version)
        case [b"queue_missing"]:
            return QueueMissing()
        case [b"not_queued"]:
            return NotQueued()
        case [b"published", offset, woken, more, fresh]:
            return EventPublished(offset, woken, more=bool(more), fresh=bool(fresh))
        case _:
            raise AssertionError(f"the Lua script returned an unknown result: {given!r}")
