"""Summaries of commits as text, which crash reports use to name the location of a crash in a workflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.model.records import Entry, EntryStatus
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage, EndRun, PublishEvent, Write

SHOWN = 4


def summarize_batch(batch: Sequence[Write]) -> str:
    """Return the summary of a batch, for example `charge succeeded, run order-42 suspended`."""
    changes = [change for write in batch for change in _changes(write)]
    return ", ".join(changes[:SHOWN]) + (f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")


def _changes(write: Write) -> Iterator[str]:
    match write:
        case CreateRun(record):
            yield f"run {record.id} created"
        case CommitTurn():
            yield from (_entry(entry) for entry in write.entries)
            if write.continue_as is not None:
                yield f"run {write.run_id} continues as new"
            elif write.patch is not None:
                yield f"run {write.run_id} {write.patch.status.value}"
        case DeliverMessage():
            yield f"{write.message.kind} for run {write.run_id}"
        case EndRun():
            yield f"run {write.run_id} ended by a caller"
        case PublishEvent():
            yield f"event {write.event.topic} published"
        case _:
            yield type(write).__name__


def _entry(entry: Entry) -> str:
    requested = entry.status is EntryStatus.PENDING
    return f"{entry.location} {'requested' if requested else entry.status.value}"
