"""Records as values of the Redis store, and back.

A run is a hash with a field for each attribute that is not at its default: what Lua judges by is text (empty for
None), the rest MessagePack that only Python reads. How it stands after its last turn (waits, held, result, error) is
one field. Entries and mail are framed values: a header that Lua reads, then the rest. MessagePack that Lua is to read
must not hold the type `bin`, which its decoder does not know: `raw` passes bytes as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import astuple

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

encode = msgspec.msgpack.Encoder().encode
EMPTY = encode(())

Standing = tuple[tuple[Wait, ...], Hold | None, bytes | None, ErrorRecord | None]
"""How a run stands after a turn: what it waits for, what holds it, how it ended."""

_NOTHING: Standing = ((), None, None, None)

_payload = msgspec.msgpack.Decoder(bytes | None)
_standing = msgspec.msgpack.Decoder(Standing)
_names = msgspec.msgpack.Decoder(tuple[str, ...])
_tags = msgspec.msgpack.Decoder(dict[str, str])
_header = msgspec.msgpack.Decoder(list[Any])
_message = msgspec.msgpack.Decoder(Message)
_item = msgspec.msgpack.Decoder(StreamItem)
_value = msgspec.msgpack.Decoder(PublishedValue)
_letter = msgspec.msgpack.Decoder(DeadLetter)
_worker = msgspec.msgpack.Decoder(WorkerRecord)
_key = msgspec.msgpack.Decoder(tuple[float, bytes])


class _EntryRow(Entry, frozen=True, gc=False, array_like=True):
    """An entry without the names of its fields, which would be longer than what is in them."""


_entry = msgspec.msgpack.Decoder(_EntryRow)

Pairs = Sequence[bytes]
"""A hash as Redis lists it: field, value, field, value ..."""


# --- small parts -----------------------------------------------------------------------------------------------------


def raw(value: bytes) -> Raw:
    """Bytes, as the only kind of string that Lua's MessagePack knows."""
    size = len(value)
    if size < 32:
        return Raw(bytes((0xA0 | size,)) + value)
    if size < 1 << 16:
        return Raw(b"\xda" + size.to_bytes(2) + value)
    return Raw(b"\xdb" + size.to_bytes(4) + value)


def framed(header: tuple[Any, ...], blob: bytes) -> bytes:
    packed = encode(header)
    return len(packed).to_bytes(4) + packed + blob


def unframed(value: bytes) -> tuple[list[Any], bytes]:
    end = 4 + int.from_bytes(value[:4])
    return _header.decode(value[4:end]), value[end:]


def moment(at: float | None) -> str:
    return "" if at is None else repr(float(at))


def _moment(text: bytes) -> float | None:
    return float(text) if text else None


def _text(text: bytes) -> str | None:
    return text.decode() if text else None


def pairs_of(pairs: Pairs) -> Iterable[tuple[bytes, bytes]]:
    return zip(pairs[::2], pairs[1::2], strict=True)


def flag(value: object) -> str:
    return "1" if value else "0"


# --- runs ------------------------------------------------------------------------------------------------------------


_AT_FIRST = {
    b"pool": b"default",
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
    **dict.fromkeys((b"deadline_at", b"retention", b"standing"), b""),
}
"""What a field that a hash lacks would say."""


def born(run: RunRecord, raw: Callable[[bytes], Any]) -> list[Any]:
    """The fields of a new run, but for those that depend on its owner; `raw` is how bytes are passed."""
    fields = [
        *("workflow", run.workflow, "version", str(run.version), "input", raw(run.input)),
        *("seed", str(run.seed), "shard", str(run.shard)),
    ]
    if run.pool != "default":
        fields += ("pool", run.pool)
    if run.parent is not None:
        fields += ("parent", run.parent, "attached", flag(run.attached))
    if run.tags:
        fields += ("tags", raw(encode(run.tags)))
    if run.deadline_at is not None:
        fields += ("deadline_at", moment(run.deadline_at))
    if run.retention is not None:
        fields += ("retention", moment(run.retention))
    if run.generation or run.epoch or run.run_attempt != 1:
        fields += ("generation", str(run.generation), "epoch", str(run.epoch), "run_attempt", str(run.run_attempt))
    if run.original_workflow is not None:
        fields += ("original_workflow", run.original_workflow)
    if run.original_input is not None:
        fields += ("original_input", raw(run.original_input))
    return fields


def run_of(pairs: Pairs) -> RunRecord:
    row = {**_AT_FIRST, **dict(pairs_of(pairs))}
    waits, held, result, error = _standing_of(row[b"standing"])
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
        tags=_tags.decode(row[b"tags"]),
        first_executed_at=_moment(row[b"first_executed_at"]),
        updated_at=float(row.get(b"updated_at", row[b"created_at"])),
        ended_at=_moment(row[b"ended_at"]),
        wake_at=_moment(row[b"wake_at"]),
        owner=_text(row[b"owner"]),
        recoveries=int(row[b"recoveries"]),
        deadline_at=_moment(row[b"deadline_at"]),
        retention=_moment(row[b"retention"]),
        waits=waits,
        held=held,
        drift=_names.decode(row[b"drift"]),
        last_message_no=int(row[b"last_message_no"]),
        fence=int(row[b"fence"]),
    )


def position_of(pairs: Pairs, history: Pairs) -> int:
    """As `rows.position` of `lua/rows.lua` has it."""
    skipped = next((int(value) for field, value in pairs_of(pairs) if field == b"skipped"), 0)
    return skipped + len(history) // 2


def orphans_of(pairs: Pairs) -> bool:
    return any(field == b"orphans" and value == b"1" for field, value in pairs_of(pairs))


def standing(waits: tuple[Wait, ...], held: Hold | None, result: bytes | None, error: ErrorRecord | None) -> bytes:
    """Empty if there is nothing to say."""
    parts = (waits, held, result, error)
    return b"" if parts == _NOTHING else encode(parts)


def _standing_of(value: bytes) -> Standing:
    return _standing.decode(value) if value else _NOTHING


def ending_of(status: RunStatus, standing: bytes) -> RunResult:
    _, _, result, error = _standing_of(standing)
    return RunResult(status, result, error)


# --- histories and mail ----------------------------------------------------------------------------------------------


def entry_value(turn_id: str, entry: Entry) -> bytes:
    """A row of a history; the first one of a turn has its id, by which a repeated call is known."""
    return framed((turn_id, entry.location), encode(astuple(entry)))


def marker(turn_id: str) -> bytes:
    """The row of a turn without entries: nobody reads it, but its position is taken and its turn can be found."""
    return framed((turn_id, "", True), b"")


def history_of(pairs: Pairs) -> list[tuple[int, Entry]]:
    """Entries with their positions, in order."""
    rows = sorted((int(position), value) for position, value in pairs_of(pairs))
    blobs = ((position, value[4 + int.from_bytes(value[:4]) :]) for position, value in rows)
    return [(position, Entry(*astuple(_entry.decode(blob)))) for position, blob in blobs if blob]


def message_value(message: Message, topic_slice: int) -> bytes:
    """An assignment is kept as its topic would have made it: the event's body, and all else in the header."""
    if message.kind != "assignment":
        return framed((message.kind, message.id), encode(message))
    made = (message.kind, message.id, message.name, topic_slice, message.offset, 0)
    shown = (message.target or "", message.sender or "", moment(message.sent_at), moment(message.expires_at))
    return framed((*made, *shown, message.event_id or ""), encode(message.body))


def message_of(number: int, value: bytes) -> Message:
    header, blob = unframed(value)
    if header[0] != "assignment":
        return msgspec.structs.replace(_message.decode(blob), number=number)
    kind, id, topic, _, place, _, target, sender, sent_at, expires_at, event_id = header
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
        offset=place,
        event_id=event_id or None,
    )


def inbox_of(pairs: Pairs, after: int = 0) -> list[Message]:
    """Unread mail with a higher number, in order."""
    found = sorted((int(number), value) for number, value in pairs_of(pairs))
    return [message_of(number, value) for number, value in found if number > after]


# --- topics, and what runs show --------------------------------------------------------------------------------------


def event_of(fields: Sequence[Any]) -> TopicEvent:
    topic, place, id, body, sent_at, delivery, consume, expires_at, sender, event_id = fields
    return TopicEvent(
        topic=topic.decode(),
        id=id.decode(),
        body=_payload.decode(body),
        sent_at=float(sent_at),
        delivery=delivery.decode(),
        consume=consume == b"1",
        expires_at=_moment(expires_at),
        sender=_text(sender),
        offset=int(place),
        event_id=_text(event_id),
    )


def item_write(item: StreamItem) -> tuple[Any, ...]:
    return (item.stream, item.location, item.writer, raw(encode(item)))


def item_of(offset: int, blob: bytes, superseded: bool) -> StreamItem:
    return msgspec.structs.replace(_item.decode(blob), offset=offset, superseded=superseded)


def value_of(blob: bytes) -> PublishedValue:
    return _value.decode(blob)


def letter_of(blob: bytes) -> DeadLetter:
    return _letter.decode(blob)


def observer_of(member: bytes) -> list[Any]:
    return _header.decode(member)


def worker_of(blob: bytes, gone: bool) -> WorkerRecord:
    return msgspec.structs.replace(_worker.decode(blob), fenced=gone)


def key_blob(made_at: float, secret: bytes) -> Raw:
    return raw(encode((made_at, secret)))


def key_of(number: int, blob: bytes) -> SigningKey:
    return SigningKey(number, *_key.decode(blob))
