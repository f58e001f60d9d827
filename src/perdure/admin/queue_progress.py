"""Whether a run that waits in a queue will be admitted, decided from its row and its place. Pure functions, no I/O."""

from __future__ import annotations

from perdure.admin.run_progress import StoreState
from perdure.model.queue_records import PlaceRecord, QueueSummary
from perdure.model.records import RunRecord
from perdure.model.validation import MAX_SECONDS
from perdure.queues.effective_settings import effective_settings

ADMITTED_WITHIN_SECONDS = 60.0  # an admission that is possible takes less; the sweep of the admitter is much shorter


def waiting_reason(record: RunRecord, place: PlaceRecord | None, state: StoreState) -> str:
    """Return what will let a waiting run continue; a text that starts with `no ` if nothing will."""
    queue = (state.queues or {}).get(record.queue or "")
    if queue is None:
        return f"no readable queue {record.queue!r} to wait in"
    if place is None or place.held or place.queue != queue.name:
        return f"no waiting place in queue {queue.name!r}"
    if record.held is not None:
        return "held"
    late = state.now - ADMITTED_WITHIN_SECONDS
    if place.expires_at is not None and place.expires_at < late:
        return f"no end, though its place in queue {queue.name!r} has expired"
    if place.eligible_at is None:
        is_lost = place.since < late and _could_be_admitted(record, queue, state)
        return f"no slot of queue {queue.name!r}, though none is held" if is_lost else "queue"
    if place.eligible_at < late:
        return f"no promotion in queue {queue.name!r}, though its delay is over"
    if place.eligible_at > state.now + MAX_SECONDS:
        return f"no time at which its delay in queue {queue.name!r} is over"
    return "queue"


def _could_be_admitted(record: RunRecord, queue: QueueSummary, state: StoreState) -> bool:
    """Return whether no rule delays the run: all slots are free, no rate applies, and a live worker serves it."""
    settings = effective_settings(queue.declared, queue.override)
    is_rated = settings.rate is not None or settings.partition_rate is not None
    return queue.held == 0 and queue.paused is None and not is_rated and state.serves(record)
