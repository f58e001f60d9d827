"""Reads of the PostgreSQL store. Each is one statement, and so reads one snapshot of the database."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.model.queries import Awaited, RunQuery
from perdure.model.records import DeadLetter, Message, PublishedValue, RunRecord, StreamItem, TopicEvent, WorkerRecord
from perdure.stores import sql_rows as rows
from perdure.stores.paging import check_limit, created_between, cursor_after, key_of, statuses_of
from perdure.stores.postgres.pool import ConnectionPool, sql
from perdure.stores.results import RunPage, Snapshot, StoredEntry, UnfinalizedRun, UnreadableRun
from perdure.stores.writes import Observer

FINALIZATION_PAGE = 500  # of observers and of messages per run
WAITING_PAGE = 200  # runs per statement of a search for runs that wait


def _of(columns: str, table: str) -> str:
    return ", ".join(f"{table}.{column}" for column in columns.split(", "))


def _arrays(columns: str, table: str) -> str:
    """Return SQL that aggregates each column of a table's rows into an array, so that many rows are one row."""
    return ", ".join(f"array_agg({table}.{column})" for column in columns.split(", "))


_RUN = _of(rows.RUN_COLUMNS, "r")
_EVENT = "t.name, e.id, e.body, e.sent_at, e.delivery, e.consume, e.expires_at, e.sender, e.event_offset, e.event_id"
_ITEM = "s.stream, s.value, s.location, s.at, s.attempt, s.writer, s.at_offset, s.superseded"
_ENTRY_ARRAYS = _arrays(rows.ENTRY_COLUMNS, "x")
_MESSAGE_ARRAYS = _arrays(rows.MESSAGE_COLUMNS, "x")
_RUN_WIDTH = len(rows.RUN_COLUMNS.split(", "))
_ENTRY_WIDTH = len(rows.ENTRY_COLUMNS.split(", "))
_MESSAGE_WIDTH = len(rows.MESSAGE_COLUMNS.split(", "))

RECORDS = f"SELECT {_RUN} FROM {{schema}}.runs r WHERE r.id = ANY ($1)"
LOAD = f"""
    SELECT {_RUN}, greatest(r.fence, (SELECT max(e.position) FROM {{schema}}.entries e WHERE e.run_pk = r.pk), 0),
           history.*, unread.*
    FROM {{schema}}.runs r
    CROSS JOIN LATERAL (
        SELECT {_ENTRY_ARRAYS} FROM (
            SELECT * FROM {{schema}}.entries e WHERE e.run_pk = r.pk AND e.kind <> 'marker' ORDER BY e.position
        ) AS x
    ) AS history
    CROSS JOIN LATERAL (
        SELECT {_MESSAGE_ARRAYS} FROM (
            SELECT * FROM {{schema}}.inbox i WHERE i.run_pk = r.pk AND i.consumed_at IS NULL ORDER BY i.number
        ) AS x
    ) AS unread
    WHERE r.id = ANY ($1)"""
INBOX = f"""
    SELECT {_of(rows.MESSAGE_COLUMNS, "i")} FROM {{schema}}.inbox i
    WHERE i.run_pk = (SELECT r.pk FROM {{schema}}.runs r WHERE r.id = $1) AND i.number > $2 AND i.consumed_at IS NULL
    ORDER BY i.number"""
HISTORY = f"""
    SELECT e.position, {_of(rows.ENTRY_COLUMNS, "e")} FROM {{schema}}.entries e
    WHERE e.run_pk = (SELECT r.pk FROM {{schema}}.runs r WHERE r.id = $1) AND e.position > $2 AND e.kind <> 'marker'
    ORDER BY e.position"""
WORKERS = f"SELECT {rows.WORKER_COLUMNS} FROM {{schema}}.workers ORDER BY id"
UNFINALIZED = f"""
    SELECT {_RUN}, r.orphaned_children, observers.*, unread.*
    FROM {{schema}}.runs r
    CROSS JOIN LATERAL (
        SELECT array_agg(x.observer), array_agg(x.target) FROM (
            SELECT * FROM {{schema}}.observers o WHERE o.run_pk = r.pk ORDER BY o.observer, o.target LIMIT $2
        ) AS x
    ) AS observers
    CROSS JOIN LATERAL (
        SELECT {_MESSAGE_ARRAYS} FROM (
            SELECT * FROM {{schema}}.inbox i
            WHERE i.run_pk = r.pk AND i.consumed_at IS NULL AND i.kind IN ('event', 'assignment')
            ORDER BY i.number LIMIT $2
        ) AS x
    ) AS unread
    WHERE r.unfinalized ORDER BY r.ended_at, r.id LIMIT $1"""
OPEN_CHILDREN = """
    SELECT r.id FROM {schema}.runs r
    WHERE r.parent = $1 AND r.attached AND r.ended_at IS NULL AND r.id > $2 ORDER BY r.id LIMIT $3"""
UNFINISHED = f"""
    SELECT {_EVENT} FROM {{schema}}.topic_events e JOIN {{schema}}.topics t ON t.pk = e.topic_pk
    WHERE e.fan_out_cursor IS NOT NULL ORDER BY t.name, e.event_offset LIMIT $1"""
TOPIC = f"""
    SELECT {_EVENT} FROM {{schema}}.topics t JOIN {{schema}}.topic_events e ON e.topic_pk = t.pk
    WHERE t.name = $1 AND e.event_offset > $2 AND e.deleted_at IS NULL ORDER BY e.event_offset LIMIT $3"""
SUBSCRIBED = """
    SELECT r.id, s.target FROM {schema}.subscriptions s JOIN {schema}.runs r ON r.pk = s.run_pk WHERE r.id = ANY ($1)"""
PUBLISHED = """
    SELECT p.key, p.value, p.expires_at FROM {schema}.published p
    WHERE p.run_pk = (SELECT r.pk FROM {schema}.runs r WHERE r.id = $1) ORDER BY p.key"""
STREAM = f"""
    SELECT {_ITEM} FROM {{schema}}.stream_items s
    WHERE s.run_pk = (SELECT r.pk FROM {{schema}}.runs r WHERE r.id = $1) AND s.stream = $2 AND s.at_offset >= $3
    ORDER BY s.at_offset LIMIT $4"""
# Runs that may wait for an event, or for the end of a run. {number} is that of the name. The planner must read the runs
# by these keys, not search all suspended runs for them: OFFSET 0 keeps it from moving other conditions in here.
SUBSCRIBED_TO = """
    (SELECT * FROM {{schema}}.runs WHERE pk = ANY (ARRAY(
        SELECT s.run_pk FROM {{schema}}.subscriptions s JOIN {{schema}}.topics t ON t.pk = s.topic_pk
        WHERE t.name = ${number})) OFFSET 0)"""
OBSERVES = """
    (SELECT * FROM {{schema}}.runs WHERE id = ANY (ARRAY(
        SELECT o.observer FROM {{schema}}.observers o
        WHERE o.run_pk = (SELECT child.pk FROM {{schema}}.runs child WHERE child.id = ${number}))) OFFSET 0)"""
DEAD_LETTERS = f"""
    SELECT {_of(rows.DEAD_LETTER_COLUMNS, "d")} FROM {{schema}}.dead_letters d
    WHERE d.pk > $1 AND ($2::text IS NULL OR d.kind = $2) AND ($3::text IS NULL OR d.event_name = $3)
    ORDER BY d.pk LIMIT $4"""
DEAD_LETTER = f"SELECT {_of(rows.DEAD_LETTER_COLUMNS, 'd')} FROM {{schema}}.dead_letters d WHERE d.id = $1"
DEAD_LETTER_PK = "SELECT d.pk FROM {schema}.dead_letters d WHERE d.id = $1"


# --- runs with their history and inbox ------------------------------------------------------------------------------


async def records(pool: ConnectionPool, ids: Sequence[str]) -> list[RunRecord | UnreadableRun | None]:
    found = {row[0]: rows.run_or_mark(row) for row in await pool.fetch(sql(RECORDS, pool.target), list(ids))}
    return [found.get(id) for id in ids]


async def load(pool: ConnectionPool, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
    found = {row[0]: _snapshot(row) for row in await pool.fetch(sql(LOAD, pool.target), list(ids))}
    return [found.get(id) for id in ids]


def _snapshot(row: rows.Row) -> Snapshot | UnreadableRun:
    entries = row[_RUN_WIDTH + 1 : _RUN_WIDTH + 1 + _ENTRY_WIDTH]
    messages = row[_RUN_WIDTH + 1 + _ENTRY_WIDTH :]
    return rows.snapshot_of_rows(row, row[_RUN_WIDTH], _transposed(entries), _transposed(messages))


def _transposed(columns: rows.Row) -> list[rows.Row]:
    """Return the rows that these arrays are the columns of. The arrays of no rows are NULL."""
    return [] if columns[0] is None else list(zip(*columns, strict=True))


async def inbox(pool: ConnectionPool, run_id: str, after: int) -> list[Message]:
    found = await pool.fetch(sql(INBOX, pool.target), run_id, after)
    return rows.decode_all(f"message of run {run_id!r}", rows.message_of_row, found)


async def history(pool: ConnectionPool, run_id: str, after: int) -> list[StoredEntry]:
    found = await pool.fetch(sql(HISTORY, pool.target), run_id, after)
    return rows.decode_all(f"entry of run {run_id!r}", _stored_entry, found)


def _stored_entry(row: rows.Row) -> StoredEntry:
    return StoredEntry(row[0], rows.entry_of_row(row[1:]))


async def unfinalized(pool: ConnectionPool, limit: int) -> list[UnfinalizedRun]:
    found = await pool.fetch(sql(UNFINALIZED, pool.target), check_limit(limit), FINALIZATION_PAGE)
    return rows.decode_readable("run", _unfinalized_run, found)


def _unfinalized_run(row: rows.Row) -> UnfinalizedRun:
    observers = _transposed(row[_RUN_WIDTH + 1 : _RUN_WIDTH + 3])
    return UnfinalizedRun(
        record=rows.run_of_row(row),
        observers=tuple(Observer(*each) for each in observers),
        messages=tuple(map(rows.message_of_row, _transposed(row[_RUN_WIDTH + 3 :]))),
        orphaned_children=row[_RUN_WIDTH],
    )


async def open_children(pool: ConnectionPool, run_id: str, limit: int, after: str | None) -> list[str]:
    found = await pool.fetch(sql(OPEN_CHILDREN, pool.target), run_id, after or "", check_limit(limit))
    return [row[0] for row in found]


# --- topics, published values and streams ---------------------------------------------------------------------------


async def unfinished(pool: ConnectionPool, limit: int) -> list[TopicEvent]:
    found = await pool.fetch(sql(UNFINISHED, pool.target), check_limit(limit))
    return rows.decode_readable("event", rows.event_of_row, found)


async def topic(pool: ConnectionPool, name: str, limit: int, after: int) -> list[TopicEvent]:
    found = await pool.fetch(sql(TOPIC, pool.target), name, after, check_limit(limit))
    return rows.decode_readable("event", rows.event_of_row, found)


async def subscribed(pool: ConnectionPool, ids: Sequence[str]) -> list[frozenset[str]]:
    targets: dict[str, set[str]] = {id: set() for id in ids}
    for id, target in await pool.fetch(sql(SUBSCRIBED, pool.target), list(ids)):
        targets[id].add(target)
    return [frozenset(targets[id]) for id in ids]


async def published(pool: ConnectionPool, run_id: str) -> list[PublishedValue]:
    return [PublishedValue(*row) for row in await pool.fetch(sql(PUBLISHED, pool.target), run_id)]


async def stream(pool: ConnectionPool, run_id: str, name: str, start: int, limit: int) -> list[StreamItem]:
    found = await pool.fetch(sql(STREAM, pool.target), run_id, name, start, check_limit(limit))
    return [rows.item_of_row(row) for row in found]


# --- workers and dead letters ---------------------------------------------------------------------------------------


async def workers(pool: ConnectionPool) -> list[WorkerRecord]:
    return rows.decode_readable("worker", rows.worker_of_row, await pool.fetch(sql(WORKERS, pool.target)))


async def dead_letters(
    pool: ConnectionPool, limit: int, after: str | None, kind: str | None, event: str | None
) -> list[DeadLetter]:
    """Return a page of dead letters, oldest first."""
    pk = 0 if after is None else await pool.value(sql(DEAD_LETTER_PK, pool.target), after)
    if pk is None:
        raise StoreError(f"dead letter {after!r}, the end of the previous page, is missing; start with the first page")
    found = await pool.fetch(sql(DEAD_LETTERS, pool.target), pk, kind, event, check_limit(limit))
    return rows.decode_readable("dead letter", rows.dead_letter_of_row, found)


async def dead_letter(pool: ConnectionPool, dead_letter_id: str) -> DeadLetter | None:
    found = await pool.fetch(sql(DEAD_LETTER, pool.target), dead_letter_id)
    return rows.dead_letter_of_row(found[0]) if found else None


# --- pages of runs --------------------------------------------------------------------------------------------------


async def runs(pool: ConnectionPool, query: RunQuery) -> RunPage:
    """Return a page of runs. Reads one run more than the page has, to find out whether there is a next page."""
    limit = check_limit(query.limit)
    if query.waiting_for is None:
        return rows.page_of_rows(await _newest_first(pool, query, limit + 1), limit)
    found: list[rows.Row] = []
    size = max(limit + 1, WAITING_PAGE)
    while len(found) <= limit:
        page = await _newest_first(pool, query, size)
        found += (row for row in page if rows.may_wait(query, row))
        if len(page) < size:
            break
        query = replace(query, after=cursor_after(page[-1][4], page[-1][0]))
    return rows.page_of_rows(found[: limit + 1], limit)


async def _newest_first(pool: ConnectionPool, query: RunQuery, size: int) -> list[rows.Row]:
    source, where, values = select_runs(query)
    text = f"SELECT {_RUN} FROM {source} r WHERE {where} ORDER BY r.created_at DESC, r.id DESC LIMIT {size}"
    return await pool.fetch(sql(text, pool.target), *values)


def select_runs(query: RunQuery) -> tuple[str, str, list[Any]]:
    """Return what a query reads from, the terms of its WHERE clause, and the values of both."""
    where, values = conditions(query)
    awaited = query.awaited
    if awaited is None or awaited.name is None or awaited.kind not in ("event", "child"):
        return "{schema}.runs", where, values
    source = SUBSCRIBED_TO if awaited.kind == "event" else OBSERVES
    return source.format(number=len(values) + 1), where, [*values, awaited.name]


def conditions(query: RunQuery) -> tuple[str, list[Any]]:
    """Return a query as the terms of a WHERE clause and their values."""
    terms: list[str] = ["TRUE"]
    values: list[Any] = []

    def term(text: str, *arguments: Any) -> None:
        numbers = [f"${len(values) + n}" for n in range(1, len(arguments) + 1)]
        terms.append(text.format(*numbers))
        values.extend(arguments)

    if query.held is not None:
        terms.append("r.held_kind IS NOT NULL AND r.status = 'suspended'")
    if isinstance(query.held, str):
        term("r.held_kind = {}", query.held)
    if query.awaited is not None:
        for text, *arguments in _wait_terms(query.awaited):
            term(text, *arguments)
    statuses = statuses_of(query)
    if statuses is not None:
        term("r.status = ANY ({}::text[])", [*statuses])
    if query.workflow is not None:
        term("r.workflow = {}", query.workflow)
    if query.parent is not None:
        term("r.parent = {}", query.parent)
    if query.id_prefix:
        term("r.id >= {} AND r.id < {}", query.id_prefix, query.id_prefix + chr(sys.maxunicode))
    since, until = created_between(query)
    if since is not None:
        term("r.created_at >= {}", since)
    if until is not None:
        term("r.created_at < {}", until)
    if query.tags:
        term("r.tags @> {}::jsonb", msgspec.json.encode(query.tags).decode())
    if query.after is not None:
        term("(r.created_at, r.id) < ({}, {})", *key_of(query.after))
    return " AND ".join(terms), values


def _wait_terms(awaited: Awaited) -> list[tuple[str, ...]]:
    """Return terms that few runs meet which do not wait for this, with their values; `rows.may_wait` checks others."""
    if awaited.kind == "held":
        return [("r.held_kind IS NOT NULL AND r.status = 'suspended'",)]
    suspended = ("r.status = 'suspended'",)
    if awaited.name is not None and awaited.kind in ("event", "child"):
        return [suspended]  # see `select_runs`
    return [suspended, *(("strpos(r.waits, {}) > 0", text) for text in rows.wait_texts(awaited))]
