"""Apply a batch of writes with few statements: read the run states, check in Python, write all rows of a kind at once.

Within `BEGIN IMMEDIATE` no other connection writes, so what was read stays true until the commit. The result is the
same as if the writes were applied one after the other. For this, the batch is split into parts: a run occurs once in
a part, except for several messages to one run. The rows of a part are flushed before the next part is checked. A write
that may change other runs is a part of its own, and the cached states of those runs are dropped.

The common case, a turn that appends one entry, costs one insert.

Turns follow the acceptance rule of `stores/protocol.py`; comments name its numbers:
`_append_to_known_run` (the common case) and `_commit_turn` (the general case).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw
import msgspec

from perdure.model.records import Entry, RunRecord, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores import semantics as rules
from perdure.stores import sql_rows
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
from perdure.stores.sqlite import documents, finalization, rows
from perdure.stores.sqlite.finalization import ADD_DEAD_LETTER, MESSAGE_NUMBER, REMOVE_DEAD_LETTER
from perdure.stores.sqlite.run_state_cache import (
    CachedRunState,
    RunStateCache,
    read_run_state,
    read_run_states,
    state_of_new_run,
)
from perdure.stores.sqlite.streams import ADD_ITEM, PUT_VALUE, SUPERSEDE, appended_rows, item_row, value_row
from perdure.stores.sqlite.tags import ADD_TAG, change_tags, tag_rows
from perdure.stores.sqlite.topics import ADD_MESSAGE, CONSUME, COUNT_MESSAGE, UNSUBSCRIBE_ALL, Topics, message_rows
from perdure.stores.sqlite.unread import FIRST_UNREAD_OF_NAME, UNREAD, UNREAD_EVENT, UNREAD_OF_NAME, UNREAD_WAKING_HELD
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
    PutDocument,
    ReleaseRun,
    ReplayDeadLetter,
    RewindRun,
    RunPatch,
    SupersedeStream,
    TagRun,
    Write,
)

TURN_AT = "SELECT turn_id FROM entries WHERE run_pk = ? AND position = ?"
WORKER_IS_LIVE = "SELECT 1 FROM workers WHERE id = ? AND fenced = 0"
RUN = f"SELECT {sql_rows.RUN_COLUMNS} FROM runs WHERE id = ?"

# Statements in the order in which `_flush` executes them: deletes before inserts, a row before rows that refer to it.
DROP_ALL = "DELETE FROM entries WHERE run_pk = ?"
DROP_BELOW = "DELETE FROM entries WHERE run_pk = ? AND (location = ? OR (location >= ? AND location < ?))"
DROP_AT_POSITION = "DELETE FROM entries WHERE run_pk = ? AND position = ?"
DROP_MARKERS = "DELETE FROM entries WHERE run_pk = ? AND kind = 'marker'"
ADD_RUN = f"INSERT INTO runs ({sql_rows.RUN_COLUMNS}) VALUES ({','.join('?' * 33)})"
ADD_RUN_WITH_OBSERVER = f"INSERT INTO runs ({sql_rows.RUN_COLUMNS}, has_observers) VALUES ({','.join('?' * 33)}, 1)"
# Without column names: the driver hashes the text of the statement for every row, and names cost 2 % of a step.
ADD_ENTRY = f"INSERT INTO entries VALUES ({','.join('?' * 19)})"
RESTART = """
    UPDATE runs SET original_workflow = coalesce(original_workflow, workflow), workflow = ?, version = ?,
           original_input = coalesce(original_input, input), input = ?, first_executed_at = ?,
           run_attempt = ?, pool = coalesce(?, pool), generation = generation + 1, epoch = epoch + 1
    WHERE pk = ?"""
MOVE_FENCE = "UPDATE runs SET fence = ? WHERE pk = ?"
PATCH = """
    UPDATE runs SET status = ?, owner = ?, wake_at = ?, has_new_messages = ?, waits = ?, held = ?, drift = ?,
           recoveries = ?, result = ?, error = ?, ended_at = ?, prune_at = ?, updated_at = ?, unfinalized = ?
    WHERE pk = ?"""
CLEAR_NEW_MESSAGES = "UPDATE runs SET wake_at = NULL, has_new_messages = 0 WHERE pk = ?"
END = """
    UPDATE runs SET status = ?, owner = NULL, wake_at = NULL, has_new_messages = 0, waits = NULL, held = NULL,
           ended_at = ?, updated_at = ?, prune_at = ?, fence = ?, orphaned_children = ?, unfinalized = ?
    WHERE pk = ?"""
RELEASE = "UPDATE runs SET owner = NULL, has_new_messages = 0, status = ?, wake_at = ?, updated_at = ? WHERE pk = ?"
_ORDER = (
    DROP_ALL,
    DROP_BELOW,
    DROP_AT_POSITION,
    DROP_MARKERS,
    UNSUBSCRIBE_ALL,
    ADD_RUN,
    ADD_RUN_WITH_OBSERVER,
    ADD_TAG,
    ADD_ENTRY,
    ADD_ITEM,
    RESTART,
    MOVE_FENCE,
    PATCH,
    CLEAR_NEW_MESSAGES,
    END,
    RELEASE,
    CONSUME,
    ADD_MESSAGE,
    COUNT_MESSAGE,
    ADD_DEAD_LETTER,
    finalization.ADD_OBSERVER,
    finalization.SET_HAS_OBSERVERS,
    finalization.ADD_OBSERVER_OF_NEW_RUN,
    finalization.REMOVE_OBSERVER,
    finalization.UPDATE_UNFINALIZED,
    PUT_VALUE,
    SUPERSEDE,
)


def write(
    connection: apsw.Connection, batch: Sequence[Write], cache: RunStateCache
) -> tuple[list[WriteResult], frozenset[str]]:
    """Apply a batch within the caller's transaction. Return one result per write, and the runs to notify about.

    The caller clears the cache if the transaction is not committed.
    """
    writer = BatchWriter(connection, cache)
    results = [result for part in _parts(batch) for result in writer.apply_part(part)]
    return results, frozenset(writer.changed)


COMMITTED, RUNNING = Committed(), RunStatus.RUNNING

Part = list[tuple[rules.Key, Write]]
"""Writes to different runs, or several messages to one run, each with the key of its run or topic."""


def _parts(batch: Sequence[Write]) -> Iterator[Part]:
    """Split the batch so that a run occurs once per part, except for messages, and a write that may change other runs
    is a part of its own."""
    part: Part = []
    seen: dict[rules.Key, bool] = {}  # whether more messages to the run may follow in this part
    key: rules.Key
    for write in batch:
        if type(write) is CommitTurn and write.extras is None:  # the common case, without function calls
            key, alone, is_message = write.run_id, False, False
        else:
            key, alone = rules.run_of(write), _is_alone(write)
            is_message = isinstance(write, DeliverMessage) and rules.is_unbounded(write)
        if part and (alone or (key in seen and not (is_message and seen[key]))):
            yield part
            part, seen = [], {}
        part.append((key, write))
        seen[key] = is_message
        if alone:
            yield part
            part, seen = [], {}
    yield part


def _is_alone(write: Write) -> bool:
    """Return whether the write may change other runs than its own, or needs rows that were flushed before."""
    if isinstance(write, CommitTurn):
        extras = write.extras
        return extras is not None and bool(extras.subscribe or extras.unsubscribe or extras.released_assignments)
    if isinstance(write, CreateRun):
        return rules.is_created_alone(write)
    if isinstance(write, FinalizeRun):
        return not rules.only_marks_notified(write)
    return isinstance(write, (PublishEvent, FanOut, RewindRun, ReplayDeadLetter))


_ToRun = DeliverMessage | EndRun | ObserveRunEnd | FinalizeRun | RewindRun | AppendStream | SupersedeStream | TagRun


class BatchWriter:
    """Checks writes and collects the rows that they add. Used within one transaction."""

    def __init__(self, connection: apsw.Connection, cache: RunStateCache) -> None:
        self._connection = connection
        self._cache = cache
        self._states = cache.begin(connection)
        self._pending: dict[str, list[sql_rows.Row]] = {sql: [] for sql in _ORDER}
        self._new_runs: dict[str, list[RunRecord]] = {ADD_RUN: [], ADD_RUN_WITH_OBSERVER: []}
        self._live_workers = cache.live_workers
        self._topics = Topics(connection)
        self._unflushed_messages: dict[tuple[int, str], int] = {}  # numbers of messages, by run and message id
        self.changed: set[str] = set()

    def apply_part(self, part: Part) -> list[WriteResult]:
        """Apply the writes of a part and flush their rows. Return the results in the order of the writes."""
        ids = dict.fromkeys(key for key, _ in part if key not in self._states and isinstance(key, str))
        if ids:
            self._states.update(read_run_states(self._connection, ids))
        results: list[WriteResult] = []
        for key, write in part:
            if type(write) is CommitTurn and self._append_to_known_run(write):
                results.append(COMMITTED)
                continue
            result = self._apply(write)
            self._cache.update(key, write, result)
            results.append(result)
        self._flush()
        if self._topics.touched:
            self._drop_touched()
        return results

    def _append_to_known_run(self, turn: CommitTurn) -> bool:
        """Apply the common case: a turn that only appends entries to a run that its worker owns.

        Return False, without a change, for any other turn; `_commit_turn` then decides. This method never decides
        differently: it applies rule 7 when the conditions below exclude rules 1 to 6.
        """
        run = self._states.get(turn.run_id)
        if (
            run is None  # rule 1
            or turn.patch is not None
            or turn.extras is not None
            or turn.consumed
            or turn.continue_as is not None
        ):
            return False
        # Rules 2 and 6 (position), 5 (owner), 3 (status): the turn continues at the last position of its worker's run.
        if run.position != turn.base or run.owner != turn.worker or run.status is not RUNNING or run.has_messages:
            return False
        if run.last_message_no > turn.seen or not turn.entries or not self._is_live(turn.worker):  # rule 4
            return False
        self._add_entries(run.pk, turn.base + 1, turn.turn_id, turn.entries)
        run.position = turn.base + len(turn.entries)
        return True

    def _flush(self) -> None:
        """Write the collected rows."""
        for sql, pending in self._pending.items():
            if not pending:
                continue
            if sql is CONSUME:
                self._topics.consume(pending)
            else:
                self._connection.executemany(sql, pending)
            if sql in self._new_runs:
                self._cache_created(self._new_runs[sql], has_observers=sql is ADD_RUN_WITH_OBSERVER)
            pending.clear()
        self._unflushed_messages.clear()

    def _cache_created(self, created: list[RunRecord], *, has_observers: bool) -> None:
        """Cache the states of the runs that were just inserted.

        SQLite gives consecutive primary keys to the rows of one statement, so they are known without reading.
        """
        first = self._connection.last_insert_rowid() - len(created) + 1
        for pk, record in enumerate(created, first):
            self._states[record.id] = state_of_new_run(record, pk, has_observers=has_observers)
            if record.tags:
                self._pending[ADD_TAG] += tag_rows(pk, record.tags, record.created_at)
        created.clear()

    def _drop_touched(self) -> None:
        for id in self._topics.touched:
            self._cache.drop(id)
        self.changed |= self._topics.touched
        self._topics.touched.clear()

    def _apply(self, write: Write) -> WriteResult:
        match write:
            case CommitTurn():  # first, because it is the most frequent write
                run = self._states.get(write.run_id)
                return RunMissing() if run is None else self._commit_turn(write, run)  # rule 1
            case CreateRun():
                return self._create(write)
            case PublishEvent():
                return self._topics.publish(write)
            case FanOut():
                return self._topics.fan_out(write)
            case ReplayDeadLetter():
                return self._replay(write)
            case PutDocument():
                return documents.put(self._connection, write, self.changed)
            case ReleaseRun():
                return self._release(write, self._states.get(write.run_id))
            case _:
                run = self._states.get(write.run_id)
                return RunMissing() if run is None else self._apply_to_run(write, run)

    def _apply_to_run(self, write: _ToRun, run: CachedRunState) -> WriteResult:
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
                return finalization.finalize(self._connection, self._topics, run, write)
            case RewindRun():
                return self._rewind(write, run)
            case AppendStream():
                return self._append_stream(write, run)
            case SupersedeStream():
                self._pending[SUPERSEDE].append((run.pk, write.location, write.writer))
                return Committed()
            case TagRun():
                return self._tag(write, run)

    # creating

    def _create(self, write: CreateRun) -> WriteResult:
        record = write.record
        run = self._states.get(record.id)
        if run is None:
            return self._create_new(write, write.received)
        stored = sql_rows.run_or_error(self._connection.execute(RUN, (record.id,)).get)
        if rules.can_replace(write, stored, run.unfinalized):
            for sql in finalization.DROP_RUN:
                self._connection.execute(sql, (run.pk,))
            return self._create_new(write, last_message_no=stored.last_message_no, fence=run.position + 1)
        if stored.created_by != record.created_by:
            return IdTaken(stored)
        if write.observer is not None:
            observer = write.observer
            observe = ObserveRunEnd(run_id=record.id, observer=observer.run_id, target=observer.target)
            if isinstance(result := self._observe(observe, run), AlreadyEnded):
                return result
        return Created(owned=record.owner is not None and stored.owner == record.owner)

    def _create_new(self, write: CreateRun, last_message_no: int, fence: int = 0) -> WriteResult:
        """Create a run whose id is not taken, with messages after this number; `fence`: of the run that it replaces."""
        record, observer = write.record, write.observer
        owner_is_live = record.owner is not None and self._is_live(record.owner)
        new = rules.initial_record(record, owner_is_live, last_message_no + len(write.inbox), fence)
        add = ADD_RUN if observer is None else ADD_RUN_WITH_OBSERVER
        if rules.is_created_alone(write):
            self._create_alone(write, add, new, last_message_no)
        else:
            self._pending[add].append(rows.run_row(new))
            self._new_runs[add].append(new)
        if observer is not None:
            self._pending[finalization.ADD_OBSERVER_OF_NEW_RUN].append((observer.run_id, observer.target, record.id))
        if new.owner is None:
            self.changed.add(record.id)
        return Created(owned=new.owner is not None)

    def _create_alone(self, write: CreateRun, add: str, new: RunRecord, last_message_no: int) -> None:
        """Create a run with its history and inbox. The run is inserted at once, because its rows need its key."""
        self._connection.execute(add, rows.run_row(new))
        pk = self._connection.last_insert_rowid()
        self._pending[ADD_TAG] += tag_rows(pk, new.tags, new.created_at)
        self._add_entries(pk, 1, None, write.entries)
        numbered = enumerate(write.inbox, last_message_no + 1)
        self._pending[ADD_MESSAGE] += [rows.message_row(pk, number, message) for number, message in numbered]

    # turns

    def _commit_turn(self, turn: CommitTurn, run: CachedRunState) -> WriteResult:
        if run.position > turn.base and self._turn_at(run, turn.base + 1) == turn.turn_id:  # rule 2
            return Committed(has_messages=self._has_unseen(turn, run))
        refused = rules.refuse_turn(turn, run, self._is_live(turn.worker))  # rules 3 to 6
        if refused is not None:
            return refused
        self._append(turn, run)  # rule 7, with all that follows
        if turn.extras is not None:
            run = self._add_extras(turn, run, turn.extras)
        has_unseen = self._has_unseen(turn, run)
        if turn.patch is not None:
            self._patch(turn, run, turn.patch)
        elif run.has_messages and not has_unseen:
            self._pending[CLEAR_NEW_MESSAGES].append((run.pk,))
        return Committed(has_messages=has_unseen)

    def _append(self, turn: CommitTurn, run: CachedRunState) -> None:
        first = turn.base + 1
        entries = turn.entries
        if turn.continue_as is not None:
            self._restart(turn, run, turn.continue_as)
            entries = turn.continue_as.entries
        elif turn.extras is not None:
            if turn.extras.dropped:
                self._drop(turn, run, turn.extras.dropped)
            self._pending[DROP_AT_POSITION] += [(run.pk, position) for position in turn.extras.replaced]
        if entries:
            self._add_entries(run.pk, first, turn.turn_id, entries)
        else:
            self._pending[ADD_ENTRY].append(rows.marker_row(run.pk, first, turn.turn_id, turn.now))
        for number in turn.consumed:
            self._pending[CONSUME].append((turn.now, run.pk, number))
        if run.has_subscriptions and _closes_receives(turn):
            self._pending[UNSUBSCRIBE_ALL].append((run.pk,))

    def _add_entries(self, run_pk: int, first: int, turn_id: str | None, entries: Sequence[Entry]) -> None:
        add = self._pending[ADD_ENTRY].append
        for position, entry in enumerate(entries, first):
            add(rows.entry_row(run_pk, position, turn_id, entry))
            turn_id = None

    def _drop(self, turn: CommitTurn, run: CachedRunState, locations: Sequence[str]) -> None:
        """Delete entries that the run no longer needs. The fence keeps their positions taken."""
        self._pending[MOVE_FENCE].append((rules.last_position(turn), run.pk))
        # Locations below "a" start with "a/", which sorts before "a0".
        self._pending[DROP_BELOW] += [(run.pk, each, f"{each}/", f"{each}0") for each in locations]
        self._pending[DROP_MARKERS].append((run.pk,))

    def _restart(self, turn: CommitTurn, run: CachedRunState, restart: ContinueAs) -> None:
        self._pending[MOVE_FENCE].append((rules.last_position(turn), run.pk))
        self._pending[DROP_ALL].append((run.pk,))
        input = rows.pack(restart.input)
        start = (restart.first_executed_at, restart.run_attempt, restart.pool)
        self._pending[RESTART].append((restart.workflow, restart.version, input, *start, run.pk))

    def _add_extras(self, turn: CommitTurn, run: CachedRunState, extras: TurnExtras) -> CachedRunState:
        """Apply the extras of a turn. Return the run's state after them: a subscription may have found an event."""
        self._pending[PUT_VALUE] += [value_row(run.pk, value) for value in extras.published]
        self._pending[ADD_ITEM] += [item_row(run.pk, item) for item in extras.streamed]
        self._pending[ADD_DEAD_LETTER] += map(rows.dead_letter_row, extras.dead_letters)
        if extras.tags:
            change_tags(self._connection, run.pk, extras.tags)
        if not _is_alone(turn):
            return run
        self._flush()
        self._topics.unsubscribe(run.pk, extras.unsubscribe)
        self._topics.release(run.pk, extras.released_assignments, turn.now)
        if not _closes_receives(turn):
            for subscription in extras.subscribe:
                self._topics.subscribe(run.pk, subscription, turn.now)
        return read_run_state(self._connection, run.pk)[1]

    def _patch(self, turn: CommitTurn, run: CachedRunState, patch: RunPatch) -> None:
        owner = None if patch.status.terminal else patch.owner
        has_unseen = self._has_unseen(turn, run, held=rules.ignores_messages(turn, patch))
        wake_at = rules.wake_after(patch, turn.now, has_unseen)
        self._pending[PATCH].append(
            (
                patch.status,
                owner,
                wake_at,
                has_unseen and owner is not None,
                sql_rows.as_json(patch.waits),
                sql_rows.as_json(patch.held),
                sql_rows.as_json(patch.drift),
                patch.recoveries,
                rows.pack(patch.result),
                sql_rows.as_json(patch.error),
                patch.ended_at,
                patch.prune_at,
                turn.now,
                patch.status.terminal and self._needs_finalization(run, turn.consumed),
                run.pk,
            )
        )
        if patch.status.terminal or (owner is None and wake_at is not None):
            self.changed.add(turn.run_id)

    def _turn_at(self, run: CachedRunState, position: int) -> str | None:
        found: str | None = self._connection.execute(TURN_AT, (run.pk, position)).get
        return found

    def _has_unseen(self, turn: CommitTurn, run: CachedRunState, *, held: bool = False) -> bool:
        """Return whether the inbox has messages that the turn has not seen. `held`: only those that wake a held run."""
        if run.last_message_no <= turn.seen:
            return False
        sql = UNREAD_WAKING_HELD if held else UNREAD
        return self._connection.execute(sql, (run.pk, turn.seen, _numbers(turn.consumed))).get is not None

    # writes from outside the run

    def _deliver(self, write: DeliverMessage, run: CachedRunState) -> WriteResult:
        message = write.message
        number = self._unflushed_messages.get((run.pk, message.id))
        if number is None:
            number = self._connection.execute(MESSAGE_NUMBER, (run.pk, message.id)).get
        if number is not None:
            return MessageDelivered(number, fresh=False, owner=run.owner)
        if run.status.terminal:
            return AlreadyEnded(run.status)
        if write.limit is not None and run.last_message_no >= write.limit and message.kind in rules.EVENTS:
            pending = self._unread_if_full(run, message.name, write.limit)
            if pending >= write.limit:
                return LimitReached(pending)
        added, count = message_rows(run, message, write.now)
        self._pending[ADD_MESSAGE].append(added)
        self._pending[COUNT_MESSAGE].append(count)
        self.changed.add(write.run_id)
        run.last_message_no, run.wake_at, run.has_messages = count[:3]  # the part may have more messages to this run
        self._unflushed_messages[run.pk, message.id] = run.last_message_no
        return MessageDelivered(run.last_message_no, fresh=True, owner=run.owner)

    def _unread_if_full(self, run: CachedRunState, name: str, limit: int) -> int:
        """Return the number of unread events of this name if it may have reached the limit, otherwise 0.

        The numbers of these messages lie between that of the first and that of the run's last message. So most calls
        read one row of the index.
        """
        first = self._connection.execute(FIRST_UNREAD_OF_NAME, (run.pk, name)).get
        if first is None or run.last_message_no - first + 1 < limit:
            return 0
        return int(self._connection.execute(UNREAD_OF_NAME, (run.pk, name)).get)

    def _end(self, write: EndRun, run: CachedRunState) -> WriteResult:
        if run.position and self._turn_at(run, run.position) == write.turn_id:
            return Committed()
        if run.status.terminal:
            return AlreadyEnded(run.status)
        if write.only_if_not_started and run.has_executed:
            return AlreadyStarted()
        position = run.position + 1
        prune_at = None if write.prune_after is None else write.now + write.prune_after
        self._pending[ADD_ENTRY].append(rows.marker_row(run.pk, position, write.turn_id, write.now))
        # A run that has executed may have children, which the finalization must end.
        pending = (run.has_executed, run.has_executed or self._needs_finalization(run))
        self._pending[END].append((write.status, write.now, write.now, prune_at, position, *pending, run.pk))
        if run.has_subscriptions:
            self._pending[UNSUBSCRIBE_ALL].append((run.pk,))
        self.changed.add(write.run_id)
        return Committed()

    def _release(self, write: ReleaseRun, run: CachedRunState | None) -> WriteResult:
        if run is None or run.status.terminal or not self._is_live(write.worker):
            return Superseded()
        if run.owner not in (None, write.worker):
            return Superseded()
        if run.owner is not None:
            self._pending[RELEASE].append((rules.status_released(run.has_executed), write.now, write.now, run.pk))
            self.changed.add(write.run_id)
        return Committed()

    # finalization, rewinds, streams

    def _needs_finalization(self, run: CachedRunState, consumed: Sequence[int] = ()) -> bool:
        """Return whether a run that ends now has observers to notify or unread events."""
        if run.has_observers or not run.last_message_no:
            return run.has_observers
        return self._connection.execute(UNREAD_EVENT, (run.pk, 0, _numbers(consumed))).get is not None

    def _observe(self, write: ObserveRunEnd, run: CachedRunState) -> WriteResult:
        if run.status.terminal:
            return rules.already_ended(sql_rows.run_or_error(self._connection.execute(RUN, (write.run_id,)).get))
        self._pending[finalization.ADD_OBSERVER].append((run.pk, write.observer, write.target))
        if not run.has_observers:
            self._pending[finalization.SET_HAS_OBSERVERS].append((run.pk,))
        return ObserverAdded()

    def _mark_notified(self, write: FinalizeRun, run: CachedRunState) -> WriteResult:
        if run.unfinalized:
            self._pending[finalization.REMOVE_OBSERVER] += [
                (run.pk, each.run_id, each.target) for each in write.notified
            ]
            self._pending[finalization.UPDATE_UNFINALIZED].append((run.pk,) * 4)
        return Committed()

    def _replay(self, write: ReplayDeadLetter) -> WriteResult:
        run = self._states.get(rules.run_of(write))
        if not finalization.can_replay(self._connection, self._topics, run, write):
            return DeadLetterMissing()
        result = self._apply(write.send)
        if isinstance(result, MessageDelivered | EventPublished):
            self._connection.execute(REMOVE_DEAD_LETTER, (write.dead_letter_id,))
        return result

    def _rewind(self, write: RewindRun, run: CachedRunState) -> WriteResult:
        if run.position > write.base and self._turn_at(run, write.base + 1) == write.turn_id:
            return Committed()
        if run.position != write.base:
            return Superseded()
        finalization.rewind(self._connection, run, write)
        if write.entries:
            self._add_entries(run.pk, write.base + 1, write.turn_id, write.entries)
        else:
            self._pending[ADD_ENTRY].append(rows.marker_row(run.pk, write.base + 1, write.turn_id, write.now))
        self.changed.add(write.run_id)
        return Committed()

    def _append_stream(self, write: AppendStream, run: CachedRunState) -> WriteResult:
        refused = rules.refuse_append(write, run, self._is_live(write.worker))
        if refused is not None:
            return refused
        if write.items:
            self._pending[ADD_ITEM] += appended_rows(self._connection, run.pk, write)
        return Committed()

    def _tag(self, write: TagRun, run: CachedRunState) -> WriteResult:
        if run.owner is not None:
            return Superseded()
        change_tags(self._connection, run.pk, write.tags)
        return Committed()

    def _is_live(self, worker: str) -> bool:
        if worker not in self._live_workers:
            self._live_workers[worker] = self._connection.execute(WORKER_IS_LIVE, (worker,)).get is not None
        return self._live_workers[worker]


def _closes_receives(turn: CommitTurn) -> bool:
    """Return whether the turn ends or restarts the run, which closes all its open receives."""
    return turn.continue_as is not None or (turn.patch is not None and turn.patch.status.terminal)


def _numbers(numbers: Sequence[int]) -> str:
    return msgspec.json.encode(numbers).decode()
