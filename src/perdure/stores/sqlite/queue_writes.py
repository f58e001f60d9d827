"""Writes of queues in the SQLite store: arrivals, joins, admissions, settings and departures.

`QueueWriter` lives as long as the transaction of a batch. It writes places directly, and collects the changes of the
counters of partitions and of the place numbers, which `flush` writes. Each of its writes except arrivals without a
dedupe key and departures is a part of its own, so that all earlier changes were flushed. The rules of
`stores/queue_rules.py` decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec
from msgspec import Struct

from perdure.model.queue_records import (
    COUNT_CAP,
    PartitionOverride,
    Place,
    QueueOverride,
    QueuePause,
    QueueSettings,
    Take,
)
from perdure.model.records import queue_hint
from perdure.stores import queue_rules as rules
from perdure.stores import semantics, sql_rows
from perdure.stores.results import Admitted, Committed, LimitReached, NotQueued, QueueMissing, Superseded, WriteResult
from perdure.stores.sqlite import rows
from perdure.stores.sqlite.run_state_cache import CachedRunState, RunStateCache
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, CreateRun, LeaveQueue, Requeue

QUEUE = "SELECT pk, name, version, is_full, last_turn FROM queues WHERE name = ?"
QUEUE_BY_PK = QUEUE.replace("name = ?", "pk = ?")
WAITING_COUNT = """
    SELECT count(*) FROM (
        SELECT 1 FROM places WHERE queue_pk = ?1 AND held = 0 AND eligible_at IS NULL
        UNION ALL SELECT 1 FROM places WHERE queue_pk = ?1 AND held = 0 AND eligible_at IS NOT NULL LIMIT ?2)"""

# places
ADD_PLACE = """
    INSERT INTO places (run_pk, queue_pk, partition, priority, number, since, held, eligible_at, expires_at, latest_at,
                        dedupe)
    VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?)"""
REMOVE_PLACE = "DELETE FROM places WHERE run_pk = ? RETURNING queue_pk, partition, held, eligible_at IS NOT NULL"
END_PLACE_OF_RUN = "UPDATE runs SET waiting = 0, gate = '' WHERE pk = ? AND (waiting = 1 OR gate <> '')"
PLACES_WITH_KEY = """
    SELECT runs.id, number, places.held, eligible_at, latest_at, joined_by, run_pk, places.partition
    FROM places CROSS JOIN runs ON runs.pk = run_pk WHERE queue_pk = ? AND dedupe = ?"""
JOIN_PLACE = "UPDATE places SET joined_by = ?, eligible_at = ? WHERE run_pk = ?"
REPLACE_PAYLOAD = "UPDATE runs SET workflow = ?, version = ?, pool = ?, input = ?, updated_at = ? WHERE pk = ?"
PLACE = "SELECT queue_pk, held, priority FROM places WHERE run_pk = ?"
SET_PRIORITY = (
    "UPDATE places SET priority = ? WHERE run_pk = ?",
    "UPDATE runs SET priority = ? WHERE pk = ?",
)
LEAVE = """
    UPDATE runs SET wake_at = CASE WHEN waiting = 1 THEN ?1 ELSE wake_at END,
           held = CASE WHEN waiting = 1 THEN NULL ELSE held END, waiting = 0, gate = '', updated_at = ?1
    WHERE pk = ?2"""
WAIT = "UPDATE runs SET queue = ?, partition = ?, priority = ?, waiting = 1, gate = '', wake_at = NULL WHERE pk = ?"

# admission
DUE_PLACES = """
    SELECT run_pk, partition FROM places WHERE queue_pk = ? AND held = 0 AND eligible_at <= ?
    ORDER BY eligible_at, number LIMIT ?"""
PROMOTE = "UPDATE places SET eligible_at = NULL, number = ? WHERE run_pk = ?"
FIRST_PLACES = """
    SELECT run_pk, runs.id, expires_at, runs.held IS NOT NULL, workflow, version, pool
    FROM places INDEXED BY places_waiting CROSS JOIN runs ON runs.pk = run_pk
    WHERE queue_pk = ? AND places.partition = ? AND places.held = 0 AND eligible_at IS NULL
    ORDER BY places.priority, number LIMIT ?"""
HOLD_SLOT = "UPDATE places SET held = 1, admitted_at = ? WHERE run_pk = ?"
MAKE_DUE = "UPDATE runs SET waiting = 0, wake_at = ?, gate = ?, updated_at = ? WHERE pk = ?"
STORE_TAKE = """
    UPDATE partitions SET turn = ?, state = ?, taken = ?, slot_limit = ?, ready_at = ?, keep_until = ?
    WHERE queue_pk = ? AND partition = ?"""
STORE_ADMISSION = """
    UPDATE queues SET version = version + 1, state = ?, taken = ?, is_full = ?, last_turn = max(last_turn, ?)
    WHERE pk = ?"""

# partitions and settings
ADD_PARTITION = """
    INSERT OR IGNORE INTO partitions (queue_pk, partition, waiting, delayed, held, turn, state, taken)
    VALUES (?, ?, 0, 0, 0, ?, x'', 0)"""
COUNT_PLACES = """
    UPDATE partitions SET waiting = waiting + ?, delayed = delayed + ?, held = held + ?
    WHERE queue_pk = ? AND partition = ?"""
SETTINGS = "SELECT name, declared, override, paused FROM queues WHERE pk = ?"
ADD_QUEUE = """
    INSERT INTO queues (name, declared, override, paused, version, state, taken, is_full, last_turn)
    VALUES (?, ?, ?, ?, 1, x'', 0, 0, 0)"""
CONFIGURE = "UPDATE queues SET declared = ?, override = ?, paused = ?, version = version + 1 WHERE pk = ?"
CLEAR_LIMITS = """
    UPDATE partitions SET slot_limit = NULL, ready_at = NULL
    WHERE queue_pk = ? AND (slot_limit IS NOT NULL OR ready_at IS NOT NULL)"""
OVERRIDE_OF_PARTITION = "SELECT override FROM partitions WHERE queue_pk = ? AND partition = ?"
CONFIGURE_PARTITION = """
    UPDATE partitions SET override = ?, slot_limit = NULL, ready_at = NULL WHERE queue_pk = ? AND partition = ?"""
NEXT_VERSION = "UPDATE queues SET version = version + 1 WHERE pk = ?"
LAST_NUMBER = "SELECT value FROM counters WHERE name = 'places'"
STORE_NUMBER = "INSERT INTO counters (name, value) VALUES ('places', ?) ON CONFLICT (name) DO UPDATE SET value = ?1"

_settings = msgspec.json.Decoder(QueueSettings)
_overrides = msgspec.json.Decoder(QueueOverride)
_pauses = msgspec.json.Decoder(QueuePause)
_partition_overrides = msgspec.json.Decoder(PartitionOverride)
_encode = msgspec.json.Encoder().encode


class QueueRow(Struct, frozen=True):
    """The columns of a queue that writes need."""

    pk: int
    name: str
    version: int
    is_full: bool
    last_turn: int


class QueueWriter:
    """Writes to queues within one transaction. `changed` collects the names for change hints."""

    def __init__(self, connection: apsw.Connection, cache: RunStateCache, changed: set[str]) -> None:
        self._connection = connection
        self._cache = cache
        self._changed = changed
        self._queues: dict[str | int, QueueRow | None] = {}  # by name and by pk
        self._counts: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])  # waiting, delayed, held
        self._number: int | None = None  # the last place number, if this transaction gave one

    def flush(self) -> None:
        """Write the collected changes of counters."""
        if self._counts:
            added = [(*key, self._by_pk(key[0]).last_turn + 1) for key in self._counts]
            self._connection.executemany(ADD_PARTITION, added)
            changes = [(*counts, *key) for key, counts in sorted(self._counts.items())]
            self._connection.executemany(COUNT_PLACES, changes)
            self._counts.clear()
        if self._number is not None:
            self._connection.execute(STORE_NUMBER, (self._number,))
            self._number = None

    def _find(self, name: str) -> QueueRow | None:
        if name not in self._queues:
            self._remember(name, self._connection.execute(QUEUE, (name,)).fetchone())
        return self._queues[name]

    def _by_pk(self, pk: int) -> QueueRow:
        if pk not in self._queues:
            self._remember(pk, self._connection.execute(QUEUE_BY_PK, (pk,)).fetchone())
        queue = self._queues[pk]
        assert queue is not None
        return queue

    def _remember(self, key: str | int, row: Any) -> None:
        self._queues[key] = None if row is None else QueueRow(*row)

    def _count(self, queue_pk: int, partition: str, *, waiting: int = 0, delayed: int = 0, held: int = 0) -> None:
        if not (waiting or delayed or held):
            return
        counts = self._counts[queue_pk, partition]
        counts[0] += waiting
        counts[1] += delayed
        counts[2] += held

    def _next_number(self) -> int:
        if self._number is None:
            self._number = self._connection.execute(LAST_NUMBER).get or 0
        self._number += 1
        return self._number

    # places

    def has_queue(self, name: str) -> bool:
        """Return whether the store has this queue."""
        return self._find(name) is not None

    def refuse_place(self, write: CreateRun, place: Place) -> WriteResult | None:
        """Return why a new run gets no place: it joins another, or its queue is unknown or full. None: it arrives."""
        queue = self._find(place.queue)
        if queue is None:
            return QueueMissing()
        if place.dedupe is not None:
            found = self._connection.execute(PLACES_WITH_KEY, (queue.pk, place.dedupe)).fetchall()
            join = rules.find_duplicate(place, write.record.created_by, [_keyed_place(row) for row in found])
            if join is not None:
                [row] = [row for row in found if row[0] == join.run_id]
                self._join(write, queue, row, join)
                return join.result
        if queue.is_full:
            return LimitReached(self._connection.execute(WAITING_COUNT, (queue.pk, COUNT_CAP)).get)
        return None

    def _join(self, write: CreateRun, queue: QueueRow, row: Any, join: rules.Join) -> None:
        """Apply a start to the place that it joins."""
        id, _, _, eligible_at, _, _, run_pk, _ = row
        if not join.changes:
            return
        record = write.record
        self._connection.execute(JOIN_PLACE, (record.created_by, join.eligible_at, run_pk))
        if join.eligible_at != eligible_at:
            self._changed.add(queue_hint(queue.name))
        if join.replaces:
            payload = (record.workflow, record.version, record.pool, rows.pack(record.input), record.created_at)
            self._connection.execute(REPLACE_PAYLOAD, (*payload, run_pk))
            self._cache.drop(id)

    def arrive(self, run_pk: int, place: Place, since: float) -> sql_rows.Row:
        """Count the place of a run that begins to wait, and return the values of `ADD_PLACE`."""
        queue = self._find(place.queue)
        assert queue is not None
        is_delayed = place.eligible_at is not None
        self._count(queue.pk, place.partition, waiting=not is_delayed, delayed=is_delayed)
        self._changed.add(queue_hint(queue.name))
        order = (place.partition, place.priority, self._next_number(), since)
        return (run_pk, queue.pk, *order, place.eligible_at, place.expires_at, place.latest_at, place.dedupe)

    def wait_again(self, run_pk: int, place: Place, now: float) -> None:
        """Add the place of a stored run that was rewound after its end."""
        self._connection.execute(WAIT, (place.queue, place.partition, place.priority, run_pk))
        self._connection.execute(ADD_PLACE, self.arrive(run_pk, place, now))

    def depart(self, run_pks: Sequence[sql_rows.Row]) -> None:
        """Delete the places of these runs, if they have one: their slots are free."""
        removed: list[Any] = [*self._connection.executemany(REMOVE_PLACE, run_pks)]
        for queue_pk, partition, held, is_delayed in removed:
            if held:
                self._count(queue_pk, partition, held=-1)
                self._changed.add(queue_hint(self._by_pk(queue_pk).name))
            else:
                self._count(queue_pk, partition, waiting=is_delayed - 1, delayed=-is_delayed)

    def notify(self, run_pk: int) -> None:
        """Notify the admitter of this run's queue: the run may be admitted now."""
        found = self._connection.execute(PLACE, (run_pk,)).fetchone()
        if found is not None:
            self._changed.add(queue_hint(self._by_pk(found[0]).name))

    def requeue(self, write: Requeue, run: CachedRunState) -> WriteResult:
        """Give a waiting run another priority."""
        found = self._place(run.pk, write.queue)
        if found is None:
            return NotQueued()
        _, held, priority = found
        if priority == write.priority:
            return Committed()
        if held:
            return NotQueued()
        for sql in SET_PRIORITY:
            self._connection.execute(sql, (write.priority, run.pk))
        self._changed.add(queue_hint(write.queue))
        return Committed()

    def leave(self, write: LeaveQueue, run: CachedRunState) -> WriteResult:
        """Take a run out of its queue."""
        if self._place(run.pk, write.queue) is None:
            return NotQueued()
        self.depart([(run.pk,)])
        self._connection.execute(LEAVE, (write.now, run.pk))
        self._changed.add(write.run_id)
        return Committed()

    def _place(self, run_pk: int, queue: str) -> Any:
        """Return (queue_pk, held, priority) of the run's place in this queue, or None."""
        found = self._connection.execute(PLACE, (run_pk,)).fetchone()
        known = self._find(queue)
        return found if found is not None and known is not None and found[0] == known.pk else None

    # settings

    def configure(self, write: ConfigureQueue) -> WriteResult:
        """Create a queue or replace its settings. All its partitions forget their limits."""
        queue = self._find(write.name)
        paused = None if write.paused is None else _encode(write.paused).decode()
        settings = (_encode(write.declared).decode(), _encode(write.override).decode(), paused)
        if queue is None:
            if write.base != 0:
                return Superseded()
            self._connection.execute(ADD_QUEUE, (write.name, *settings))
            version = 1
        else:
            stored = self._settings(queue)
            if stored == (write.declared, write.override, write.paused):
                return Committed(version=queue.version)
            if stored is not None and write.base != queue.version:
                return Superseded()  # settings that cannot be read are replaced by any others
            self._connection.execute(CONFIGURE, (*settings, queue.pk))
            self._connection.execute(CLEAR_LIMITS, (queue.pk,))
            version = queue.version + 1
        self._queues.clear()
        self._changed.add(queue_hint(write.name))
        return Committed(version=version)

    def _settings(self, queue: QueueRow) -> tuple[QueueSettings, QueueOverride, QueuePause | None] | None:
        row = self._connection.execute(SETTINGS, (queue.pk,)).get
        found = sql_rows.decode_readable("queue", lambda row: settings_of(*row[1:]), [row])
        return found[0] if found else None

    def configure_partition(self, write: ConfigurePartition) -> WriteResult:
        """Set or remove the override of one partition."""
        queue = self._find(write.queue)
        if queue is None:
            return QueueMissing()
        override = None if write.override is None else _encode(write.override).decode()
        stored = self._connection.execute(OVERRIDE_OF_PARTITION, (queue.pk, write.partition)).get
        if override == stored:
            return Committed(version=queue.version)
        self._connection.execute(ADD_PARTITION, (queue.pk, write.partition, queue.last_turn + 1))
        self._connection.execute(CONFIGURE_PARTITION, (override, queue.pk, write.partition))
        self._connection.execute(NEXT_VERSION, (queue.pk,))
        self._queues.clear()
        self._changed.add(queue_hint(write.queue))
        return Committed(version=queue.version + 1)

    # admission

    def admit(self, write: Admit, store_now: float) -> WriteResult:
        """Admit waiting runs as planned, if the queue has not changed since."""
        queue = self._find(write.queue)
        if queue is None:
            return QueueMissing()
        if queue.version != write.base or rules.is_clock_wrong(write, store_now):
            return Superseded()
        promoted = self._promote(queue, write)
        serves = frozenset(write.serves)
        admitted = [id for take in write.takes for id in self._take(queue, take, write, serves)]
        last_turn = max((take.turn for take in write.takes), default=0)
        stored = (write.state, len(admitted), write.full, last_turn, queue.pk)
        self._connection.execute(STORE_ADMISSION, stored)
        self._queues.clear()
        return Admitted(tuple(admitted), promoted, queue.version + 1)

    def _promote(self, queue: QueueRow, write: Admit) -> int:
        """Make delayed places eligible whose time has come. Return their number."""
        if not write.promote:
            return 0
        due: list[Any] = [*self._connection.execute(DUE_PLACES, (queue.pk, write.now, write.promote))]
        self._connection.executemany(PROMOTE, [(self._next_number(), run_pk) for run_pk, _ in due])
        for _, partition in due:
            self._count(queue.pk, partition, waiting=1, delayed=-1)
        return len(due)

    def _take(self, queue: QueueRow, take: Take, write: Admit, serves: frozenset[tuple[str, int, str]]) -> list[str]:
        """Admit the first runs of a partition that may be admitted, and store its state. Return their ids."""
        taken: list[tuple[int, str]] = []
        if take.count:
            found = self._connection.cursor().execute(FIRST_PLACES, (queue.pk, take.partition, write.scan))
            for run_pk, id, expires_at, is_held, *code in found:
                if is_held or tuple(code) not in serves or semantics.expired(expires_at, write.now):
                    continue
                taken.append((run_pk, id))
                if len(taken) == take.count:
                    break
            found.close()
        gate = write.queue if write.gate else ""
        self._connection.executemany(HOLD_SLOT, [(write.now, pk) for pk, _ in taken])
        self._connection.executemany(MAKE_DUE, [(write.now, gate, write.now, pk) for pk, _ in taken])
        self._count(queue.pk, take.partition, waiting=-len(taken), held=len(taken))
        self._connection.execute(ADD_PARTITION, (queue.pk, take.partition, take.turn))
        stored = (take.turn, take.state, len(taken), take.limit, take.ready_at, take.keep_until)
        self._connection.execute(STORE_TAKE, (*stored, queue.pk, take.partition))
        ids = [id for _, id in taken]
        for id in ids:
            self._cache.drop(id)
        self._changed.update(ids)
        return ids


def settings_of(
    declared: str, override: str, paused: str | None
) -> tuple[QueueSettings, QueueOverride, QueuePause | None]:
    """Return a queue's settings, override and pause from their columns."""
    return _settings.decode(declared), _overrides.decode(override), None if paused is None else _pauses.decode(paused)


def partition_override_of(stored: str | None) -> PartitionOverride | None:
    """Return the override of a partition from its column."""
    return None if stored is None else _partition_overrides.decode(stored)


def _keyed_place(row: Any) -> rules.KeyedPlace:
    id, number, held, eligible_at, latest_at, joined_by = row[:6]
    return rules.KeyedPlace(id, number, bool(held), eligible_at, latest_at, joined_by)
