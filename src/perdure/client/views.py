"""Public views of runs, entries and dead letters: stored records with times as datetimes and payloads decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from perdure.clock import to_datetime, to_datetime_or_none
from perdure.codec import Codec
from perdure.codec.attempt_notes import decode_notes
from perdure.errors import InvalidPayload
from perdure.model.records import (
    DeadLetter,
    Entry,
    EntryStatus,
    Hold,
    Message,
    PublishedValue,
    RunRecord,
    RunStatus,
    StreamItem,
    Wait,
)
from perdure.model.tags import Tags
from perdure.stores.results import StoredEntry, UnreadableRun
from perdure.workflows.types import ErrorView, error_view

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Suspended:
    """The outcome of `poll` for a run that waits, with the reasons."""

    waiting_for: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a run waits, as data; `str(reason)` is its text."""

    kind: str  # "timer", "retry", "event", "child", "deferred", "held", "no_worker", "start", "queue" (`QueueReason`)
    text: str
    location: str | None = None
    name: str | None = None
    until: datetime | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class HeartbeatView:
    """The last recorded heartbeat of a running step."""

    details: Any
    at: datetime


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Everything about a run except its history. In a list, `input` and `result` are None: it reads no payloads."""

    id: str
    workflow: str
    version: int
    status: RunStatus
    input: Any
    result: Any
    error: ErrorView | None
    parent: str | None
    tags: Tags
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    recoveries: int
    generation: int
    owner: str | None
    waiting_for: tuple[Reason, ...] = ()
    drift: tuple[str, ...] = ()  # locations whose arguments in a replay differ from the recorded ones
    published: Mapping[str, Any] = field(default_factory=dict)
    held: Hold | None = None  # why the run is held: kind, reason, location, line
    cancel_reason: str | None = None
    cancel_pending: bool = False  # a cancel was requested and is not processed yet, for example because the run is held
    heartbeats: Mapping[str, HeartbeatView] = field(default_factory=dict)  # of running steps, by location
    queue: str | None = None  # of the run's start, with its partition and priority
    partition: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of a run's history."""

    location: str
    kind: str
    name: str
    status: EntryStatus
    value: Any
    error: ErrorView | None
    attempts: int
    seq: int | None
    started_at: datetime
    settled_at: datetime | None
    heartbeat: Any = None  # of a pending step: details and time of its last recorded heartbeat
    heartbeat_at: datetime | None = None
    position: int = 0  # in the history: where a page of it continues


@dataclass(frozen=True, slots=True)
class RunList:
    """A page of runs, newest first. Pass `next` as `after` to get the next page; it is None on the last page.

    `unreadable` are marks (`id`, `reason`) of runs in the page that cannot be read. `scanned` is the number of runs
    that were examined. A page examines at most 10,000, so it may have fewer runs than its limit, or none, and a `next`.
    """

    runs: tuple[RunDescription, ...]
    next: str | None
    unreadable: tuple[UnreadableRun, ...] = ()
    scanned: int = 0

    def __iter__(self) -> Iterator[RunDescription]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)


@dataclass(frozen=True, slots=True)
class DeadLetterView(Generic[V]):
    """An event that could not be delivered, or an action that failed for good.

    `value` is an instance of the event class that `dead_letters` was called with, otherwise plain data. A value that
    does not fit the class, which `reason` says, is plain data too.
    """

    id: str
    kind: str
    reason: str
    event_id: str | None
    event_name: str | None
    value: V
    original_target: str | None
    target_status: RunStatus | None
    target_ended_at: datetime | None
    sent_at: datetime | None


@dataclass(frozen=True, slots=True)
class StreamItemView(Generic[V]):
    """One item of a stream. `superseded`: another attempt has replaced the step attempt that wrote it."""

    offset: int
    value: V
    superseded: bool
    location: str
    attempt: int
    at: datetime


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The result of `recover`: dead workers fenced, runs released from them, and runs claimed by this engine."""

    workers_fenced: int
    runs_released: int
    runs_claimed: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A cancel of a run: its reason, and whether it is still to be processed."""

    reason: str | None = None
    pending: bool = False


def describe_run(
    record: RunRecord,
    codec: Codec,
    reasons: Sequence[Reason] = (),
    published: Mapping[str, Any] | None = None,
    cancel: CancelRequest | None = None,
    heartbeats: Mapping[str, HeartbeatView] | None = None,
) -> RunDescription:
    cancel = cancel or CancelRequest(cancel_reason_of(record))
    return RunDescription(
        id=record.id,
        workflow=record.workflow,
        version=record.version,
        status=record.status,
        input=codec.decode(record.input) if record.input else None,
        result=None if record.result is None else codec.decode(record.result),
        error=None if record.status is RunStatus.CANCELLED else error_view(record.error, codec),
        parent=record.parent,
        tags=dict(record.tags),
        created_at=to_datetime(record.created_at),
        updated_at=to_datetime(record.updated_at or record.created_at),
        ended_at=to_datetime_or_none(record.ended_at),
        recoveries=record.recoveries,
        generation=record.generation,
        owner=record.owner,
        waiting_for=tuple(reasons),
        drift=record.drift,
        published=published or {},
        held=record.current_hold,
        cancel_reason=cancel.reason,
        cancel_pending=cancel.pending,
        heartbeats=heartbeats or {},
        queue=record.queue,
        partition=record.partition,
        priority=record.priority,
    )


def cancel_reason_of(record: RunRecord) -> str | None:
    """Return why a run that ended as cancelled was cancelled, if a reason was given."""
    cancelled = record.status is RunStatus.CANCELLED and record.error is not None
    return record.error.message if cancelled and record.error is not None else None


def find_cancel(
    record: RunRecord, inbox: Sequence[Message], history: Sequence[StoredEntry], codec: Codec
) -> CancelRequest | None:
    """Return the cancel of a run: in its inbox, if it waits or came before the first execution, or in its history."""
    for message in inbox:
        if message.kind == "cancel":
            return CancelRequest(_text(message.body, codec), pending=not record.status.terminal)
    for row in history:
        if row.entry.kind == "cancel" and row.entry.name == "cancel":
            return CancelRequest(_text(row.entry.value, codec))
    return None


def _text(encoded: bytes | None, codec: Codec) -> str | None:
    return None if encoded is None else str(codec.decode(encoded))


def published_values(values: Iterable[PublishedValue], now: float) -> dict[str, bytes]:
    """Return the values that a workflow published, without expired ones and those that perdure stores for itself."""
    own = (each for each in values if not each.key.startswith("~"))
    return {each.key: each.value for each in own if each.expires_at is None or each.expires_at > now}


def waiting_reasons(record: RunRecord, served: bool) -> tuple[Reason, ...]:
    """Return the reasons why a run waits. `served`: whether a live worker has its workflow."""
    if record.status.terminal:
        return ()
    reasons = [_reason(wait, record.held) for wait in record.waits] if record.status is RunStatus.SUSPENDED else []
    if not served and record.owner is None and record.held is None:
        name = f"{record.workflow} v{record.version}"
        reasons.append(Reason("no_worker", f"no live worker has workflow {name}", name=name))
    elif record.status is RunStatus.PENDING:
        until = to_datetime_or_none(record.wake_at)
        reasons.append(Reason("start", "waits to be claimed by a worker", until=until))
    return tuple(reasons)


def _reason(wait: Wait, held: Hold | None) -> Reason:
    if wait.kind == "held" and held is not None:
        at = f" (at {held.line})" if held.line is not None and held.line not in held.reason else ""
        return Reason("held", f"held: {held.reason}{at}", held.location, held.reason)
    until = to_datetime_or_none(wait.until)
    match wait.kind:
        case "timer":
            text = f"timer {wait.location} until {until:%Y-%m-%d %H:%M:%S} UTC"
        case "retry" if wait.location is None:
            text = f"retry of the run at {until:%Y-%m-%d %H:%M:%S} UTC"
        case "retry":
            text = f"retry of step {wait.location} at {until:%Y-%m-%d %H:%M:%S} UTC"
        case "event":
            text = f"event {wait.name}{_by(until)}"
        case "child":
            text = f"the end of run {wait.name}"
        case "deferred":
            text = f"deferred {wait.name}, to be completed with its token{_by(until)}"
        case "held":
            text = f"held: {wait.name}"
        case _:
            text = f"{wait.kind} {wait.name or wait.location or ''}".strip()
    return Reason(wait.kind, text, wait.location, wait.name, until)


def _by(until: datetime | None) -> str:
    return "" if until is None else f" until {until:%Y-%m-%d %H:%M:%S} UTC"


def build_history(rows: Sequence[StoredEntry], codec: Codec, decode: Callable[[Entry], Any]) -> list[HistoryEntry]:
    """Return the latest state of each entry, in call order."""
    latest: dict[str, Entry] = {row.entry.location: row.entry for row in rows}
    in_order = sorted(latest.values(), key=lambda entry: entry.call_seq)
    positions = {row.entry.location: row.position for row in rows}
    return [entry_view(entry, codec, decode(entry), positions[entry.location]) for entry in in_order]


def running_heartbeats(rows: Sequence[StoredEntry], codec: Codec) -> dict[str, HeartbeatView]:
    """Return the last heartbeats of the steps that run now, by location."""
    latest = {row.entry.location: row.entry for row in rows}
    running = (each for each in latest.values() if each.status is EntryStatus.PENDING and each.due_at is None)
    found = ((each.location, decode_notes(codec, each.value)) for each in running if each.value is not None)
    return {
        location: HeartbeatView(notes.heartbeat, to_datetime(notes.heartbeat_at))
        for location, notes in found
        if notes.heartbeat_at is not None
    }


def entry_view(entry: Entry, codec: Codec, value: Any, position: int) -> HistoryEntry:
    notes = decode_notes(codec, entry.value if entry.status is EntryStatus.PENDING else None)
    return HistoryEntry(
        location=entry.location,
        kind=entry.kind,
        name=entry.name,
        status=entry.status,
        value=value,
        error=error_view(entry.error, codec),
        attempts=entry.attempts,
        seq=entry.seq,
        started_at=to_datetime(entry.started_at),
        settled_at=to_datetime_or_none(entry.settled_at),
        heartbeat=notes.heartbeat,
        heartbeat_at=to_datetime_or_none(notes.heartbeat_at),
        position=position,
    )


def dead_letter_view(dead_letter: DeadLetter, codec: Codec, kind: Any = Any) -> DeadLetterView[Any]:
    """Return a dead letter with its value decoded as `kind`.

    A value that does not match is plain data: it may be the reason of the dead letter.
    """
    status, data = dead_letter.target_status, dead_letter.value
    try:
        value = None if data is None else codec.decode(data, kind)
    except InvalidPayload:
        value = None if data is None else codec.decode(data)
    return DeadLetterView(
        id=dead_letter.id,
        kind=dead_letter.kind,
        reason=dead_letter.reason,
        event_id=dead_letter.event_id,
        event_name=dead_letter.event_name,
        value=value,
        original_target=dead_letter.original_target,
        target_status=None if status is None else RunStatus(status),
        target_ended_at=to_datetime_or_none(dead_letter.target_ended_at),
        sent_at=to_datetime_or_none(dead_letter.sent_at),
    )


def stream_item_view(item: StreamItem, codec: Codec, kind: Any = Any, of_run: str = "") -> StreamItemView[Any]:
    """Return an item with its value decoded as `kind`. Raises `InvalidPayload` if the value does not match."""
    what = f"item {item.offset} of stream {item.stream!r}{of_run}"
    value = codec.decode(item.value, kind, what=what)
    return StreamItemView(item.offset, value, item.superseded, item.location, item.attempt, to_datetime(item.at))
