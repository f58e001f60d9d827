"""Pure functions for the rules of writes, used by the stores that check writes in Python (memory and SQLite).

A write is checked against the run's `RunState`, the few fields of its row and history that decide. This module knows no
storage: the same rules, applied in the same order, make two stores return the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.queue_records import Place
from perdure.model.records import Entry, Message, RunRecord, RunResult, RunStatus, StreamItem, TopicEvent
from perdure.model.tags import Tags, TagValue, merge_tags
from perdure.model.turns import TurnExtras
from perdure.stores import queue_rules
from perdure.stores.results import AlreadyEnded, Committed, Superseded, WriteResult
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
    ReleaseRun,
    ReplayDeadLetter,
    Requeue,
    RewindRun,
    RunPatch,
    SupersedeStream,
    TagRun,
    Write,
)

MARKER = "marker"
"""Kind of the row that a turn without entries writes, so that it takes a position and a repeated call is recognised."""

WAKES_HELD = frozenset(("resume", "cancel"))
"""Kinds of messages that wake a held run. No other kind does."""

EVENTS = frozenset(("event", "assignment"))
"""Kinds of messages that a limit applies to and that need finalization if the run ends without reading them."""

ASSIGNMENT = "assignment"
RELEASABLE = frozenset((ASSIGNMENT, "deferred"))

DELIVERIES = frozenset(("after_wait", "after_create", "all"))

Key = str | tuple[str, str]
"""What a write changes: the id of a run, or a topic or queue as a tuple, which no run id can be equal to."""


class RunState(Struct):
    """The fields of a run that decide whether a write is accepted. `position` includes the fence."""

    status: RunStatus
    owner: str | None
    position: int
    last_message_no: int
    wake_at: float | None
    has_messages: bool  # the run has an owner and got messages that the owner has not seen
    held: bool
    has_executed: bool  # the run has executed, in any generation
    awaits_first_turn: bool  # the current generation has not executed
    waiting: bool = False  # it waits in a queue: nothing but its admission makes it due


# --- before anything is stored -----------------------------------------------------------------------------------


def run_of(write: Write) -> Key:
    """Return the run, topic, queue or kind of documents that a write is about. Some change other runs too."""
    match write:
        case CommitTurn():  # first: most writes are turns
            return write.run_id
        case CreateRun():
            return write.record.id
        case PublishEvent():
            return ("topic", write.event.topic)
        case FanOut():
            return ("topic", write.topic)
        case ReplayDeadLetter():
            return run_of(write.send)
        case Admit() | ConfigurePartition():
            return ("queue", write.queue)
        case ConfigureQueue():
            return ("queue", write.name)
        case PutDocument():
            return ("document", write.kind)
        case _:
            return write.run_id


def is_unbounded(write: DeliverMessage) -> bool:
    """Return whether the message is accepted however full the inbox is."""
    return write.limit is None or write.message.kind not in EVENTS


def only_marks_notified(write: FinalizeRun) -> bool:
    """Return whether the write only removes notified observers: no messages, topics, children or dead letters."""
    return not (write.consumed or write.returned or write.redirected or write.dead_letters or write.orphaned_children)


def qualifies_for_fast_path(write: Write) -> bool:
    """Return whether a single write may take a store's fast path (ADR 13, 14).

    There are two cases: a new run that its worker owns, and a turn of one entry that may end its run. Such an end must
    have seen no messages and have no known observers. A turn does not know whether its run has a place in a queue,
    which its end must delete: the store must check that.
    """
    match write:
        case CommitTurn():
            if len(write.entries) != 1 or not write.owned or write.consumed or write.continue_as or write.extras:
                return False
            if write.patch is None:
                return True
            return write.patch.status.terminal and not write.seen and not write.observed
        case CreateRun():
            return write.record.owner is not None and write.observer is None and not is_created_alone(write)
        case _:
            return False


def is_created_alone(write: CreateRun) -> bool:
    """Return whether more than the row of a new run is written, so that it cannot be inserted with other new runs."""
    return bool(write.entries or write.inbox or write.received or write.replaces or write.place or write.by)


def check_batch(batch: Sequence[Write]) -> None:
    """Raise `StoreError` for a malformed write. Called before the first write is applied, so that none is stored."""
    for write in batch:
        match write:
            case CommitTurn():
                _check_turn(write)
            case CreateRun():
                _check_new(write)
            case DeliverMessage():
                _check_text("a run id", write.run_id)
                _check_message(write.run_id, write.message)
            case EndRun():
                _check_text("a run id", write.run_id)
                _check_text("a turn id", write.turn_id)
                if not write.status.terminal:
                    raise StoreError(f"run {write.run_id!r} cannot be ended as {write.status}; use a terminal status")
            case RewindRun():
                _check_rewind(write)
            case PublishEvent():
                _check_event(write.event, write.page)
            case FanOut():
                _check_page(write.topic, write.page)
            case ReplayDeadLetter():
                _check_text("the id of a dead letter", write.dead_letter_id)
                check_batch((write.send,))
            case AppendStream():
                _check_text("a run id", write.run_id)
                _check_items(write.run_id, write.items)
            case FinalizeRun():
                _check_text("a run id", write.run_id)
                check_batch([event.to for event in write.redirected])
            case PutDocument():
                _check_document(write)
            case TagRun():
                _check_text("a run id", write.run_id)
                _check_tag_changes(write.run_id, write.tags)
            case ObserveRunEnd() | SupersedeStream() | ReleaseRun():
                _check_text("a run id", write.run_id)
            case Admit() | ConfigureQueue() | ConfigurePartition() | Requeue() | LeaveQueue():
                queue_rules.check_queue_write(write)
            case _:
                raise StoreError(f"{type(write).__name__} is not a write of this store; upgrade the store")


def _check_turn(turn: CommitTurn) -> None:
    # Runs for every step: conditions are checked inline, and messages are built only for an error.
    if type(turn.run_id) is not str or type(turn.turn_id) is not str or not turn.run_id or not turn.turn_id:
        _check_text("a run id", turn.run_id)
        _check_text("a turn id", turn.turn_id)
    for entry in turn.entries:
        if type(entry) is not Entry or entry.kind == MARKER or not (entry.value is None or type(entry.value) is bytes):
            _check_entry(turn.run_id, entry)
    if turn.continue_as is not None:
        for entry in turn.continue_as.entries:
            _check_entry(turn.run_id, entry)
    if turn.extras is not None:
        _check_extras(turn.run_id, turn.extras)


def _check_extras(run_id: str, extras: TurnExtras) -> None:
    _check_items(run_id, extras.streamed)
    for published in extras.published:
        _check_text("the key of a published value", published.key)
        _check_bytes(f"the value that run {run_id!r} publishes as {published.key!r}", published.value)
    for subscription in extras.subscribe:
        _check_text("the target of a subscription", subscription.target)
    if extras.tags:
        _check_tag_changes(run_id, extras.tags)


def _check_tag_changes(run_id: str, tags: Mapping[str, TagValue | None]) -> None:
    for key, value in tags.items():
        _check_text("a tag's key", key)
        given: object = value
        if given is not None and not isinstance(given, str | int | float | datetime):
            raise StoreError(f"tag {key!r} of run {run_id!r} must be a tag's value or None, not {type(given).__name__}")


def _check_document(write: PutDocument) -> None:
    _check_text("a kind of documents", write.kind)
    _check_text("the id of a document", write.id)
    _check_text("a write id", write.write_id)
    _check_bytes(f"the body of document {write.kind}/{write.id}", write.body)
    for dead_letter in write.dead_letters:
        _check_text("a dead letter's id", dead_letter.id)
    if write.base < 0:
        raise StoreError(f"the base of document {write.kind}/{write.id} must be at least 0, not {write.base!r}")


def _check_new(write: CreateRun) -> None:
    run_id = write.record.id
    _check_text("a run id", run_id)
    _check_bytes(f"the input of run {run_id!r}", write.record.input)
    for entry in write.entries:
        _check_entry(run_id, entry)
    for message in write.inbox:
        _check_message(run_id, message)
    if write.replaces is not None and write.entries:
        raise StoreError(f"run {run_id!r} replaces another generation and cannot have a history; use no entries")
    if write.place is not None:
        queue_rules.check_place(run_id, write.place)


def _check_rewind(write: RewindRun) -> None:
    _check_text("a run id", write.run_id)
    _check_text("a turn id", write.turn_id)
    for entry in write.entries:
        _check_entry(write.run_id, entry)
    for message in write.returned:
        _check_message(write.run_id, message)
    if write.place is not None:
        queue_rules.check_place_of_rewind(write.run_id, write.place)


def _check_message(run_id: str, message: Message) -> None:
    _check_text("a message id", message.id)
    _check_bytes(f"a message to run {run_id!r}", message.body)


def _check_event(event: TopicEvent, page: int) -> None:
    _check_text("an event id", event.id)
    _check_page(event.topic, page)
    _check_bytes(f"event {event.id!r} of topic {event.topic!r}", event.body)
    if event.delivery not in DELIVERIES:
        raise StoreError(
            f"the delivery of event {event.id!r} of topic {event.topic!r} must be one of "
            f"{', '.join(sorted(DELIVERIES))}, not {event.delivery!r}"
        )


def _check_page(topic: str, page: int) -> None:
    _check_text("a topic", topic)
    if page < 1:
        raise StoreError(f"a page of subscriptions to {topic!r} must be at least 1, not {page!r}")


def _check_items(run_id: str, items: Sequence[StreamItem]) -> None:
    for item in items:
        _check_text("the name of a stream", item.stream)
        _check_bytes(f"an item of stream {item.stream!r} of run {run_id!r}", item.value)


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise StoreError(f"{what} must be a non-empty string, not {text!r}")


def _check_bytes(what: str, value: object) -> None:
    if value is not None and not isinstance(value, bytes):
        raise StoreError(f"{what} must be encoded bytes, not {type(value).__name__}; encode it with the codec")


def _check_entry(run_id: str, entry: object) -> None:
    if not isinstance(entry, Entry):
        raise StoreError(f"the entries of run {run_id!r} must be Entry records, not {type(entry).__name__}")
    if entry.kind == MARKER:
        raise StoreError(
            f"entry {entry.location!r} of run {run_id!r} has kind {MARKER!r}, which is reserved; use another kind"
        )
    value: object = entry.value
    if value is not None and not isinstance(value, bytes):  # checked first: building the message costs more
        _check_bytes(f"the value of entry {entry.location!r} of run {run_id!r}", value)


# --- acceptance --------------------------------------------------------------------------------------------------


def refuse_turn(turn: CommitTurn, run: RunState, alive: bool) -> WriteResult | None:
    """Return why a turn is rejected, or None if it is accepted: rules 3 to 7 of `perdure.stores.protocol`.

    The caller has applied rules 1 and 2. `alive`: the worker is known and not fenced.
    """
    if run.status.terminal:  # rule 3
        return AlreadyEnded(run.status)
    if not alive:  # rule 4
        return Superseded()
    if run.waiting or (run.owner != turn.worker and (turn.owned or run.owner is not None)):  # rule 5
        return Superseded()
    if turn.base != run.position:  # rule 6
        return Superseded()
    return None  # rule 7


def refuse_append(write: AppendStream, run: RunState, alive: bool) -> WriteResult | None:
    """Return why stream items of a step are rejected, or None if they are accepted."""
    if run.status.terminal:
        return AlreadyEnded(run.status)
    return None if alive and run.owner == write.worker else Superseded()


def unwritten_items(write: AppendStream, stored: int) -> tuple[StreamItem, ...]:
    """Return the items that are not stored yet. `stored` is the number of items that their writer has stored so far."""
    return write.items if write.first is None else write.items[max(0, stored - write.first) :]


def last_position(turn: CommitTurn) -> int:
    """Return the last position of the history with this turn in it. A turn without entries takes one position too."""
    carried_over = 0 if turn.continue_as is None else len(turn.continue_as.entries)
    return turn.base + max(1, len(turn.entries), carried_over)


def is_dropped(location: str, dropped: Sequence[str]) -> bool:
    """Return whether a turn that drops these locations drops this one: each of them and all locations below."""
    return any(location == each or location.startswith(each + "/") for each in dropped)


# --- rows ----------------------------------------------------------------------------------------------------------


def can_replace(write: CreateRun, existing: RunRecord, unfinalized: bool) -> bool:
    """Return whether a new run replaces the existing run with its id."""
    before = write.replaces
    if before is None or not existing.status.terminal or unfinalized:
        return False
    return (existing.created_by, existing.generation) == (before.created_by, before.generation)


def initial_record(
    record: RunRecord, alive: bool, last_message_no: int = 0, fence: int = 0, *, place: Place | None = None
) -> RunRecord:
    """Return the row of a new run: claimed by its owner if that worker is alive, else without an owner and due.

    `last_message_no` is the number of the last message that it has, or has received; `fence` the last position of the
    run that it replaces. With `place` the run has no owner and is not due.
    """
    owned = record.owner is not None and alive and place is None
    wake_at = record.created_at if record.wake_at is None else record.wake_at
    created = replace(
        record,
        status=RunStatus.RUNNING if owned else RunStatus.PENDING,
        owner=record.owner if owned else None,
        wake_at=None if owned else wake_at,
        first_executed_at=record.created_at if owned else None,
        updated_at=record.created_at,
        ended_at=None,
        result=None,
        error=None,
        waits=(),
        held=None,
        drift=(),
        recoveries=0,
        last_message_no=last_message_no,
        fence=fence,
        queue=None,
        partition="",
        priority=0,
        waiting=False,
        gate="",
    )
    return created if place is None else queue_rules.placed(created, place)


def restarted(record: RunRecord, continue_as: ContinueAs) -> RunRecord:
    """Return the row of a run whose history restarts."""
    return replace(
        record,
        workflow=continue_as.workflow,
        version=continue_as.version,
        input=continue_as.input,
        original_workflow=record.original_workflow or record.workflow,
        original_input=record.input if record.original_input is None else record.original_input,
        first_executed_at=continue_as.first_executed_at,
        run_attempt=continue_as.run_attempt,
        pool=record.pool if continue_as.pool is None else continue_as.pool,
        generation=record.generation + 1,
        epoch=record.epoch + 1,
    )


def rewound(record: RunRecord, has_executed: bool, write: RewindRun, position: int) -> RunRecord:
    """Return the row of a run that was rewound and is now at this position: due, without end, hold or owner.

    A run that waits is not due, and one that had ended waits if the write has a place.
    """
    now_open = replace(
        record,
        status=status_released(has_executed),
        generation=record.generation + 1,
        owner=None,
        result=None,
        error=None,
        ended_at=None,
        held=None,
        waits=(),
        drift=(),
        recoveries=0,
        wake_at=None if record.waiting else write.now,
        updated_at=write.now,
        deadline_at=write.deadline_at,
        fence=position,
    )
    if write.place is None or not record.status.terminal:
        return now_open
    return queue_rules.placed(now_open, write.place)


def terminated(record: RunRecord, write: EndRun, position: int) -> RunRecord:
    """Return the row of a run that was ended from outside at this position."""
    return replace(
        record,
        status=write.status,
        owner=None,
        wake_at=None,
        waits=(),
        held=None,
        ended_at=write.now,
        updated_at=write.now,
        fence=position,
        waiting=False,
        gate="",
    )


def already_ended(record: RunRecord) -> AlreadyEnded:
    """Return the result of a write that observes a run which has ended."""
    return AlreadyEnded(record.status, RunResult(record.status, record.result, record.error))


def tagged(record: RunRecord, changes: Mapping[str, TagValue | None]) -> RunRecord:
    """Return the row of a run with these changes of its tags: values to set, None to remove one."""
    changed = changed_tags(record.tags, changes)
    return record if changed is None else replace(record, tags=changed)


def changed_tags(tags: Tags, changes: Mapping[str, TagValue | None]) -> Tags | None:
    """Return the tags after these changes, or None if they stay the same."""
    changed = merge_tags(tags, changes)
    return None if same_tags(changed, tags) else changed


def same_tags(one: Tags, other: Tags) -> bool:
    """Return whether two runs have the same tags, with values of the same type: 1 is not True."""
    return one == other and all(type(one[key]) is type(other[key]) for key in one)


# --- documents ----------------------------------------------------------------------------------------------------


def refuse_document(write: PutDocument, version: int | None, write_id: str | None) -> Committed | Superseded | None:
    """Return the result of a write that changes no document, or None if it is applied.

    `version` and `write_id` are those of the stored document, None if there is none.
    """
    if version is None and write.body is None:
        return Committed()  # deleted before, or never there
    if version is not None and write_id == write.write_id and write.body is not None:
        return Committed(version=version)
    return None if write.base == (version or 0) else Superseded()


def is_due_earlier(due_at: float | None, before: float | None) -> bool:
    """Return whether a document became due earlier by a write, so that a change hint is needed."""
    return due_at is not None and (before is None or due_at < before)


# --- topics --------------------------------------------------------------------------------------------------------


def expired(expires_at: float | None, now: float) -> bool:
    """Return whether the time `expires_at` has come; None never expires."""
    return expires_at is not None and expires_at <= now


def may_read(event: TopicEvent, created_at: float) -> bool:
    """Return whether the event's delivery admits a run that was created at this time."""
    return event.delivery != "after_create" or created_at <= event.sent_at


def is_queueable(event: TopicEvent) -> bool:
    """Return whether the event is queued for later subscriptions. Other events are deleted when no run has them."""
    return event.delivery != "after_wait"


def assignment_id(topic: str, offset: int) -> str:
    """Return the message id of an assignment; the same for every run that gets the event."""
    return f"topic/{topic}/{offset}"


def assignment(event: TopicEvent, target: str) -> Message:
    """Return the message that assigns a stored event to the receive at `target`."""
    return Message(
        id=assignment_id(event.topic, event.offset),
        kind=ASSIGNMENT,
        name=event.topic,
        body=event.body,
        sender=event.sender,
        sent_at=event.sent_at,
        expires_at=event.expires_at,
        target=target,
        offset=event.offset,
        event_id=event.event_id,
    )


# --- wake-ups ----------------------------------------------------------------------------------------------------


def wakes(message: Message, run: RunState) -> bool:
    """Return whether a message makes a run due.

    A run that waits in a queue is never made due. A held run waits for a resume or a cancel. A run whose generation has
    not started waits for its time. While a worker owns the run, neither applies.
    """
    if run.waiting:
        return False
    return not (run.held or run.awaits_first_turn) or run.owner is not None or message.kind in WAKES_HELD


def ignores_messages(turn: CommitTurn, patch: RunPatch) -> bool:
    """Return whether only a resume or a cancel wakes the run after this turn: it is held, or its restart is delayed."""
    delayed = turn.continue_as is not None and turn.continue_as.first_executed_at is None
    return (patch.held is not None or delayed) and patch.owner is None


def wake_after(patch: RunPatch, now: float, unseen: bool) -> float | None:
    """Return the run's `wake_at` after this patch. `unseen`: there are unseen messages that wake the patched run.

    This decides the race between a send and a suspension. Both are writes to one run, so one comes first. A message
    that comes before the turn is `unseen` and leaves the run due. A message that comes after the turn finds the run
    suspended and makes it due.
    """
    if patch.status.terminal:
        return None
    return now if unseen else patch.wake_at


def earliest(wake_at: float | None, now: float) -> float:
    """Return the earlier of a wake-up, if there is one, and now."""
    return now if wake_at is None or wake_at > now else wake_at


def status_released(has_executed: bool) -> RunStatus:
    """Return the status of a run that was released: it waits for a worker."""
    return RunStatus.RUNNING if has_executed else RunStatus.PENDING
