"""Pruning, dead-letter removal and signing keys of the SQLite store. All functions use the writer's connection.

Pruning looks for rows to delete before it takes the write lock, so that idle workers do not block busy ones.
"""

from __future__ import annotations

import secrets
from typing import Any

import apsw

from perdure.model.records import SigningKey
from perdure.stores.results import RETAINED_REASONS, Committed, RunMissing, RunRetained
from perdure.stores.sqlite import documents
from perdure.stores.sqlite.finalization import DROP_RUN, REMOVE_DEAD_LETTER
from perdure.stores.sqlite.workers import writing

PRUNABLE = """
    SELECT pk, id FROM runs
    WHERE prune_at <= ? AND ended_at IS NOT NULL AND unfinalized = 0
          AND NOT EXISTS (SELECT 1 FROM runs AS above WHERE above.id = runs.parent AND above.ended_at IS NULL)
    ORDER BY prune_at LIMIT ?"""
DELETABLE = """
    SELECT pk, ended_at IS NULL, unfinalized,
           EXISTS (SELECT 1 FROM runs AS above WHERE above.id = runs.parent AND above.ended_at IS NULL)
    FROM runs WHERE id = ?"""
EXPIRED_EVENTS = """
    SELECT rowid FROM topic_events WHERE expires_at <= ? AND deleted_at IS NULL LIMIT ?"""
EXPIRED_VALUES = "SELECT run_pk, key FROM published WHERE expires_at <= ? LIMIT ?"
DELETED_EVENTS = "SELECT topic, event_offset FROM topic_events WHERE deleted_at <= ? LIMIT ?"
CONSUMED_EVENTS = "SELECT rowid FROM inbox WHERE consumed_at <= ? AND kind = 'event' LIMIT ?"

DELETE_EXPIRED_EVENT = """
    UPDATE topic_events SET assigned_to = NULL, queued = 0, fan_out_cursor = NULL, body = NULL, deleted_at = ?
    WHERE rowid = ?"""
DROP_VALUE = "DELETE FROM published WHERE run_pk = ? AND key = ?"
DROP_EVENT = (
    "DELETE FROM inbox WHERE kind = 'assignment' AND name = ? AND topic_offset = ? AND consumed_at IS NOT NULL",
    "DELETE FROM topic_events WHERE topic = ? AND event_offset = ?",
)
UNUSED_PARTITIONS = "SELECT queue_pk, partition FROM partitions WHERE unused_from <= ? LIMIT ?"
DROP_PARTITION = "DELETE FROM partitions WHERE queue_pk = ? AND partition = ?"
DROP_MESSAGE = "DELETE FROM inbox WHERE rowid = ?"

KEYS = "SELECT number, created_at, secret FROM signing_keys WHERE name = ? ORDER BY number"
ADD_KEY = """
    INSERT INTO signing_keys (name, number, created_at, secret)
    VALUES (?1, (SELECT coalesce(max(number), 0) + 1 FROM signing_keys WHERE name = ?1), ?2, ?3)
    RETURNING number, created_at, secret"""


def prune(connection: apsw.Connection, now: float, limit: int, keep_ids_for: float) -> list[str]:
    """Delete prunable runs, what has expired, and old ids, up to `limit` of each. Return the ids of the runs."""
    ids_until = now - keep_ids_for
    searches = (
        (PRUNABLE, now),
        (EXPIRED_EVENTS, now),
        (EXPIRED_VALUES, now),
        (DELETED_EVENTS, ids_until),
        (CONSUMED_EVENTS, ids_until),
        (documents.EXPIRED, now),
        (UNUSED_PARTITIONS, now),
    )
    if all(connection.execute(sql, (until, 1)).get is None for sql, until in searches):
        return []
    with writing(connection):
        runs: list[Any] = connection.execute(PRUNABLE, (now, limit)).fetchall()
        for sql in DROP_RUN:
            connection.executemany(sql, [(pk,) for pk, _ in runs])
        expired = connection.execute(EXPIRED_EVENTS, (now, limit)).fetchall()
        connection.executemany(DELETE_EXPIRED_EVENT, [(now, rowid) for (rowid,) in expired])
        connection.executemany(DROP_VALUE, connection.execute(EXPIRED_VALUES, (now, limit)).fetchall())
        deleted = connection.execute(DELETED_EVENTS, (ids_until, limit)).fetchall()
        for sql in DROP_EVENT:
            connection.executemany(sql, deleted)
        connection.executemany(DROP_MESSAGE, connection.execute(CONSUMED_EVENTS, (ids_until, limit)).fetchall())
        connection.executemany(documents.DROP, connection.execute(documents.EXPIRED, (now, limit)).fetchall())
        unused = connection.execute(UNUSED_PARTITIONS, (now, limit)).fetchall()
        connection.executemany(DROP_PARTITION, unused)
    return [id for _, id in runs]


def delete_run(connection: apsw.Connection, run_id: str) -> Committed | RunMissing | RunRetained:
    with writing(connection):
        found = connection.execute(DELETABLE, (run_id,)).fetchone()
        if found is None:
            return RunMissing()
        pk, *reasons = found
        for reason, applies in zip(RETAINED_REASONS, reasons, strict=True):
            if applies:
                return RunRetained(reason)
        for sql in DROP_RUN:
            connection.execute(sql, (pk,))
        return Committed()


def remove_dead_letter(connection: apsw.Connection, dead_letter_id: str) -> bool:
    with writing(connection):
        return connection.execute(REMOVE_DEAD_LETTER, (dead_letter_id,)).get is not None


def keys(connection: apsw.Connection, name: str, now: float) -> list[SigningKey]:
    """Return the keys of this name. The first call creates one."""
    found = _stored_keys(connection, name)
    if found:
        return found
    with writing(connection):
        # Read again under the lock: another process may have created the key.
        return _stored_keys(connection, name) or [_add_key(connection, name, now)]


def _stored_keys(connection: apsw.Connection, name: str) -> list[SigningKey]:
    return [SigningKey(*row) for row in connection.execute(KEYS, (name,))]


def add_key(connection: apsw.Connection, name: str, now: float) -> SigningKey:
    with writing(connection):
        return _add_key(connection, name, now)


def _add_key(connection: apsw.Connection, name: str, now: float) -> SigningKey:
    number, created_at, secret = connection.execute(ADD_KEY, (name, now, secrets.token_bytes(32))).get
    return SigningKey(number, created_at, secret)
