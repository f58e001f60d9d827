"""Fast path of a batch with a single write: a new run that its worker owns, or a turn of one entry.

Most writes of an engine with little load are one of these, and a caller waits for each. Their fields are passed to a
small script (`lua/fast_create.lua`, `lua/fast_turn.lua`) that applies the common case or declines without any change;
then the general path (`write_encoding.py`) gets the same write. Such a script takes a third of the server's time (ADR
14). The fast path adds no rule of its own, and tests compare both paths. There is no third case.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from perdure.model.records import RunRecord
from perdure.stores import semantics
from perdure.stores.redis.encoding import (
    encode,
    encode_entry,
    encode_new_run,
    encode_stored_tags,
    encode_time,
    encode_turn_state,
)
from perdure.stores.redis.listener import ChangePublisher
from perdure.stores.results import Committed, Created, WriteResult
from perdure.stores.writes import CommitTurn, CreateRun, RunPatch, Write

_CREATED = Created(owned=True)
_COMMITTED = Committed()
_NO_CHANGES: frozenset[str] = frozenset()


class RedisFastPathCall(Struct, frozen=True):
    """A call of a fast-path script. If the script does not decline: the result, and the runs to notify about."""

    script: str
    run_id: str
    arguments: tuple[Any, ...]
    result: WriteResult
    changed: frozenset[str] = _NO_CHANGES


def build_call(write: Write, publisher: ChangePublisher) -> RedisFastPathCall | None:
    """Return the call for a checked write, or None if the write has no fast path."""
    if not semantics.qualifies_for_fast_path(write):
        return None
    if isinstance(write, CreateRun):
        record = write.record
        if record.parent is not None or write.place is not None or write.by is not None:
            return None  # a child is also in the indexes of its parent, and a run with a place in those of its queue
        return RedisFastPathCall("fast_create", record.id, _new_run_arguments(record), _CREATED)
    assert isinstance(write, CommitTurn)
    return _build_turn_call(write, write.patch, publisher)


def _build_turn_call(turn: CommitTurn, patch: RunPatch | None, publisher: ChangePublisher) -> RedisFastPathCall:
    run_id = turn.run_id
    arguments = (run_id, turn.worker, turn.base, turn.seen, encode_entry(turn.turn_id, turn.entries[0]))
    if patch is None:
        return RedisFastPathCall("fast_turn", run_id, arguments, _COMMITTED)
    end = (patch.status.value, encode_time(patch.prune_at), *publisher, *_end_arguments(patch, turn.now))
    return RedisFastPathCall("fast_turn", run_id, (*arguments, *end), _COMMITTED, frozenset((run_id,)))


def _new_run_arguments(record: RunRecord) -> tuple[Any, ...]:
    created_at = encode_time(record.created_at)
    tags = encode_stored_tags(record.tags) if record.tags else b""
    head = (record.id, record.owner, created_at, record.created_by, record.workflow, tags)
    return (*head, *encode_new_run(record, bytes))


def _end_arguments(patch: RunPatch, now: float) -> list[Any]:
    state = encode_turn_state((), None, patch.result, patch.error)
    error_type = "" if patch.error is None else patch.error.type
    fields: list[Any] = [state, encode_time(patch.ended_at), encode_time(now), error_type]
    if patch.prune_at is not None:
        fields += ("prune_at", encode_time(patch.prune_at))
    if patch.drift:
        fields += ("drift", encode(patch.drift))
    if patch.recoveries:
        fields += ("recoveries", str(patch.recoveries))
    return fields
