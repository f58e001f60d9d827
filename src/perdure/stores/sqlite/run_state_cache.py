"""What the last commits have shown of runs and workers, so that the next turn of a run need not read their rows again.

Good only as long as nobody else has written. SQLite tells: `PRAGMA data_version`, asked within our own transaction, is
the same as after our last one if and only if no other connection has committed in between. Whatever else this
connection writes makes us forget everything. (Measured: it takes a quarter off the cost of a turn in a busy engine.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw

from perdure.model.records import RunRecord
from perdure.stores import sql_rows as rows
from perdure.stores.results import Committed, WriteResult
from perdure.stores.semantics import Key, RunState, last_position
from perdure.stores.writes import AppendStream, CommitTurn, DeliverMessage, SupersedeStream, Write

MAX_CACHED_RUNS = 20_000

STANDING = """
    SELECT id, no, status, owner, fence, last_message_no, wake_at, mailed, held IS NOT NULL,
           first_executed_at IS NOT NULL, generation, observed, listens, unsettled,
           (SELECT max(position) FROM entries WHERE run_no = runs.no)
    FROM runs WHERE id = ?"""
STANDING_OF_NO = STANDING.replace("WHERE id = ?", "WHERE no = ?")


class CachedRunState(RunState, kw_only=True):
    """A run's standing with the number of its row, and whether it has rows in tables that most runs are not in."""

    no: int
    observed: bool
    listens: bool
    unsettled: bool


def read_standings(connection: apsw.Connection, ids: Iterable[str]) -> Iterator[tuple[str, CachedRunState]]:
    """The standings of those runs that there are."""
    return map(_known_of_row, connection.executemany(STANDING, [(id,) for id in ids]))


def read_standing(connection: apsw.Connection, no: int) -> tuple[str, CachedRunState]:
    """The id and standing of the run with this number."""
    row: rows.Row = connection.execute(STANDING_OF_NO, (no,)).get
    return _known_of_row(row)


def _known_of_row(row: rows.Row) -> tuple[str, CachedRunState]:
    id, no, status, owner, fence, last_message_no, wake_at, mailed, held, has_begun, generation, *more = row
    observed, listens, unsettled, last = more
    known = CachedRunState(
        status=rows.run_status(status),
        owner=owner,
        position=max(last or 0, fence),
        last_message_no=last_message_no,
        wake_at=wake_at,
        mailed=bool(mailed),
        held=bool(held),
        begun=bool(has_begun) or generation > 0,
        waits_to_begin=not has_begun,
        no=no,
        observed=bool(observed),
        listens=bool(listens),
        unsettled=bool(unsettled),
    )
    return id, known


def known_at_birth(record: RunRecord, no: int, *, observed: bool) -> CachedRunState:
    """The standing of a run that has just been written, and has neither history nor mail."""
    begun = record.first_executed_at is not None
    return CachedRunState(
        status=record.status,
        owner=record.owner,
        position=record.fence,
        last_message_no=record.last_message_no,
        wake_at=record.wake_at,
        mailed=False,
        held=record.held is not None,
        begun=begun or record.generation > 0,
        waits_to_begin=not begun,
        no=no,
        observed=observed,
        listens=False,
        unsettled=False,
    )


class RunStateCache:
    """The standings of runs by id, as of the last commit of one connection."""

    def __init__(self) -> None:
        self.alive: dict[str, bool] = {}  # workers, since `begin`
        self._known: dict[Key, CachedRunState] = {}
        self._connection: apsw.Connection | None = None
        self._version: int | None = None

    def begin(self, connection: apsw.Connection) -> dict[Key, CachedRunState]:
        """What is still true, in a transaction that has just begun."""
        version = connection.execute("PRAGMA data_version").get
        if connection is not self._connection or version != self._version or len(self._known) > MAX_CACHED_RUNS:
            self._known, self.alive = {}, {}
            self._connection, self._version = connection, version
        return self._known

    def forget(self) -> None:
        self._connection = None

    def update(self, key: Key, write: Write, answer: WriteResult) -> None:
        """Take note of what a write has changed: a plain turn moves its run on, anything else is better read again.

        Mail was taken note of when it was judged, for there may be more to the same run.
        """
        run = self._known.get(key)
        if run is None:
            return
        if isinstance(write, CommitTurn) and isinstance(answer, Committed) and not run.mailed and _is_plain(write):
            if run.position == write.base:
                run.position = last_position(write)
        elif not isinstance(write, (AppendStream, SupersedeStream, DeliverMessage)):
            del self._known[key]

    def drop(self, id: str) -> None:
        """Something of this run has changed that is better read again."""
        self._known.pop(id, None)


def _is_plain(turn: CommitTurn) -> bool:
    return turn.patch is None and not turn.consumed and turn.restart is None and turn.extras is None
