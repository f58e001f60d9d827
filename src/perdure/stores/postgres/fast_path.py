"""The fast path for a single write: a new run that its worker owns, or a turn of one entry.

Most writes of an idle engine are one of these, and a caller waits for each. The fields are the arguments of a SQL
function that applies this common case or declines without writing. A declined write takes the general path (`batch`).
The fast path adds no rule: `fast_commit_turn` applies a turn only if none of rules 1 to 6 of the acceptance rule
(`stores/protocol.py`) refuses it. A run of one step takes about a fifth less time (docs/adr/0013).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct

from perdure.model.records import RunRecord
from perdure.stores import semantics
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.write_encoding import all_text, entry_row
from perdure.stores.results import Committed, Created, WriteResult
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch, Write

_FAST_CREATE_RUN = f"SELECT {{schema}}.fast_create_run({', '.join(f'${n}' for n in range(1, 21))})"
_FAST_COMMIT_TURN = f"SELECT {{schema}}.fast_commit_turn({', '.join(f'${n}' for n in range(1, 30))})"

_CREATED = Created(owned=True)
_COMMITTED = Committed()
_NOT_ENDED = (None,) * 8
_NONE_CHANGED: frozenset[str] = frozenset()


class PostgresFastPathCall(Struct, frozen=True):
    """A statement that returns whether it applied the write; if so, the write's result and the changed runs."""

    statement: str
    arguments: tuple[Any, ...]
    result: WriteResult
    changed: frozenset[str] = _NONE_CHANGED


def call(write: Write) -> PostgresFastPathCall | None:
    """Return the call for a checked write, None if the write does not qualify for the fast path."""
    if not semantics.qualifies_for_fast_path(write):
        return None
    if isinstance(write, CreateRun):
        if write.by is not None or write.record.ancestor_queues or not all_text(write.record.tags):
            return None
        return PostgresFastPathCall(_FAST_CREATE_RUN, _new_run(write.record), _CREATED)
    assert isinstance(write, CommitTurn)
    return _turn(write, write.patch)


def _turn(turn: CommitTurn, patch: RunPatch | None) -> PostgresFastPathCall:
    fence = (turn.run_id, turn.worker, turn.base, turn.seen, turn.turn_id)
    entry = entry_row(turn.entries[0])
    if patch is None:
        return PostgresFastPathCall(_FAST_COMMIT_TURN, (*fence, *entry, *_NOT_ENDED), _COMMITTED)
    return PostgresFastPathCall(
        _FAST_COMMIT_TURN, (*fence, *entry, *_end(patch, turn.now)), _COMMITTED, frozenset((turn.run_id,))
    )


_new_run_fields = attrgetter(
    "id", "workflow", "version", "input", "created_at", "created_by", "pool", "shard", "generation", "epoch",
    "run_attempt", "original_workflow", "original_input", "parent", "attached", "owner", "deadline_at", "retention"
)  # fmt: skip


def _new_run(record: RunRecord) -> tuple[Any, ...]:
    return (*_new_run_fields(record), str(record.seed), rows.as_json(record.tags) or "{}")


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
