"""The short way of a write that is alone in its batch: a new run of its worker's own, or a turn of one entry.

Most writes of an engine with little to do are one of these, and its callers wait for each. Their fields go as they are
to a function of the schema that knows only this case, or declines; then the write goes the way of all others
(`postgres_batch`). A run of one step takes about a fifth less so (docs/adr/0013).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct

from perdure.model.records import RunRecord
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.write_encoding import entry_row
from perdure.stores.results import Committed, Created, WriteResult
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch, Write

_CREATE_PLAINLY = f"SELECT {{schema}}.fast_create_run({', '.join(f'${n}' for n in range(1, 21))})"
_TURN_PLAINLY = f"SELECT {{schema}}.fast_commit_turn({', '.join(f'${n}' for n in range(1, 30))})"

_MADE = Created(owned=True)
_COMMITTED = Committed()
_GOES_ON = (None,) * 8
_NOBODY: frozenset[str] = frozenset()


class FastPathCall(Struct, frozen=True):
    """A statement that says whether it was done; if so, the answer to the write and the runs that others hear of."""

    statement: str
    given: tuple[Any, ...]
    answer: WriteResult
    changed: frozenset[str] = _NOBODY


def call(write: Write) -> FastPathCall | None:
    """The call for a write that has been checked; None if it is no plain one."""
    if not rules.qualifies_for_fast_path(write):
        return None
    if isinstance(write, CreateRun):
        return FastPathCall(_CREATE_PLAINLY, _new_run(write.record), _MADE)
    assert isinstance(write, CommitTurn)
    return _turn(write, write.patch)


def _turn(turn: CommitTurn, patch: RunPatch | None) -> FastPathCall:
    standing = (turn.run_id, turn.worker, turn.base, turn.seen, turn.turn_id)
    entry = entry_row(turn.entries[0])
    if patch is None:
        return FastPathCall(_TURN_PLAINLY, (*standing, *entry, *_GOES_ON), _COMMITTED)
    return FastPathCall(
        _TURN_PLAINLY, (*standing, *entry, *_end(patch, turn.now)), _COMMITTED, frozenset((turn.run_id,))
    )


_of_new_run = attrgetter(
    "id", "workflow", "version", "input", "created_at", "created_by", "pool", "shard", "generation", "epoch",
    "run_attempt", "original_workflow", "original_input", "parent", "attached", "owner", "deadline_at", "retention"
)  # fmt: skip


def _new_run(record: RunRecord) -> tuple[Any, ...]:
    return (*_of_new_run(record), str(record.seed), rows.as_json(record.tags) or "{}")


def _end(patch: RunPatch, now: float) -> tuple[Any, ...]:
    return (
        patch.status,
        now,
        patch.result,
        rows.as_json(patch.error),
        rows.as_json(patch.drift),
        patch.recoveries,
        patch.ended_at,
        patch.prune_at,
    )
