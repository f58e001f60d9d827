"""Reading the SQLite store: on a connection of its own, so that nobody waits for the writer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import apsw

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import DeadLetter, Message, RunRecord, TopicEvent, WorkerRecord
from perdure.stores import sql_rows as rows
from perdure.stores.paging import check_limit, created_between, cursor_after, key_of, statuses_of
from perdure.stores.results import RunPage, Snapshot, StoredEntry, UnfinalizedRun
from perdure.stores.sqlite import rows as sqlite_rows
from perdure.stores.sqlite.batch import RUN
from perdure.stores.sqlite.topics import EVENT_COLUMNS
from perdure.stores.writes import Observer

T = TypeVar("T")

DUTY_PAGE = 500  # of what one run owes

RUN_AND_NO = f"SELECT {rows.RUN_COLUMNS}, no FROM runs WHERE id = ?"
POSITION = "SELECT max(position) FROM entries WHERE run_no = ?"
ENTRIES = f"SELECT {rows.ENTRY_COLUMNS} FROM entries WHERE run_no = ? AND kind <> 'marker' ORDER BY position"
INBOX = f"SELECT {rows.MESSAGE_COLUMNS} FROM inbox WHERE run_no = ? AND consumed_at IS NULL ORDER BY number"
INBOX_AFTER = f"""
    SELECT {rows.MESSAGE_COLUMNS} FROM inbox
    WHERE run_no = (SELECT no FROM runs WHERE id = ?) AND number > ? AND consumed_at IS NULL ORDER BY number"""
HISTORY = f"""
    SELECT position, {rows.ENTRY_COLUMNS} FROM entries
    WHERE run_no = (SELECT no FROM runs WHERE id = ?) AND position > ? AND kind <> 'marker' ORDER BY position"""
WORKERS = f"SELECT {rows.WORKER_COLUMNS} FROM workers ORDER BY id"
LETTER = f"SELECT {rows.LETTER_COLUMNS} FROM dead_letters WHERE id = ?"
UNSETTLED = f"""
    SELECT {rows.RUN_COLUMNS}, no, orphans FROM runs WHERE unsettled = 1 ORDER BY ended_at, id LIMIT ?"""
OBSERVERS = "SELECT observer, target FROM observers WHERE run_no = ? ORDER BY observer, target LIMIT ?"
DUTY_MAIL = f"""
    SELECT {rows.MESSAGE_COLUMNS} FROM inbox
    WHERE run_no = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment') ORDER BY number LIMIT ?"""
OPEN_CHILDREN = """
    SELECT id FROM runs WHERE parent = ? AND attached = 1 AND ended_at IS NULL AND id > ? ORDER BY id LIMIT ?"""
UNFINISHED = f"""
    SELECT {EVENT_COLUMNS} FROM topic_events WHERE fan_out_cursor IS NOT NULL ORDER BY topic, place LIMIT ?"""
TOPIC = f"""
    SELECT {EVENT_COLUMNS} FROM topic_events
    WHERE topic = ? AND place > ? AND deleted_at IS NULL ORDER BY place LIMIT ?"""


def reading(connection: apsw.Connection, read: Callable[[], T]) -> T:
    """What `read` returns, all of it as of one moment."""
    connection.execute("BEGIN")
    try:
        return read()
    finally:
        connection.execute("ROLLBACK")


def load(connection: apsw.Connection, ids: Sequence[str]) -> list[Snapshot | None]:
    return reading(connection, lambda: [_snapshot(connection, id) for id in ids])


def _snapshot(connection: apsw.Connection, id: str) -> Snapshot | None:
    row = connection.execute(RUN_AND_NO, (id,)).fetchone()
    if row is None:
        return None
    record, where = rows.run_of_row(row), (row[-1],)
    return Snapshot(
        record=record,
        position=max(connection.execute(POSITION, where).get or 0, record.fence),
        entries=tuple(map(rows.entry_of_row, connection.execute(ENTRIES, where))),
        inbox=tuple(map(rows.message_of_row, connection.execute(INBOX, where))),
    )


def records(connection: apsw.Connection, ids: Sequence[str]) -> list[RunRecord | None]:
    found = {row[0]: rows.run_of_row(row) for row in connection.executemany(RUN, [(id,) for id in ids])}
    return [found.get(id) for id in ids]


def inbox(connection: apsw.Connection, run_id: str, after: int) -> list[Message]:
    return [rows.message_of_row(row) for row in connection.execute(INBOX_AFTER, (run_id, after))]


def history(connection: apsw.Connection, run_id: str, after: int) -> list[StoredEntry]:
    found = connection.execute(HISTORY, (run_id, after))
    return [StoredEntry(position, rows.entry_of_row(tuple(entry))) for position, *entry in found]


def workers(connection: apsw.Connection) -> list[WorkerRecord]:
    return [rows.worker_of_row(row) for row in connection.execute(WORKERS)]


def dead_letters(
    connection: apsw.Connection, limit: int, after: str | None, kind: str | None, event: str | None
) -> list[DeadLetter]:
    """In the order in which they came."""
    no = 0
    if after is not None:
        no = connection.execute("SELECT no FROM dead_letters WHERE id = ?", (after,)).get
    if no is None:
        raise StoreError(f"dead letter {after!r}, where the page before ended, is gone; begin with the first page")
    values = [value for value in (kind, event) if value is not None]
    found = connection.execute(letters_query(kind is not None, event is not None), (no, *values, check_limit(limit)))
    return [rows.letter_of_row(row) for row in found]


def letters_query(of_kind: bool, of_event: bool) -> str:
    terms = "no > ?" + " AND kind = ?" * of_kind + " AND event_name = ?" * of_event
    return f"SELECT {rows.LETTER_COLUMNS} FROM dead_letters WHERE {terms} ORDER BY no LIMIT ?"


def dead_letter(connection: apsw.Connection, letter_id: str) -> DeadLetter | None:
    row = connection.execute(LETTER, (letter_id,)).fetchone()
    return rows.letter_of_row(row) if row is not None else None


# --- duties, families and topics -----------------------------------------------------------------------------------


def unsettled(connection: apsw.Connection, limit: int) -> list[UnfinalizedRun]:
    owing = (check_limit(limit),)
    return reading(connection, lambda: [_owing(connection, row) for row in connection.execute(UNSETTLED, owing)])


def _owing(connection: apsw.Connection, row: rows.Row) -> UnfinalizedRun:
    no, orphans = row[-2:]
    return UnfinalizedRun(
        record=rows.run_of_row(row),
        observers=tuple(Observer(*each) for each in connection.execute(OBSERVERS, (no, DUTY_PAGE))),
        messages=tuple(map(rows.message_of_row, connection.execute(DUTY_MAIL, (no, DUTY_PAGE)))),
        orphans=bool(orphans),
    )


def open_children(connection: apsw.Connection, run_id: str, limit: int, after: str | None) -> list[str]:
    return [id for (id,) in connection.execute(OPEN_CHILDREN, (run_id, after or "", check_limit(limit)))]


def unfinished(connection: apsw.Connection, limit: int) -> list[TopicEvent]:
    return [rows.event_of_row(row) for row in connection.execute(UNFINISHED, (check_limit(limit),))]


def topic(connection: apsw.Connection, name: str, limit: int, after: int) -> list[TopicEvent]:
    return [rows.event_of_row(row) for row in connection.execute(TOPIC, (name, after, check_limit(limit)))]


# --- pages of runs -------------------------------------------------------------------------------------------------


def runs(connection: apsw.Connection, query: RunQuery) -> RunPage:
    """Asks for one more than the page holds, to know whether there is a next one."""
    limit = check_limit(query.limit)
    where, values = conditions(query)
    sql = f"SELECT {rows.RUN_COLUMNS} FROM runs WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ?"
    found = [rows.run_of_row(row) for row in connection.execute(sql, (*values, limit + 1))]
    page = tuple(found[:limit])
    more = len(found) > limit
    return RunPage(page, cursor_after(page[-1].created_at, page[-1].id) if more else None)


def conditions(query: RunQuery) -> tuple[str, list[sqlite_rows.Stored]]:
    """A query as the terms of a WHERE and their values."""
    terms: list[tuple[str, list[sqlite_rows.Stored]]] = [("TRUE", [])]
    statuses = statuses_of(query)
    if statuses is not None:
        terms.append((f"status IN ({','.join('?' * len(statuses))})", list(statuses)))
    if query.workflow is not None:
        terms.append(("workflow = ?", [query.workflow]))
    if query.parent is not None:
        terms.append(("parent = ?", [query.parent]))
    if query.id_prefix:
        terms.append(("id >= ? AND id < ?", [query.id_prefix, query.id_prefix + chr(sys.maxunicode)]))
    since, until = created_between(query)
    if since is not None:
        terms.append(("created_at >= ?", [since]))
    if until is not None:
        terms.append(("created_at < ?", [until]))
    for key, value in (query.tags or {}).items():
        terms.append(("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = ?)", [key, value]))
    if query.after is not None:
        terms.append(("(created_at, id) < (?, ?)", [*key_of(query.after)]))
    return " AND ".join(term for term, _ in terms), [value for _, values in terms for value in values]
