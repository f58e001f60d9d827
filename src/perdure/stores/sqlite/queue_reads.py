"""Reads of queues in the SQLite store. They use the reader's connection; each is one snapshot."""

from __future__ import annotations

from itertools import islice
from typing import Any

import apsw

from perdure.errors import StoreError
from perdure.model.queue_records import COUNT_CAP, PartitionView, PlaceCursor, PlaceRecord, QueueSummary, QueueView
from perdure.stores import sql_rows
from perdure.stores.paging import check_limit
from perdure.stores.sqlite.queries import reading
from perdure.stores.sqlite.queue_writes import partition_override_of, settings_of

_NEXT_AT = """
    SELECT min(at) FROM (
        SELECT min(eligible_at) AS at FROM places WHERE queue_pk = queues.pk AND held = 0 AND eligible_at IS NOT NULL
        UNION ALL SELECT min(expires_at) FROM places
            WHERE queue_pk = queues.pk AND held = 0 AND expires_at IS NOT NULL
        UNION ALL SELECT min(ready_at) FROM partitions
            WHERE queue_pk = queues.pk AND lacks_only_time = 1 AND ready_at IS NOT NULL)"""
_SETTINGS = "name, version, state, declared, override, paused"
QUEUES = f"""
    SELECT {_SETTINGS},
           (SELECT count(*) FROM (
                SELECT 1 FROM places WHERE queue_pk = queues.pk AND held = 0 AND eligible_at IS NULL
                UNION ALL SELECT 1 FROM places WHERE queue_pk = queues.pk AND held = 0 AND eligible_at IS NOT NULL
                LIMIT ?1)),
           (SELECT count(*) FROM (SELECT 1 FROM places WHERE queue_pk = queues.pk AND held = 1 LIMIT ?1)),
           EXISTS (SELECT 1 FROM partitions
                   WHERE queue_pk = queues.pk AND lacks_only_time = 1 AND ready_at IS NULL),
           is_full, ({_NEXT_AT})
    FROM queues ORDER BY name"""
QUEUE = f"SELECT {_SETTINGS}, taken, ({_NEXT_AT}), pk FROM queues WHERE name = ?"
HELD = "SELECT count(*) FROM places WHERE queue_pk = ? AND held = 1"
ACTIVE = """
    SELECT count(*) FROM places INDEXED BY places_held CROSS JOIN runs ON runs.pk = run_pk
    WHERE queue_pk = ? AND places.held = 1 AND (owner IS NOT NULL OR wake_at <= ?)"""
_PARTITION = "turn, partition, min(waiting, ?), held, state, taken, override"
READY = f"""
    SELECT {_PARTITION} FROM partitions INDEXED BY partitions_ready
    WHERE queue_pk = ? AND lacks_only_time = 1 AND ready_at IS NULL ORDER BY turn, partition LIMIT ?"""
TIMED = f"""
    SELECT {_PARTITION} FROM partitions INDEXED BY partitions_timed
    WHERE queue_pk = ? AND lacks_only_time = 1 AND ready_at <= ? ORDER BY turn, partition LIMIT ?"""
ELIGIBLE = """
    SELECT count(*) FROM (SELECT 1 FROM places WHERE queue_pk = ? AND held = 0 AND eligible_at <= ? LIMIT ?)"""
EXPIRED = """
    SELECT runs.id FROM places INDEXED BY places_expiring CROSS JOIN runs ON runs.pk = run_pk
    WHERE queue_pk = ? AND places.held = 0 AND expires_at <= ? ORDER BY expires_at, runs.id LIMIT ?"""

_PLACE_COLUMNS = """
    runs.id, queues.name, places.partition, places.priority, number, since, places.held, admitted_at, eligible_at,
    expires_at, dedupe"""
PLACE = f"""
    SELECT {_PLACE_COLUMNS}
    FROM runs CROSS JOIN places ON run_pk = runs.pk CROSS JOIN queues ON queues.pk = queue_pk WHERE runs.id = ?"""
AHEAD = """
    SELECT count(*) FROM (
        SELECT 1 FROM places AS earlier INDEXED BY places_waiting
        WHERE (queue_pk, partition) = (SELECT queue_pk, partition FROM places WHERE run_pk = ?1)
              AND held = 0 AND eligible_at IS NULL
              AND (priority, number) < (SELECT priority, number FROM places WHERE run_pk = ?1 AND held = 0)
        LIMIT ?2)"""


def queues(connection: apsw.Connection) -> list[QueueSummary]:
    """Return all queues by name. One that cannot be decoded is skipped and logged."""
    return sql_rows.decode_readable("queue", _summary, connection.execute(QUEUES, (COUNT_CAP,)))


def _summary(row: sql_rows.Row) -> QueueSummary:
    name, version, state, declared, override, paused, waiting, held, needs_admission, is_full, next_at = row
    settings = settings_of(declared, override, paused)
    return QueueSummary(
        name=name,
        version=version,
        state=state,
        declared=settings[0],
        override=settings[1],
        paused=settings[2],
        waiting=waiting,
        held=held,
        needs_admission=bool(needs_admission),
        full=bool(is_full),
        next_at=next_at,
    )


def queue_view(connection: apsw.Connection, name: str, now: float, limit: int) -> QueueView | None:
    """Return the input of an admission of one snapshot, or None if the queue is unknown."""
    check_limit(limit)
    return reading(connection, lambda: _view(connection, name, now, limit))


def _view(connection: apsw.Connection, name: str, now: float, limit: int) -> QueueView | None:
    row: Any = connection.execute(QUEUE, (name,)).fetchone()
    if row is None:
        return None
    _, version, state, declared, override, paused, taken, next_at, pk = row
    try:
        settings = settings_of(declared, override, paused)
    except Exception as error:
        raise StoreError(f"queue {name!r} cannot be read ({error}); see `perdure doctor`") from error
    expired = connection.execute(EXPIRED, (pk, now, limit))
    return QueueView(
        name=name,
        version=version,
        state=state,
        declared=settings[0],
        override=settings[1],
        paused=settings[2],
        held=connection.execute(HELD, (pk,)).get,
        active=connection.execute(ACTIVE, (pk, now)).get,
        taken=taken,
        partitions=_ready_partitions(connection, name, pk, now, limit),
        eligible=connection.execute(ELIGIBLE, (pk, now, limit)).get,
        expired=tuple(id for (id,) in expired),
        next_at=next_at,
    )


def _ready_partitions(
    connection: apsw.Connection, name: str, pk: Any, now: float, limit: int
) -> tuple[PartitionView, ...]:
    """Return the first ready partitions in the order of (turn, partition)."""
    ready: list[Any] = [*connection.execute(READY, (COUNT_CAP, pk, limit))]
    ready += connection.execute(TIMED, (COUNT_CAP, pk, now, limit))
    first = sorted(ready, key=lambda row: row[:2])[:limit]
    return tuple(sql_rows.decode_readable(f"partition of queue {name!r}", _partition_view, first))


def _partition_view(row: sql_rows.Row) -> PartitionView:
    turn, partition, waiting, held, state, taken, override = row
    return PartitionView(
        partition=partition,
        waiting=waiting,
        held=held,
        turn=turn,
        state=state,
        taken=taken,
        override=partition_override_of(override),
    )


def places(
    connection: apsw.Connection, name: str, partition: str | None, after: PlaceCursor | None, limit: int, *, held: bool
) -> list[PlaceRecord]:
    """Return a page of the waiting or held places of a queue, in order."""
    check_limit(limit)
    indexes = ("places_held",) if held else ("places_waiting", "places_delayed_in_order")
    conditions = {
        "places_held": "places.held = 1",
        "places_waiting": "places.held = 0 AND eligible_at IS NULL",
        "places_delayed_in_order": "places.held = 0 AND eligible_at IS NOT NULL",
    }

    def read() -> list[PlaceRecord]:
        found: list[PlaceRecord] = []
        for index in indexes:
            sql, values = places_query(index, conditions[index], partition, after)
            page = islice(connection.execute(sql, (name, *values, limit)), limit)
            found += sql_rows.decode_readable("place", place_of_row, page)
        return sorted(found, key=lambda row: (row.partition, row.priority, row.number))[:limit]

    return reading(connection, read)


def places_query(
    index: str, condition: str, partition: str | None, after: PlaceCursor | None
) -> tuple[str, list[str | int]]:
    """Return the statement that reads a page of places by this index, and its values between name and limit."""
    terms, values = [condition], list[str | int]()
    if partition is not None:
        terms.append("places.partition = ?")
        values.append(partition)
    if after is not None:
        terms.append("(places.partition, places.priority, number) > (?, ?, ?)")
        values += [after.partition, after.priority, after.number]
    return (
        f"SELECT {_PLACE_COLUMNS} FROM queues CROSS JOIN places INDEXED BY {index} ON queue_pk = queues.pk "
        f"CROSS JOIN runs ON runs.pk = run_pk WHERE name = ? AND {' AND '.join(terms)} "
        "ORDER BY places.partition, places.priority, number LIMIT ?"
    ), values


def place(connection: apsw.Connection, run_id: str) -> PlaceRecord | None:
    """Return the place of a run, or None."""
    row = connection.execute(PLACE, (run_id,)).fetchone()
    return None if row is None else place_of_row(row)


def place_of_row(row: sql_rows.Row) -> PlaceRecord:
    """Return the place of a row with the columns of a place."""
    run_id, queue, partition, priority, number, since, held, admitted_at, eligible_at, expires_at, dedupe = row
    return PlaceRecord(
        run_id=run_id,
        queue=queue,
        partition=partition,
        priority=priority,
        number=number,
        since=since,
        held=bool(held),
        admitted_at=admitted_at,
        eligible_at=eligible_at,
        expires_at=expires_at,
        dedupe=dedupe,
    )


def places_ahead(connection: apsw.Connection, run_id: str, cap: int) -> int:
    """Return how many eligible places of its queue and partition precede that of the run, at most `cap`."""

    def read() -> int:
        pk = connection.execute("SELECT pk FROM runs WHERE id = ?", (run_id,)).get
        return int(connection.execute(AHEAD, (pk, cap)).get)

    return reading(connection, read)
