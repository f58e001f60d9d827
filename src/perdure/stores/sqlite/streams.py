"""Published values and streams of runs in the SQLite store."""

from __future__ import annotations

import apsw

from perdure.model.records import PublishedValue, StreamItem
from perdure.stores import semantics as rules
from perdure.stores import sql_rows
from perdure.stores.paging import check_limit
from perdure.stores.sqlite import rows
from perdure.stores.writes import AppendStream

PUT_VALUE = """
    INSERT INTO published (run_pk, key, value, expires_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (run_pk, key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at"""
VALUES_OF_RUN = """
    SELECT key, value, expires_at FROM published WHERE run_pk = (SELECT pk FROM runs WHERE id = ?) ORDER BY key"""
ADD_ITEM = """
    INSERT INTO stream_items (run_pk, stream, value, location, at, attempt, writer, epoch, offset, writer_seq)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, (SELECT epoch FROM runs WHERE pk = ?1),
            (SELECT coalesce(max(offset) + 1, 0) FROM stream_items WHERE run_pk = ?1 AND stream = ?2),
            (SELECT coalesce(max(writer_seq) + 1, 0) FROM stream_items WHERE run_pk = ?1 AND writer = ?7))"""
NEXT_WRITER_SEQ = "SELECT coalesce(max(writer_seq) + 1, 0) FROM stream_items WHERE run_pk = ? AND writer = ?"
SUPERSEDE_ALL = """
    UPDATE stream_items SET superseded = 1
    WHERE run_pk = ?1 AND location = ?2 AND superseded = 0 AND epoch = (SELECT epoch FROM runs WHERE pk = ?1)"""
SUPERSEDE = f"{SUPERSEDE_ALL} AND writer <> ?3"
ITEMS = """
    SELECT stream, value, location, at, attempt, writer, offset, superseded FROM stream_items
    WHERE run_pk = (SELECT pk FROM runs WHERE id = ?) AND stream = ? AND offset >= ? ORDER BY offset LIMIT ?"""


def value_row(run_pk: int, value: PublishedValue) -> rows.Row:
    return run_pk, value.key, rows.pack(value.value), value.expires_at


def item_row(run_pk: int, item: StreamItem) -> rows.Row:
    """Return the row of an item. The insert gives it the next offset of its stream."""
    return run_pk, item.stream, rows.pack(item.value), item.location, item.at, item.attempt, item.writer


def appended_rows(connection: apsw.Connection, run_pk: int, write: AppendStream) -> list[rows.Row]:
    """Return the rows of those items that an earlier call of the same write has not stored yet."""
    stored = connection.execute(NEXT_WRITER_SEQ, (run_pk, write.items[0].writer)).get
    return [item_row(run_pk, item) for item in rules.unwritten_items(write, stored)]


def published(connection: apsw.Connection, run_id: str) -> list[PublishedValue]:
    found = connection.execute(VALUES_OF_RUN, (run_id,))
    return [PublishedValue(key, sql_rows.unpack(value) or b"", expires_at) for key, value, expires_at in found]


def stream(connection: apsw.Connection, run_id: str, name: str, start: int, limit: int) -> list[StreamItem]:
    found = connection.execute(ITEMS, (run_id, name, start, check_limit(limit)))
    return [sql_rows.item_of_row(row) for row in found]
