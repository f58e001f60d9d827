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

from collections.abc import Sequence

import apsw
import msgspec

from perdure.clock import Clock
from perdure.model.records import Entry, RunRecord, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores import queue_rules, sql_rows
from perdure.stores import semantics as rules
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
from perdure.stores.sqlite import documents, finalization, rows
from perdure.stores.sqlite.batch_parts import Part, RunWrite, closes_receives, has_more_rows, is_alone, split_batch
from perdure.stores.sqlite.finalization import ADD_DEAD_LETTER, MESSAGE_NUMBER, REMOVE_DEAD_LETTER
from perdure.stores.sqlite.queue_writes import ADD_PLACE, END_PLACE_OF_RUN, REMOVE_PLACE, QueueWriter
from perdure.stores.sqlite.run_state_cache import (
    CachedRunState,
    RunStateCache,
    read_run_state,
    read_run_states,
    state_of_new_run,
)
from perdure.stores.sqlite.statements import (
    ADD_ENTRY,
    ADD_QUEUED_RUN,
    ADD_RUN,
    ADD_RUN_WITH_OBSERVER,
    CLEAR_NEW_MESSAGES,
    DROP_ALL,
    DROP_AT_POSITION,
    DROP_BELOW,
    DROP_MARKERS,
    END,
    FLUSH_ORDER,
    HOLD_WAITING,
    MOVE_FENCE,
    PATCH,
    RELEASE,
    RESTART,
    RUN,
    TURN_AT,
    WORKER_IS_LIVE,
)
from perdure.stores.sqlite.streams import ADD_ITEM, PUT_VALUE, SUPERSEDE, appended_rows, item_row, value_row
from perdure.stores.sqlite.tags import ADD_TAG, change_tags, tag_rows
from perdure.stores.sqlite.topics import ADD_MESSAGE, CONSUME, COUNT_MESSAGE, UNSUBSCRIBE_ALL, Topics, message_rows
from perdure.stores.sqlite.unread import FIRST_UNREAD_OF_NAME, UNREAD, UNREAD_EVENT, UNREAD_OF_NAME, UNREAD_WAKING_HELD
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


def write(
    connection: apsw.Connection, batch: Sequence[Write], cache: RunStateCache, clock: Clock
) -> tuple[list[WriteResult], frozenset[str]]:
    """Apply a batch within the caller's transaction. Return one result per write, and the names for a change hint.

    The caller clears the cache if the transaction is not committed.
    """
    writer = BatchWriter(connection, cache, clock)
    results = [result for part in split_batch(batch) for result in writer.apply_part(part)]
    return results, frozenset(writer.changed)


COMMITTED, RUNNING = Committed(), RunStatus.RUNNING

CreatedRun = tuple[RunRecord, CreateRun]
"""The row of a new run and the write that creates it."""


class BatchWriter:
    """Checks writes and collects the rows that they add. Used within one transaction."""

    def __init__(self, connection: apsw.Connection, cache: RunStateCache, clock: Clock) -> None:
        self._connection = connection
        self._cache = cache
        self._states = cache.begin(connection)
        self._pending: dict[str, list[sql_rows.Row]] = {sql: [] for sql in FLUSH_ORDER}
        self._new_runs: dict[str, list[CreatedRun]] = {ADD_RUN: [], ADD_RUN_WITH_OBSERVER: [], ADD_QUEUED_RUN: []}
        self._live_workers = cache.live_workers
        self._topics = Topics(connection)
        self._unflushed_messages: dict[tuple[int, str], int] = {}  # numbers of messages, by run and message id
        self.changed: set[str] = set()
        self._queues = QueueWriter(connection, cache, self.changed)
        self._clock = clock

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
            elif sql is REMOVE_PLACE:
                self._queues.depart(pending)
            else:
                self._connection.executemany(sql, pending)
            if sql in self._new_runs:
                self._cache_created(self._new_runs[sql])
            pending.clear()
        self._queues.flush()
        self._unflushed_messages.clear()

    def _cache_created(self, created: list[CreatedRun]) -> None:
        """Cache the states of the runs that were just inserted.

        SQLite gives consecutive primary keys to the rows of one statement, so they are known without reading.
        """
        first = self._connection.last_insert_rowid() - len(created) + 1
        for pk, (record, write) in enumerate(created, first):
            self._states[record.id] = state_of_new_run(record, pk, has_observers=write.observer is not None)
            if record.tags:
                self._pending[ADD_TAG] += tag_rows(pk, record.tags, record.created_at)
            if write.place is not None:
                self._pending[ADD_PLACE].append(self._queues.arrive(pk, write.place, record.created_at))
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
            case Admit():
                return self._queues.admit(write, self._clock.now())
            case ConfigureQueue():
                return self._queues.configure(write)
            case ConfigurePartition():
                return self._queues.configure_partition(write)
            case ReleaseRun():
                return self._release(write, self._states.get(write.run_id))
            case _:
                run = self._states.get(write.run_id)
                return RunMissing() if run is None else self._apply_to_run(write, run)

    def _apply_to_run(self, write: RunWrite, run: CachedRunState) -> WriteResult:
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
            case Requeue():
                return self._queues.requeue(write, run)
            case LeaveQueue():
                return self._queues.leave(write, run)

    # creating

    def _create(self, write: CreateRun) -> WriteResult:
        record = write.record
        if write.by is not None and not self._is_live(write.by):
            return Superseded()
        run = self._states.get(record.id)
        if run is None:
            return self._refuse_place(write) or self._create_new(write, write.received)
        stored = sql_rows.run_or_error(self._connection.execute(RUN, (record.id,)).get)
        if rules.can_replace(write, stored, run.unfinalized):
            refused = self._refuse_place(write)
            if refused is not None:
                return refused
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

    def _refuse_place(self, write: CreateRun) -> WriteResult | None:
        return None if write.place is None else self._queues.refuse_place(write, write.place)

    def _create_new(self, write: CreateRun, last_message_no: int, fence: int = 0) -> WriteResult:
        """Create a run whose id is not taken, with messages after this number; `fence`: of the run that it replaces."""
        record, observer = write.record, write.observer
        owner_is_live = record.owner is not None and self._is_live(record.owner)
        last = last_message_no + len(write.inbox)
        new = rules.initial_record(record, owner_is_live, last, fence, place=write.place)
        if write.place is not None or new.ancestor_queues:
            add, row = ADD_QUEUED_RUN, (*rows.run_row(new), *rows.queue_columns(new), observer is not None)
        else:
            add, row = ADD_RUN if observer is None else ADD_RUN_WITH_OBSERVER, rows.run_row(new)
        if has_more_rows(write):
            self._create_alone(write, add, row, new, last_message_no)
        else:
            self._pending[add].append(row)
            self._new_runs[add].append((new, write))
        if observer is not None:
            self._pending[finalization.ADD_OBSERVER_OF_NEW_RUN].append((observer.run_id, observer.target, record.id))
        if new.owner is None and not new.waiting:
            self.changed.add(record.id)
        return Created(owned=new.owner is not None)

    def _create_alone(
        self, write: CreateRun, add: str, row: sql_rows.Row, new: RunRecord, last_message_no: int
    ) -> None:
        """Create a run with its history and inbox. The run is inserted at once, because its rows need its key."""
        self._connection.execute(add, row)
        pk = self._connection.last_insert_rowid()
        self._pending[ADD_TAG] += tag_rows(pk, new.tags, new.created_at)
        if write.place is not None:
            self._pending[ADD_PLACE].append(self._queues.arrive(pk, write.place, new.created_at))
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
        if run.has_subscriptions and closes_receives(turn):
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
        if not is_alone(turn):
            return run
        self._flush()
        self._topics.unsubscribe(run.pk, extras.unsubscribe)
        self._topics.release(run.pk, extras.released_assignments, turn.now)
        if not closes_receives(turn):
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
        if patch.status.terminal and run.has_queue:
            self._end_place(run)
        if patch.status.terminal or (owner is None and wake_at is not None):
            self.changed.add(turn.run_id)

    def _end_place(self, run: CachedRunState) -> None:
        self._pending[REMOVE_PLACE].append((run.pk,))
        self._pending[END_PLACE_OF_RUN].append((run.pk,))

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
        if run.waiting:
            self._hold_waiting(run, message.kind)
        return MessageDelivered(run.last_message_no, fresh=True, owner=run.owner)

    def _hold_waiting(self, run: CachedRunState, message_kind: str) -> None:
        """Hold a run that waits in a queue, or end its hold: no worker processes its messages before its admission."""
        before = queue_rules.PAUSED_IN_QUEUE if run.held else None
        held = queue_rules.held_while_waiting(before, message_kind)
        if (held is not None) != run.held:
            self._pending[HOLD_WAITING].append((sql_rows.as_json(held), run.pk))
            run.held = held is not None
            if held is None:
                self._queues.notify(run.pk)

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
        if run.has_queue:
            self._end_place(run)
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
        place = write.place if run.status.terminal else None  # an open run keeps its place or slot
        if place is not None and not self._queues.has_queue(place.queue):
            return QueueMissing()
        finalization.rewind(self._connection, run, write)
        if place is not None:
            self._queues.wait_again(run.pk, place, write.now)
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


def _numbers(numbers: Sequence[int]) -> str:
    return msgspec.json.encode(numbers).decode()
