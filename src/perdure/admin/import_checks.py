"""Checks of an exported run before it is imported. An import is data from elsewhere: anything may be wrong with it.

A start would have checked names, tags and numbers; they are checked in the same way here. A value that a store, a view
or a worker could not read is refused. What remains may still differ from what the code of the workflow requests: then
the worker that resumes the run holds it, as it holds any run whose history diverged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.client.rewind import received_messages
from perdure.codec import Codec
from perdure.errors import InvalidArgument, InvalidPayload
from perdure.model.locations import scope_of
from perdure.model.records import Entry, EntryStatus, Message, RunRecord, RunResult, RunStatus
from perdure.model.validation import check_name, check_public_name, check_seconds, check_tags
from perdure.runner.compensations import CompensationRecord
from perdure.runner.function_names import has_valid_form
from perdure.runner.runner import Runner, RunStart
from perdure.stores.results import Snapshot
from perdure.workflows.context import Context, RunInfo
from perdure.workflows.definition import Workflow, WorkflowOptions
from perdure.workflows.events import POLICIES, parse_policy

MAX_COUNT = 2**30  # of generations and attempts; a store adds to them
MAX_SEQUENCE = 2**50  # of numbers that order entries
MAX_SEED = 2**64
MAX_TIME = 250_000_000_000.0  # in the year 9892: later times are no datetimes
MAX_RETAINED_ITERATIONS = 100_000  # of one loop: a worker prunes them one by one
MESSAGE_KINDS = ("cancel", "event", "deferred")


def check_snapshot(snapshot: Snapshot, codec: Codec) -> None:
    """Raise `InvalidArgument` for a run that must not be stored."""
    try:
        _check_record(snapshot.record, codec)
        for entry in snapshot.entries:
            _check_entry(entry, codec)
        _check_order(snapshot.entries)
        _check_inbox(snapshot.inbox, codec)
    except (InvalidPayload, RecursionError) as error:
        raise InvalidArgument(f"the export has a value that cannot be read: {error}") from None
    _check_loads(snapshot, codec)


def _check_record(record: RunRecord, codec: Codec) -> None:
    check_name("a workflow's name", record.workflow)
    if record.original_workflow is not None:
        check_name("a workflow's name", record.original_workflow)
    check_public_name("a workflow's name", record.workflow)
    check_public_name("a workflow's pool", record.pool)
    check_tags(record.tags)
    _check_number("the version", record.version, 1, MAX_COUNT)
    _check_number("the seed", record.seed, 0, MAX_SEED)
    for what in ("generation", "epoch", "recoveries"):
        _check_number(f"the {what} of the run", getattr(record, what), 0, MAX_COUNT)
    _check_number("the run_attempt of the run", record.run_attempt, 1, MAX_COUNT)
    for what in ("created_at", "first_executed_at", "updated_at", "ended_at", "deadline_at"):
        _check_time(f"the {what} of the run", getattr(record, what))
    if record.retention is not None:
        check_seconds("the retention of the run", record.retention)
    for location in record.drift:
        _check_text("a location in `drift`", location)
    for payload in (record.input, record.original_input, record.result):
        _check_payload("a payload of the run", payload, codec)
    _check_end(record)


def _check_end(record: RunRecord) -> None:
    """Check that an ended run has what its status promises to callers."""
    required: Mapping[RunStatus, str] = {RunStatus.SUCCEEDED: "result", RunStatus.FAILED: "error"}
    missing = [name for name in ("ended_at", required.get(record.status, "ended_at")) if getattr(record, name) is None]
    if record.status.terminal and missing:
        raise InvalidArgument(f"the export has a run that is {record.status} and has no {missing[0]}; export it again")


def _check_entry(entry: Entry, codec: Codec) -> None:
    _check_text("the location of an entry", entry.location)
    what = f"entry {entry.location!r}"
    _check_text(f"the kind of {what}", entry.kind)
    _check_text(f"the name of {what}", entry.name)
    if entry.kind == "marker":
        raise InvalidArgument(f"{what} has the kind 'marker', which is reserved; export the run again")
    if entry.status is EntryStatus.FAILED and entry.error is None:
        raise InvalidArgument(f"{what} failed and has no error; export the run again")
    _check_number(f"the call_seq of {what}", entry.call_seq, 0, MAX_SEQUENCE)
    _check_number(f"the ordinal of {what}", entry.ordinal, -1, MAX_SEQUENCE)
    _check_number(f"the seq of {what}", 1 if entry.seq is None else entry.seq, 1, MAX_SEQUENCE)
    _check_number(f"the attempts of {what}", entry.attempts, 0, MAX_COUNT)
    _check_number(f"the generation of {what}", entry.generation, 0, MAX_COUNT)
    for time in ("started_at", "settled_at", "due_at"):
        _check_time(f"the {time} of {what}", getattr(entry, time))
    _check_payload(f"the value of {what}", entry.value, codec)
    if entry.kind == "compensation":
        _check_compensation(entry)


def _check_compensation(entry: Entry) -> None:
    """Refuse a compensation whose function has no registered name: it would be an import path of an old version."""
    try:
        record = msgspec.json.decode(entry.detail or b"", type=CompensationRecord)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the compensation {entry.location!r} cannot be read: {error}") from None
    if record.kind not in ("rollback", "exit"):
        raise InvalidArgument(f"the compensation {entry.location!r} must be a rollback or an exit, not {record.kind!r}")
    if not has_valid_form(record.fn):
        raise InvalidArgument(
            f"the compensation {entry.location!r} names {record.fn!r}, which is no registered name of a step or of a "
            "function of the workflow's module; such a run cannot be imported"
        )


def _check_order(entries: Iterable[Entry]) -> None:
    """Check that the numbers which order the entries of a run are unique."""
    latest = {entry.location: entry for entry in entries}.values()
    completed = Counter(f"seq {entry.seq}" for entry in latest if entry.seq is not None)
    ordered = (entry for entry in latest if entry.ordinal >= 0)
    requested = Counter(f"ordinal {entry.ordinal} in scope {scope_of(entry.location)!r}" for entry in ordered)
    for number, count in completed.most_common(1) + requested.most_common(1):
        if count > 1:
            raise InvalidArgument(f"the export has {count} entries with {number}; it must be unique")


def _check_inbox(inbox: Iterable[Message], codec: Codec) -> None:
    ids = Counter(message.id for message in inbox)
    for message in inbox:
        what = f"message {message.id!r}"
        _check_text("the id of a message", message.id)
        if ids[message.id] > 1:
            raise InvalidArgument(f"the export has {what} more than once; the id of a message must be unique")
        if message.kind not in MESSAGE_KINDS or parse_policy(message.name, message.policy) is None:
            raise InvalidArgument(
                f"{what} has kind {message.kind!r} and policy {message.policy!r}; the kind must be one of "
                f"{', '.join(MESSAGE_KINDS)}, the policy one of {', '.join(POLICIES)}"
            )
        if message.kind != "cancel":
            check_name(f"the name of {what}", message.name)
        for text in (message.sender, message.event_id):
            _check_text(f"the sender or event id of {what}", text or "-")
        for time in (message.sent_at, message.expires_at):
            _check_time(f"a time of {what}", time)
        if message.kind == "deferred":
            _check_result(what, message.body)
        else:
            _check_payload(f"the body of {what}", message.body, codec)


def last_message_no(snapshot: Snapshot) -> int:
    """Return the highest number of a message that the history names; `InvalidArgument` if it cannot be read."""
    try:
        received = [message.number for message in received_messages(snapshot.entries)]
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the export has received messages that cannot be read: {error}") from None
    highest = max(received, default=0)
    _check_number("the number of a received message", highest, 0, MAX_SEQUENCE)
    return highest


def _check_result(what: str, body: bytes | None) -> None:
    try:
        msgspec.json.decode(body or b"", type=RunResult)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the body of {what} cannot be read: {error}") from None


def _check_loads(snapshot: Snapshot, codec: Codec) -> None:
    """Check that a worker can load the history; whether it matches the code of the workflow is not known here."""
    record = snapshot.record
    info = RunInfo(record.id, record.workflow, record.version, record.generation, record.tags, None)
    start = RunStart(_PLACEHOLDER, info, record.input, record.seed, record.created_at, snapshot.entries, codec=codec)
    try:
        runner = Runner(start)
        history = runner.state.history
        runner.close()
    except Exception as error:  # whatever a worker would stumble over
        raise InvalidArgument(f"the history of the export cannot be loaded: {type(error).__name__}: {error}") from None
    for loop, last in history.iterations.items():
        first = history.kept_from.get(loop, 0)
        if last - first > MAX_RETAINED_ITERATIONS:
            raise InvalidArgument(
                f"the export has iterations {first} to {last} of loop {loop!r}; "
                f"{MAX_RETAINED_ITERATIONS} retained iterations are the maximum"
            )


async def _unused(ctx: Context) -> None:
    """Stand in for the function of a workflow that this process need not have. It is not called."""


_PLACEHOLDER: Workflow[Any, Any] = Workflow(_unused, "import", 1, WorkflowOptions())


# --- values


def _check_number(what: str, number: int, minimum: int, maximum: int) -> None:
    if not minimum <= number <= maximum:
        value = number if number.bit_length() < 100 else f"a number of {number.bit_length()} bits"
        raise InvalidArgument(f"{what} must be between {minimum} and {maximum}, not {value}")


def _check_time(what: str, time: float | None) -> None:
    if time is not None and not (math.isfinite(time) and 0.0 <= time <= MAX_TIME):
        raise InvalidArgument(f"{what} must be seconds since 1970, not {time}")


def _check_text(what: str, text: str) -> None:
    """Refuse an empty text, and one that not every store can hold. Names of tasks may have any other character."""
    if not text or "\0" in text or text != text.encode("utf-8", "replace").decode():
        raise InvalidArgument(f"{what} must be a text without NUL characters, not {text[:80]!r}")


def _check_payload(what: str, payload: bytes | None, codec: Codec) -> None:
    if payload is not None:
        codec.decode(payload, what=what)
