"""Lines of a simulation's trace about writes and their results."""

from __future__ import annotations

from perdure.stores.results import Admitted, Committed, Joined, WriteResult
from perdure.stores.writes import (
    Admit,
    CommitTurn,
    ConfigurePartition,
    ConfigureQueue,
    CreateRun,
    DeliverMessage,
    PublishEvent,
    Write,
)


def run_of(write: Write) -> str | None:
    """Return the id of the run that a write is about, or None."""
    if isinstance(write, CreateRun):
        return write.record.id
    return getattr(write, "run_id", None)


def describe_write(write: Write) -> str:
    """Return one line about a write."""
    kind = type(write).__name__
    match write:
        case CreateRun():
            return f"{kind} {write.record.id}{': forked' if write.entries else ''}"
        case CommitTurn():
            changes = " ".join(f"{each.location}={each.status}" for each in write.entries)
            state = "" if write.patch is None else f" now {write.patch.status}"
            took = f" took {list(write.consumed)}" if write.consumed else ""
            return f"{kind} {write.run_id} at {write.base}: {changes}{took}{state}"
        case DeliverMessage():
            return f"{kind} {write.run_id}: {write.message.kind} {write.message.name} {write.message.id}"
        case PublishEvent():
            return f"{kind} {write.event.topic} {write.event.id}"
        case Admit():
            takes = " ".join(f"{take.partition}:{take.count}" for take in write.takes)
            return f"{kind} {write.queue} at {write.base}: {takes} promote={write.promote}"
        case ConfigureQueue():
            return f"{kind} {write.name} at {write.base}: {write.declared} {write.override} {write.paused}"
        case ConfigurePartition():
            return f"{kind} {write.queue}/{write.partition}: {write.override}"
        case _:
            return f"{kind} {run_of(write) or ''}"


def describe_result(result: WriteResult) -> str:
    """Return one word or more about a result."""
    if isinstance(result, Admitted):
        return f"Admitted {' '.join(result.runs)}"
    if isinstance(result, Joined):
        return f"Joined {result.run_id}"
    return type(result).__name__ + (" (messages)" if isinstance(result, Committed) and result.has_messages else "")
