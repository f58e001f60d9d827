"""Reads of queues and places. A store with several partitions has no queues, so that each read is empty there."""

from __future__ import annotations

from perdure.errors import StoreError
from perdure.model.queue_records import PlaceCursor, PlaceRecord, QueueSummary, QueueView
from perdure.stores.paging import check_limit
from perdure.stores.redis import queue_encoding as encoding
from perdure.stores.redis.encoding import decode_readable, describe_error, encode_time
from perdure.stores.redis.partitions import Partitions


async def queues(partitions: Partitions) -> list[QueueSummary]:
    pages = await partitions.read_all("queues")
    found = decode_readable("queue", encoding.decode_summary, (each for page in pages for each in page))
    return sorted(found, key=lambda queue: queue.name)


async def queue_view(partitions: Partitions, name: str, now: float, limit: int) -> QueueView | None:
    found = await partitions.read(partitions.of(name), "queue_view", name, encode_time(now), check_limit(limit))
    try:
        return encoding.decode_view(name, found) if found else None
    except Exception as error:
        raise StoreError(f"queue {name!r} cannot be read ({describe_error(error)}); see `perdure doctor`") from error


async def places(
    partitions: Partitions,
    name: str,
    partition: str | None,
    after: PlaceCursor | None,
    limit: int,
    *,
    held: bool,
) -> list[PlaceRecord]:
    first, above = "" if partition is None else partition, "-inf"
    if after is not None and partition in (None, after.partition):
        first, above = after.partition, encoding.score_of(after.priority, after.number)
    elif after is not None and partition is not None and partition < after.partition:
        return []
    query = (name, partition is not None, first, above, check_limit(limit), held)
    found = await partitions.read(partitions.of(name), "places", *query)
    return [place for place in decode_readable("place", encoding.decode_place, found) if place is not None]


async def place(partitions: Partitions, run_id: str) -> PlaceRecord | None:
    found = await partitions.read(partitions.of(run_id), "place", run_id)
    try:
        return encoding.decode_place(found)
    except Exception as error:
        damage = describe_error(error)
        raise StoreError(f"the place of run {run_id!r} cannot be read ({damage}); see `perdure doctor`") from error


async def places_ahead(partitions: Partitions, run_id: str, cap: int) -> int:
    found = await place(partitions, run_id)
    if found is None or found.held:
        return 0
    score = encoding.score_of(found.priority, found.number)
    ahead: int = await partitions.read(partitions.of(run_id), "places_ahead", run_id, score)
    return min(cap, ahead)
