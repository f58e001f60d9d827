"""What a commit records, in words: to say at which point of a workflow a crash was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.model.records import Entry, EntryStatus
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage, EndRun, PublishEvent, Write

MANY = 4


def said(batch: Sequence[Write]) -> str:
    """`charge succeeded, run order-42 suspended`."""
    words = [word for write in batch for word in _words(write)]
    return ", ".join(words[:MANY]) + (f" and {len(words) - MANY} more" if len(words) > MANY else "")


def _words(write: Write) -> Iterator[str]:
    match write:
        case CreateRun(record):
            yield f"run {record.id} created"
        case CommitTurn():
            yield from (_entry(entry) for entry in write.entries)
            if write.continue_as is not None:
                yield f"run {write.run_id} begins anew"
            elif write.patch is not None:
                yield f"run {write.run_id} {write.patch.status.value}"
        case DeliverMessage():
            yield f"{write.message.kind} for run {write.run_id}"
        case EndRun():
            yield f"run {write.run_id} ended from outside"
        case PublishEvent():
            yield f"event {write.event.topic} published"
        case _:
            yield type(write).__name__


def _entry(entry: Entry) -> str:
    asked = entry.status is EntryStatus.PENDING
    return f"{entry.location} {'asked for' if asked else entry.status.value}"
