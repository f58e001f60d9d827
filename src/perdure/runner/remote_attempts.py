"""RemoteAttempts: the attempts of steps that execute on other workers, as internal child runs.

To the entry tracker they are steps like all others: requested, retried, exhausted and completed by the same rules. What
differs is how an attempt executes. It is recorded when it starts, with the id of its internal run in the detail of the
entry. The start is an external effect, and a message brings the result. So a run that only waits for such steps is
suspended.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.codec.attempt_notes import decode_notes, encode_notes
from perdure.model.records import EntryStatus, RunResult
from perdure.model.turns import ExternalEffect, StartChild, StepDone
from perdure.runner.attempt_tracker import EXHAUSTED, AttemptTracker
from perdure.runner.child_tracker import ChildTracker
from perdure.runner.pending import PendingEntry
from perdure.workflows.context import RunInfo
from perdure.workflows.remote_steps import build_start, read_result


class RemoteAttempts:
    """See the module's docstring."""

    __slots__ = ("_attempts", "_children", "_codec", "_info")

    def __init__(self, info: RunInfo, codec: Codec, attempts: AttemptTracker, children: ChildTracker) -> None:
        self._info = info
        self._codec = codec
        self._attempts = attempts
        self._children = children

    def start(self, pending: PendingEntry) -> ExternalEffect:
        """Return the effect that starts an attempt, and record the attempt if it is not recorded yet."""
        self.prepare(pending)
        action = pending.action
        assert isinstance(action, StartChild)
        self._children.on_requested(pending.location)
        is_recorded = pending.recorded is EntryStatus.PENDING and pending.attempts == pending.attempt
        if not is_recorded or _child_of(pending.detail).get("id") != action.run_id:
            pending.detail = _with_child(pending.detail, action.run_id, attached=True)
            self._attempts.record_started(pending)
        return ExternalEffect(pending.location, pending.attempt, action)

    def prepare(self, pending: PendingEntry) -> None:
        """Set the action of an attempt: the start of its internal run. A recorded fallback id is kept."""
        call = pending.call
        assert call is not None
        number = decode_notes(self._codec, pending.notes).starts + pending.attempt
        action = build_start(call, pending, number, self._info, self._codec)
        if action.fallback_id is not None and _child_of(pending.detail).get("id") == action.fallback_id:
            action = replace(action, run_id=action.fallback_id, fallback_id=None)
        pending.action = action

    def use_fallback(self, pending: PendingEntry) -> None:
        """Start an attempt under its other id: the first one belongs to an earlier run with the id of this one."""
        action = pending.action
        assert isinstance(action, StartChild)
        assert action.fallback_id is not None
        self._attempts.end(pending)
        pending.detail = _with_child(pending.detail, action.fallback_id, attached=True)
        self._attempts.record_started(pending)
        self._attempts.schedule(pending)

    def end(self, pending: PendingEntry, result: RunResult) -> StepDone:
        """Return how an attempt ended, from the end of its internal run. The entry waits for nothing any more."""
        done = read_result(result, pending.location, pending.attempt, self._codec)
        self.stop_waiting(pending)
        if done.notes is not None and (starts := decode_notes(self._codec, pending.notes).starts):
            notes = replace(decode_notes(self._codec, done.notes), starts=starts)
            done = replace(done, notes=encode_notes(self._codec, notes))
        return done

    def stop_waiting(self, pending: PendingEntry) -> None:
        """Note that no internal run of this entry executes."""
        if pending.running:
            self._attempts.end(pending)
        self._attempts.unschedule(pending.location)
        pending.detail = _with_child(pending.detail, _child_of(pending.detail).get("id", ""), attached=False)
        pending.action = pending.awaited = None

    def count_starts(self, pending: PendingEntry) -> None:
        """Keep the number of starts of an exhausted step that gets its attempts again: ids of runs must differ."""
        notes = decode_notes(self._codec, pending.notes)
        pending.notes = encode_notes(self._codec, replace(notes, starts=notes.starts + pending.attempts))


def awaits_result(pending: PendingEntry) -> bool:
    """Return whether an attempt is under way. Its end may be reported twice: by a message, and by a repeated start."""
    return pending.due_at is None and pending.detail != EXHAUSTED


def is_remote(pending: PendingEntry) -> bool:
    """Return whether the entry is a step that executes on another worker."""
    return pending.call is not None and pending.call.step.is_remote


def _child_of(detail: bytes | None) -> dict[str, Any]:
    if detail is None or detail == EXHAUSTED:
        return {}
    decoded: dict[str, Any] = msgspec.json.decode(detail)
    return decoded


def _with_child(detail: bytes | None, run_id: str, *, attached: bool) -> bytes:
    """Return the detail of an entry with its internal run. A step of a rollback has a detail already."""
    return msgspec.json.encode({**_child_of(detail), "id": run_id, "attached": attached})
