"""The short way of a write that is alone in its batch: a new run of its worker's own, or a turn of one entry.

Most writes of an engine with little to do are one of these, and its callers wait for each. Their fields go as they are
to a script that knows only this case, or declines; then the write goes the way of all others (`redis_writes`). The
server takes a third of the time for such a script (docs/adr/0014).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from perdure.model.records import RunRecord
from perdure.stores import semantics as rules
from perdure.stores.redis.encoding import born, encode, entry_value, moment, standing
from perdure.stores.redis.listener import ChangePublisher
from perdure.stores.results import Committed, Created, WriteResult
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch, Write

_MADE = Created(owned=True)
_COMMITTED = Committed()
_NOBODY: frozenset[str] = frozenset()


class Call(Struct, frozen=True):
    """A script that says whether it was done; if so, the answer to the write and the runs that others hear of."""

    script: str
    run_id: str
    given: tuple[Any, ...]
    answer: WriteResult
    changed: frozenset[str] = _NOBODY


def call(write: Write, me: ChangePublisher) -> Call | None:
    """The call for a write that has been checked; None if it is no plain one. Others hear of it from `me`."""
    if not rules.qualifies_for_fast_path(write):
        return None
    if isinstance(write, CreateRun):
        record = write.record  # a child is in its parent's indexes, too
        return Call("create_plainly", record.id, _new_run(record), _MADE) if record.parent is None else None
    assert isinstance(write, CommitTurn)
    return _turn(write, write.patch, me)


def _turn(turn: CommitTurn, patch: RunPatch | None, me: ChangePublisher) -> Call:
    run_id = turn.run_id
    given = (run_id, turn.worker, turn.base, turn.seen, entry_value(turn.turn_id, turn.entries[0]))
    if patch is None:
        return Call("turn_plainly", run_id, given, _COMMITTED)
    end = (patch.status.value, moment(patch.prune_at), *me, *_ended(patch, turn.now))
    return Call("turn_plainly", run_id, (*given, *end), _COMMITTED, frozenset((run_id,)))


def _new_run(record: RunRecord) -> tuple[Any, ...]:
    return (record.id, record.owner, moment(record.created_at), record.created_by, *born(record, bytes))


def _ended(patch: RunPatch, now: float) -> list[Any]:
    fields: list[Any] = [standing((), None, patch.result, patch.error), moment(patch.ended_at), moment(now)]
    if patch.prune_at is not None:
        fields += ("prune_at", moment(patch.prune_at))
    if patch.drift:
        fields += ("drift", encode(patch.drift))
    if patch.recoveries:
        fields += ("recoveries", str(patch.recoveries))
    return fields
