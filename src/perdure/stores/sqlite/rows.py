"""Records as rows that the SQLite store writes. `stores/sql_rows.py` turns rows into records.

Payloads are stored as text if they are valid text (most are JSON), otherwise as blobs. Reading returns the same bytes.
"""

from __future__ import annotations

from typing import Any

from perdure.model.records import DeadLetter, Entry, Message, RunRecord
from perdure.stores.semantics import MARKER
from perdure.stores.sql_rows import as_json, tags_as_json

Stored = str | int | float | bytes | None
Row = tuple[Any, ...]


def pack(payload: bytes | None) -> str | bytes | None:
    """Return the payload as text if it is valid UTF-8 without NUL bytes, otherwise unchanged.

    SQLite's text functions stop at a NUL byte.
    """
    if payload is None or 0 in payload:
        return payload
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return payload


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
        run.original_workflow,
        pack(run.original_input),
        pack(run.result),
        as_json(run.error),
        run.parent,
        run.attached,
        tags_as_json(run.tags),
        run.first_executed_at,
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
        run.last_message_no,
        run.fence,
    )


def queue_columns(run: RunRecord) -> Row:
    """Return the values of `QUEUE_COLUMNS`, which follow those of `run_row`."""
    return (run.queue, run.partition, run.priority, run.waiting, run.gate, as_json(run.ancestor_queues))


def entry_row(run_pk: int, position: int, turn_id: str | None, entry: Entry) -> Row:
    return (
        run_pk,
        position,
        turn_id,
        entry.location,
        entry.kind,
        entry.name,
        entry.status,
        entry.call_seq,
        entry.ordinal,
        entry.seq,
        pack(entry.value),
        as_json(entry.error),
        entry.attempts,
        entry.generation,
        entry.started_at,
        entry.settled_at,
        entry.due_at,
        entry.fingerprint,  # always a blob: checking for text costs more than writing it
        pack(entry.detail),
    )


def marker_row(run_pk: int, position: int, turn_id: str, at: float) -> Row:
    """Return the row of a turn without entries. It takes a position and makes the turn's id findable."""
    return (
        run_pk,
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


def message_row(run_pk: int, number: int, message: Message) -> Row:
    return (
        run_pk,
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
        message.offset,
        message.wants_reply,
        message.event_id,
    )


def dead_letter_row(letter: DeadLetter) -> Row:
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
