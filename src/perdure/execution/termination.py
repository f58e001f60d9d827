"""The writes that stop a run: ending it from outside, and asking it to end itself. Pure."""

from __future__ import annotations

from perdure.config import EngineConfig
from perdure.model.records import Message
from perdure.stores.protocol import EndRun


def end_of(run_id: str, turn_id: str, now: float, config: EngineConfig, *, unless_begun: bool) -> EndRun:
    """End a run; with `unless_begun` only one that never executed, which need not be asked."""
    return EndRun(
        run_id=run_id,
        turn_id=turn_id,
        now=now,
        unless_begun=unless_begun,
        prune_after=config.seconds("run_retention"),
    )


def cancel_message(message_id: str, now: float) -> Message:
    """Raises cancellation in the workflow, once per generation: a second message finds it raised."""
    return Message(id=message_id, kind="cancel", sent_at=now)
