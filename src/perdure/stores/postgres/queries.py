"""Reads of the PostgreSQL store. Each is one statement, and so reads one snapshot of the database."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import StoreError
from perdure.model.documents import Document
from perdure.model.records import DeadLetter, Message, PublishedValue, RunRecord, StreamItem, TopicEvent, WorkerRecord
from perdure.stores import sql_rows as rows
from perdure.stores.paging import check_document_page, check_limit
from perdure.stores.postgres.pool import ConnectionPool, sql
from perdure.stores.results import Snapshot, StoredEntry, TopicSummary, UnfinalizedRun, UnreadableRun
from perdure.stores.writes import Observer

FINALIZATION_PAGE = 500  # of observers and of messages per run


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
    ORDER BY e.position LIMIT $3"""
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
TOPICS = """
    SELECT t.name, queued.count, waiting.count
    FROM {schema}.topics t
    CROSS JOIN LATERAL (SELECT count(*) FROM {schema}.topic_events e WHERE e.topic_pk = t.pk AND e.queued) AS queued
    CROSS JOIN LATERAL (
        SELECT count(DISTINCT s.run_pk) FROM {schema}.subscriptions s WHERE s.topic_pk = t.pk) AS waiting
    WHERE t.name > $1 AND (queued.count > 0 OR waiting.count > 0) ORDER BY t.name LIMIT $2"""
SUBSCRIBED = """
    SELECT r.id, s.target FROM {schema}.subscriptions s JOIN {schema}.runs r ON r.pk = s.run_pk WHERE r.id = ANY ($1)"""
PUBLISHED = """
    SELECT p.key, p.value, p.expires_at FROM {schema}.published p
    WHERE p.run_pk = (SELECT r.pk FROM {schema}.runs r WHERE r.id = $1) ORDER BY p.key"""
STREAM = f"""
    SELECT {_ITEM} FROM {{schema}}.stream_items s
    WHERE s.run_pk = (SELECT r.pk FROM {{schema}}.runs r WHERE r.id = $1) AND s.stream = $2 AND s.at_offset >= $3
    ORDER BY s.at_offset LIMIT $4"""
DEAD_LETTERS = f"""
    SELECT {_of(rows.DEAD_LETTER_COLUMNS, "d")} FROM {{schema}}.dead_letters d
    WHERE d.pk > $1 AND ($2::text IS NULL OR d.kind = $2) AND ($3::text IS NULL OR d.event_name = $3)
    ORDER BY d.pk LIMIT $4"""
DEAD_LETTER = f"SELECT {_of(rows.DEAD_LETTER_COLUMNS, 'd')} FROM {{schema}}.dead_letters d WHERE d.id = $1"
_DOCUMENT = "d.kind, d.id, d.version, d.body, d.due_at, d.expires_at"
DOCUMENT = f"SELECT {_DOCUMENT} FROM {{schema}}.documents d WHERE d.kind = $1 AND d.id = $2"
DOCUMENTS = f"""
    SELECT {_DOCUMENT} FROM {{schema}}.documents d WHERE d.kind = $1 AND d.id > $2 ORDER BY d.id LIMIT $3"""
DUE_DOCUMENTS = f"""
    SELECT {_DOCUMENT} FROM {{schema}}.documents d
    WHERE d.kind = $1 AND d.due_at <= $2 ORDER BY d.due_at, d.id LIMIT $3"""
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


async def history(pool: ConnectionPool, run_id: str, after: int, limit: int | None) -> list[StoredEntry]:
    checked = None if limit is None else check_limit(limit)
    found = await pool.fetch(sql(HISTORY, pool.target), run_id, after, checked)
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


async def topics(pool: ConnectionPool, after: str | None, limit: int) -> list[TopicSummary]:
    found = await pool.fetch(sql(TOPICS, pool.target), after or "", check_limit(limit))
    return [TopicSummary(*row) for row in found]


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


# --- documents ------------------------------------------------------------------------------------------------------


async def document(pool: ConnectionPool, kind: str, document_id: str) -> Document | None:
    found = await pool.fetch(sql(DOCUMENT, pool.target), kind, document_id)
    return _document(found[0]) if found else None


async def documents(
    pool: ConnectionPool, kind: str, after: str | None, limit: int, due_by: float | None
) -> list[Document]:
    check_document_page(after, limit, due_by)
    if due_by is not None:
        found = await pool.fetch(sql(DUE_DOCUMENTS, pool.target), kind, due_by, limit)
    else:
        found = await pool.fetch(sql(DOCUMENTS, pool.target), kind, after or "", limit)
    return [_document(row) for row in found]


def _document(row: rows.Row) -> Document:
    kind, id, version, body, due_at, expires_at = row
    return Document(kind=kind, id=id, version=version, body=body, due_at=due_at, expires_at=expires_at)


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
