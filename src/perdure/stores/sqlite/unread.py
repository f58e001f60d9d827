"""Queries of a batch about the unread messages of a run: any after a number, and events by name."""

UNREAD = """
    SELECT 1 FROM inbox
    WHERE run_pk = ? AND number > ? AND consumed_at IS NULL AND number NOT IN (SELECT value FROM json_each(?))
    LIMIT 1"""
UNREAD_WAKING_HELD = UNREAD.replace("LIMIT", "AND kind IN ('resume', 'cancel') LIMIT")
UNREAD_EVENT = UNREAD.replace("LIMIT", "AND kind IN ('event', 'assignment') LIMIT")
FIRST_UNREAD_OF_NAME = """
    SELECT number FROM inbox
    WHERE run_pk = ? AND name = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment')
    ORDER BY number LIMIT 1"""
UNREAD_OF_NAME = """
    SELECT count(*) FROM inbox
    WHERE run_pk = ? AND name = ? AND consumed_at IS NULL AND kind IN ('event', 'assignment')"""
