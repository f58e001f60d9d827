"""Encoding of records as values of the Redis store, and decoding.

A run is a hash with a field for each attribute that is not at its default. Fields that Lua reads are text (empty for
None); the others are MessagePack that only Python reads. The state after the last turn (waits, hold, result, error) is
one field, `turn_state`. Entries and messages are framed values: a header that Lua reads, then bytes that only Python
reads. MessagePack for Lua must not contain the type `bin`, which Lua's decoder does not know: `as_lua_string` passes
bytes as text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import astuple

from perdure.model.documents import Document
from perdure.model.records import (
    DeadLetter,
    Entry,
    ErrorRecord,
    Hold,
    Message,
    PublishedValue,
    RunRecord,
    RunResult,
    RunStatus,
    SigningKey,
    StreamItem,
    TopicEvent,
    Wait,
    WorkerRecord,
)
from perdure.model.tags import Tags, TagValue, decode_tags, encode_tags, index_tag

LOGGER = logging.getLogger("perdure.stores")
T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
EMPTY = encode(())

TurnState = tuple[tuple[Wait, ...], Hold | None, bytes | None, ErrorRecord | None]
"""The state of a run after a turn: its waits, its hold, its result and its error."""

_EMPTY_STATE: TurnState = ((), None, None, None)

_payload = msgspec.msgpack.Decoder(bytes | None)
_turn_state = msgspec.msgpack.Decoder(TurnState)
_names = msgspec.msgpack.Decoder(tuple[str, ...])
_tags = msgspec.msgpack.Decoder(dict[str, str | tuple[str, str, str]])
_header = msgspec.msgpack.Decoder(list[Any])
_message = msgspec.msgpack.Decoder(Message)
_item = msgspec.msgpack.Decoder(StreamItem)
_value = msgspec.msgpack.Decoder(PublishedValue)
_dead_letter = msgspec.msgpack.Decoder(DeadLetter)
_worker = msgspec.msgpack.Decoder(WorkerRecord)
_key = msgspec.msgpack.Decoder(tuple[float, bytes])


class _EntryRow(Entry, frozen=True, gc=False, array_like=True):
    """An entry encoded without field names, which would be longer than most values."""


_entry = msgspec.msgpack.Decoder(_EntryRow)

Pairs = Sequence[bytes]
"""A hash as scripts return it: field, value, field, value ..."""


# --- basic values ----------------------------------------------------------------------------------------------------


def as_lua_string(value: bytes) -> Raw:
    """Encode bytes as the only string type that Lua's MessagePack decodes."""
    size = len(value)
    if size < 32:
        return Raw(bytes((0xA0 | size,)) + value)
    if size < 1 << 16:
        return Raw(b"\xda" + size.to_bytes(2) + value)
    return Raw(b"\xdb" + size.to_bytes(4) + value)


def frame(header: tuple[Any, ...], blob: bytes) -> bytes:
    packed = encode(header)
    return len(packed).to_bytes(4) + packed + blob


def unframe(value: bytes) -> tuple[list[Any], bytes]:
    end = 4 + int.from_bytes(value[:4])
    return _header.decode(value[4:end]), value[end:]


def encode_time(at: float | None) -> str:
    return "" if at is None else repr(float(at))


def _decode_time(text: bytes) -> float | None:
    return float(text) if text else None


def _text(text: bytes) -> str | None:
    return text.decode() if text else None


def iter_pairs(pairs: Pairs) -> Iterable[tuple[bytes, bytes]]:
    return zip(pairs[::2], pairs[1::2], strict=True)


def flag(value: object) -> str:
    return "1" if value else "0"


# --- runs ------------------------------------------------------------------------------------------------------------


_FIELD_DEFAULTS = {
    b"pool": b"default",
    b"partition": b"",
    b"priority": b"0",
    b"place": b"",
    b"gate": b"",
    b"ancestor_queues": EMPTY,
    b"generation": b"0",
    b"epoch": b"0",
    b"run_attempt": b"1",
    b"attached": b"0",
    b"tags": encode({}),
    b"recoveries": b"0",
    b"drift": EMPTY,
    b"last_message_no": b"0",
    b"fence": b"0",
    **dict.fromkeys((b"original_workflow", b"parent", b"first_executed_at", b"ended_at", b"wake_at", b"owner"), b""),
    **dict.fromkeys((b"deadline_at", b"retention", b"turn_state", b"queue"), b""),
}
"""Values of the fields that a hash does not have."""

WAITING = b"waiting"
"""Value of the field `place` of a run that waits in a queue; of a run that holds a slot it is "held"."""


def encode_new_run(run: RunRecord, as_bytes: Callable[[bytes], Any]) -> list[Any]:
    """Return the fields of a new run except its workflow, its tags and those that depend on its owner and its queue.

    `as_bytes` encodes payloads.
    """
    fields = [
        *("version", str(run.version), "input", as_bytes(run.input)),
        *("seed", str(run.seed), "shard", str(run.shard)),
    ]
    if run.pool != "default":
        fields += ("pool", run.pool)
    if run.parent is not None:
        fields += ("parent", run.parent, "attached", flag(run.attached))
    if run.ancestor_queues:
        fields += ("ancestor_queues", as_bytes(encode(run.ancestor_queues)))
    if run.deadline_at is not None:
        fields += ("deadline_at", encode_time(run.deadline_at))
    if run.retention is not None:
        fields += ("retention", encode_time(run.retention))
    if run.generation or run.epoch or run.run_attempt != 1:
        fields += ("generation", str(run.generation), "epoch", str(run.epoch), "run_attempt", str(run.run_attempt))
    if run.original_workflow is not None:
        fields += ("original_workflow", run.original_workflow)
    if run.original_input is not None:
        fields += ("original_input", as_bytes(run.original_input))
    return fields


BARE_FIELDS = (
    *("id", "created_by", "created_at", "workflow", "version", "seed", "pool", "shard", "generation", "epoch"),
    *("run_attempt", "original_workflow", "parent", "attached", "tags", "first_executed_at", "updated_at", "ended_at"),
    *("wake_at", "owner", "recoveries", "deadline_at", "retention", "drift", "last_message_no", "fence", "queue"),
    *("partition", "priority", "place", "gate", "ancestor_queues"),
)
"""The fields of a run without payloads. The query `bare` returns the status, these fields and the turn state."""
_BARE_NAMES = tuple(name.encode() for name in ("status", *BARE_FIELDS, "turn_state"))


def bare_pairs(values: Sequence[bytes | None]) -> list[bytes]:
    """Return a bare row as a hash. Its input is empty."""
    found = [b"input", b""]
    for name, value in zip(_BARE_NAMES, values, strict=True):
        if value is not None:
            found += (name, value)
    return found


def decode_run(pairs: Pairs) -> RunRecord:
    row = {**_FIELD_DEFAULTS, **dict(iter_pairs(pairs))}
    waits, held, result, error = _decode_turn_state(row[b"turn_state"])
    return RunRecord(
        id=row[b"id"].decode(),
        workflow=row[b"workflow"].decode(),
        version=int(row[b"version"]),
        input=row[b"input"],
        created_at=float(row[b"created_at"]),
        created_by=row[b"created_by"].decode(),
        seed=int(row[b"seed"]),
        pool=row[b"pool"].decode(),
        shard=int(row[b"shard"]),
        status=RunStatus(row[b"status"].decode()),
        generation=int(row[b"generation"]),
        epoch=int(row[b"epoch"]),
        run_attempt=int(row[b"run_attempt"]),
        original_workflow=_text(row[b"original_workflow"]),
        original_input=row.get(b"original_input"),
        result=result,
        error=error,
        parent=_text(row[b"parent"]),
        attached=row[b"attached"] == b"1",
        tags=decode_stored_tags(row[b"tags"]),
        first_executed_at=_decode_time(row[b"first_executed_at"]),
        updated_at=float(row.get(b"updated_at", row[b"created_at"])),
        ended_at=_decode_time(row[b"ended_at"]),
        wake_at=_decode_time(row[b"wake_at"]),
        owner=_text(row[b"owner"]),
        recoveries=int(row[b"recoveries"]),
        deadline_at=_decode_time(row[b"deadline_at"]),
        retention=_decode_time(row[b"retention"]),
        waits=waits,
        held=held,
        drift=_names.decode(row[b"drift"]),
        last_message_no=int(row[b"last_message_no"]),
        fence=int(row[b"fence"]),
        queue=_text(row[b"queue"]),
        partition=row[b"partition"].decode(),
        priority=int(row[b"priority"]),
        waiting=row[b"place"] == WAITING,
        gate=row[b"gate"].decode(),
        ancestor_queues=_names.decode(row[b"ancestor_queues"]),
    )


def find_damaged_field(pairs: Pairs) -> str | None:
    """Return which field of a run's hash cannot be decoded, and why."""
    if not pairs:
        return "its fields are missing"
    row = dict(iter_pairs(pairs))
    for field, decode in _DECODERS.items():
        if field not in row and field not in _REQUIRED:
            continue
        try:
            decode(row[field])
        except Exception as error:
            return f"field {field.decode()}: {describe_error(error)}"
    return None


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_REQUIRED = (b"id", b"workflow", b"version", b"input", b"created_at", b"created_by", b"seed", b"shard", b"status")
_DECODERS: dict[bytes, Callable[[bytes], object]] = {
    **dict.fromkeys((b"id", b"workflow", b"created_by", b"pool", b"original_workflow", b"parent", b"owner"), _text),
    **dict.fromkeys((b"version", b"seed", b"shard", b"generation", b"epoch", b"run_attempt", b"recoveries"), int),
    **dict.fromkeys((b"last_message_no", b"fence", b"skipped"), int),
    b"created_at": float,
    b"updated_at": float,
    **dict.fromkeys((b"first_executed_at", b"ended_at", b"wake_at", b"deadline_at", b"retention"), _decode_time),
    b"input": bytes,
    b"status": lambda value: RunStatus(value.decode()),
    b"tags": lambda value: decode_stored_tags(value),
    **dict.fromkeys((b"queue", b"partition", b"place", b"gate"), _text),
    b"priority": int,
    **dict.fromkeys((b"drift", b"ancestor_queues"), _names.decode),
    b"turn_state": lambda value: _decode_turn_state(value),
}


def decode_readable(what: str, decode: Callable[[Any], T], stored: Iterable[Any]) -> list[T]:
    """Return the decoded values without those that cannot be decoded, which are logged."""
    decoded: list[T] = []
    for value in stored:
        try:
            decoded.append(decode(value))
        except Exception as error:
            first = value[0] if isinstance(value, list) else value
            LOGGER.error("Stored %s %r cannot be read and is skipped: %s", what, first, describe_error(error))
    return decoded


def decode_position(pairs: Pairs, history: Pairs) -> int:
    """Return the last position of the history, computed as `run_rows.position` in Lua does."""
    skipped = next((int(value) for field, value in iter_pairs(pairs) if field == b"skipped"), 0)
    return skipped + len(history) // 2


def has_orphaned_children(pairs: Pairs) -> bool:
    return any(field == b"orphaned_children" and value == b"1" for field, value in iter_pairs(pairs))


# --- tags ------------------------------------------------------------------------------------------------------------

StoredTag = str | tuple[str, str, str]
"""A tag as `lua/tags.lua` indexes it: text, or the canonical text, the number (or empty) and the encoded value."""


def encode_stored_tags(tags: Tags) -> bytes:
    """Return the value of the field `tags`."""
    return encode({key: encode_tag(key, value) for key, value in tags.items()})


def encode_tag(key: str, value: TagValue) -> StoredTag:
    if isinstance(value, str):
        return value
    row = index_tag(key, value)
    return (row.text, "" if row.number is None else repr(row.number), encode_tags({"": value}).decode())


def decode_stored_tags(value: bytes) -> dict[str, TagValue]:
    return {
        key: tag if isinstance(tag, str) else decode_tags(tag[2])[""]  # a tag that is not text
        for key, tag in _tags.decode(value).items()
    }


# --- turn state ------------------------------------------------------------------------------------------------------


def encode_turn_state(
    waits: tuple[Wait, ...], held: Hold | None, result: bytes | None, error: ErrorRecord | None
) -> bytes:
    """Return the value of the field `turn_state`; empty for a run without waits, hold, result and error."""
    parts = (waits, held, result, error)
    return b"" if parts == _EMPTY_STATE else encode(parts)


def _decode_turn_state(value: bytes) -> TurnState:
    return _turn_state.decode(value) if value else _EMPTY_STATE


def decode_run_result(status: RunStatus, turn_state: bytes) -> RunResult:
    _, _, result, error = _decode_turn_state(turn_state)
    return RunResult(status, result, error)


# --- histories and messages ------------------------------------------------------------------------------------------


def encode_entry(turn_id: str, entry: Entry) -> bytes:
    """Encode a row of a history. The first row of a turn has its id, so that a repeated commit is detected."""
    return frame((turn_id, entry.location), encode(astuple(entry)))


def encode_marker(turn_id: str) -> bytes:
    """Encode the row of a turn without entries. It takes a position and has the turn id; decoding skips it."""
    return frame((turn_id, "", True), b"")


def decode_history(pairs: Pairs) -> list[tuple[int, Entry]]:
    """Return entries with their positions, in order."""
    rows = sorted((int(position), value) for position, value in iter_pairs(pairs))
    blobs = ((position, value[4 + int.from_bytes(value[:4]) :]) for position, value in rows)
    return [(position, Entry(*astuple(_entry.decode(blob)))) for position, blob in blobs if blob]


def encode_message(message: Message, topic_partition: int) -> bytes:
    """Encode a message. An assignment has the form that Lua gives it: the body of the event, the rest in the header."""
    if message.kind != "assignment":
        return frame((message.kind, message.id, message.name), encode(message))
    first = (message.kind, message.id, message.name, topic_partition, message.offset, 0)
    rest = (message.target or "", message.sender or "", encode_time(message.sent_at), encode_time(message.expires_at))
    return frame((*first, *rest, message.event_id or ""), encode(message.body))


def decode_message(number: int, value: bytes) -> Message:
    header, blob = unframe(value)
    if header[0] != "assignment":
        return msgspec.structs.replace(_message.decode(blob), number=number)
    kind, id, topic, _, offset, _, target, sender, sent_at, expires_at, event_id = header
    return Message(
        id=id,
        kind=kind,
        number=number,
        name=topic,
        body=_payload.decode(blob),
        sender=sender or None,
        sent_at=float(sent_at),
        expires_at=float(expires_at) if expires_at else None,
        target=target or None,
        offset=offset,
        event_id=event_id or None,
    )


def decode_inbox(pairs: Pairs, after: int = 0) -> list[Message]:
    """Return the messages with a number above `after`, in order."""
    found = sorted((int(number), value) for number, value in iter_pairs(pairs))
    return [decode_message(number, value) for number, value in found if number > after]


# --- topics, outputs, workers and keys -------------------------------------------------------------------------------


def decode_event(fields: Sequence[Any]) -> TopicEvent:
    topic, offset, id, body, sent_at, delivery, consume, expires_at, sender, event_id = fields
    return TopicEvent(
        topic=topic.decode(),
        id=id.decode(),
        body=_payload.decode(body),
        sent_at=float(sent_at),
        delivery=delivery.decode(),
        consume=consume == b"1",
        expires_at=_decode_time(expires_at),
        sender=_text(sender),
        offset=int(offset),
        event_id=_text(event_id),
    )


def decode_document(kind: str, fields: Sequence[Any]) -> Document:
    id, version, body, due_at, expires_at = fields
    return Document(
        kind=kind,
        id=id.decode(),
        version=int(version),
        body=body,
        due_at=_decode_time(due_at),
        expires_at=_decode_time(expires_at),
    )


def encode_stream_item(item: StreamItem) -> tuple[Any, ...]:
    return (item.stream, item.location, item.writer, as_lua_string(encode(item)))


def decode_stream_item(offset: int, blob: bytes, superseded: bool) -> StreamItem:
    return msgspec.structs.replace(_item.decode(blob), offset=offset, superseded=superseded)


def decode_published_value(blob: bytes) -> PublishedValue:
    return _value.decode(blob)


def decode_dead_letter(blob: bytes) -> DeadLetter:
    return _dead_letter.decode(blob)


def decode_observer(member: bytes) -> list[Any]:
    return _header.decode(member)


def decode_worker(id: bytes, blob: bytes, fenced: bool) -> WorkerRecord:
    """Return a worker. One that cannot be decoded has no lease, until it renews its lease."""
    try:
        return msgspec.structs.replace(_worker.decode(blob), fenced=fenced)
    except msgspec.DecodeError as error:
        LOGGER.warning("Worker %s: its record cannot be read (%s)", id.decode(), error, extra={"worker": id.decode()})
        return WorkerRecord(id=id.decode(), pool="", workflows=(), lease_until=0.0, started_at=0.0, fenced=fenced)


def encode_signing_key(created_at: float, secret: bytes) -> Raw:
    return as_lua_string(encode((created_at, secret)))


def decode_signing_key(number: int, blob: bytes) -> SigningKey:
    return SigningKey(number, *_key.decode(blob))
