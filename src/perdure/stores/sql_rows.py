"""Convert records to rows of tables and back, for the stores with SQL tables.

Payloads are bytes of a codec; a store may return them as text if they are valid text. Structured columns are JSON as
text, NULL if empty. A row may have more columns than a function here reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from perdure.errors import StoreError
from perdure.model.queries import Awaited, RunQuery
from perdure.model.records import (
    DeadLetter,
    Entry,
    EntryStatus,
    ErrorRecord,
    Hold,
    Message,
    RunRecord,
    RunStatus,
    StreamItem,
    TopicEvent,
    Wait,
    WorkerRecord,
)
from perdure.model.tags import Tags, decode_tags, encode_tags
from perdure.stores.paging import cursor_after, matches_wait
from perdure.stores.results import RunPage, Snapshot, UnreadableRun

LOGGER = logging.getLogger("perdure.stores")
Row = Sequence[Any]
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_errors = msgspec.json.Decoder(ErrorRecord)
_waits = msgspec.json.Decoder(tuple[Wait, ...])
_held = msgspec.json.Decoder(Hold)
_names = msgspec.json.Decoder(tuple[str, ...])
_workflows = msgspec.json.Decoder(tuple[tuple[str, int], ...])
_run_status = {status.value: status for status in RunStatus}
run_status = _run_status.__getitem__
_entry_status = {status.value: status for status in EntryStatus}


def unpack(stored: str | bytes | None) -> bytes | None:
    """Return a payload as bytes, whether it is stored as text or as bytes."""
    return stored.encode() if isinstance(stored, str) else stored


def as_json(value: Any) -> str | None:
    """Return the value of a structured column; None (NULL) for an empty value."""
    return _encode(value).decode() if value else None


def tags_as_json(tags: Tags) -> str | None:
    """Return the value of the column `tags`."""
    return encode_tags(tags).decode() if tags else None


def tags_of(stored: str | None) -> Tags:
    """Return tags from the value of their column. Raises an error for a value that no tag has."""
    tags = decode_tags(stored) if stored else {}
    for key, value in tags.items():
        if not isinstance(value, str | int | float | datetime):
            raise TypeError(f"tag {key!r} is of type {type(value).__name__}")
    return tags


def error_of(stored: str | None) -> ErrorRecord | None:
    return _errors.decode(stored) if stored else None


# --- runs and their histories ---------------------------------------------------------------------------------------

PLAIN_RUN_COLUMNS = (
    "id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch, "
    "run_attempt, original_workflow, original_input, result, error, parent, attached, tags, first_executed_at, "
    "updated_at, ended_at, "
    "wake_at, owner, recoveries, deadline_at, retention, waits, held, drift, last_message_no, fence"
)
QUEUE_COLUMNS = "queue, partition, priority, waiting, gate, ancestor_queues"
"""Columns of a run that most runs leave at their defaults."""
RUN_COLUMNS = f"{PLAIN_RUN_COLUMNS}, {QUEUE_COLUMNS}"


def run_of_row(row: Row) -> RunRecord:
    """Return the run of a row that starts with `RUN_COLUMNS`."""
    (id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch) = row[:12]
    (run_attempt, original_workflow, original_input, result, error, parent, attached, tags, first_executed_at) = row[
        12:21
    ]
    (updated_at, ended_at, wake_at, owner, recoveries, deadline_at, retention, waits, held, drift) = row[21:31]
    last_message_no, fence, queue, partition, priority, waiting, gate, ancestor_queues = row[31:39]
    return RunRecord(
        id=id,
        workflow=workflow,
        version=version,
        input=unpack(input) or b"",
        created_at=created_at,
        created_by=created_by,
        seed=int(seed),
        pool=pool,
        shard=shard,
        status=_run_status[status],
        generation=generation,
        epoch=epoch,
        run_attempt=run_attempt,
        original_workflow=original_workflow,
        original_input=unpack(original_input),
        result=unpack(result),
        error=error_of(error),
        parent=parent,
        attached=bool(attached),
        tags=tags_of(tags) if tags else {},
        first_executed_at=first_executed_at,
        updated_at=updated_at,
        ended_at=ended_at,
        wake_at=wake_at,
        owner=owner,
        recoveries=recoveries,
        deadline_at=deadline_at,
        retention=retention,
        waits=_waits.decode(waits) if waits else (),
        held=_held.decode(held) if held else None,
        drift=_names.decode(drift) if drift else (),
        last_message_no=last_message_no,
        fence=fence,
        queue=queue,
        partition=partition,
        priority=priority,
        waiting=bool(waiting),
        gate=gate,
        ancestor_queues=_names.decode(ancestor_queues) if ancestor_queues else (),
    )


ENTRY_COLUMNS = (
    "location, kind, name, status, call_seq, ordinal, seq, value, error, attempts, generation, started_at, settled_at, "
    "due_at, fingerprint, detail"
)


def entry_of_row(row: Row) -> Entry:
    """Return the entry of a row with `ENTRY_COLUMNS`."""
    location, kind, name, status, call_seq, ordinal, seq, value, error, *rest = row
    attempts, generation, started_at, settled_at, due_at, fingerprint, detail = rest
    return Entry(
        location,
        kind,
        name,
        _entry_status[status],
        call_seq,
        ordinal,
        seq,
        value.encode() if isinstance(value, str) else value,
        _errors.decode(error) if error else None,
        attempts,
        generation,
        started_at,
        settled_at,
        due_at,
        unpack(fingerprint),
        unpack(detail),
    )


# --- messages, topics and streams -----------------------------------------------------------------------------------

MESSAGE_COLUMNS = (
    "number, id, kind, name, body, sender, sent_at, expires_at, policy, target, topic_offset, wants_reply, event_id"
)


def message_of_row(row: Row) -> Message:
    number, id, kind, name, body, sender, sent_at, expires_at, policy, target, topic_offset, wants_reply, event_id = row
    return Message(
        id=id,
        kind=kind,
        number=number,
        name=name,
        body=unpack(body),
        sender=sender,
        sent_at=sent_at,
        expires_at=expires_at,
        policy=policy,
        target=target,
        offset=topic_offset,
        wants_reply=bool(wants_reply),
        event_id=event_id,
    )


def event_of_row(row: Row) -> TopicEvent:
    """Return the event of a row that starts with the topic's name, followed by the event's columns."""
    topic, id, body, sent_at, delivery, consume, expires_at, sender, offset, event_id = row[:10]
    return TopicEvent(
        topic=topic,
        id=id,
        body=unpack(body),
        sent_at=sent_at,
        delivery=delivery,
        consume=bool(consume),
        expires_at=expires_at,
        sender=sender,
        offset=offset,
        event_id=event_id,
    )


def item_of_row(row: Row) -> StreamItem:
    stream, value, location, at, attempt, writer, offset, superseded = row
    return StreamItem(
        stream=stream,
        value=unpack(value) or b"",
        location=location,
        at=at,
        attempt=attempt,
        writer=writer,
        offset=offset,
        superseded=bool(superseded),
    )


# --- dead letters and workers ---------------------------------------------------------------------------------------

DEAD_LETTER_COLUMNS = (
    "id, kind, at, reason, event_id, event_name, value, original_target, target_status, target_ended_at, sent_at"
)


def dead_letter_of_row(row: Row) -> DeadLetter:
    id, kind, at, reason, event_id, event_name, value, original_target, target_status, target_ended_at, sent_at = row
    return DeadLetter(
        id=id,
        kind=kind,
        at=at,
        reason=reason,
        event_id=event_id,
        event_name=event_name,
        value=unpack(value),
        original_target=original_target,
        target_status=target_status,
        target_ended_at=target_ended_at,
        sent_at=sent_at,
    )


WORKER_COLUMNS = "id, pool, workflows, lease_until, started_at, host, pid, fenced"


def worker_row(worker: WorkerRecord) -> Row:
    pairs = _encode(worker.workflows).decode()
    return (worker.id, worker.pool, pairs, worker.lease_until, worker.started_at, worker.host, worker.pid)


def worker_of_row(row: Row) -> WorkerRecord:
    """Return the worker of a row. One whose workflows cannot be decoded has none, until it renews its lease."""
    id, pool, workflows, lease_until, started_at, host, pid, fenced = row
    try:
        pairs = _workflows.decode(workflows)
    except msgspec.DecodeError as error:
        LOGGER.warning("Worker %s: its workflows cannot be read (%s)", id, error, extra={"worker": id})
        pairs = ()
    return WorkerRecord(
        id=id,
        pool=pool,
        workflows=pairs,
        lease_until=lease_until,
        started_at=started_at,
        host=host,
        pid=pid,
        fenced=bool(fenced),
    )


# --- rows that cannot be decoded ------------------------------------------------------------------------------------


def snapshot_of_rows(
    row: Row, position: int, entries: Sequence[Row], messages: Sequence[Row]
) -> Snapshot | UnreadableRun:
    """Return the run of these rows, or a mark that says which row cannot be decoded."""
    try:
        return Snapshot(
            run_of_row(row), position, tuple(map(entry_of_row, entries)), tuple(map(message_of_row, messages))
        )
    except Exception as error:
        damage = _find_damaged_column(row) or _find_damaged_row(entries, messages) or _describe(error)
        return UnreadableRun(row[0], damage, position)


def run_or_mark(row: Row) -> RunRecord | UnreadableRun:
    """Return the run of a row, or a mark that says which column cannot be decoded."""
    try:
        return run_of_row(row)
    except Exception as error:
        return UnreadableRun(row[0], _find_damaged_column(row) or _describe(error))


def run_or_error(row: Row) -> RunRecord:
    """Return the run of a row; raise `StoreError` if it cannot be decoded."""
    found = run_or_mark(row)
    if isinstance(found, UnreadableRun):
        raise StoreError(str(found))
    return found


def page_of_rows(rows: Sequence[Row], limit: int) -> RunPage:
    """Return the page of these rows of runs; a row beyond `limit` shows that there is a next page."""
    found = [run_or_mark(row) for row in rows[:limit]]
    return RunPage(
        tuple(each for each in found if isinstance(each, RunRecord)),
        cursor_after(rows[limit - 1][4], rows[limit - 1][0]) if len(rows) > limit else None,
        tuple(each for each in found if isinstance(each, UnreadableRun)),
    )


def may_wait(query: RunQuery, row: Row) -> bool:
    """Return whether the run of a row waits for what the query requests. One that cannot be decoded may."""
    found = run_or_mark(row)
    return isinstance(found, UnreadableRun) or matches_wait(query, found)


def wait_texts(awaited: Awaited) -> list[str]:
    """Return texts that the column `waits` of every run contains that waits for this."""
    texts = [f'"kind":{as_text(awaited.kind)}']
    return texts if awaited.name is None or awaited.kind == "event" else [*texts, f'"name":{as_text(awaited.name)}']


def as_text(name: str) -> str:
    """Return a name as it is in a column of JSON."""
    return msgspec.json.encode(name).decode()


def decode_all(what: str, decode: Callable[[Row], T], rows: Iterable[Row]) -> list[T]:
    """Return the decoded rows; raise a `StoreError` that names the first one that cannot be decoded."""
    decoded: list[T] = []
    for row in rows:
        try:
            decoded.append(decode(row))
        except Exception as error:
            raise StoreError(f"{what}: {row[0]!r} cannot be read ({_describe(error)}); see `perdure doctor`") from error
    return decoded


def decode_readable(what: str, decode: Callable[[Row], T], rows: Iterable[Row]) -> list[T]:
    """Return the decoded rows without those that cannot be decoded, which are logged."""
    decoded: list[T] = []
    for row in rows:
        try:
            decoded.append(decode(row))
        except Exception as error:
            LOGGER.error("Stored %s %r cannot be read and is skipped: %s", what, row[0], _describe(error))
    return decoded


def _find_damaged_column(row: Row) -> str | None:
    """Return which column of a run's row cannot be decoded, and why."""
    for column, value in zip(RUN_COLUMNS.split(", "), row, strict=False):
        decode = _RUN_DECODERS.get(column)
        if decode is None or not value:
            continue
        try:
            decode(value)
        except Exception as error:
            return f"column {column}: {_describe(error)}"
    return None


def _find_damaged_row(entries: Sequence[Row], messages: Sequence[Row]) -> str | None:
    """Return which entry or message of a run cannot be decoded, and why."""
    decoders: tuple[tuple[str, Callable[[Row], object], Sequence[Row]], ...] = (
        ("entry", entry_of_row, entries),
        ("message", message_of_row, messages),
    )
    for what, decode, rows in decoders:
        for row in rows:
            try:
                decode(row)
            except Exception as error:
                return f"{what} {row[0]!r}: {_describe(error)}"
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_RUN_DECODERS: dict[str, Callable[[Any], object]] = {
    "seed": int,
    "status": RunStatus,
    "error": _errors.decode,
    "tags": tags_of,
    "waits": _waits.decode,
    "held": _held.decode,
    "drift": _names.decode,
    "ancestor_queues": _names.decode,
}
