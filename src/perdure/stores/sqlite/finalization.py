"""What a run owes when it has ended, in the SQLite store: news to its observers, answers to its mail, word to its
children; what became a dead letter of that; and what undoes an end: going back in the history.

Written straight on the connection, within a transaction: what a batch has gathered must have been written before.
"""

from __future__ import annotations

import apsw

from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.results import Committed, LimitReached, WriteResult
from perdure.stores.sqlite import rows as sqlite_rows
from perdure.stores.sqlite.run_state_cache import CachedRunState
from perdure.stores.sqlite.streams import SUPERSEDE_ALL
from perdure.stores.sqlite.topics import UNSUBSCRIBE_ALL, Topics
from perdure.stores.writes import FinalizeRun, PublishEvent, ReplayDeadLetter, RewindRun

OBSERVE = "INSERT OR IGNORE INTO observers (run_no, observer, target) VALUES (?, ?, ?)"
OBSERVED = "UPDATE runs SET observed = 1 WHERE no = ? AND observed = 0"
OBSERVE_NEW = "INSERT INTO observers (run_no, observer, target) SELECT no, ?, ? FROM runs WHERE id = ?"
TELL = "DELETE FROM observers WHERE run_no = ? AND observer = ? AND target = ?"
ADD_LETTER = f"INSERT OR IGNORE INTO dead_letters ({rows.LETTER_COLUMNS}) VALUES ({','.join('?' * 11)})"
OWED_MAIL = "SELECT 1 FROM inbox WHERE run_no = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment') LIMIT 1"
ANY_OBSERVER = "SELECT 1 FROM observers WHERE run_no = ? LIMIT 1"
TOLD_CHILDREN = "UPDATE runs SET orphans = 0 WHERE no = ?"
TICK_OFF = f"""
    UPDATE runs SET observed = EXISTS ({ANY_OBSERVER}),
           unsettled = orphans OR EXISTS ({ANY_OBSERVER}) OR EXISTS ({OWED_MAIL})
    WHERE no = ?"""

DROP_AT = "DELETE FROM entries WHERE run_no = ? AND location = ?"
REWIND = """
    UPDATE runs SET status = ?, generation = generation + 1, owner = NULL, mailed = 0, wake_at = ?, updated_at = ?,
           result = NULL, error = NULL, ended_at = NULL, held = NULL, waits = NULL, drift = NULL, recoveries = 0,
           prune_at = NULL, unsettled = 0, orphans = 0, deadline_at = ?, fence = ?
    WHERE no = ?"""
UNREAD_AGAIN = f"""
    INSERT INTO inbox (run_no, {rows.MESSAGE_COLUMNS}) VALUES ({",".join("?" * 14)})
    ON CONFLICT (run_no, number) DO UPDATE SET consumed_at = NULL, body = excluded.body, kind = excluded.kind,
           target = excluded.target, place = excluded.place"""

LETTER_IS_THERE = "SELECT 1 FROM dead_letters WHERE id = ?"
REMOVE_LETTER = "DELETE FROM dead_letters WHERE id = ? RETURNING 1"
MESSAGE_NUMBER = "SELECT number FROM inbox WHERE run_no = ? AND id = ?"


def settle(connection: apsw.Connection, topics: Topics, run: CachedRunState, write: FinalizeRun) -> WriteResult:
    if not run.unsettled:
        return Committed()
    connection.executemany(TELL, [(run.no, each.run_id, each.target) for each in write.notified])
    topics.consume((write.now, run.no, number) for number in write.consumed)
    topics.release(run.no, write.returned, write.now)
    connection.executemany(ADD_LETTER, map(sqlite_rows.letter_row, write.dead_letters))
    for moved in write.moved:
        unread = topics.consume([(write.now, run.no, moved.number)])
        if unread and isinstance(topics.publish(moved.to), LimitReached):
            connection.execute(ADD_LETTER, sqlite_rows.letter_row(moved.otherwise))
    if write.orphans:
        connection.execute(TOLD_CHILDREN, (run.no,))
    connection.execute(TICK_OFF, (run.no,) * 4)
    return Committed()


def may_replay(
    connection: apsw.Connection, topics: Topics, run: CachedRunState | None, write: ReplayDeadLetter
) -> bool:
    """Whether the letter is there, or was sent by this very call before. `run` is the one that it is to go to."""
    if connection.execute(LETTER_IS_THERE, (write.letter_id,)).get is not None:
        return True
    if isinstance(write.send, PublishEvent):
        return topics.knows(write.send.event)
    return run is not None and connection.execute(MESSAGE_NUMBER, (run.no, write.send.message.id)).get is not None


def rewind(connection: apsw.Connection, run: CachedRunState, write: RewindRun) -> None:
    """Everything but the entries that the rewinding itself appends."""
    connection.executemany(DROP_AT, [(run.no, location) for location in write.dropped])
    connection.executemany(SUPERSEDE_ALL, [(run.no, location) for location in write.dropped])
    connection.execute(UNSUBSCRIBE_ALL, (run.no,))
    connection.executemany(
        UNREAD_AGAIN, [sqlite_rows.message_row(run.no, each.number, each) for each in write.returned]
    )
    fence = write.base + max(1, len(write.entries))
    row = (rules.status_released(run.begun), write.now, write.now, write.deadline_at, fence, run.no)
    connection.execute(REWIND, row)
