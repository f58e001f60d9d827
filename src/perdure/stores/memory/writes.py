"""Carrying out writes on what the memory store keeps, one after the other. They must have been checked."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.stores import semantics as rules
from perdure.stores.memory.runs import MemoryRun
from perdure.stores.memory.state import MemoryState
from perdure.stores.memory.turns import commit_turn, read
from perdure.stores.results import (
    Answer,
    Begun,
    Committed,
    Created,
    Delivered,
    Ended,
    Exists,
    Full,
    Gone,
    Missing,
    Observing,
    Published,
    Superseded,
)
from perdure.stores.writes import (
    AppendStream,
    CommitTurn,
    CreateRun,
    Deliver,
    EndRun,
    FanOut,
    Observe,
    Observer,
    Publish,
    ReleaseRun,
    Replay,
    RewindRun,
    Settle,
    SupersedeStream,
    Write,
)


def carry_out(state: MemoryState, write: Write) -> Answer:
    match write:
        case CommitTurn():
            return commit_turn(state, write)
        case CreateRun():
            return _create(state, write)
        case Deliver():
            return _deliver(state, write)
        case EndRun():
            return _end(state, write)
        case ReleaseRun():
            return _release(state, write)
        case Observe():
            return _observe(state, write)
        case RewindRun():
            return _rewind(state, write)
        case Settle():
            return _settle(state, write)
        case Publish():
            return state.topics.publish(write)
        case FanOut():
            return state.topics.fan_out(write)
        case Replay():
            return _replay(state, write)
        case AppendStream():
            return _append(state, write)
        case SupersedeStream():
            return _supersede(state, write)


def _create(state: MemoryState, write: CreateRun) -> Answer:
    record = write.record
    run = state.runs.get(record.id)
    if run is not None and run.record.created_by != record.created_by:
        return Exists(run.record)
    if run is not None and write.observer is not None and run.record.status.terminal:
        return rules.told(run.record)
    if run is None:
        run = state.runs.add(rules.born(record, state.alive(record.owner), len(write.inbox)))
        _furnish(run, write)
        if run.record.owner is None:
            state.runs.changed.add(record.id)
    if write.observer is not None:
        run.observers[write.observer] = None
    return Created(owned=record.owner is not None and run.record.owner == record.owner)


def _furnish(run: MemoryRun, write: CreateRun) -> None:
    """Give a fork the history and the mail that it begins with."""
    if write.entries:
        run.append(0, None, write.entries)
        run.position = len(write.entries)
    for number, message in enumerate(write.inbox, 1):
        run.inbox[number] = replace(message, number=number)
        run.numbers[message.id] = number


def _deliver(state: MemoryState, write: Deliver) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    owner, message = run.record.owner, write.message
    if message.id in run.numbers:
        return Delivered(run.numbers[message.id], fresh=False, owner=owner)
    if run.record.status.terminal:
        return Ended(run.record.status)
    if write.limit is not None and message.kind in rules.EVENTS and len(run.inbox) >= write.limit:
        unread = len(run.unread_events())
        if unread >= write.limit:
            return Full(unread)
    return Delivered(state.runs.mail(run, message, write.now), fresh=True, owner=owner)


def _end(state: MemoryState, write: EndRun) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    if run.turn_at(run.position) == write.turn_id:
        return Committed()
    if run.record.status.terminal:
        return Ended(run.record.status)
    begun = run.judged().begun
    if write.unless_begun and begun:
        return Begun()
    run.append(run.position, write.turn_id, ())
    run.position += 1
    run.prune_at = None if write.prune_after is None else write.now + write.prune_after
    run.orphans = begun
    state.topics.unsubscribe_all(run)
    state.runs.put(run, rules.terminated(run.record, write, run.position))
    state.runs.changed.add(write.run_id)
    return Committed()


def _release(state: MemoryState, write: ReleaseRun) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None or run.record.status.terminal or not state.alive(write.worker):
        return Superseded()
    if run.record.owner not in (None, write.worker):
        return Superseded()
    if run.record.owner is not None:
        state.runs.release(run, write.now)
        state.runs.changed.add(write.run_id)
    return Committed()


def _observe(state: MemoryState, write: Observe) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    if run.record.status.terminal:
        return rules.told(run.record)
    run.observers[Observer(write.observer, write.target)] = None
    return Observing()


def _rewind(state: MemoryState, write: RewindRun) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    if run.turn_at(write.base + 1) == write.turn_id:
        return Committed()
    if run.position != write.base:
        return Superseded()
    dropped = frozenset(write.dropped)
    for at in [at for at, row in run.rows.items() if row.entry is not None and row.entry.location in dropped]:
        del run.rows[at]
    run.append(write.base, write.turn_id, write.entries)
    run.position += max(1, len(write.entries))
    run.numbers.update((message.id, message.number) for message in write.returned)
    unread = run.inbox | {message.number: message for message in write.returned}
    run.inbox = dict(sorted(unread.items()))
    run.prune_at, run.orphans = None, False
    state.topics.unsubscribe_all(run)
    for location in dropped:
        run.shown.supersede(location)
    state.runs.put(run, rules.rewound(run.record, run.judged().begun, write, run.position))
    state.runs.changed.add(write.run_id)
    return Committed()


def _settle(state: MemoryState, write: Settle) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    if not run.owes:
        return Committed()
    for observer in write.told:
        run.observers.pop(observer, None)
    read(state, run, write.consumed, write.now)
    for number in write.returned:
        state.topics.give_back(run, number, write.now)
    run.orphans = run.orphans and not write.orphans
    state.keep_letters(write.dead_letters)
    for moved in write.moved:
        if moved.number in run.inbox:
            read(state, run, (moved.number,), write.now)
            if isinstance(state.topics.publish(moved.to), Full):
                state.keep_letters([moved.otherwise])
    state.runs.put(run, run.record)
    return Committed()


def _replay(state: MemoryState, write: Replay) -> Answer:
    if write.letter_id not in state.letters and not _is_known(state, write.send):
        return Gone()
    answer = carry_out(state, write.send)
    if isinstance(answer, Delivered | Published):
        state.letters.pop(write.letter_id, None)
    return answer


def _is_known(state: MemoryState, send: Deliver | Publish) -> bool:
    """Whether what is to be sent was sent by this very call before."""
    if isinstance(send, Publish):
        return state.topics.knows(send.event)
    run = state.runs.get(send.run_id)
    return run is not None and send.message.id in run.numbers


def _append(state: MemoryState, write: AppendStream) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    refused = rules.refuse_append(write, run.judged(), state.alive(write.worker))
    if refused is not None:
        return refused
    if write.items:
        run.shown.append(rules.items_missing(write, run.shown.written[write.items[0].writer]))
        state.runs.changed.add(write.run_id)
    return Committed()


def _supersede(state: MemoryState, write: SupersedeStream) -> Answer:
    run = state.runs.get(write.run_id)
    if run is None:
        return Missing()
    run.shown.supersede(write.location, write.writer)
    return Committed()
