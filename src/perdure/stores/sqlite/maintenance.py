"""Keeping the SQLite store small, and the keys in it. All of it runs on the writer's connection.

Whether there is anything to prune is asked before the write lock is taken: idle engines do not get in the way of busy
ones.
"""

from __future__ import annotations

import secrets

import apsw

from perdure.model.records import SigningKey
from perdure.stores.sqlite.finalization import REMOVE_LETTER
from perdure.stores.sqlite.workers import writing

PRUNABLE = """
    SELECT no FROM runs
    WHERE prune_at <= ? AND ended_at IS NOT NULL AND unsettled = 0
          AND NOT EXISTS (SELECT 1 FROM runs AS above WHERE above.id = runs.parent AND above.ended_at IS NULL)
    ORDER BY prune_at LIMIT ?"""
EXPIRED_EVENTS = """
    SELECT rowid FROM topic_events WHERE expires_at <= ? AND deleted_at IS NULL LIMIT ?"""
EXPIRED_VALUES = "SELECT run_no, key FROM published WHERE expires_at <= ? LIMIT ?"
GONE_EVENTS = "SELECT topic, place FROM topic_events WHERE deleted_at <= ? LIMIT ?"
CONSUMED_EVENTS = "SELECT rowid FROM inbox WHERE consumed_at <= ? AND kind = 'event' LIMIT ?"

_OWNED = ("entries", "inbox", "observers", "subscriptions", "topic_cursors", "published", "stream_items")
DROP_RUN = (*(f"DELETE FROM {table} WHERE run_no = ?" for table in _OWNED), "DELETE FROM runs WHERE no = ?")
LET_GO = """
    UPDATE topic_events SET assigned_to = NULL, queued = 0, fan_out_cursor = NULL, body = NULL, deleted_at = ?
    WHERE rowid = ?"""
DROP_VALUE = "DELETE FROM published WHERE run_no = ? AND key = ?"
DROP_EVENT = (
    "DELETE FROM inbox WHERE kind = 'assignment' AND name = ? AND place = ? AND consumed_at IS NOT NULL",
    "DELETE FROM topic_events WHERE topic = ? AND place = ?",
)
DROP_MESSAGE = "DELETE FROM inbox WHERE rowid = ?"

KEYS = "SELECT number, made_at, secret FROM keys WHERE name = ? ORDER BY number"
ADD_KEY = """
    INSERT INTO keys (name, number, made_at, secret)
    VALUES (?1, (SELECT coalesce(max(number), 0) + 1 FROM keys WHERE name = ?1), ?2, ?3)
    RETURNING number, made_at, secret"""


def prune(connection: apsw.Connection, now: float, limit: int, keep_ids_for: float) -> int:
    """Runs, then what has expired, then ids: each up to the limit."""
    forgotten = now - keep_ids_for
    asked = (
        (PRUNABLE, now),
        (EXPIRED_EVENTS, now),
        (EXPIRED_VALUES, now),
        (GONE_EVENTS, forgotten),
        (CONSUMED_EVENTS, forgotten),
    )
    if all(connection.execute(sql, (until, 1)).get is None for sql, until in asked):
        return 0
    with writing(connection):
        runs = connection.execute(PRUNABLE, (now, limit)).fetchall()
        for sql in DROP_RUN:
            connection.executemany(sql, runs)
        expired = connection.execute(EXPIRED_EVENTS, (now, limit)).fetchall()
        connection.executemany(LET_GO, [(now, rowid) for (rowid,) in expired])
        connection.executemany(DROP_VALUE, connection.execute(EXPIRED_VALUES, (now, limit)).fetchall())
        gone = connection.execute(GONE_EVENTS, (forgotten, limit)).fetchall()
        for sql in DROP_EVENT:
            connection.executemany(sql, gone)
        connection.executemany(DROP_MESSAGE, connection.execute(CONSUMED_EVENTS, (forgotten, limit)).fetchall())
    return len(runs)


def remove_dead_letter(connection: apsw.Connection, letter_id: str) -> bool:
    with writing(connection):
        return connection.execute(REMOVE_LETTER, (letter_id,)).get is not None


def keys(connection: apsw.Connection, name: str, now: float) -> list[SigningKey]:
    found = [SigningKey(*row) for row in connection.execute(KEYS, (name,))]
    if found:
        return found
    with writing(connection):
        found = [
            SigningKey(*row) for row in connection.execute(KEYS, (name,))
        ]  # again: another process may have been first
        return found or [_add_key(connection, name, now)]


def add_key(connection: apsw.Connection, name: str, now: float) -> SigningKey:
    with writing(connection):
        return _add_key(connection, name, now)


def _add_key(connection: apsw.Connection, name: str, now: float) -> SigningKey:
    number, created_at, secret = connection.execute(ADD_KEY, (name, now, secrets.token_bytes(32))).get
    return SigningKey(number, created_at, secret)
