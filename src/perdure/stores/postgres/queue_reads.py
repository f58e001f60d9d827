"""Reads of queues of the PostgreSQL store. Each is one statement, and so reads one snapshot of the database.

A function in PL/pgSQL with several statements would mix snapshots: a slot could be returned between the count of slots
and the list of partitions. On a test 20 slots were held with a limit of 10.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.model.queue_records import (
    COUNT_CAP,
    PartitionOverride,
    PartitionView,
    PlaceCursor,
    PlaceRecord,
    QueueOverride,
    QueuePause,
    QueueSettings,
    QueueSummary,
    QueueView,
)
from perdure.stores import sql_rows as rows
from perdure.stores.paging import check_limit
from perdure.stores.postgres.pool import ConnectionPool, sql

_declared = msgspec.json.Decoder(QueueSettings)
_override = msgspec.json.Decoder(QueueOverride)
_pause = msgspec.json.Decoder(QueuePause)
_partition_override = msgspec.json.Decoder(PartitionOverride)

_PARTITION = "p.partition, least(p.waiting, {cap}) AS waiting, p.held, p.turn, p.state, p.taken, p.override, p.ready_at"
_LISTED = _PARTITION.format(cap=COUNT_CAP)
_PARTITION_COLUMNS = ("partition", "waiting", "held", "turn", "state", "taken", "override")
_ARRAYS = ", ".join(f"array_agg(x.{column} ORDER BY x.turn, x.partition) AS {column}" for column in _PARTITION_COLUMNS)


def _first_partition(queue: str, pk: str, cap: str) -> str:
    """Return SQL of the partition '' of a queue that does not count it, if it lacks nothing but perhaps time."""
    return f"""
        SELECT '' AS partition, w.count AS waiting, h.count AS held, coalesce(p.turn, {queue}.last_turn + 1) AS turn,
               coalesce(p.state, '') AS state, coalesce(p.taken, 0) AS taken, p.override, p.ready_at
        FROM (
            SELECT count(*) FROM (
                SELECT 1 FROM {{schema}}.places w
                WHERE w.queue_pk = {pk} AND w.partition = '' AND NOT w.held AND w.eligible_at IS NULL
                ORDER BY w.priority, w.number LIMIT {cap}
            ) AS x
        ) AS w
        CROSS JOIN LATERAL (
            SELECT count(*) FROM {{schema}}.places h
            WHERE w.count > 0 AND h.queue_pk = {pk} AND h.partition = '' AND h.held
        ) AS h
        LEFT JOIN {{schema}}.partitions p ON p.queue_pk = {pk} AND p.partition = ''
        WHERE NOT {queue}.is_partitioned AND w.count > 0 AND (p.slot_limit IS NULL OR h.count < p.slot_limit)"""


def _next_at(pk: str) -> str:
    """Return SQL of the times at which a queue needs an admission."""
    return f"""
        (SELECT p.eligible_at FROM {{schema}}.places p WHERE p.queue_pk = {pk} AND p.eligible_at IS NOT NULL
         ORDER BY p.eligible_at LIMIT 1),
        (SELECT p.expires_at FROM {{schema}}.places p
         WHERE p.queue_pk = {pk} AND NOT p.held AND p.expires_at IS NOT NULL
         ORDER BY p.expires_at LIMIT 1),
        (SELECT p.ready_at FROM {{schema}}.partitions p
         WHERE p.queue_pk = {pk} AND p.is_listed AND p.ready_at IS NOT NULL ORDER BY p.ready_at LIMIT 1)"""


_PK = "(SELECT q.pk FROM q)"
QUEUE_VIEW = f"""
    WITH q AS MATERIALIZED (
        SELECT * FROM {{schema}}.queues WHERE name = $1
    ), first AS MATERIALIZED (
        SELECT f.* FROM q CROSS JOIN LATERAL ({_first_partition("q", _PK, str(COUNT_CAP))}) AS f
    ), ready AS (
        SELECT {_ARRAYS}
        FROM (
            SELECT * FROM (
                (SELECT {_LISTED} FROM {{schema}}.partitions p
                 WHERE p.queue_pk = {_PK} AND p.is_listed AND p.ready_at IS NULL ORDER BY p.turn, p.partition LIMIT $3)
                UNION ALL
                (SELECT {_LISTED} FROM {{schema}}.partitions p
                 WHERE p.queue_pk = {_PK} AND p.is_listed AND p.ready_at <= $2 ORDER BY p.turn, p.partition LIMIT $3)
                UNION ALL
                SELECT * FROM first f WHERE f.ready_at IS NULL OR f.ready_at <= $2
            ) AS y
            ORDER BY y.turn, y.partition LIMIT $3
        ) AS x
    ), slots AS (
        SELECT count(*) AS held, count(a.pk) AS active
        FROM {{schema}}.places p
        LEFT JOIN LATERAL (
            SELECT r.pk FROM {{schema}}.runs r
            WHERE r.pk = p.run_pk AND (r.owner IS NOT NULL OR r.wake_at <= $2) OFFSET 0
        ) AS a ON true
        WHERE p.queue_pk = {_PK} AND p.held
    ), expired AS (
        SELECT array_agg(x.id ORDER BY x.expires_at, x.id) AS ids
        FROM (
            SELECT r.id, p.expires_at FROM {{schema}}.places p
            CROSS JOIN LATERAL (SELECT y.id FROM {{schema}}.runs y WHERE y.pk = p.run_pk OFFSET 0) AS r
            WHERE p.queue_pk = {_PK} AND NOT p.held AND p.expires_at <= $2 ORDER BY p.expires_at, r.id LIMIT $3
        ) AS x
    )
    SELECT q.name, q.version, q.state, q.declared, q.override, q.paused, q.taken, slots.held, slots.active,
           (SELECT count(*) FROM (
                SELECT 1 FROM {{schema}}.places p WHERE p.queue_pk = {_PK} AND p.eligible_at <= $2
                ORDER BY p.eligible_at LIMIT $3) AS x),
           expired.ids, least({_next_at(_PK)}, (SELECT f.ready_at FROM first f)), ready.*
    FROM q, slots, expired, ready"""

# The cost of an idle queue is that of a few lookups: ORDER BY makes the planner use the indexes, instead of a scan that
# expects an early match.
QUEUES = f"""
    SELECT q.name, q.version, q.state, q.declared, q.override, q.paused,
           {{schema}}.waiting_places(q.pk, q.count_cap),
           (SELECT count(*) FROM (
                SELECT 1 FROM {{schema}}.places p WHERE p.queue_pk = q.pk AND p.held
                ORDER BY p.partition LIMIT {COUNT_CAP}) AS x),
           first.partition IS NOT NULL AND first.ready_at IS NULL OR (
               SELECT true FROM {{schema}}.partitions p WHERE p.queue_pk = q.pk AND p.is_listed AND p.ready_at IS NULL
               ORDER BY p.turn LIMIT 1) IS NOT NULL,
           q.is_full, least({_next_at("q.pk")}, first.ready_at)
    FROM {{schema}}.queues q
    LEFT JOIN LATERAL ({_first_partition("q", "q.pk", "1")}) AS first ON true
    ORDER BY q.name"""

_PLACE = (
    "r.id, q.name, p.partition, p.priority, p.number, p.since, p.held, p.admitted_at, p.eligible_at, p.expires_at, "
    "p.dedupe"
)
PLACE = f"""
    SELECT {_PLACE} FROM {{schema}}.runs r
    JOIN {{schema}}.places p ON p.run_pk = r.pk JOIN {{schema}}.queues q ON q.pk = p.queue_pk WHERE r.id = $1"""
PLACES_AHEAD = """
    SELECT count(*) FROM (
        SELECT 1 FROM {schema}.places mine
        CROSS JOIN LATERAL (
            SELECT 1 FROM {schema}.places p
            WHERE p.queue_pk = mine.queue_pk AND p.partition = mine.partition AND NOT p.held AND p.eligible_at IS NULL
                  AND (p.priority, p.number) < (mine.priority, mine.number) LIMIT $2
        ) AS ahead
        WHERE mine.run_pk = (SELECT r.pk FROM {schema}.runs r WHERE r.id = $1) AND NOT mine.held
    ) AS x"""


async def queues(pool: ConnectionPool) -> list[QueueSummary]:
    return rows.decode_readable("queue", _summary, await pool.fetch(sql(QUEUES, pool.target)))


def _summary(row: rows.Row) -> QueueSummary:
    name, version, state, declared, override, paused, waiting, held, needs_admission, full, next_at = row
    return QueueSummary(
        name=name,
        version=version,
        state=state,
        declared=_declared.decode(declared),
        override=_override.decode(override),
        paused=None if paused is None else _pause.decode(paused),
        waiting=waiting,
        held=held,
        needs_admission=needs_admission,
        full=full,
        next_at=next_at,
    )


async def queue_view(pool: ConnectionPool, name: str, now: float, limit: int) -> QueueView | None:
    found = await pool.fetch(sql(QUEUE_VIEW, pool.target), name, now, check_limit(limit))
    return rows.decode_all("queue", _view, found)[0] if found else None


def _view(row: rows.Row) -> QueueView:
    name, version, state, declared, override, paused, taken, held, active, eligible, expired, next_at, *arrays = row
    return QueueView(
        name=name,
        version=version,
        state=state,
        declared=_declared.decode(declared),
        override=_override.decode(override),
        paused=None if paused is None else _pause.decode(paused),
        held=held,
        active=active,
        taken=taken,
        partitions=() if arrays[0] is None else tuple(map(_partition, zip(*arrays, strict=True))),
        eligible=eligible,
        expired=tuple(expired or ()),
        next_at=next_at,
    )


def _partition(row: rows.Row) -> PartitionView:
    partition, waiting, held, turn, state, taken, override = row
    return PartitionView(
        partition=partition,
        waiting=waiting,
        held=held,
        turn=turn,
        state=state,
        taken=taken,
        override=None if override is None else _partition_override.decode(override),
    )


async def places(
    pool: ConnectionPool, name: str, partition: str | None, after: PlaceCursor | None, limit: int, held: bool
) -> list[PlaceRecord]:
    text, values = places_of(name, partition, after, check_limit(limit), held)
    return [_place(row) for row in await pool.fetch(sql(text, pool.target), *values)]


def places_of(
    name: str, partition: str | None, after: PlaceCursor | None, limit: int, held: bool
) -> tuple[str, list[Any]]:
    """Return the statement of a page of places, and its values. Waiting places are read by two indexes."""
    values: list[Any] = [name, limit]
    terms = ["p.queue_pk = (SELECT q.pk FROM {schema}.queues q WHERE q.name = $1)"]
    if partition is not None:
        values.append(partition)
        terms.append(f"p.partition = ${len(values)}")
    if after is not None:
        values += [after.partition, after.priority, after.number]
        last = len(values)
        terms.append(f"(p.partition, p.priority, p.number) > (${last - 2}, ${last - 1}, ${last})")
    kinds = ("p.held",) if held else ("NOT p.held AND p.eligible_at IS NULL", "p.eligible_at IS NOT NULL")
    parts = (
        f"(SELECT p.* FROM {{schema}}.places p WHERE {' AND '.join([*terms, kind])} "
        "ORDER BY p.partition, p.priority, p.number LIMIT $2)"
        for kind in kinds
    )
    text = f"""
        SELECT {_PLACE} FROM ({" UNION ALL ".join(parts)}) AS p
        CROSS JOIN LATERAL (SELECT x.id FROM {{schema}}.runs x WHERE x.pk = p.run_pk OFFSET 0) AS r
        JOIN {{schema}}.queues q ON q.pk = p.queue_pk
        ORDER BY p.partition, p.priority, p.number LIMIT $2"""
    return text, values


async def place(pool: ConnectionPool, run_id: str) -> PlaceRecord | None:
    found = await pool.fetch(sql(PLACE, pool.target), run_id)
    return _place(found[0]) if found else None


def _place(row: rows.Row) -> PlaceRecord:
    run_id, queue, partition, priority, number, since, held, admitted_at, eligible_at, expires_at, dedupe = row
    return PlaceRecord(
        run_id=run_id,
        queue=queue,
        partition=partition,
        priority=priority,
        number=number,
        since=since,
        held=held,
        admitted_at=admitted_at,
        eligible_at=eligible_at,
        expires_at=expires_at,
        dedupe=dedupe,
    )


async def places_ahead(pool: ConnectionPool, run_id: str, cap: int) -> int:
    number: int = await pool.value(sql(PLACES_AHEAD, pool.target), run_id, cap)
    return number
