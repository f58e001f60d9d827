"""What a run owes when it has ended, in the SQLite store: news to its observers, answers to its mail, word to its
children; and what undoes an end: going back in the history.

Written straight on the connection, within a transaction: what a batch has gathered must have been written before.
"""

from __future__ import annotations

import apsw

from perdure.store import rules
from perdure.store import sqlite_rows as rows
from perdure.store.base import Answer, Committed, RewindRun, Settle
from perdure.store.sqlite_memory import Known
from perdure.store.sqlite_shown import SUPERSEDE_ALL
from perdure.store.sqlite_topics import UNSUBSCRIBE_ALL, Topics

OBSERVE = "INSERT OR IGNORE INTO observers (run_no, observer, target) VALUES (?, ?, ?)"
OBSERVED = "UPDATE runs SET observed = 1 WHERE no = ? AND observed = 0"
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
    INSERT INTO inbox (run_no, {rows.MESSAGE_COLUMNS}) VALUES ({",".join("?" * 13)})
    ON CONFLICT (run_no, number) DO UPDATE SET consumed_at = NULL, body = excluded.body, kind = excluded.kind,
           target = excluded.target, place = excluded.place"""


def settle(connection: apsw.Connection, topics: Topics, run: Known, write: Settle) -> Answer:
    if not run.unsettled:
        return Committed()
    connection.executemany(TELL, [(run.no, each.run_id, each.target) for each in write.told])
    topics.consume((write.now, run.no, number) for number in write.consumed)
    topics.give_back(run.no, write.returned, write.now)
    connection.executemany(ADD_LETTER, map(rows.letter_row, write.dead_letters))
    if write.orphans:
        connection.execute(TOLD_CHILDREN, (run.no,))
    connection.execute(TICK_OFF, (run.no,) * 4)
    return Committed()


def rewind(connection: apsw.Connection, run: Known, write: RewindRun) -> None:
    """Everything but the entries that the rewinding itself appends."""
    connection.executemany(DROP_AT, [(run.no, location) for location in write.dropped])
    connection.executemany(SUPERSEDE_ALL, [(run.no, location) for location in write.dropped])
    connection.execute(UNSUBSCRIBE_ALL, (run.no,))
    connection.executemany(UNREAD_AGAIN, [rows.message_row(run.no, each.number, each) for each in write.returned])
    fence = write.base + max(1, len(write.entries))
    row = (rules.status_released(run.begun), write.now, write.now, write.deadline_at, fence, run.no)
    connection.execute(REWIND, row)
