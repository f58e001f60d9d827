"""Reads of the SQLite store. They use the reader's connection, so that they do not wait for the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import apsw

from perdure.errors import StoreError
from perdure.model.records import DeadLetter, Message, RunRecord, TopicEvent, WorkerRecord
from perdure.stores import sql_rows
from perdure.stores.paging import check_limit
from perdure.stores.results import Snapshot, StoredEntry, TopicSummary, UnfinalizedRun, UnreadableRun
from perdure.stores.sqlite.statements import RUN
from perdure.stores.sqlite.topics import EVENT_COLUMNS
from perdure.stores.writes import Observer

T = TypeVar("T")

FINALIZATION_PAGE = 500  # observers and unread events per unfinalized run

RUN_AND_PK = f"SELECT {sql_rows.RUN_COLUMNS}, pk FROM runs WHERE id = ?"
POSITION = "SELECT max(position) FROM entries WHERE run_pk = ?"
_FENCE = sql_rows.RUN_COLUMNS.split(", ").index("fence")
ENTRIES = f"SELECT {sql_rows.ENTRY_COLUMNS} FROM entries WHERE run_pk = ? AND kind <> 'marker' ORDER BY position"
INBOX = f"SELECT {sql_rows.MESSAGE_COLUMNS} FROM inbox WHERE run_pk = ? AND consumed_at IS NULL ORDER BY number"
INBOX_AFTER = f"""
    SELECT {sql_rows.MESSAGE_COLUMNS} FROM inbox
    WHERE run_pk = (SELECT pk FROM runs WHERE id = ?) AND number > ? AND consumed_at IS NULL ORDER BY number"""
HISTORY = f"""
    SELECT position, {sql_rows.ENTRY_COLUMNS} FROM entries
    WHERE run_pk = (SELECT pk FROM runs WHERE id = ?) AND position > ? AND kind <> 'marker' ORDER BY position LIMIT ?"""
SUBSCRIBED = "SELECT target FROM subscriptions WHERE run_pk = (SELECT pk FROM runs WHERE id = ?)"
WORKERS = f"SELECT {sql_rows.WORKER_COLUMNS} FROM workers ORDER BY id"
DEAD_LETTER = f"SELECT {sql_rows.DEAD_LETTER_COLUMNS} FROM dead_letters WHERE id = ?"
UNFINALIZED = f"""
    SELECT {sql_rows.RUN_COLUMNS}, pk, orphaned_children FROM runs
    WHERE unfinalized = 1 ORDER BY ended_at, id LIMIT ?"""
OBSERVERS = "SELECT observer, target FROM observers WHERE run_pk = ? ORDER BY observer, target LIMIT ?"
UNREAD_EVENTS = f"""
    SELECT {sql_rows.MESSAGE_COLUMNS} FROM inbox
    WHERE run_pk = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment') ORDER BY number LIMIT ?"""
OPEN_CHILDREN = """
    SELECT id FROM runs WHERE parent = ? AND attached = 1 AND ended_at IS NULL AND id > ? ORDER BY id LIMIT ?"""
UNFINISHED_BROADCASTS = f"""
    SELECT {EVENT_COLUMNS} FROM topic_events WHERE fan_out_cursor IS NOT NULL ORDER BY topic, event_offset LIMIT ?"""
TOPIC = f"""
    SELECT {EVENT_COLUMNS} FROM topic_events
    WHERE topic = ? AND event_offset > ? AND deleted_at IS NULL ORDER BY event_offset LIMIT ?"""
NEXT_TOPIC = """
    SELECT min(topic) FROM (
        SELECT * FROM (SELECT topic FROM topic_events WHERE queued = 1 AND topic > ?1 ORDER BY topic LIMIT 1)
        UNION ALL SELECT * FROM (SELECT topic FROM subscriptions WHERE topic > ?1 ORDER BY topic LIMIT 1))"""
QUEUED_IN_TOPIC = "SELECT count(*) FROM topic_events WHERE topic = ? AND queued = 1"
WAITING_FOR_TOPIC = "SELECT count(DISTINCT run_pk) FROM subscriptions WHERE topic = ?"


def reading(connection: apsw.Connection, read: Callable[[], T]) -> T:
    """Call `read` within one read transaction and return its result, which is one consistent snapshot."""
    connection.execute("BEGIN")
    try:
        return read()
    finally:
        connection.execute("ROLLBACK")


def load(connection: apsw.Connection, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
    return reading(connection, lambda: [_snapshot(connection, id) for id in ids])


def _snapshot(connection: apsw.Connection, id: str) -> Snapshot | UnreadableRun | None:
    row = connection.execute(RUN_AND_PK, (id,)).fetchone()
    if row is None:
        return None
    fence, pk = row[_FENCE], row[-1]
    position = max(connection.execute(POSITION, (pk,)).get or 0, fence)
    entries, unread = [*connection.execute(ENTRIES, (pk,))], [*connection.execute(INBOX, (pk,))]
    return sql_rows.snapshot_of_rows(row, position, entries, unread)


def records(connection: apsw.Connection, ids: Sequence[str]) -> list[RunRecord | UnreadableRun | None]:
    found = {row[0]: sql_rows.run_or_mark(row) for row in connection.executemany(RUN, [(id,) for id in ids])}
    return [found.get(id) for id in ids]


def inbox(connection: apsw.Connection, run_id: str, after: int) -> list[Message]:
    found = connection.execute(INBOX_AFTER, (run_id, after))
    return sql_rows.decode_all(f"message of run {run_id!r}", sql_rows.message_of_row, found)


def history(connection: apsw.Connection, run_id: str, after: int, limit: int | None) -> list[StoredEntry]:
    found = connection.execute(HISTORY, (run_id, after, -1 if limit is None else check_limit(limit)))
    return sql_rows.decode_all(f"entry of run {run_id!r}", _stored_entry, found)


def _stored_entry(row: sql_rows.Row) -> StoredEntry:
    return StoredEntry(row[0], sql_rows.entry_of_row(row[1:]))


def subscribed(connection: apsw.Connection, ids: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(target for (target,) in connection.execute(SUBSCRIBED, (id,))) for id in ids]


def workers(connection: apsw.Connection) -> list[WorkerRecord]:
    return sql_rows.decode_readable("worker", sql_rows.worker_of_row, connection.execute(WORKERS))


def dead_letters(
    connection: apsw.Connection, limit: int, after: str | None, kind: str | None, event: str | None
) -> list[DeadLetter]:
    """Return one page of dead letters, oldest first."""
    pk = 0
    if after is not None:
        pk = connection.execute("SELECT pk FROM dead_letters WHERE id = ?", (after,)).get
    if pk is None:
        raise StoreError(f"dead letter {after!r}, the last of the previous page, was removed; start at the first page")
    values = [value for value in (kind, event) if value is not None]
    found = connection.execute(
        dead_letters_query(kind is not None, event is not None), (pk, *values, check_limit(limit))
    )
    return sql_rows.decode_readable("dead letter", sql_rows.dead_letter_of_row, found)


def dead_letters_query(of_kind: bool, of_event: bool) -> str:
    terms = "pk > ?" + " AND kind = ?" * of_kind + " AND event_name = ?" * of_event
    return f"SELECT {sql_rows.DEAD_LETTER_COLUMNS} FROM dead_letters WHERE {terms} ORDER BY pk LIMIT ?"


def dead_letter(connection: apsw.Connection, dead_letter_id: str) -> DeadLetter | None:
    row = connection.execute(DEAD_LETTER, (dead_letter_id,)).fetchone()
    return sql_rows.dead_letter_of_row(row) if row is not None else None


# --- finalization, children and topics -------------------------------------------------------------------------------


def unfinalized(connection: apsw.Connection, limit: int) -> list[UnfinalizedRun]:
    """Return ended runs that need finalization, earliest end first, each with a page of what is pending."""
    where = (check_limit(limit),)

    def read() -> list[UnfinalizedRun]:
        found = [*connection.execute(UNFINALIZED, where)]
        return sql_rows.decode_readable("run", lambda row: _unfinalized_run(connection, row), found)

    return reading(connection, read)


def _unfinalized_run(connection: apsw.Connection, row: sql_rows.Row) -> UnfinalizedRun:
    pk, orphaned_children = row[-2:]
    page = (pk, FINALIZATION_PAGE)
    return UnfinalizedRun(
        record=sql_rows.run_of_row(row),
        observers=tuple(Observer(*each) for each in connection.execute(OBSERVERS, page)),
        messages=tuple(map(sql_rows.message_of_row, connection.execute(UNREAD_EVENTS, page))),
        orphaned_children=bool(orphaned_children),
    )


def open_children(connection: apsw.Connection, run_id: str, limit: int, after: str | None) -> list[str]:
    return [id for (id,) in connection.execute(OPEN_CHILDREN, (run_id, after or "", check_limit(limit)))]


def unfinished_broadcasts(connection: apsw.Connection, limit: int) -> list[TopicEvent]:
    found = connection.execute(UNFINISHED_BROADCASTS, (check_limit(limit),))
    return sql_rows.decode_readable("event", sql_rows.event_of_row, found)


def topic(connection: apsw.Connection, name: str, limit: int, after: int) -> list[TopicEvent]:
    found = connection.execute(TOPIC, (name, after, check_limit(limit)))
    return sql_rows.decode_readable("event", sql_rows.event_of_row, found)


def topics(connection: apsw.Connection, after: str | None, limit: int) -> list[TopicSummary]:
    """Return a page of topics that have queued events or waiting runs. Each is found by an index, without a scan."""
    limit = check_limit(limit)

    def read() -> list[TopicSummary]:
        found: list[TopicSummary] = []
        name = connection.execute(NEXT_TOPIC, (after or "",)).get
        while name is not None and len(found) < limit:
            queued, waiting = (connection.execute(sql, (name,)).get for sql in (QUEUED_IN_TOPIC, WAITING_FOR_TOPIC))
            found.append(TopicSummary(name, queued, waiting))
            name = connection.execute(NEXT_TOPIC, (name,)).get
        return found

    return reading(connection, read)
