"""What the last commits have shown of runs, so that the next turn of a run need not read its row again.

Good only as long as nobody else has written. SQLite tells: `PRAGMA data_version`, asked within our own transaction, is
the same as after our last one if and only if no other connection has committed in between. Whatever else this
connection writes makes us forget everything. (Measured: it takes a quarter off the cost of a turn in a busy engine.)
"""

from __future__ import annotations

import apsw

from perdure.store.base import Answer, Committed, CommitTurn, Write
from perdure.store.rules import Standing, last_position, run_of

MOST = 20_000


class Known(Standing):
    """A run's standing with the number of its row."""

    no: int = 0


class StandingMemory:
    """The standings of runs by id, as of the last commit of one connection."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._connection: apsw.Connection | None = None
        self._version: int | None = None

    def begin(self, connection: apsw.Connection) -> dict[str, Known]:
        """What is still true, in a transaction that has just begun."""
        version = connection.execute("PRAGMA data_version").get
        if connection is not self._connection or version != self._version or len(self._known) > MOST:
            self._known = {}
            self._connection, self._version = connection, version
        return self._known

    def forget(self) -> None:
        self._connection = None

    def learn(self, write: Write, answer: Answer) -> None:
        """Take note of what a write has changed: a plain turn moves its run on, anything else is better read again."""
        run = self._known.get(run_of(write))
        if run is None:
            return
        if not isinstance(answer, Committed) or not isinstance(write, CommitTurn) or run.mailed or not _is_plain(write):
            del self._known[run_of(write)]
        elif run.position == write.base:
            run.position = last_position(write)


def _is_plain(turn: CommitTurn) -> bool:
    return turn.patch is None and not turn.consumed and not turn.dropped and turn.restart is None
