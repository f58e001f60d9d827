"""What runs show in the SQLite store: values under keys, and streams of items."""

from __future__ import annotations

import apsw

from perdure.model.records import PublishedValue, StreamItem
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.paging import check_limit
from perdure.stores.sqlite import rows as sqlite_rows
from perdure.stores.writes import AppendStream

SHOW = """
    INSERT INTO published (run_no, key, value, expires_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (run_no, key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at"""
SHOWN = """
    SELECT key, value, expires_at FROM published WHERE run_no = (SELECT no FROM runs WHERE id = ?) ORDER BY key"""
ADD_ITEM = """
    INSERT INTO stream_items (run_no, stream, value, location, at, attempt, writer, epoch, offset, nth)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, (SELECT epoch FROM runs WHERE no = ?1),
            (SELECT coalesce(max(offset) + 1, 0) FROM stream_items WHERE run_no = ?1 AND stream = ?2),
            (SELECT coalesce(max(nth) + 1, 0) FROM stream_items WHERE run_no = ?1 AND writer = ?7))"""
WRITTEN = "SELECT coalesce(max(nth) + 1, 0) FROM stream_items WHERE run_no = ? AND writer = ?"
SUPERSEDE_ALL = """
    UPDATE stream_items SET superseded = 1
    WHERE run_no = ?1 AND location = ?2 AND superseded = 0 AND epoch = (SELECT epoch FROM runs WHERE no = ?1)"""
SUPERSEDE = f"{SUPERSEDE_ALL} AND writer <> ?3"
ITEMS = """
    SELECT stream, value, location, at, attempt, writer, offset, superseded FROM stream_items
    WHERE run_no = (SELECT no FROM runs WHERE id = ?) AND stream = ? AND offset >= ? ORDER BY offset LIMIT ?"""


def value_row(run_no: int, shown: PublishedValue) -> rows.Row:
    return run_no, shown.key, sqlite_rows.pack(shown.value), shown.expires_at


def item_row(run_no: int, item: StreamItem) -> rows.Row:
    """An item that gets the next offset of its stream."""
    return run_no, item.stream, sqlite_rows.pack(item.value), item.location, item.at, item.attempt, item.writer


def appended_rows(connection: apsw.Connection, run_no: int, write: AppendStream) -> list[rows.Row]:
    """The items that a step appends and that are not there yet."""
    there = connection.execute(WRITTEN, (run_no, write.items[0].writer)).get
    return [item_row(run_no, item) for item in rules.unwritten_items(write, there)]


def published(connection: apsw.Connection, run_id: str) -> list[PublishedValue]:
    found = connection.execute(SHOWN, (run_id,))
    return [PublishedValue(key, rows.unpack(value) or b"", expires_at) for key, value, expires_at in found]


def stream(connection: apsw.Connection, run_id: str, name: str, start: int, limit: int) -> list[StreamItem]:
    return [rows.item_of_row(row) for row in connection.execute(ITEMS, (run_id, name, start, check_limit(limit)))]
