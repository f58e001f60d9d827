"""A batch of writes as few statements: read what decides, judge in Python, write all rows of a kind at once.

Within `BEGIN IMMEDIATE` nobody else writes, so that what was read stays true until the commit. The writes of a batch
behave as if carried out one after the other: the batch is cut where a run comes up again, unless it gets nothing but
mail, and each part is flushed before the next is judged. The hot case, turns with one entry and no patch, costs one
insert each. A write that may touch other runs than its own is a part by itself, and those runs are read again when they
come up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw
import msgspec

from perdure.model.records import Entry, RunRecord, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
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
    RunMissing,
    Superseded,
    WriteResult,
)
from perdure.stores.sqlite import finalization as sqlite_duties
from perdure.stores.sqlite import rows as sqlite_rows
from perdure.stores.sqlite.finalization import ADD_LETTER, MESSAGE_NUMBER, REMOVE_LETTER
from perdure.stores.sqlite.run_state_cache import (
    CachedRunState,
    RunStateCache,
    known_at_birth,
    read_standing,
    read_standings,
)
from perdure.stores.sqlite.streams import ADD_ITEM, SHOW, SUPERSEDE, appended_rows, item_row, value_row
from perdure.stores.sqlite.topics import ADD_MESSAGE, CONSUME, COUNT_MESSAGE, UNSUBSCRIBE_ALL, Topics, mail_rows
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

TURN_AT = "SELECT turn_id FROM entries WHERE run_no = ? AND position = ?"
UNREAD = """
    SELECT 1 FROM inbox
    WHERE run_no = ? AND number > ? AND consumed_at IS NULL AND number NOT IN (SELECT value FROM json_each(?))
    LIMIT 1"""
UNREAD_WAKING_HELD = UNREAD.replace("LIMIT", "AND kind IN ('resume', 'cancel') LIMIT")
UNREAD_EVENT = UNREAD.replace("LIMIT", "AND kind IN ('event', 'assignment') LIMIT")
UNREAD_COUNT = """
    SELECT count(*) FROM inbox WHERE run_no = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment')"""
ALIVE = "SELECT 1 FROM workers WHERE id = ? AND gone = 0"
RUN = f"SELECT {rows.RUN_COLUMNS} FROM runs WHERE id = ?"

# Written in this order: what goes before what comes, rows before those that point to them.
DROP_ALL = "DELETE FROM entries WHERE run_no = ?"
DROP_BELOW = "DELETE FROM entries WHERE run_no = ? AND (location = ? OR (location >= ? AND location < ?))"
DROP_MARKERS = "DELETE FROM entries WHERE run_no = ? AND kind = 'marker'"
ADD_RUN = f"INSERT INTO runs ({rows.RUN_COLUMNS}) VALUES ({','.join('?' * 33)})"
ADD_OBSERVED_RUN = f"INSERT INTO runs ({rows.RUN_COLUMNS}, observed) VALUES ({','.join('?' * 33)}, 1)"
# Without its columns, which are those of the table: the driver hashes the text for every row, 2 % of a step.
ADD_ENTRY = f"INSERT INTO entries VALUES ({','.join('?' * 19)})"
RESTART = """
    UPDATE runs SET original_workflow = coalesce(original_workflow, workflow), workflow = ?, version = ?,
           original_input = coalesce(original_input, input), input = ?, first_executed_at = ?,
           run_attempt = ?, pool = coalesce(?, pool), generation = generation + 1, epoch = epoch + 1
    WHERE no = ?"""
MOVE_FENCE = "UPDATE runs SET fence = ? WHERE no = ?"
PATCH = """
    UPDATE runs SET status = ?, owner = ?, wake_at = ?, mailed = ?, waits = ?, held = ?, drift = ?, recoveries = ?,
           result = ?, error = ?, ended_at = ?, prune_at = ?, updated_at = ?, unsettled = ?
    WHERE no = ?"""
CLEAR_MAILED = "UPDATE runs SET wake_at = NULL, mailed = 0 WHERE no = ?"
END = """
    UPDATE runs SET status = ?, owner = NULL, wake_at = NULL, mailed = 0, waits = NULL, held = NULL, ended_at = ?,
           updated_at = ?, prune_at = ?, fence = ?, orphans = ?, unsettled = ?
    WHERE no = ?"""
RELEASE = "UPDATE runs SET owner = NULL, mailed = 0, status = ?, wake_at = ?, updated_at = ? WHERE no = ?"
_ORDER = (
    DROP_ALL,
    DROP_BELOW,
    DROP_MARKERS,
    UNSUBSCRIBE_ALL,
    ADD_RUN,
    ADD_OBSERVED_RUN,
    ADD_ENTRY,
    ADD_ITEM,
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
    sqlite_duties.OBSERVE,
    sqlite_duties.OBSERVED,
    sqlite_duties.OBSERVE_NEW,
    sqlite_duties.TELL,
    sqlite_duties.TICK_OFF,
    SHOW,
    SUPERSEDE,
)


def write(
    connection: apsw.Connection, batch: Sequence[Write], memory: RunStateCache
) -> tuple[list[WriteResult], frozenset[str]]:
    """Write a batch within the transaction of the caller, who has the memory forget if it is not committed.

    The answers, and the runs that others will want to know of.
    """
    writer = BatchWriter(connection, memory)
    answers = [answer for part in _parts(batch) for answer in writer.carry_out(part)]
    return answers, frozenset(writer.changed)


COMMITTED, RUNNING = Committed(), RunStatus.RUNNING

Part = list[tuple[rules.Key, Write]]
"""Writes to different runs, or several messages to one, each with what it is about."""


def _parts(batch: Sequence[Write]) -> Iterator[Part]:
    """The batch, cut so that no run comes up twice in a part but for mail, and what touches other runs is alone."""
    part: Part = []
    met: dict[rules.Key, bool] = {}  # whether more mail may follow
    key: rules.Key
    for write in batch:
        if type(write) is CommitTurn and write.extras is None:  # most of them, so without a question to others
            key, alone, is_mail = write.run_id, False, False
        else:
            key, alone = rules.run_of(write), _is_alone(write)
            is_mail = isinstance(write, DeliverMessage) and rules.is_unbounded(write)
        if part and (alone or (key in met and not (is_mail and met[key]))):
            yield part
            part, met = [], {}
        part.append((key, write))
        met[key] = is_mail
        if alone:
            yield part
            part, met = [], {}
    yield part


def _is_alone(write: Write) -> bool:
    if isinstance(write, CommitTurn):
        extras = write.extras
        return extras is not None and bool(extras.subscribe or extras.unsubscribe or extras.released_assignments)
    if isinstance(write, CreateRun):
        return bool(write.entries or write.inbox)
    if isinstance(write, FinalizeRun):
        return not rules.only_marks_notified(write)
    return isinstance(write, (PublishEvent, FanOut, RewindRun, ReplayDeadLetter))


_ToRun = DeliverMessage | EndRun | ObserveRunEnd | FinalizeRun | RewindRun | AppendStream | SupersedeStream


class BatchWriter:
    """Judges writes and gathers the rows that they make; must be used within one transaction."""

    def __init__(self, connection: apsw.Connection, memory: RunStateCache) -> None:
        self._connection = connection
        self._memory = memory
        self._known = memory.begin(connection)
        self._pending: dict[str, list[rows.Row]] = {sql: [] for sql in _ORDER}
        self._born: dict[str, list[RunRecord]] = {ADD_RUN: [], ADD_OBSERVED_RUN: []}
        self._alive = memory.alive
        self._topics = Topics(connection)
        self._unflushed_messages: dict[tuple[int, str], int] = {}  # messages that are not written yet, by run and id
        self.changed: set[str] = set()

    def carry_out(self, part: Part) -> list[WriteResult]:
        """The answers, in the order of the writes."""
        ids = dict.fromkeys(key for key, _ in part if key not in self._known and isinstance(key, str))
        if ids:
            self._known.update(read_standings(self._connection, ids))
        answers: list[WriteResult] = []
        for key, write in part:
            if type(write) is CommitTurn and self._append_to_known_run(write):
                answers.append(COMMITTED)
                continue
            answer = self._apply(write)
            self._memory.update(key, write, answer)
            answers.append(answer)
        self._flush()
        if self._topics.touched:
            self._forget_touched()
        return answers

    def _append_to_known_run(self, turn: CommitTurn) -> bool:
        """The hot case in one go: a turn that only adds to a run that is ours and of which all is known.

        Nothing here decides differently from `_commit_turn`; what it does not recognise goes there.
        """
        run = self._known.get(turn.run_id)
        if (
            run is None
            or turn.patch is not None
            or turn.extras is not None
            or turn.consumed
            or turn.restart is not None
        ):
            return False
        if run.position != turn.base or run.owner != turn.worker or run.status is not RUNNING or run.mailed:
            return False
        if run.last_message_no > turn.seen or not turn.entries or not self._is_alive(turn.worker):
            return False
        self._add_entries(run.no, turn.base + 1, turn.turn_id, turn.entries)
        run.position = turn.base + len(turn.entries)
        return True

    def _flush(self) -> None:
        """Write what was gathered."""
        for sql, pending in self._pending.items():
            if not pending:
                continue
            if sql is CONSUME:
                self._topics.consume(pending)
            else:
                self._connection.executemany(sql, pending)
            if sql in self._born:
                self._cache_created(self._born[sql], observed=sql is ADD_OBSERVED_RUN)
            pending.clear()
        self._unflushed_messages.clear()

    def _cache_created(self, born: list[RunRecord], *, observed: bool) -> None:
        """These runs are the last rows: SQLite numbers them one after the other, so that none need be read again."""
        first = self._connection.last_insert_rowid() - len(born) + 1
        for no, record in enumerate(born, first):
            self._known[record.id] = known_at_birth(record, no, observed=observed)
        born.clear()

    def _forget_touched(self) -> None:
        for id in self._topics.touched:
            self._memory.drop(id)
        self.changed |= self._topics.touched
        self._topics.touched.clear()

    def _apply(self, write: Write) -> WriteResult:
        match write:
            case CommitTurn():  # the most frequent is asked for first
                run = self._known.get(write.run_id)
                return RunMissing() if run is None else self._commit_turn(write, run)
            case CreateRun():
                return self._create(write)
            case PublishEvent():
                return self._topics.publish(write)
            case FanOut():
                return self._topics.fan_out(write)
            case ReplayDeadLetter():
                return self._replay(write)
            case ReleaseRun():
                return self._release(write, self._known.get(write.run_id))
            case _:
                run = self._known.get(write.run_id)
                return RunMissing() if run is None else self._judge_other(write, run)

    def _judge_other(self, write: _ToRun, run: CachedRunState) -> WriteResult:
        match write:
            case DeliverMessage():
                return self._deliver(write, run)
            case EndRun():
                return self._end(write, run)
            case ObserveRunEnd():
                return self._observe(write, run)
            case FinalizeRun() if rules.only_marks_notified(write):
                return self._mark_notified(write, run)
            case FinalizeRun():
                return sqlite_duties.settle(self._connection, self._topics, run, write)
            case RewindRun():
                return self._rewind(write, run)
            case AppendStream():
                return self._append_stream(write, run)
            case SupersedeStream():
                self._pending[SUPERSEDE].append((run.no, write.location, write.writer))
                return Committed()

    # creating

    def _create(self, write: CreateRun) -> WriteResult:
        record = write.record
        run = self._known.get(record.id)
        if run is None:
            alive = record.owner is not None and self._is_alive(record.owner)
            new = rules.initial_record(record, alive, last_message_no=len(write.inbox))
            add = ADD_RUN if write.observer is None else ADD_OBSERVED_RUN
            if write.entries or write.inbox:
                self._fork(write, add, new)
            else:
                self._pending[add].append(sqlite_rows.run_row(new))
                self._born[add].append(new)
            if write.observer is not None:
                observer = write.observer
                self._pending[sqlite_duties.OBSERVE_NEW].append((observer.run_id, observer.target, record.id))
            if new.owner is None:
                self.changed.add(record.id)
            return Created(owned=new.owner is not None)
        stored = rows.run_of_row(self._connection.execute(RUN, (record.id,)).get)
        if stored.created_by != record.created_by:
            return IdTaken(stored)
        if write.observer is not None:
            observer = write.observer
            observe = ObserveRunEnd(run_id=record.id, observer=observer.run_id, target=observer.target)
            if isinstance(answer := self._observe(observe, run), AlreadyEnded):
                return answer
        return Created(owned=record.owner is not None and stored.owner == record.owner)

    def _fork(self, write: CreateRun, add: str, new: RunRecord) -> None:
        """A run that is born with a history and an inbox: what is theirs needs the number of its row."""
        self._connection.execute(add, sqlite_rows.run_row(new))
        no = self._connection.last_insert_rowid()
        self._add_entries(no, 1, None, write.entries)
        messages = [sqlite_rows.message_row(no, number, message) for number, message in enumerate(write.inbox, 1)]
        self._pending[ADD_MESSAGE] += messages

    # turns

    def _commit_turn(self, turn: CommitTurn, run: CachedRunState) -> WriteResult:
        if run.position > turn.base and self._turn_at(run, turn.base + 1) == turn.turn_id:
            return Committed(has_messages=self._unseen(turn, run))
        refused = rules.refuse_turn(turn, run, self._is_alive(turn.worker))
        if refused is not None:
            return refused
        self._append(turn, run)
        if turn.extras is not None:
            run = self._add_extras(turn, run, turn.extras)
        mail = self._unseen(turn, run)
        if turn.patch is not None:
            self._patch(turn, run, turn.patch)
        elif run.mailed and not mail:
            self._pending[CLEAR_MAILED].append((run.no,))
        return Committed(has_messages=mail)

    def _append(self, turn: CommitTurn, run: CachedRunState) -> None:
        first = turn.base + 1
        entries = turn.entries
        if turn.restart is not None:
            self._restart(turn, run, turn.restart)
            entries = turn.restart.entries
        elif turn.extras is not None and turn.extras.dropped:
            self._drop(turn, run, turn.extras.dropped)
        if entries:
            self._add_entries(run.no, first, turn.turn_id, entries)
        else:
            self._pending[ADD_ENTRY].append(sqlite_rows.marker_row(run.no, first, turn.turn_id, turn.now))
        for number in turn.consumed:
            self._pending[CONSUME].append((turn.now, run.no, number))
        if run.listens and _stops_listening(turn):
            self._pending[UNSUBSCRIBE_ALL].append((run.no,))

    def _add_entries(self, run_no: int, first: int, turn_id: str | None, entries: Sequence[Entry]) -> None:
        add = self._pending[ADD_ENTRY].append
        for position, entry in enumerate(entries, first):
            add(sqlite_rows.entry_row(run_no, position, turn_id, entry))
            turn_id = None

    def _drop(self, turn: CommitTurn, run: CachedRunState, locations: Sequence[str]) -> None:
        """Delete what is no longer needed; the fence keeps the positions taken that go with it."""
        self._pending[MOVE_FENCE].append((rules.last_position(turn), run.no))
        # Below "a" is what begins with "a/", and that sorts before "a0".
        self._pending[DROP_BELOW] += [(run.no, each, f"{each}/", f"{each}0") for each in locations]
        self._pending[DROP_MARKERS].append((run.no,))

    def _restart(self, turn: CommitTurn, run: CachedRunState, restart: ContinueAs) -> None:
        self._pending[MOVE_FENCE].append((rules.last_position(turn), run.no))
        self._pending[DROP_ALL].append((run.no,))
        input = sqlite_rows.pack(restart.input)
        begun = (restart.first_executed_at, restart.run_attempt, restart.pool)
        self._pending[RESTART].append((restart.workflow, restart.version, input, *begun, run.no))

    def _add_extras(self, turn: CommitTurn, run: CachedRunState, extras: TurnExtras) -> CachedRunState:
        """What few turns have; the run as it stands after that, for its subscriptions may have found mail."""
        self._pending[SHOW] += [value_row(run.no, shown) for shown in extras.published]
        self._pending[ADD_ITEM] += [item_row(run.no, item) for item in extras.streamed]
        self._pending[ADD_LETTER] += map(sqlite_rows.letter_row, extras.dead_letters)
        if extras.published or extras.streamed:
            self.changed.add(turn.run_id)
        if not _is_alone(turn):
            return run
        self._flush()
        self._topics.unsubscribe(run.no, extras.unsubscribe)
        self._topics.release(run.no, extras.released_assignments, turn.now)
        if not _stops_listening(turn):
            for subscription in extras.subscribe:
                self._topics.subscribe(run.no, subscription, turn.now)
        return read_standing(self._connection, run.no)[1]

    def _patch(self, turn: CommitTurn, run: CachedRunState, patch: RunPatch) -> None:
        owner = None if patch.status.terminal else patch.owner
        unseen = self._unseen(turn, run, held=rules.ignores_messages(turn, patch))
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
                sqlite_rows.pack(patch.result),
                rows.as_json(patch.error),
                patch.ended_at,
                patch.prune_at,
                turn.now,
                patch.status.terminal and self._owes(run, turn.consumed),
                run.no,
            )
        )
        if patch.status.terminal or (owner is None and wake_at is not None):
            self.changed.add(turn.run_id)

    def _turn_at(self, run: CachedRunState, position: int) -> str | None:
        found: str | None = self._connection.execute(TURN_AT, (run.no, position)).get
        return found

    def _unseen(self, turn: CommitTurn, run: CachedRunState, *, held: bool = False) -> bool:
        """Whether mail is left that the turn did not know of; for a run that it holds, only what wakes a held run."""
        if run.last_message_no <= turn.seen:
            return False
        sql = UNREAD_WAKING_HELD if held else UNREAD
        return self._connection.execute(sql, (run.no, turn.seen, _numbers(turn.consumed))).get is not None

    # from outside

    def _deliver(self, write: DeliverMessage, run: CachedRunState) -> WriteResult:
        message = write.message
        number = self._unflushed_messages.get((run.no, message.id))
        if number is None:
            number = self._connection.execute(MESSAGE_NUMBER, (run.no, message.id)).get
        if number is not None:
            return MessageDelivered(number, fresh=False, owner=run.owner)
        if run.status.terminal:
            return AlreadyEnded(run.status)
        if write.limit is not None and run.last_message_no >= write.limit and message.kind in rules.EVENTS:
            pending = self._connection.execute(UNREAD_COUNT, (run.no,)).get
            if pending >= write.limit:
                return LimitReached(pending)
        added, count = mail_rows(run, message, write.now)
        self._pending[ADD_MESSAGE].append(added)
        self._pending[COUNT_MESSAGE].append(count)
        self.changed.add(write.run_id)
        run.last_message_no, run.wake_at, run.mailed = count[:3]
        self._unflushed_messages[run.no, message.id] = run.last_message_no
        return MessageDelivered(run.last_message_no, fresh=True, owner=run.owner)

    def _end(self, write: EndRun, run: CachedRunState) -> WriteResult:
        if run.position and self._turn_at(run, run.position) == write.turn_id:
            return Committed()
        if run.status.terminal:
            return AlreadyEnded(run.status)
        if write.only_if_not_started and run.begun:
            return AlreadyStarted()
        position = run.position + 1
        prune_at = None if write.prune_after is None else write.now + write.prune_after
        self._pending[ADD_ENTRY].append(sqlite_rows.marker_row(run.no, position, write.turn_id, write.now))
        owing = (run.begun, run.begun or self._owes(run))
        self._pending[END].append((write.status, write.now, write.now, prune_at, position, *owing, run.no))
        if run.listens:
            self._pending[UNSUBSCRIBE_ALL].append((run.no,))
        self.changed.add(write.run_id)
        return Committed()

    def _release(self, write: ReleaseRun, run: CachedRunState | None) -> WriteResult:
        if run is None or run.status.terminal or not self._is_alive(write.worker):
            return Superseded()
        if run.owner not in (None, write.worker):
            return Superseded()
        if run.owner is not None:
            self._pending[RELEASE].append((rules.status_released(run.begun), write.now, write.now, run.no))
            self.changed.add(write.run_id)
        return Committed()

    # duties, going back, streams

    def _owes(self, run: CachedRunState, consumed: Sequence[int] = ()) -> bool:
        """Whether a run that ends like this has to tell somebody, or has events that nobody will read."""
        if run.observed or not run.last_message_no:
            return run.observed
        return self._connection.execute(UNREAD_EVENT, (run.no, 0, _numbers(consumed))).get is not None

    def _observe(self, write: ObserveRunEnd, run: CachedRunState) -> WriteResult:
        if run.status.terminal:
            return rules.already_ended(rows.run_of_row(self._connection.execute(RUN, (write.run_id,)).get))
        self._pending[sqlite_duties.OBSERVE].append((run.no, write.observer, write.target))
        if not run.observed:
            self._pending[sqlite_duties.OBSERVED].append((run.no,))
        return ObserverAdded()

    def _mark_notified(self, write: FinalizeRun, run: CachedRunState) -> WriteResult:
        if run.unsettled:
            self._pending[sqlite_duties.TELL] += [(run.no, each.run_id, each.target) for each in write.notified]
            self._pending[sqlite_duties.TICK_OFF].append((run.no,) * 4)
        return Committed()

    def _replay(self, write: ReplayDeadLetter) -> WriteResult:
        run = self._known.get(rules.run_of(write))
        if not sqlite_duties.may_replay(self._connection, self._topics, run, write):
            return DeadLetterMissing()
        answer = self._apply(write.send)
        if isinstance(answer, MessageDelivered | EventPublished):
            self._connection.execute(REMOVE_LETTER, (write.letter_id,))
        return answer

    def _rewind(self, write: RewindRun, run: CachedRunState) -> WriteResult:
        if run.position > write.base and self._turn_at(run, write.base + 1) == write.turn_id:
            return Committed()
        if run.position != write.base:
            return Superseded()
        sqlite_duties.rewind(self._connection, run, write)
        if write.entries:
            self._add_entries(run.no, write.base + 1, write.turn_id, write.entries)
        else:
            self._pending[ADD_ENTRY].append(sqlite_rows.marker_row(run.no, write.base + 1, write.turn_id, write.now))
        self.changed.add(write.run_id)
        return Committed()

    def _append_stream(self, write: AppendStream, run: CachedRunState) -> WriteResult:
        refused = rules.refuse_append(write, run, self._is_alive(write.worker))
        if refused is not None:
            return refused
        if write.items:
            self._pending[ADD_ITEM] += appended_rows(self._connection, run.no, write)
            self.changed.add(write.run_id)
        return Committed()

    def _is_alive(self, worker: str) -> bool:
        if worker not in self._alive:
            self._alive[worker] = self._connection.execute(ALIVE, (worker,)).get is not None
        return self._alive[worker]


def _stops_listening(turn: CommitTurn) -> bool:
    """Whether the run ends or begins anew, and no receive of it is open any more."""
    return turn.restart is not None or (turn.patch is not None and turn.patch.status.terminal)


def _numbers(numbers: Sequence[int]) -> str:
    return msgspec.json.encode(numbers).decode()
