"""Statements by which a batch changes runs and their histories, and the order in which a batch executes them."""

from __future__ import annotations

from perdure.stores import sql_rows
from perdure.stores.sqlite import finalization
from perdure.stores.sqlite.finalization import ADD_DEAD_LETTER
from perdure.stores.sqlite.queue_writes import ADD_PLACE, END_PLACE_OF_RUN, REMOVE_PLACE
from perdure.stores.sqlite.streams import ADD_ITEM, PUT_VALUE, SUPERSEDE
from perdure.stores.sqlite.tags import ADD_TAG
from perdure.stores.sqlite.topics import ADD_MESSAGE, CONSUME, COUNT_MESSAGE, UNSUBSCRIBE_ALL

TURN_AT = "SELECT turn_id FROM entries WHERE run_pk = ? AND position = ?"
WORKER_IS_LIVE = "SELECT 1 FROM workers WHERE id = ? AND fenced = 0"
RUN = f"SELECT {sql_rows.RUN_COLUMNS} FROM runs WHERE id = ?"

# Statements in the order in which `_flush` executes them: deletes before inserts, a row before rows that refer to it.
DROP_ALL = "DELETE FROM entries WHERE run_pk = ?"
DROP_BELOW = "DELETE FROM entries WHERE run_pk = ? AND (location = ? OR (location >= ? AND location < ?))"
DROP_AT_POSITION = "DELETE FROM entries WHERE run_pk = ? AND position = ?"
DROP_MARKERS = "DELETE FROM entries WHERE run_pk = ? AND kind = 'marker'"
_PLAIN = sql_rows.PLAIN_RUN_COLUMNS
ADD_RUN = f"INSERT INTO runs ({_PLAIN}) VALUES ({','.join('?' * 33)})"
ADD_RUN_WITH_OBSERVER = f"INSERT INTO runs ({_PLAIN}, has_observers) VALUES ({','.join('?' * 33)}, 1)"
ADD_QUEUED_RUN = f"INSERT INTO runs ({sql_rows.RUN_COLUMNS}, has_observers) VALUES ({','.join('?' * 40)})"
# Without column names: the driver hashes the text of the statement for every row, and names cost 2 % of a step.
ADD_ENTRY = f"INSERT INTO entries VALUES ({','.join('?' * 19)})"
RESTART = """
    UPDATE runs SET original_workflow = coalesce(original_workflow, workflow), workflow = ?, version = ?,
           original_input = coalesce(original_input, input), input = ?, first_executed_at = ?,
           run_attempt = ?, pool = coalesce(?, pool), generation = generation + 1, epoch = epoch + 1
    WHERE pk = ?"""
MOVE_FENCE = "UPDATE runs SET fence = ? WHERE pk = ?"
PATCH = """
    UPDATE runs SET status = ?, owner = ?, wake_at = ?, has_new_messages = ?, waits = ?, held = ?, drift = ?,
           recoveries = ?, result = ?, error = ?, ended_at = ?, prune_at = ?, updated_at = ?, unfinalized = ?
    WHERE pk = ?"""
CLEAR_NEW_MESSAGES = "UPDATE runs SET wake_at = NULL, has_new_messages = 0 WHERE pk = ?"
END = """
    UPDATE runs SET status = ?, owner = NULL, wake_at = NULL, has_new_messages = 0, waits = NULL, held = NULL,
           ended_at = ?, updated_at = ?, prune_at = ?, fence = ?, orphaned_children = ?, unfinalized = ?
    WHERE pk = ?"""
HOLD_WAITING = "UPDATE runs SET held = ? WHERE pk = ?"
RELEASE = "UPDATE runs SET owner = NULL, has_new_messages = 0, status = ?, wake_at = ?, updated_at = ? WHERE pk = ?"
FLUSH_ORDER = (
    DROP_ALL,
    DROP_BELOW,
    DROP_AT_POSITION,
    DROP_MARKERS,
    UNSUBSCRIBE_ALL,
    ADD_RUN,
    ADD_RUN_WITH_OBSERVER,
    ADD_QUEUED_RUN,
    ADD_PLACE,
    ADD_TAG,
    ADD_ENTRY,
    ADD_ITEM,
    REMOVE_PLACE,
    END_PLACE_OF_RUN,
    RESTART,
    MOVE_FENCE,
    PATCH,
    CLEAR_NEW_MESSAGES,
    END,
    RELEASE,
    CONSUME,
    ADD_MESSAGE,
    COUNT_MESSAGE,
    HOLD_WAITING,
    ADD_DEAD_LETTER,
    finalization.ADD_OBSERVER,
    finalization.SET_HAS_OBSERVERS,
    finalization.ADD_OBSERVER_OF_NEW_RUN,
    finalization.REMOVE_OBSERVER,
    finalization.UPDATE_UNFINALIZED,
    PUT_VALUE,
    SUPERSEDE,
)
