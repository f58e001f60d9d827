"""Arrivals: the errors of a start into a queue, for clients and workflows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from perdure.errors import InvalidArgument, QueueFull, WorkflowMisuse
from perdure.model.queue_records import Place, QueueSummary
from perdure.model.records import RunRecord
from perdure.queues.effective_settings import effective_settings
from perdure.stores.protocol import Store
from perdure.stores.results import LimitReached, QueueMissing, WriteResult

Read = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


def raise_for_place(place: Place, result: WriteResult) -> None:
    """Raise `QueueFull` if the queue takes no more places, `InvalidArgument` if the store has no such queue."""
    if isinstance(result, LimitReached):
        raise QueueFull(f"queue {place.queue!r} holds {result.pending} waiting runs or more and takes no more of them")
    if isinstance(result, QueueMissing):
        raise InvalidArgument(
            f"no work queue of this store has the name {place.queue!r}; declare WorkQueue({place.queue!r}) in a worker"
        )


async def refuse_cycle(store: Store, parent: RunRecord, place: Place, read: Read) -> None:
    """Raise `WorkflowMisuse` if an attached child could wait for the slot that its own ancestor holds.

    A queue without a limit of concurrency admits the child whatever its ancestors hold. So does a queue that the
    parent has left by `release`.
    """
    queues: list[QueueSummary] = await read(store.queues)
    limited = {each.name for each in queues if _limits_concurrency(each)}
    if place.queue not in limited:
        return
    if place.queue not in parent.ancestor_queues and await read(lambda: store.place(parent.id)) is None:
        return
    raise WorkflowMisuse(
        f"run {parent.id!r} or an ancestor holds a slot of queue {place.queue!r}, and starts an attached child in it: "
        "both may wait for each other; use queue=None, another queue, or detached=True"
    )


def _limits_concurrency(queue: QueueSummary) -> bool:
    settings = effective_settings(queue.declared, queue.override)
    return settings.concurrency is not None or settings.partition_concurrency is not None
