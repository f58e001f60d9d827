"""A batch of writes as few statements: read what decides, judge in Python, write all rows of a kind at once.

Within `BEGIN IMMEDIATE` nobody else writes, so that what was read stays true until the commit. The writes of a batch
behave as if carried out one after the other: the batch is cut where a run comes up again, and each part is flushed
before the next is judged. The hot case, turns with one entry and no patch, costs one insert each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import apsw
import msgspec

from perdure.store import rules
from perdure.store import sqlite_rows as rows
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
    RunPatch,
    Superseded,
    Write,
)
from perdure.store.sqlite_memory import Known, StandingMemory

STANDING = """
    SELECT id, no, status, owner, fence, inbox_last, wake_at, mailed, held IS NOT NULL,
           begun_at IS NOT NULL OR generation > 0,
           (SELECT max(position) FROM entries WHERE run_no = runs.no)
    FROM runs WHERE id = ?"""
TURN_AT = "SELECT turn_id FROM entries WHERE run_no = ? AND position = ?"
UNREAD = """
    SELECT 1 FROM inbox
    WHERE run_no = ? AND number > ? AND consumed_at IS NULL AND number NOT IN (SELECT value FROM json_each(?))
    LIMIT 1"""
UNREAD_WAKING_HELD = UNREAD.replace("LIMIT", "AND kind IN ('resume', 'cancel') LIMIT")
UNREAD_COUNT = "SELECT count(*) FROM inbox WHERE run_no = ? AND consumed_at IS NULL"
MESSAGE_NUMBER = "SELECT number FROM inbox WHERE run_no = ? AND id = ?"
ALIVE = "SELECT 1 FROM workers WHERE id = ? AND gone = 0"
RUN = f"SELECT {rows.RUN_COLUMNS} FROM runs WHERE id = ?"

# Written in this order: what goes before what comes, rows before those that point to them.
DROP_ALL = "DELETE FROM entries WHERE run_no = ?"
DROP_ENTRY = "DELETE FROM entries WHERE run_no = ? AND position = ?"
DROP_MARKERS = "DELETE FROM entries WHERE run_no = ? AND kind = 'marker'"
ADD_RUN = f"INSERT INTO runs ({rows.RUN_COLUMNS}) VALUES ({','.join('?' * 31)})"
ADD_ENTRY = f"INSERT INTO entries (run_no, position, turn_id, {rows.ENTRY_COLUMNS}) VALUES ({','.join('?' * 19)})"
RESTART = """
    UPDATE runs SET first_workflow = coalesce(first_workflow, workflow), workflow = ?, version = ?,
           first_input = coalesce(first_input, input), input = ?, begun_at = ?,
           run_attempt = ?, generation = generation + 1
    WHERE no = ?"""
MOVE_FENCE = "UPDATE runs SET fence = ? WHERE no = ?"
PATCH = """
    UPDATE runs SET status = ?, owner = ?, wake_at = ?, mailed = ?, waits = ?, held = ?, drift = ?, recoveries = ?,
           result = ?, error = ?, ended_at = ?, prune_at = ?, updated_at = ?
    WHERE no = ?"""
CLEAR_MAILED = "UPDATE runs SET wake_at = NULL, mailed = 0 WHERE no = ?"
END = """
    UPDATE runs SET status = ?, owner = NULL, wake_at = NULL, mailed = 0, waits = NULL, held = NULL, ended_at = ?,
           updated_at = ?, prune_at = ?, fence = ?
    WHERE no = ?"""
RELEASE = "UPDATE runs SET owner = NULL, mailed = 0, status = ?, wake_at = ?, updated_at = ? WHERE no = ?"
CONSUME = "UPDATE inbox SET consumed_at = ?, body = NULL WHERE run_no = ? AND number = ? AND consumed_at IS NULL"
ADD_MESSAGE = f"INSERT INTO inbox (run_no, {rows.MESSAGE_COLUMNS}) VALUES ({','.join('?' * 9)})"
COUNT_MESSAGE = "UPDATE runs SET inbox_last = ?, wake_at = ?, mailed = ? WHERE no = ?"
ADD_LETTER = f"INSERT OR IGNORE INTO dead_letters ({rows.LETTER_COLUMNS}) VALUES ({','.join('?' * 11)})"
_ORDER = (
    DROP_ALL,
    DROP_ENTRY,
    DROP_MARKERS,
    ADD_RUN,
    ADD_ENTRY,
    RESTART,
    MOVE_FENCE,
    PATCH,
    CLEAR_MAILED,
    END,
    RELEASE,
    CONSUME,
    ADD_MESSAGE,
    COUNT_MESSAGE,
    ADD_LETTER,
)


def commit(
    connection: apsw.Connection, batch: Sequence[Write], memory: StandingMemory
) -> tuple[list[Answer], frozenset[str]]:
    """Carry out the batch in one transaction; the answers, and the runs that others will want to know of."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        writer = BatchWriter(connection, memory)
        answers = [answer for part in _parts(batch) for answer in writer.carry_out(part)]
        connection.execute("COMMIT")
    except BaseException:
        memory.forget()
        raise
    return answers, frozenset(writer.changed)


def _parts(batch: Sequence[Write]) -> Iterator[list[Write]]:
    """The batch, cut so that no run comes up twice in a part."""
    part: list[Write] = []
    ids: set[str] = set()
    for write in batch:
        id = rules.run_of(write)
        if id in ids:
            yield part
            part, ids = [], set()
        part.append(write)
        ids.add(id)
    yield part


class BatchWriter:
    """Judges writes and gathers the rows that they make; must be used within one transaction."""

    def __init__(self, connection: apsw.Connection, memory: StandingMemory) -> None:
        self._connection = connection
        self._memory = memory
        self._known = memory.begin(connection)
        self._pending: dict[str, list[rows.Row]] = {sql: [] for sql in _ORDER}
        self._alive: dict[str, bool] = {}
        self.changed: set[str] = set()

    def carry_out(self, part: Sequence[Write]) -> list[Answer]:
        """Writes to different runs."""
        self._read_standings([id for write in part if (id := rules.run_of(write)) not in self._known])
        answers = []
        for write in part:
            answer = self._judge(write)
            self._memory.learn(write, answer)
            answers.append(answer)
        for sql, pending in self._pending.items():
            if pending:
                self._connection.executemany(sql, pending)
                pending.clear()
        return answers

    def _read_standings(self, ids: Iterable[str]) -> None:
        for row in self._connection.executemany(STANDING, [(id,) for id in ids]):
            id, no, status, owner, fence, inbox_last, wake_at, mailed, held, begun, last = row
            position = max(last or 0, fence)
            self._known[id] = Known(
                rows.run_status(status), owner, position, inbox_last, wake_at, mailed, held, begun, no
            )

    def _judge(self, write: Write) -> Answer:
        if isinstance(write, CreateRun):
            return self._create(write)
        run = self._known.get(write.run_id)
        if isinstance(write, ReleaseRun):
            return self._release(write, run)
        if run is None:
            return Missing()
        match write:
            case CommitTurn():
                return self._commit_turn(write, run)
            case Deliver():
                return self._deliver(write, run)
            case EndRun():
                return self._end(write, run)

    # creating

    def _create(self, write: CreateRun) -> Answer:
        record = write.record
        run = self._known.get(record.id)
        if run is None:
            new = rules.born(record, record.owner is not None and self._is_alive(record.owner))
            self._pending[ADD_RUN].append(rows.run_row(new))
            if new.owner is None:
                self.changed.add(record.id)
            return Created(owned=new.owner is not None)
        stored = rows.run_of_row(self._connection.execute(RUN, (record.id,)).get)
        if stored.created_by != record.created_by:
            return Exists(stored)
        return Created(owned=record.owner is not None and stored.owner == record.owner)

    # turns

    def _commit_turn(self, turn: CommitTurn, run: Known) -> Answer:
        if run.position > turn.base and self._turn_at(run, turn.base + 1) == turn.turn_id:
            return Committed(mail=self._unseen(turn, run))
        refused = rules.refuse_turn(turn, run, self._is_alive(turn.worker))
        if refused is not None:
            return refused
        self._append(turn, run)
        mail = self._unseen(turn, run)
        if turn.patch is not None:
            self._patch(turn, run, turn.patch)
        elif run.mailed and not mail:
            self._pending[CLEAR_MAILED].append((run.no,))
        for letter in turn.dead_letters:
            self._pending[ADD_LETTER].append(rows.letter_row(letter))
        return Committed(mail=mail)

    def _append(self, turn: CommitTurn, run: Known) -> None:
        first = turn.base + 1
        if turn.restart is not None or turn.dropped:
            self._drop(turn, run)
        if turn.entries and turn.restart is None:
            add = self._pending[ADD_ENTRY].append
            turn_id: str | None = turn.turn_id
            for position, entry in enumerate(turn.entries, first):
                add(rows.entry_row(run.no, position, turn_id, entry))
                turn_id = None
        else:
            self._pending[ADD_ENTRY].append(rows.marker_row(run.no, first, turn.turn_id, turn.now))
        for number in turn.consumed:
            self._pending[CONSUME].append((turn.now, run.no, number))

    def _drop(self, turn: CommitTurn, run: Known) -> None:
        """Delete what is no longer needed; the fence keeps the positions taken that go with it."""
        self._pending[MOVE_FENCE].append((rules.last_position(turn), run.no))
        restart = turn.restart
        if restart is None:
            self._pending[DROP_ENTRY] += [(run.no, position) for position in turn.dropped]
            self._pending[DROP_MARKERS].append((run.no,))
            return
        self._pending[DROP_ALL].append((run.no,))
        input = rows.pack(restart.input)
        row = (restart.workflow, restart.version, input, restart.begun_at, restart.run_attempt, run.no)
        self._pending[RESTART].append(row)

    def _patch(self, turn: CommitTurn, run: Known, patch: RunPatch) -> None:
        owner = None if patch.status.terminal else patch.owner
        unseen = self._unseen(turn, run, held=patch.held is not None and owner is None)
        wake_at = rules.wake_after(patch, turn.now, unseen)
        self._pending[PATCH].append(
            (
                patch.status,
                owner,
                wake_at,
                unseen and owner is not None,
                rows.as_json(patch.waits),
                rows.as_json(patch.held),
                rows.as_json(patch.drift),
                patch.recoveries,
                rows.pack(patch.result),
                rows.as_json(patch.error),
                patch.ended_at,
                patch.prune_at,
                turn.now,
                run.no,
            )
        )
        if patch.status.terminal or (owner is None and wake_at is not None):
            self.changed.add(turn.run_id)

    def _turn_at(self, run: Known, position: int) -> str | None:
        found: str | None = self._connection.execute(TURN_AT, (run.no, position)).get
        return found

    def _unseen(self, turn: CommitTurn, run: Known, *, held: bool = False) -> bool:
        """Whether mail is left that the turn did not know of; for a run that it holds, only what wakes a held run."""
        if run.inbox_last <= turn.seen:
            return False
        sql = UNREAD_WAKING_HELD if held else UNREAD
        consumed = msgspec.json.encode(turn.consumed).decode()
        return self._connection.execute(sql, (run.no, turn.seen, consumed)).get is not None

    # from outside

    def _deliver(self, write: Deliver, run: Known) -> Answer:
        message = write.message
        number = self._connection.execute(MESSAGE_NUMBER, (run.no, message.id)).get
        if number is not None:
            return Delivered(number, fresh=False, owner=run.owner)
        if run.status.terminal:
            return Ended(run.status)
        if write.limit is not None and run.inbox_last >= write.limit:  # only then it may be full
            pending = self._connection.execute(UNREAD_COUNT, (run.no,)).get
            if pending >= write.limit:
                return Full(pending)
        number = run.inbox_last + 1
        woken = rules.wakes(message, run)
        wake_at = rules.earliest(run.wake_at, write.now) if woken else run.wake_at
        self._pending[ADD_MESSAGE].append(rows.message_row(run.no, number, message))
        self._pending[COUNT_MESSAGE].append((number, wake_at, woken and run.owner is not None, run.no))
        self.changed.add(write.run_id)
        return Delivered(number, fresh=True, owner=run.owner)

    def _end(self, write: EndRun, run: Known) -> Answer:
        if run.position and self._turn_at(run, run.position) == write.turn_id:
            return Committed()
        if run.status.terminal:
            return Ended(run.status)
        if write.unless_begun and run.begun:
            return Begun()
        position = run.position + 1
        prune_at = None if write.prune_after is None else write.now + write.prune_after
        self._pending[ADD_ENTRY].append(rows.marker_row(run.no, position, write.turn_id, write.now))
        self._pending[END].append((write.status, write.now, write.now, prune_at, position, run.no))
        self.changed.add(write.run_id)
        return Committed()

    def _release(self, write: ReleaseRun, run: Known | None) -> Answer:
        if run is None or run.status.terminal or not self._is_alive(write.worker):
            return Superseded()
        if run.owner not in (None, write.worker):
            return Superseded()
        if run.owner is not None:
            self._pending[RELEASE].append((rules.status_released(run.begun), write.now, write.now, run.no))
            self.changed.add(write.run_id)
        return Committed()

    def _is_alive(self, worker: str) -> bool:
        if worker not in self._alive:
            self._alive[worker] = self._connection.execute(ALIVE, (worker,)).get is not None
        return self._alive[worker]
