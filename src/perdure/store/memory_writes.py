"""Carrying out writes on the runs of the memory store, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from perdure.records import DeadLetter, RunRecord, WorkerRecord
from perdure.store import rules
from perdure.store.base import (
    Answer,
    Begun,
    Committed,
    CommitTurn,
    Created,
    CreateRun,
    Deliver,
    Delivered,
    Ended,
    EndRun,
    Exists,
    Full,
    Missing,
    ReleaseRun,
    Restart,
    RunPatch,
    Superseded,
    Write,
)
from perdure.store.memory_runs import MemoryRun, MemoryRuns, Row


class Writes:
    """One batch; the writes must have been checked. `changed`: the runs that others will want to know of."""

    def __init__(
        self, runs: MemoryRuns, workers: Mapping[str, WorkerRecord], dead_letters: dict[str, DeadLetter]
    ) -> None:
        self._runs = runs
        self._workers = workers
        self._dead_letters = dead_letters
        self.changed: set[str] = set()

    def carry_out(self, write: Write) -> Answer:
        match write:
            case CommitTurn():
                return self._commit_turn(write)
            case CreateRun():
                return self._create(write)
            case Deliver():
                return self._deliver(write)
            case EndRun():
                return self._end(write)
            case ReleaseRun():
                return self._release(write)

    def _create(self, write: CreateRun) -> Answer:
        record = write.record
        run = self._runs.get(record.id)
        if run is not None and run.record.created_by != record.created_by:
            return Exists(run.record)
        if run is None:
            self._runs.add(rules.born(record, self._alive(record.owner)))
            run = self._runs[record.id]
            if run.record.owner is None:
                self.changed.add(record.id)
        return Created(owned=record.owner is not None and run.record.owner == record.owner)

    def _commit_turn(self, turn: CommitTurn) -> Answer:
        run = self._runs.get(turn.run_id)
        if run is None:
            return Missing()
        if run.turn_at(turn.base + 1) == turn.turn_id:
            return Committed(mail=_unseen(run, turn, held=False))
        refused = rules.refuse_turn(turn, run.standing(), self._alive(turn.worker))
        if refused is not None:
            return refused
        self._append(run, turn)
        mail = _unseen(run, turn, held=False)
        record = run.record
        if turn.restart is not None:
            record = _restarted(record, turn.restart)
        if turn.restart is not None or turn.dropped:
            record = replace(record, fence=run.position)
        if turn.patch is not None:
            self._patch(run, record, turn, turn.patch)
        elif run.mailed and not mail:
            self._runs.put(run, replace(record, wake_at=None))
        elif record is not run.record:
            self._runs.put(run, record, mailed=run.mailed)
        for letter in turn.dead_letters:
            self._dead_letters.setdefault(letter.id, letter)
        return Committed(mail=mail)

    def _append(self, run: MemoryRun, turn: CommitTurn) -> None:
        run.position = rules.last_position(turn)
        for number in turn.consumed:
            run.inbox.pop(number, None)
        if turn.restart is not None:
            run.rows.clear()
        elif turn.dropped:
            for at in turn.dropped:
                run.rows.pop(at, None)
            for at in [at for at, row in run.rows.items() if row.entry is None]:
                del run.rows[at]
        if turn.restart is not None or not turn.entries:
            run.rows[turn.base + 1] = Row(turn.turn_id, None)
            return
        for at, entry in enumerate(turn.entries, turn.base + 1):
            run.rows[at] = Row(turn.turn_id if at == turn.base + 1 else None, entry)

    def _patch(self, run: MemoryRun, record: RunRecord, turn: CommitTurn, patch: RunPatch) -> None:
        ended = patch.status.terminal
        unseen = _unseen(run, turn, held=patch.held is not None and patch.owner is None)
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
        )
        self._runs.put(run, patched, mailed=unseen and patched.owner is not None)
        if ended or (patched.owner is None and patched.wake_at is not None):
            self.changed.add(record.id)

    def _deliver(self, write: Deliver) -> Answer:
        run = self._runs.get(write.run_id)
        if run is None:
            return Missing()
        owner = run.record.owner
        message = write.message
        if message.id in run.numbers:
            return Delivered(run.numbers[message.id], fresh=False, owner=owner)
        if run.record.status.terminal:
            return Ended(run.record.status)
        if write.limit is not None and len(run.inbox) >= write.limit:
            return Full(len(run.inbox))
        number = run.record.inbox_last + 1
        run.inbox[number] = replace(message, number=number)
        run.numbers[message.id] = number
        record = replace(run.record, inbox_last=number)
        if rules.wakes(message, run.standing()):
            record = replace(record, wake_at=rules.earliest(record.wake_at, write.now))
            self._runs.put(run, record, mailed=owner is not None)
        else:
            self._runs.put(run, record)
        self.changed.add(write.run_id)
        return Delivered(number, fresh=True, owner=owner)

    def _end(self, write: EndRun) -> Answer:
        run = self._runs.get(write.run_id)
        if run is None:
            return Missing()
        if run.turn_at(run.position) == write.turn_id:
            return Committed()
        if run.record.status.terminal:
            return Ended(run.record.status)
        if write.unless_begun and run.standing().begun:
            return Begun()
        run.position += 1
        run.rows[run.position] = Row(write.turn_id, None)
        run.prune_at = None if write.prune_after is None else write.now + write.prune_after
        ended = replace(
            run.record,
            status=write.status,
            owner=None,
            wake_at=None,
            waits=(),
            held=None,
            ended_at=write.now,
            updated_at=write.now,
            fence=run.position,
        )
        self._runs.put(run, ended)
        self.changed.add(write.run_id)
        return Committed()

    def _release(self, write: ReleaseRun) -> Answer:
        run = self._runs.get(write.run_id)
        if run is None or run.record.status.terminal or not self._alive(write.worker):
            return Superseded()
        if run.record.owner not in (None, write.worker):
            return Superseded()
        if run.record.owner is not None:
            self._runs.release(run, write.now)
            self.changed.add(write.run_id)
        return Committed()

    def _alive(self, worker_id: str | None) -> bool:
        worker = self._workers.get(worker_id) if worker_id is not None else None
        return worker is not None and not worker.gone


def _unseen(run: MemoryRun, turn: CommitTurn, *, held: bool) -> bool:
    """Whether mail is left that the turn did not know of; for a run that it holds, only such as wakes a held run."""
    if run.record.inbox_last <= turn.seen:
        return False
    unread = (message for number, message in run.inbox.items() if number > turn.seen and number not in turn.consumed)
    return any(not held or message.kind in rules.WAKES_HELD for message in unread)


def _restarted(record: RunRecord, restart: Restart) -> RunRecord:
    return replace(
        record,
        workflow=restart.workflow,
        version=restart.version,
        input=restart.input,
        first_workflow=record.first_workflow or record.workflow,
        first_input=record.input if record.first_input is None else record.first_input,
        begun_at=restart.begun_at,
        run_attempt=restart.run_attempt,
        generation=record.generation + 1,
    )
