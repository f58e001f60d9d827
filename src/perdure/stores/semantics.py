"""What a write means, in pure functions: for the stores that judge in Python (memory and SQLite).

A write is held against the run's `Standing`, the few facts of its row and history that decide. No storage here: the
same rules, asked in the same order, are what makes two stores answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.records import Entry, Message, RunRecord, RunResult, RunStatus, StreamItem, TopicEvent
from perdure.model.turns import TurnExtras
from perdure.stores.results import AlreadyEnded, Superseded, WriteResult
from perdure.stores.writes import (
    AppendStream,
    CommitTurn,
    ContinueAs,
    CreateRun,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    ObserveRunEnd,
    PublishEvent,
    ReleaseRun,
    ReplayDeadLetter,
    RewindRun,
    RunPatch,
    SupersedeStream,
    Write,
)

MARKER = "marker"
"""The kind of the row that a turn without entries leaves, so that it takes a position and can be recognised."""

WAKES_HELD = frozenset(("resume", "cancel"))
"""The only mail for which a held run is woken."""

EVENTS = frozenset(("event", "assignment"))
"""The mail of which there may be too much, and that is owed an answer if the run ends without having read it."""

ASSIGNMENT = "assignment"

DELIVERIES = frozenset(("after_wait", "after_create", "all"))

Key = str | tuple[str, str]
"""What a write is about: the id of a run, or a topic, which no id of a run can be mistaken for."""


class RunState(Struct):
    """What of a run decides whether a write is taken. `position` counts the fence in."""

    status: RunStatus
    owner: str | None
    position: int
    last_message_no: int
    wake_at: float | None
    mailed: bool  # owned, and mail came that the owner has not seen
    held: bool
    begun: bool  # has ever executed
    waits_to_begin: bool  # its present generation has not executed


# --- before anything is stored -----------------------------------------------------------------------------------


def run_of(write: Write) -> Key:
    """The one run, or the topic, that a write is about. What it assigns and returns touches other runs too."""
    match write:
        case CommitTurn():  # most are
            return write.run_id
        case CreateRun():
            return write.record.id
        case PublishEvent():
            return ("topic", write.event.topic)
        case FanOut():
            return ("topic", write.topic)
        case ReplayDeadLetter():
            return run_of(write.send)
        case _:
            return write.run_id


def is_unbounded(write: DeliverMessage) -> bool:
    """Whether mail is taken however much there is."""
    return write.limit is None or write.message.kind not in EVENTS


def only_marks_notified(write: FinalizeRun) -> bool:
    """Whether all that is ticked off is who was told: nothing is done to mail, topics, children or dead letters."""
    return not (write.consumed or write.returned or write.moved or write.dead_letters or write.orphans)


def qualifies_for_fast_path(write: Write) -> bool:
    """Whether a write is what almost all are that are alone in their batch: a new run of its worker's own, or a turn
    that adds one entry and does nothing else, except that it may end a run which has read no mail, and of whose end
    nobody is told.
    """
    match write:
        case CommitTurn():
            if len(write.entries) != 1 or not write.owned or write.consumed or write.restart or write.extras:
                return False
            if write.patch is None:
                return True
            return write.patch.status.terminal and not write.seen and not write.observed
        case CreateRun():
            return write.record.owner is not None and not write.entries and not write.inbox and write.observer is None
        case _:
            return False


def check_batch(batch: Sequence[Write]) -> None:
    """Refuse malformed writes before the first one is carried out, so that nothing of their batch stays."""
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
                    raise StoreError(f"run {write.run_id!r} cannot be ended as {write.status}; give a terminal status")
            case RewindRun():
                _check_rewind(write)
            case PublishEvent():
                _check_event(write.event, write.page)
            case FanOut():
                _check_page(write.topic, write.page)
            case ReplayDeadLetter():
                _check_text("the id of a dead letter", write.letter_id)
                check_batch((write.send,))
            case AppendStream():
                _check_text("a run id", write.run_id)
                _check_items(write.run_id, write.items)
            case FinalizeRun():
                _check_text("a run id", write.run_id)
                check_batch([moved.to for moved in write.moved])
            case ObserveRunEnd() | SupersedeStream() | ReleaseRun():
                _check_text("a run id", write.run_id)
            case _:
                raise StoreError(f"{type(write).__name__} is not a write that this store knows; upgrade the store")


def _check_turn(turn: CommitTurn) -> None:
    # The one check that is made for every step: asked in place, and in words only if something is wrong.
    if type(turn.run_id) is not str or type(turn.turn_id) is not str or not turn.run_id or not turn.turn_id:
        _check_text("a run id", turn.run_id)
        _check_text("a turn id", turn.turn_id)
    for entry in turn.entries:
        if type(entry) is not Entry or entry.kind == MARKER or not (entry.value is None or type(entry.value) is bytes):
            _check_entry(turn.run_id, entry)
    if turn.restart is not None:
        for entry in turn.restart.entries:
            _check_entry(turn.run_id, entry)
    if turn.extras is not None:
        _check_extras(turn.run_id, turn.extras)


def _check_extras(run_id: str, extras: TurnExtras) -> None:
    _check_items(run_id, extras.streamed)
    for shown in extras.published:
        _check_text("the key of a published value", shown.key)
        _check_bytes(f"what run {run_id!r} shows as {shown.key!r}", shown.value)
    for subscription in extras.subscribe:
        _check_text("the target of a subscription", subscription.target)


def _check_new(write: CreateRun) -> None:
    run_id = write.record.id
    _check_text("a run id", run_id)
    _check_bytes(f"the input of run {run_id!r}", write.record.input)
    for entry in write.entries:
        _check_entry(run_id, entry)
    for message in write.inbox:
        _check_message(run_id, message)


def _check_rewind(write: RewindRun) -> None:
    _check_text("a run id", write.run_id)
    _check_text("a turn id", write.turn_id)
    for entry in write.entries:
        _check_entry(write.run_id, entry)
    for message in write.returned:
        _check_message(write.run_id, message)


def _check_message(run_id: str, message: Message) -> None:
    _check_text("a message id", message.id)
    _check_bytes(f"a message to run {run_id!r}", message.body)


def _check_event(event: TopicEvent, page: int) -> None:
    _check_text("an event id", event.id)
    _check_page(event.topic, page)
    _check_bytes(f"event {event.id!r} of topic {event.topic!r}", event.body)
    if event.delivery not in DELIVERIES:
        raise StoreError(
            f"event {event.id!r} of topic {event.topic!r} has the delivery {event.delivery!r}; "
            f"a store knows {', '.join(sorted(DELIVERIES))}"
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
        raise StoreError(f"a turn of run {run_id!r} holds {type(entry).__name__} where entries belong")
    if entry.kind == MARKER:
        raise StoreError(
            f"entry {entry.location!r} of run {run_id!r} has the kind {MARKER!r}, which is the store's own"
        )
    value: object = entry.value
    if value is not None and not isinstance(value, bytes):  # asked first: the words cost more than the question
        _check_bytes(f"the value of entry {entry.location!r} of run {run_id!r}", value)


# --- judging -----------------------------------------------------------------------------------------------------


def refuse_turn(turn: CommitTurn, run: RunState, alive: bool) -> WriteResult | None:
    """Why a turn that is not stored yet cannot be taken, or None. A position is given once: base must be the last."""
    if run.status.terminal:
        return AlreadyEnded(run.status)
    if not alive:
        return Superseded()
    if run.owner != turn.worker and (turn.owned or run.owner is not None):
        return Superseded()
    if turn.base != run.position:
        return Superseded()
    return None


def refuse_append(write: AppendStream, run: RunState, alive: bool) -> WriteResult | None:
    """Why what a step has written cannot be taken, or None."""
    if run.status.terminal:
        return AlreadyEnded(run.status)
    return None if alive and run.owner == write.worker else Superseded()


def unwritten_items(write: AppendStream, there: int) -> tuple[StreamItem, ...]:
    """The items that are not stored yet, of which `there` is the number that their writer has stored so far."""
    return write.items if write.first is None else write.items[max(0, there - write.first) :]


def last_position(turn: CommitTurn) -> int:
    """Where the history ends once this turn is in it; one without entries takes a position too."""
    carried = 0 if turn.restart is None else len(turn.restart.entries)
    return turn.base + max(1, len(turn.entries), carried)


def is_dropped(location: str, dropped: Sequence[str]) -> bool:
    """Whether a turn that drops these locations drops the entries of this one: they, and all that are below."""
    return any(location == each or location.startswith(each + "/") for each in dropped)


# --- rows ----------------------------------------------------------------------------------------------------------


def initial_record(record: RunRecord, alive: bool, mail: int = 0) -> RunRecord:
    """A new run as it is first stored: claimed by its owner if that worker is alive, else due. `mail`: of a fork."""
    owned = record.owner is not None and alive
    wake_at = record.created_at if record.wake_at is None else record.wake_at
    return replace(
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
        last_message_no=mail,
        fence=0,
    )


def restarted(record: RunRecord, restart: ContinueAs) -> RunRecord:
    """A run whose history begins anew."""
    return replace(
        record,
        workflow=restart.workflow,
        version=restart.version,
        input=restart.input,
        original_workflow=record.original_workflow or record.workflow,
        original_input=record.input if record.original_input is None else record.original_input,
        first_executed_at=restart.first_executed_at,
        run_attempt=restart.run_attempt,
        pool=record.pool if restart.pool is None else restart.pool,
        generation=record.generation + 1,
        epoch=record.epoch + 1,
    )


def rewound(record: RunRecord, begun: bool, write: RewindRun, position: int) -> RunRecord:
    """A run whose history was cut back, now at this position: it is due, and nothing of its end or hold is left."""
    return replace(
        record,
        status=status_released(begun),
        generation=record.generation + 1,
        owner=None,
        result=None,
        error=None,
        ended_at=None,
        held=None,
        waits=(),
        drift=(),
        recoveries=0,
        wake_at=write.now,
        updated_at=write.now,
        deadline_at=write.deadline_at,
        fence=position,
    )


def terminated(record: RunRecord, write: EndRun, position: int) -> RunRecord:
    """A run that was ended from outside, which took this position."""
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
    )


def already_ended(record: RunRecord) -> AlreadyEnded:
    """What somebody learns who observes a run that has ended."""
    return AlreadyEnded(record.status, RunResult(record.status, record.result, record.error))


# --- topics --------------------------------------------------------------------------------------------------------


def expired(expires_at: float | None, now: float) -> bool:
    return expires_at is not None and expires_at <= now


def may_read(event: TopicEvent, created_at: float) -> bool:
    """Whether a run that was created then may have the event, if it waits in time."""
    return event.delivery != "after_create" or created_at <= event.sent_at


def is_queueable(event: TopicEvent) -> bool:
    """Whether an event is queued for those who come later. Otherwise it is gone once nobody has it any more."""
    return event.delivery != "after_wait"


def assignment_id(topic: str, place: int) -> str:
    return f"topic/{topic}/{place}"


def assignment(event: TopicEvent, target: str) -> Message:
    """The message by which an event, which has its place, is given to the receive at `target`."""
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
    """Whether mail makes a run due. A held one stays until somebody resumes it, and one that has yet to begin, for the
    first time or anew, until its time has come, unless a worker is at it already."""
    return not (run.held or run.waits_to_begin) or run.owner is not None or message.kind in WAKES_HELD


def ignores_messages(turn: CommitTurn, patch: RunPatch) -> bool:
    """Whether a turn leaves the run held, or waiting for its time to begin anew: only a resume or a cancel counts."""
    anew = turn.restart is not None and turn.restart.first_executed_at is None
    return (patch.held is not None or anew) and patch.owner is None


def wake_after(patch: RunPatch, now: float, unseen: bool) -> float | None:
    """When to look at a run again after this patch; `unseen`: mail is there that would wake the run as it now is.

    Here the race between a send and a suspension is decided, and it cannot be lost. Both are writes to one run, so one
    comes first: mail that comes before the turn is `unseen` by it and leaves the run due; mail that comes after it
    finds the run suspended and makes it due.
    """
    if patch.status.terminal:
        return None
    return now if unseen else patch.wake_at


def earliest(wake_at: float | None, now: float) -> float:
    return now if wake_at is None or wake_at > now else wake_at


def status_released(begun: bool) -> RunStatus:
    """What a run is called whose owner gave it back: it goes on as if it had been waiting for a worker."""
    return RunStatus.RUNNING if begun else RunStatus.PENDING
