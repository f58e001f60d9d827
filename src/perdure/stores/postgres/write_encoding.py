"""Encode writes as JSON for the SQL functions of the schema: payloads as base64, structured columns as text.

The keys are the names of the Python fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from perdure.model.records import DeadLetter, Entry, Message, RunRecord
from perdure.model.tags import Tags, TagValue, encode_tags, index_tags
from perdure.model.turns import TurnExtras
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.queue_encoding import queue_write, requested_place
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
)

Json = dict[str, Any]


def as_json(write: Write) -> Json:
    """Return a write in the format of `apply_write`, without its empty fields."""
    match write:
        case CommitTurn():
            return _turn(write)
        case CreateRun():
            replaces = None if write.replaces is None else _fields(write.replaces)
            more = _non_empty(
                entries=_entries(write.entries),
                inbox=_messages(write.inbox),
                received=write.received,
                replaces=replaces,
                by=write.by,
            )
            return {"kind": "create", **new_run(0, write), **more}
        case DeliverMessage():
            return _tagged("message", write, message=_message(write.message))
        case EndRun():
            return _tagged("end", write)
        case ReleaseRun():
            return _tagged("release", write)
        case ObserveRunEnd():
            return _tagged("observe", write)
        case RewindRun():
            rewind = _tagged("rewind", write, entries=_entries(write.entries), returned=_messages(write.returned))
            return rewind if write.place is None else {**rewind, **requested_place(write.place)}
        case FinalizeRun():
            return _tagged(
                "finalize",
                write,
                redirected=_redirected(write.redirected),
                dead_letters=_dead_letters(write.dead_letters),
            )
        case PublishEvent():
            return _tagged("publish", write, event=_fields(write.event))
        case FanOut():
            return _tagged("fan_out", write)
        case ReplayDeadLetter():
            return _tagged("replay", write, send=as_json(write.send))
        case AppendStream():
            return _tagged("append_stream", write)
        case SupersedeStream():
            return _tagged("supersede_stream", write)
        case PutDocument():
            named = {"document_kind": write.kind, "dead_letters": _dead_letters(write.dead_letters)}
            return {**_tagged("document", write, **named), "kind": "document"}
        case TagRun():
            return {"kind": "tags", "run_id": write.run_id, "changes": _changed_tags(write.tags)}
        case Admit() | ConfigureQueue() | ConfigurePartition() | Requeue() | LeaveQueue():
            return queue_write(write)


def _tagged(kind: str, write: msgspec.Struct, **replaced: Any) -> Json:
    return {"kind": kind, **_non_empty(**{**_fields(write), **replaced})}


def _fields(struct: msgspec.Struct) -> Json:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _non_empty(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None and value != ()}


def _turn(turn: CommitTurn) -> Json:
    return _tagged(
        "turn",
        turn,
        entries=tuple(entry if entry.error is None else _entry(entry) for entry in turn.entries),
        patch=_patch(turn.patch) if turn.patch is not None else None,
        restart=_restart(turn.continue_as) if turn.continue_as is not None else None,
        continue_as=None,  # sent as `restart`
        extras=_extras(turn.extras) if turn.extras is not None else None,
    )


_PATCHED = "status, owner, wake_at, waits, held, held_kind, drift, recoveries, result, error, ended_at, prune_at"
_PATCH_NAMES = _PATCHED.split(", ")


def _patch(patch: RunPatch) -> Json:
    return _non_empty(**dict(zip(_PATCH_NAMES, _patch_row(patch), strict=True)))


def _restart(restart: ContinueAs) -> Json:
    return _non_empty(**{**_fields(restart), "entries": _entries(restart.entries)})


def _extras(extras: TurnExtras) -> Json:
    changed = _changed_tags(extras.tags) if extras.tags else None
    letters = _dead_letters(extras.dead_letters)
    return _non_empty(**{**_fields(extras), "dead_letters": letters, "tags": None, "changed_tags": changed})


_ENTRY_NAMES = rows.ENTRY_COLUMNS.split(", ")


def _entries(entries: Sequence[Entry]) -> tuple[Json, ...]:
    return tuple(map(_entry, entries))


def _entry(entry: Entry) -> Json:
    return dict(zip(_ENTRY_NAMES, entry_row(entry), strict=True))


def _messages(messages: Sequence[Message]) -> tuple[Json, ...]:
    return tuple(map(_message, messages))


def _message(record: Message) -> Json:
    return _non_empty(**_fields(record))


def _dead_letters(dead_letters: Sequence[DeadLetter]) -> tuple[Json, ...]:
    """Encode dead letters. A reason may quote any text, but PostgreSQL cannot store a NUL."""
    return tuple(
        {**_fields(each), "reason": each.reason.replace("\0", "\N{REPLACEMENT CHARACTER}")} for each in dead_letters
    )


def _redirected(events: Sequence[RedirectedEvent]) -> tuple[Json, ...]:
    return tuple(
        {"number": each.number, "to": as_json(each.to), "otherwise": _dead_letters((each.otherwise,))[0]}
        for each in events
    )


# --- tags and new runs ----------------------------------------------------------------------------------------------


def all_text(tags: Tags) -> bool:
    """Return whether all values are text. The server derives the index of such tags from the tags."""
    return all(type(value) is str for value in tags.values())


def _typed_tags(tags: Tags) -> Json:
    """Encode tags of any type: their stored form, and the rows of the index."""
    rows_of_index = [(each.key, each.kind, each.text, each.number) for each in index_tags(tags)]
    return {"tags": msgspec.Raw(encode_tags(tags)), "tag_rows": rows_of_index}


def _changed_tags(changes: Mapping[str, TagValue | None]) -> Json:
    given = {key: value for key, value in changes.items() if value is not None}
    return {"removed": [key for key, value in changes.items() if value is None], **_typed_tags(given)}


_NEW_RUN_COLUMNS = (
    "id, workflow, version, input, created_at, created_by, pool, shard, generation, epoch, run_attempt, "
    "original_workflow, original_input, parent, attached, tags, wake_at, owner, deadline_at, retention"
)
_NEW_RUN_NAMES = _NEW_RUN_COLUMNS.split(", ")
_new_run_values = attrgetter(*_NEW_RUN_NAMES)


def new_run(at: int, write: CreateRun) -> Json:
    """Encode a new run as `add_runs` takes it; `at` is its index in the batch."""
    record: RunRecord = write.record
    observer = write.observer
    observers = {} if observer is None else {"observer": observer.run_id, "target": observer.target}
    values = zip(_NEW_RUN_NAMES, _new_run_values(record), strict=True)
    tags = _typed_tags(record.tags) if record.tags and not all_text(record.tags) else {}
    encoded = {"at": at, "seed": str(record.seed), **dict(values), **observers, **tags}
    if record.ancestor_queues:
        encoded["ancestor_queues"] = rows.as_json(record.ancestor_queues)
    return encoded if write.place is None else {**encoded, **requested_place(write.place)}


def message(at: int, write: DeliverMessage) -> Json:
    """Encode a message as `write_messages` takes it."""
    return {**_message(write.message), "at": at, "run_id": write.run_id, "now": write.now, "capacity": write.limit}


def notified_rows(at: int, write: FinalizeRun) -> list[Json]:
    """Encode notified observers as `mark_notified` takes them: a row for each, or one row if there is none."""
    run = {"at": at, "run_id": write.run_id}
    return [{**run, "observer": each.run_id, "target": each.target} for each in write.notified] or [run]


def entry_row(entry: Entry) -> rows.Row:
    """Return an entry's columns in the order of `rows.ENTRY_COLUMNS`."""
    return (
        entry.location,
        entry.kind,
        entry.name,
        entry.status,
        entry.call_seq,
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
