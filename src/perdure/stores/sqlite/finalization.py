"""Finalization of ended runs, dead-letter replay and rewinds in the SQLite store.

All functions write directly to the connection within the caller's transaction. The caller flushes the rows that its
batch has collected before it calls them.
"""

from __future__ import annotations

import apsw

from perdure.stores import semantics as rules
from perdure.stores import sql_rows
from perdure.stores.results import Committed, LimitReached, WriteResult
from perdure.stores.sqlite import rows
from perdure.stores.sqlite.run_state_cache import CachedRunState
from perdure.stores.sqlite.streams import SUPERSEDE_ALL
from perdure.stores.sqlite.topics import UNSUBSCRIBE_ALL, Topics
from perdure.stores.writes import FinalizeRun, PublishEvent, ReplayDeadLetter, RewindRun

ADD_OBSERVER = "INSERT OR IGNORE INTO observers (run_pk, observer, target) VALUES (?, ?, ?)"
SET_HAS_OBSERVERS = "UPDATE runs SET has_observers = 1 WHERE pk = ? AND has_observers = 0"
ADD_OBSERVER_OF_NEW_RUN = "INSERT INTO observers (run_pk, observer, target) SELECT pk, ?, ? FROM runs WHERE id = ?"
REMOVE_OBSERVER = "DELETE FROM observers WHERE run_pk = ? AND observer = ? AND target = ?"
ADD_DEAD_LETTER = f"INSERT OR IGNORE INTO dead_letters ({sql_rows.DEAD_LETTER_COLUMNS}) VALUES ({','.join('?' * 11)})"
ANY_UNREAD_EVENT = """
    SELECT 1 FROM inbox WHERE run_pk = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment') LIMIT 1"""
ANY_OBSERVER = "SELECT 1 FROM observers WHERE run_pk = ? LIMIT 1"
CLEAR_ORPHANED_CHILDREN = "UPDATE runs SET orphaned_children = 0 WHERE pk = ?"
UPDATE_UNFINALIZED = f"""
    UPDATE runs SET has_observers = EXISTS ({ANY_OBSERVER}),
           unfinalized = orphaned_children OR EXISTS ({ANY_OBSERVER}) OR EXISTS ({ANY_UNREAD_EVENT})
    WHERE pk = ?"""

_TABLES_OF_RUN = (
    *("entries", "inbox", "observers", "subscriptions", "topic_cursors", "published", "stream_items"),
    "run_tags",
)
DROP_RUN = (*(f"DELETE FROM {table} WHERE run_pk = ?" for table in _TABLES_OF_RUN), "DELETE FROM runs WHERE pk = ?")

DROP_AT = "DELETE FROM entries WHERE run_pk = ? AND location = ?"
REWIND = """
    UPDATE runs SET status = ?, generation = generation + 1, owner = NULL, has_new_messages = 0, wake_at = ?,
           updated_at = ?, result = NULL, error = NULL, ended_at = NULL, held = NULL, waits = NULL, drift = NULL,
           recoveries = 0, prune_at = NULL, unfinalized = 0, orphaned_children = 0, deadline_at = ?, fence = ?
    WHERE pk = ?"""
RESTORE_MESSAGE = f"""
    INSERT INTO inbox (run_pk, {sql_rows.MESSAGE_COLUMNS}) VALUES ({",".join("?" * 14)})
    ON CONFLICT (run_pk, number) DO UPDATE SET consumed_at = NULL, body = excluded.body, kind = excluded.kind,
           target = excluded.target, topic_offset = excluded.topic_offset"""

DEAD_LETTER_EXISTS = "SELECT 1 FROM dead_letters WHERE id = ?"
REMOVE_DEAD_LETTER = "DELETE FROM dead_letters WHERE id = ? RETURNING 1"
MESSAGE_NUMBER = "SELECT number FROM inbox WHERE run_pk = ? AND id = ?"


def finalize(connection: apsw.Connection, topics: Topics, run: CachedRunState, write: FinalizeRun) -> WriteResult:
    """Mark parts of a run's finalization as done. Idempotent: a finalized run does not change."""
    if not run.unfinalized:
        return Committed()
    connection.executemany(REMOVE_OBSERVER, [(run.pk, each.run_id, each.target) for each in write.notified])
    topics.consume((write.now, run.pk, number) for number in write.consumed)
    topics.release(run.pk, write.returned, write.now)
    connection.executemany(ADD_DEAD_LETTER, map(rows.dead_letter_row, write.dead_letters))
    for event in write.redirected:
        unread = topics.consume([(write.now, run.pk, event.number)])
        if unread and isinstance(topics.publish(event.to), LimitReached):
            connection.execute(ADD_DEAD_LETTER, rows.dead_letter_row(event.otherwise))
    if write.orphaned_children:
        connection.execute(CLEAR_ORPHANED_CHILDREN, (run.pk,))
    connection.execute(UPDATE_UNFINALIZED, (run.pk,) * 4)
    return Committed()


def can_replay(
    connection: apsw.Connection, topics: Topics, run: CachedRunState | None, write: ReplayDeadLetter
) -> bool:
    """Return whether the dead letter exists, or an earlier call of the same write has replayed it.

    `run` is the run that the message is sent to.
    """
    if connection.execute(DEAD_LETTER_EXISTS, (write.dead_letter_id,)).get is not None:
        return True
    if isinstance(write.send, PublishEvent):
        return topics.has_event(write.send.event)
    return run is not None and connection.execute(MESSAGE_NUMBER, (run.pk, write.send.message.id)).get is not None


def rewind(connection: apsw.Connection, run: CachedRunState, write: RewindRun) -> None:
    """Apply a rewind, except for the entries that it appends."""
    connection.executemany(DROP_AT, [(run.pk, location) for location in write.dropped])
    connection.executemany(SUPERSEDE_ALL, [(run.pk, location) for location in write.dropped])
    connection.execute(UNSUBSCRIBE_ALL, (run.pk,))
    connection.executemany(RESTORE_MESSAGE, [rows.message_row(run.pk, each.number, each) for each in write.returned])
    fence = write.base + max(1, len(write.entries))
    wake_at = None if run.waiting else write.now
    row = (rules.status_released(run.has_executed), wake_at, write.now, write.deadline_at, fence, run.pk)
    connection.execute(REWIND, row)
