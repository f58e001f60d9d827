"""Records as rows of the SQLite store, and back.

Payloads are bytes of some codec: kept as text where they are readable (most are JSON), as blobs where not, and the
same bytes come back. Structured columns are JSON, NULL where empty.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.records import (
    DeadLetter,
    Entry,
    EntryStatus,
    ErrorRecord,
    Held,
    Message,
    RunRecord,
    RunStatus,
    Wait,
    WorkerRecord,
)
from perdure.store.rules import MARKER

Stored = str | int | float | bytes | None
Row = tuple[Any, ...]

_encode = msgspec.json.Encoder().encode
_errors = msgspec.json.Decoder(ErrorRecord)
_waits = msgspec.json.Decoder(tuple[Wait, ...])
_held = msgspec.json.Decoder(Held)
_drift = msgspec.json.Decoder(tuple[str, ...])
_tags = msgspec.json.Decoder(dict[str, str])
_workflows = msgspec.json.Decoder(tuple[tuple[str, int], ...])
_run_status = {status.value: status for status in RunStatus}
run_status = _run_status.__getitem__
_entry_status = {status.value: status for status in EntryStatus}


def pack(payload: bytes | None) -> str | bytes | None:
    """Text if it is any that SQLite's own functions can show whole, else a blob."""
    if payload is None or b"\0" in payload:
        return payload
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return payload


def unpack(stored: str | bytes | None) -> bytes | None:
    return stored.encode() if isinstance(stored, str) else stored


def as_json(value: Any) -> str | None:
    """A structured column; NULL for what is empty."""
    return _encode(value).decode() if value else None


# --- runs ----------------------------------------------------------------------------------------------------------

RUN_COLUMNS = (
    "id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch, "
    "run_attempt, first_workflow, first_input, result, error, parent, attached, tags, begun_at, updated_at, ended_at, "
    "wake_at, owner, recoveries, deadline_at, retention, waits, held, drift, inbox_last, fence"
)


def run_row(run: RunRecord) -> Row:
    return (
        run.id,
        run.workflow,
        run.version,
        pack(run.input),
        run.created_at,
        run.created_by,
        str(run.seed),
        run.pool,
        run.shard,
        run.status,
        run.generation,
        run.epoch,
        run.run_attempt,
        run.first_workflow,
        pack(run.first_input),
        pack(run.result),
        as_json(run.error),
        run.parent,
        run.attached,
        as_json(run.tags),
        run.begun_at,
        run.updated_at,
        run.ended_at,
        run.wake_at,
        run.owner,
        run.recoveries,
        run.deadline_at,
        run.retention,
        as_json(run.waits),
        as_json(run.held),
        as_json(run.drift),
        run.inbox_last,
        run.fence,
    )


def run_of_row(row: Row) -> RunRecord:
    (id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch) = row[:12]
    (run_attempt, first_workflow, first_input, result, error, parent, attached, tags, begun_at) = row[12:21]
    (updated_at, ended_at, wake_at, owner, recoveries, deadline_at, retention, waits, held, drift) = row[21:31]
    inbox_last, fence = row[31:33]
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
        first_workflow=first_workflow,
        first_input=unpack(first_input),
        result=unpack(result),
        error=_errors.decode(error) if error else None,
        parent=parent,
        attached=bool(attached),
        tags=_tags.decode(tags) if tags else {},
        begun_at=begun_at,
        updated_at=updated_at,
        ended_at=ended_at,
        wake_at=wake_at,
        owner=owner,
        recoveries=recoveries,
        deadline_at=deadline_at,
        retention=retention,
        waits=_waits.decode(waits) if waits else (),
        held=_held.decode(held) if held else None,
        drift=_drift.decode(drift) if drift else (),
        inbox_last=inbox_last,
        fence=fence,
    )


# --- histories -------------------------------------------------------------------------------------------------------

ENTRY_COLUMNS = (
    "location, kind, name, status, asked, ordinal, seq, value, error, attempts, generation, started_at, settled_at, "
    "due_at, fingerprint, detail"
)


def entry_row(run_no: int, position: int, turn_id: str | None, entry: Entry) -> Row:
    return (
        run_no,
        position,
        turn_id,
        entry.location,
        entry.kind,
        entry.name,
        entry.status,
        entry.asked,
        entry.ordinal,
        entry.seq,
        pack(entry.value),
        as_json(entry.error),
        entry.attempts,
        entry.generation,
        entry.started_at,
        entry.settled_at,
        entry.due_at,
        entry.fingerprint,  # never text: to find that out would cost more than to write it
        pack(entry.detail),
    )


def marker_row(run_no: int, position: int, turn_id: str, at: float) -> Row:
    """The row of a turn without entries: nobody reads it, but its position is taken and its turn can be found."""
    return (
        run_no,
        position,
        turn_id,
        "",
        MARKER,
        "",
        "succeeded",
        0,
        -1,
        None,
        None,
        None,
        0,
        0,
        at,
        None,
        None,
        None,
        None,
    )


def entry_of_row(row: Row) -> Entry:
    """An entry from its columns, in the order of `ENTRY_COLUMNS`."""
    location, kind, name, status, asked, ordinal, seq, value, error, *rest = row
    attempts, generation, started_at, settled_at, due_at, fingerprint, detail = rest
    return Entry(
        location,
        kind,
        name,
        _entry_status[status],
        asked,
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


# --- mail, dead letters, workers -------------------------------------------------------------------------------------

MESSAGE_COLUMNS = "number, id, kind, name, body, sender, sent_at, expires_at, policy, target, place, wants_reply"


def message_row(run_no: int, number: int, message: Message) -> Row:
    return (
        run_no,
        number,
        message.id,
        message.kind,
        message.name,
        pack(message.body),
        message.sender,
        message.sent_at,
        message.expires_at,
        message.policy,
        message.target,
        message.place,
        message.wants_reply,
    )


def message_of_row(row: Row) -> Message:
    number, id, kind, name, body, sender, sent_at, expires_at, policy, target, place, wants_reply = row
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
        place=place,
        wants_reply=bool(wants_reply),
    )


LETTER_COLUMNS = (
    "id, kind, at, reason, event_id, event_name, value, original_target, target_status, target_ended_at, sent_at"
)


def letter_row(letter: DeadLetter) -> Row:
    return (
        letter.id,
        letter.kind,
        letter.at,
        letter.reason,
        letter.event_id,
        letter.event_name,
        pack(letter.value),
        letter.original_target,
        letter.target_status,
        letter.target_ended_at,
        letter.sent_at,
    )


def letter_of_row(row: Row) -> DeadLetter:
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


WORKER_COLUMNS = "id, pool, workflows, lease_until, started_at, node, pid, gone"


def worker_row(worker: WorkerRecord) -> Row:
    pairs = _encode(worker.workflows).decode()
    return (worker.id, worker.pool, pairs, worker.lease_until, worker.started_at, worker.node, worker.pid)


def worker_of_row(row: Row) -> WorkerRecord:
    id, pool, workflows, lease_until, started_at, node, pid, gone = row
    return WorkerRecord(
        id=id,
        pool=pool,
        workflows=_workflows.decode(workflows),
        lease_until=lease_until,
        started_at=started_at,
        node=node,
        pid=pid,
        gone=bool(gone),
    )
