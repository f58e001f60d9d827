"""Cache of the run and worker states that decide whether a write is accepted.

With it, the next turn of a run does not read its rows again, which saves a quarter of the cost of a turn under load.
The cached states hold `position`, `owner` and `status`, which rules 3 to 6 of the acceptance rule of a turn check
(`stores/protocol.py`); a run without a state is unknown (rule 1).

The cache is valid as long as no other connection writes. `PRAGMA data_version`, read within the writer's transaction,
changes exactly when another connection has committed. Every write of the own connection outside of a batch clears the
cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw

from perdure.model.records import RunRecord
from perdure.stores import sql_rows
from perdure.stores.results import Committed, WriteResult
from perdure.stores.semantics import Key, RunState, last_position
from perdure.stores.writes import AppendStream, CommitTurn, DeliverMessage, SupersedeStream, Write

MAX_CACHED_RUNS = 20_000

RUN_STATE = """
    SELECT id, pk, status, owner, fence, last_message_no, wake_at, has_new_messages, held IS NOT NULL,
           first_executed_at IS NOT NULL, generation, has_observers, has_subscriptions, unfinalized,
           waiting, queue IS NOT NULL, (SELECT max(position) FROM entries WHERE run_pk = runs.pk)
    FROM runs WHERE id = ?"""
RUN_STATE_BY_PK = RUN_STATE.replace("WHERE id = ?", "WHERE pk = ?")


class CachedRunState(RunState, kw_only=True):
    """The state of a run, its primary key, and flags for rows in tables that few runs have rows in."""

    pk: int
    has_observers: bool
    has_subscriptions: bool
    unfinalized: bool
    has_queue: bool  # has or had a row in places


def read_run_states(connection: apsw.Connection, ids: Iterable[str]) -> Iterator[tuple[str, CachedRunState]]:
    """Yield the id and state of each of these runs that exists."""
    return map(_state_of_row, connection.executemany(RUN_STATE, [(id,) for id in ids]))


def read_run_state(connection: apsw.Connection, pk: int) -> tuple[str, CachedRunState]:
    """Return the id and state of the run with this primary key."""
    row: sql_rows.Row = connection.execute(RUN_STATE_BY_PK, (pk,)).get
    return _state_of_row(row)


def _state_of_row(row: sql_rows.Row) -> tuple[str, CachedRunState]:
    id, pk, status, owner, fence, last_message_no, wake_at, has_new_messages, held, has_executed, *more = row
    generation, has_observers, has_subscriptions, unfinalized, waiting, has_queue, last = more
    state = CachedRunState(
        status=sql_rows.run_status(status),
        owner=owner,
        position=max(last or 0, fence),
        last_message_no=last_message_no,
        wake_at=wake_at,
        has_messages=bool(has_new_messages),
        held=bool(held),
        has_executed=bool(has_executed) or generation > 0,
        awaits_first_turn=not has_executed,
        waiting=bool(waiting),
        has_queue=bool(has_queue),
        pk=pk,
        has_observers=bool(has_observers),
        has_subscriptions=bool(has_subscriptions),
        unfinalized=bool(unfinalized),
    )
    return id, state


def state_of_new_run(record: RunRecord, pk: int, *, has_observers: bool) -> CachedRunState:
    """Return the state of a run that was just inserted without history and messages."""
    has_executed = record.first_executed_at is not None
    return CachedRunState(
        status=record.status,
        owner=record.owner,
        position=record.fence,
        last_message_no=record.last_message_no,
        wake_at=record.wake_at,
        has_messages=False,
        held=record.held is not None,
        has_executed=has_executed or record.generation > 0,
        awaits_first_turn=not has_executed,
        waiting=record.waiting,
        has_queue=record.queue is not None,
        pk=pk,
        has_observers=has_observers,
        has_subscriptions=False,
        unfinalized=False,
    )


class RunStateCache:
    """The states of runs by id, as of the last commit of one connection."""

    def __init__(self) -> None:
        self.live_workers: dict[str, bool] = {}  # read since the cache was last cleared
        self._states: dict[Key, CachedRunState] = {}
        self._connection: apsw.Connection | None = None
        self._version: int | None = None

    def begin(self, connection: apsw.Connection) -> dict[Key, CachedRunState]:
        """Return the valid states at the start of a transaction. The caller may add to them."""
        version = connection.execute("PRAGMA data_version").get
        if connection is not self._connection or version != self._version or len(self._states) > MAX_CACHED_RUNS:
            self._states, self.live_workers = {}, {}
            self._connection, self._version = connection, version
        return self._states

    def clear(self) -> None:
        self._connection = None

    def update(self, key: Key, write: Write, result: WriteResult) -> None:
        """Apply a write's change to the cached state, or drop the state so that it is read again.

        A turn that only appends moves the position. Messages are not handled here: `BatchWriter` updates the state
        when it accepts a message, because the same part may contain more messages to the run.
        """
        run = self._states.get(key)
        if run is None:
            return
        if (
            isinstance(write, CommitTurn)
            and isinstance(result, Committed)
            and not run.has_messages
            and _only_appends(write)
        ):
            if run.position == write.base:  # else a repeated call (rule 2), which moves nothing
                run.position = last_position(write)
        elif not isinstance(write, (AppendStream, SupersedeStream, DeliverMessage)):
            del self._states[key]

    def drop(self, id: str) -> None:
        """Drop the state of a run that another run's write has changed."""
        self._states.pop(id, None)


def _only_appends(turn: CommitTurn) -> bool:
    return turn.patch is None and not turn.consumed and turn.continue_as is None and turn.extras is None
