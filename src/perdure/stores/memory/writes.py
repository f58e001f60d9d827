"""Apply writes to the memory store's data, one after the other. `semantics.check_batch` has checked them."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.stores import semantics as rules
from perdure.stores.memory.queue_writes import (
    admit,
    arrive,
    configure_partition,
    configure_queue,
    depart,
    leave_queue,
    refuse_place,
    requeue,
)
from perdure.stores.memory.runs import MemoryRun
from perdure.stores.memory.state import MemoryState
from perdure.stores.memory.turns import commit_turn, consume
from perdure.stores.results import (
    AlreadyEnded,
    AlreadyStarted,
    Committed,
    Created,
    DeadLetterMissing,
    EventPublished,
    IdTaken,
    LimitReached,
    MessageDelivered,
    ObserverAdded,
    QueueMissing,
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.writes import (
    Admit,
    AppendStream,
    CommitTurn,
    ConfigurePartition,
    ConfigureQueue,
    CreateRun,
    DeliverMessage,
    EndRun,
    FanOut,
    FinalizeRun,
    LeaveQueue,
    Observer,
    ObserveRunEnd,
    PublishEvent,
    PutDocument,
    ReleaseRun,
    ReplayDeadLetter,
    Requeue,
    RewindRun,
    SupersedeStream,
    TagRun,
    Write,
)


def apply(state: MemoryState, write: Write) -> WriteResult:
    """Apply one write and return its result."""
    match write:
        case CommitTurn():
            return commit_turn(state, write)
        case CreateRun():
            return _create(state, write)
        case DeliverMessage():
            return _deliver(state, write)
        case EndRun():
            return _end(state, write)
        case ReleaseRun():
            return _release(state, write)
        case ObserveRunEnd():
            return _observe(state, write)
        case RewindRun():
            return _rewind(state, write)
        case FinalizeRun():
            return _finalize(state, write)
        case PublishEvent():
            return state.topics.publish(write)
        case FanOut():
            return state.topics.fan_out(write)
        case ReplayDeadLetter():
            return _replay(state, write)
        case AppendStream():
            return _append(state, write)
        case SupersedeStream():
            return _supersede(state, write)
        case Admit():
            return admit(state, write)
        case ConfigureQueue():
            return configure_queue(state, write)
        case ConfigurePartition():
            return configure_partition(state, write)
        case Requeue():
            return requeue(state, write)
        case LeaveQueue():
            return leave_queue(state, write)
        case PutDocument():
            return _put_document(state, write)
        case TagRun():
            return _tag(state, write)


def _put_document(state: MemoryState, write: PutDocument) -> WriteResult:
    result, is_written = state.documents.put(write)
    if is_written:
        state.add_dead_letters(write.dead_letters)
    return result


def _create(state: MemoryState, write: CreateRun) -> WriteResult:
    record = write.record
    if write.by is not None and not state.alive(write.by):
        return Superseded()
    run = state.runs.get(record.id)
    position, last_message_no = 0, write.received
    replaces = run is not None and rules.can_replace(write, run.record, run.needs_finalization)
    if write.place is not None and (run is None or replaces):
        refused = refuse_place(state, write, write.place)
        if refused is not None:
            return refused
    if run is not None and replaces:
        position, last_message_no = run.position + 1, run.record.last_message_no
        state.runs.remove(run)
        run = None
    if run is not None and run.record.created_by != record.created_by:
        return IdTaken(run.record)
    if run is not None and write.observer is not None and run.record.status.terminal:
        return rules.already_ended(run.record)
    if run is None:
        last = last_message_no + len(write.inbox)
        alive = state.alive(record.owner)
        run = state.runs.add(rules.initial_record(record, alive, last, position, place=write.place))
        run.position = position
        _set_initial_history(run, write, last_message_no)
        if write.place is not None:
            arrive(state, record.id, write.place, record.created_at)
        elif run.record.owner is None:
            state.runs.changed.add(record.id)
    if write.observer is not None:
        run.observers[write.observer] = None
    return Created(owned=record.owner is not None and run.record.owner == record.owner)


def _set_initial_history(run: MemoryRun, write: CreateRun, last_message_no: int) -> None:
    """Store the history and the inbox that a run starts with; messages are numbered after `last_message_no`."""
    if write.entries:
        run.append(0, None, write.entries)
        run.position = len(write.entries)
    for number, message in enumerate(write.inbox, last_message_no + 1):
        run.inbox[number] = replace(message, number=number)
        run.numbers[message.id] = number


def _deliver(state: MemoryState, write: DeliverMessage) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    owner, message = run.record.owner, write.message
    if message.id in run.numbers:
        return MessageDelivered(run.numbers[message.id], fresh=False, owner=owner)
    if run.record.status.terminal:
        return AlreadyEnded(run.record.status)
    if write.limit is not None and message.kind in rules.EVENTS:
        unread = run.inbox.events.get(message.name, 0)
        if unread >= write.limit:
            return LimitReached(unread)
    return MessageDelivered(state.runs.deliver(run, message, write.now), fresh=True, owner=owner)


def _end(state: MemoryState, write: EndRun) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    if run.turn_at(run.position) == write.turn_id:
        return Committed()
    if run.record.status.terminal:
        return AlreadyEnded(run.record.status)
    started = run.state().has_executed
    if write.only_if_not_started and started:
        return AlreadyStarted()
    run.append(run.position, write.turn_id, ())
    run.position += 1
    run.prune_at = None if write.prune_after is None else write.now + write.prune_after
    run.orphaned_children = started
    state.topics.unsubscribe_all(run)
    depart(state, write.run_id)
    state.runs.put(run, rules.terminated(run.record, write, run.position))
    state.runs.changed.add(write.run_id)
    return Committed()


def _release(state: MemoryState, write: ReleaseRun) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None or run.record.status.terminal or not state.alive(write.worker):
        return Superseded()
    if run.record.owner not in (None, write.worker):
        return Superseded()
    if run.record.owner is not None:
        state.runs.release(run, write.now)
        state.runs.changed.add(write.run_id)
    return Committed()


def _observe(state: MemoryState, write: ObserveRunEnd) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    if run.record.status.terminal:
        return rules.already_ended(run.record)
    run.observers[Observer(write.observer, write.target)] = None
    return ObserverAdded()


def _rewind(state: MemoryState, write: RewindRun) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    if run.turn_at(write.base + 1) == write.turn_id:
        return Committed()
    if run.position != write.base:
        return Superseded()
    place = write.place if run.record.status.terminal else None  # an open run keeps its place or slot
    if place is not None and state.queues.get(place.queue) is None:
        return QueueMissing()
    dropped = frozenset(write.dropped)
    for at in [at for at, row in run.rows.items() if row.entry is not None and row.entry.location in dropped]:
        del run.rows[at]
    run.append(write.base, write.turn_id, write.entries)
    run.position += max(1, len(write.entries))
    run.numbers.update((message.id, message.number) for message in write.returned)
    run.inbox.restore(write.returned)
    run.prune_at, run.orphaned_children = None, False
    state.topics.unsubscribe_all(run)
    for location in dropped:
        run.outputs.supersede(location)
    state.runs.put(run, rules.rewound(run.record, run.state().has_executed, write, run.position))
    if place is not None:
        arrive(state, write.run_id, place, write.now)
    state.runs.changed.add(write.run_id)
    return Committed()


def _finalize(state: MemoryState, write: FinalizeRun) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    if not run.needs_finalization:
        return Committed()
    for observer in write.notified:
        run.observers.pop(observer, None)
    consume(state, run, write.consumed, write.now)
    for number in write.returned:
        state.topics.release(run, number, write.now)
    run.orphaned_children = run.orphaned_children and not write.orphaned_children
    state.add_dead_letters(write.dead_letters)
    for event in write.redirected:
        if event.number in run.inbox:
            consume(state, run, (event.number,), write.now)
            if isinstance(state.topics.publish(event.to), LimitReached):
                state.add_dead_letters([event.otherwise])
    state.runs.put(run, run.record)
    return Committed()


def _replay(state: MemoryState, write: ReplayDeadLetter) -> WriteResult:
    if write.dead_letter_id not in state.dead_letters and not _is_known(state, write.send):
        return DeadLetterMissing()
    result = apply(state, write.send)
    if isinstance(result, MessageDelivered | EventPublished):
        state.dead_letters.pop(write.dead_letter_id, None)
    return result


def _is_known(state: MemoryState, send: DeliverMessage | PublishEvent) -> bool:
    """Return whether this call has sent its event before."""
    if isinstance(send, PublishEvent):
        return state.topics.is_known(send.event)
    run = state.runs.get(send.run_id)
    return run is not None and send.message.id in run.numbers


def _append(state: MemoryState, write: AppendStream) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    rejected = rules.refuse_append(write, run.state(), state.alive(write.worker))
    if rejected is not None:
        return rejected
    if write.items:
        run.outputs.append(rules.unwritten_items(write, run.outputs.written[write.items[0].writer]))
        state.runs.changed.add(write.run_id)
    return Committed()


def _supersede(state: MemoryState, write: SupersedeStream) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    run.outputs.supersede(write.location, write.writer)
    return Committed()


def _tag(state: MemoryState, write: TagRun) -> WriteResult:
    run = state.runs.get(write.run_id)
    if run is None:
        return RunMissing()
    if run.record.owner is not None:
        return Superseded()
    state.runs.put(run, rules.tagged(run.record, write.tags))
    return Committed()
