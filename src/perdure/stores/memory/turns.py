"""Apply a turn to a run of the memory store: entries, messages, subscriptions, outputs and the row."""

from __future__ import annotations

from msgspec.structs import replace

from perdure.model.records import RunRecord
from perdure.model.turns import TurnExtras
from perdure.stores import semantics as rules
from perdure.stores.memory.queue_writes import depart
from perdure.stores.memory.runs import MemoryRun
from perdure.stores.memory.state import MemoryState
from perdure.stores.results import Committed, RunMissing, WriteResult
from perdure.stores.writes import CommitTurn, RunPatch

NOTHING = TurnExtras()


def commit_turn(state: MemoryState, turn: CommitTurn) -> WriteResult:
    """Apply a turn, or return why it is rejected: the acceptance rule of `perdure.stores.protocol`."""
    run = state.runs.get(turn.run_id)
    if run is None:  # rule 1
        return RunMissing()
    if run.turn_at(turn.base + 1) == turn.turn_id:  # rule 2
        return Committed(has_messages=_unseen(run, turn, held=False))
    rejected = rules.refuse_turn(turn, run.state(), state.alive(turn.worker))  # rules 3 to 6
    if rejected is not None:
        return rejected
    extras = turn.extras or NOTHING
    _append(run, turn, extras)  # rule 7
    consume(state, run, turn.consumed, turn.now)
    _apply_extras(state, run, turn, extras)
    has_messages = _unseen(run, turn, held=False)
    record = run.record
    if turn.continue_as is not None:
        record = rules.restarted(record, turn.continue_as)
    if turn.continue_as is not None or extras.dropped:
        record = replace(record, fence=run.position)
    if extras.tags:
        record = rules.tagged(record, extras.tags)
    if turn.patch is not None:
        _patch(state, run, record, turn, turn.patch)
    elif run.has_messages and not has_messages:
        state.runs.put(run, replace(record, wake_at=None))
    elif record is not run.record:
        state.runs.put(run, record, has_messages=run.has_messages)
    return Committed(has_messages=has_messages)


def consume(state: MemoryState, run: MemoryRun, numbers: tuple[int, ...], now: float) -> None:
    """Remove messages from the run's inbox for good."""
    for number in numbers:
        message = state.runs.consume(run, number, now)
        if message is not None and message.kind == rules.ASSIGNMENT:
            state.topics.consume(run, message.name, message.offset, now)


def _append(run: MemoryRun, turn: CommitTurn, extras: TurnExtras) -> None:
    run.position = rules.last_position(turn)
    if turn.continue_as is not None:
        run.rows.clear()
        run.append(turn.base, turn.turn_id, turn.continue_as.entries)
        return
    if extras.dropped:  # markers are deleted too: the fence replaces them
        run.rows = {
            at: row
            for at, row in run.rows.items()
            if row.entry is not None and not rules.is_dropped(row.entry.location, extras.dropped)
        }
    for position in extras.replaced:
        run.rows.pop(position, None)
    run.append(turn.base, turn.turn_id, turn.entries)


def _apply_extras(state: MemoryState, run: MemoryRun, turn: CommitTurn, extras: TurnExtras) -> None:
    """Change subscriptions, outputs and dead letters. A run that ends or restarts has no subscriptions."""
    continues = turn.continue_as is None and not (turn.patch is not None and turn.patch.status.terminal)
    if not continues:
        state.topics.unsubscribe_all(run)
    for target in extras.unsubscribe:
        state.topics.unsubscribe(run, target)
    for number in extras.released_assignments:
        state.topics.release(run, number, turn.now)
    for subscription in extras.subscribe if continues else ():
        state.topics.subscribe(run, subscription, turn.now)
    run.outputs.append(extras.streamed)
    if turn.continue_as is not None:
        run.outputs.restart()
    for value in extras.published:
        state.runs.publish(run, value)
    if extras.streamed or extras.published:
        state.runs.changed.add(turn.run_id)
    state.add_dead_letters(extras.dead_letters)


def _patch(state: MemoryState, run: MemoryRun, record: RunRecord, turn: CommitTurn, patch: RunPatch) -> None:
    ended = patch.status.terminal
    unseen = _unseen(run, turn, held=rules.ignores_messages(turn, patch))
    run.prune_at = patch.prune_at
    patched = replace(
        record,
        status=patch.status,
        owner=None if ended else patch.owner,
        wake_at=rules.wake_after(patch, turn.now, unseen),
        waits=patch.waits,
        held=patch.held,
        drift=patch.drift,
        recoveries=patch.recoveries,
        result=patch.result,
        error=patch.error,
        ended_at=patch.ended_at,
        updated_at=turn.now,
        gate="" if ended else record.gate,
    )
    if ended:
        depart(state, record.id)
    state.runs.put(run, patched, has_messages=unseen and patched.owner is not None)
    if ended or (patched.owner is None and patched.wake_at is not None):
        state.runs.changed.add(record.id)


def _unseen(run: MemoryRun, turn: CommitTurn, *, held: bool) -> bool:
    """Return whether there are unread messages that the turn has not seen; with `held`, that wake a held run."""
    if run.record.last_message_no <= turn.seen:
        return False
    unread = (message for number, message in run.inbox.items() if number > turn.seen and number not in turn.consumed)
    return any(not held or message.kind in rules.WAKES_HELD for message in unread)
