"""Lists of a Redis store: each partition reads its own indexes, and this module merges the results."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from perdure.errors import StoreError
from perdure.model.documents import Document
from perdure.model.records import DeadLetter, Message, RunRecord
from perdure.stores.paging import check_document_page, check_limit
from perdure.stores.redis import encoding
from perdure.stores.redis.partitions import Partitions, gather_calls
from perdure.stores.results import (
    Committed,
    RunMissing,
    RunRetained,
    TopicSummary,
    UnfinalizedRun,
    UnreadableRun,
)
from perdure.stores.writes import Observer

PAGE_SIZE = 200  # dead letters per partition and call while they are searched
FINALIZATION_PAGE_SIZE = 500  # observers, and messages, of an ended run that are returned at a time


async def records(partitions: Partitions, ids: list[str]) -> list[RunRecord | UnreadableRun | None]:
    found = await gather_calls(partitions.command(partitions.of(id), "HGETALL", f"run:{id}") for id in ids)
    return [decode_run_or_mark(id, flatten(pairs)) if pairs else None for id, pairs in zip(ids, found, strict=True)]


def decode_run_or_mark(id: str, pairs: list[bytes]) -> RunRecord | UnreadableRun:
    try:
        return encoding.decode_run(pairs)
    except Exception as error:
        return UnreadableRun(id, encoding.find_damaged_field(pairs) or encoding.describe_error(error))


async def subscribed(partitions: Partitions, ids: Sequence[str]) -> list[frozenset[str]]:
    found = await gather_calls(partitions.command(partitions.of(id), "HKEYS", f"subscriptions:{id}") for id in ids)
    return [frozenset(target.decode() for target in targets) for targets in found]


def flatten(pairs: object) -> list[bytes]:
    """Return a hash as field, value, field, value. A client returns it as a dictionary, a script as a flat list."""
    if isinstance(pairs, dict):
        return [part for pair in pairs.items() for part in pair]
    return list(pairs) if isinstance(pairs, list) else []


# --- ended runs and children -----------------------------------------------------------------------------------------


async def unfinalized(partitions: Partitions, limit: int) -> list[UnfinalizedRun]:
    pages = await partitions.read_all("unfinalized", limit, FINALIZATION_PAGE_SIZE)
    found = encoding.decode_readable("run", _decode_unfinalized, (fields for page in pages for fields in page))
    return sorted(found, key=lambda run: (run.record.ended_at or 0.0, run.record.id))[:limit]


def _decode_unfinalized(fields: tuple[bytes, list[bytes], list[bytes], list[bytes]]) -> UnfinalizedRun:
    _, run, observers, inbox = fields
    unread: list[Message] = [
        message for message in encoding.decode_inbox(inbox) if message.kind in ("event", "assignment")
    ]
    to_notify = tuple(Observer(*encoding.decode_observer(member)) for member in observers)
    return UnfinalizedRun(
        encoding.decode_run(run),
        to_notify,
        tuple(unread[:FINALIZATION_PAGE_SIZE]),
        encoding.has_orphaned_children(run),
    )


async def open_children(partitions: Partitions, run_id: str, limit: int, after: str | None) -> list[str]:
    first = "-" if after is None else f"({after}"
    bounds = (first, "+", "LIMIT", 0, check_limit(limit))
    pages = await partitions.command_all("ZRANGEBYLEX", f"open-children:{run_id}", *bounds)
    return sorted(id.decode() for page in pages for id in page)[:limit]


# --- topics and documents --------------------------------------------------------------------------------------------


async def topics(partitions: Partitions, after: str | None, limit: int) -> list[TopicSummary]:
    first = "-" if after is None else f"({after}"
    pages = await partitions.read_all("topics", first, check_limit(limit))
    found = (TopicSummary(name.decode(), queued, waiting) for page in pages for name, queued, waiting in page)
    return heapq.nsmallest(limit, found, key=lambda topic: topic.name)


async def document(partitions: Partitions, kind: str, document_id: str) -> Document | None:
    found = await partitions.read(partitions.of(kind), "document", kind, document_id)
    try:
        return encoding.decode_document(kind, found[0]) if found else None
    except Exception as error:
        damage = encoding.describe_error(error)
        raise StoreError(f"document {kind}/{document_id} cannot be read ({damage}); see `perdure doctor`") from error


async def documents(
    partitions: Partitions, kind: str, after: str | None, limit: int, due_by: float | None
) -> list[Document]:
    check_document_page(after, limit, due_by)
    if due_by is None:
        query = ("documents", kind, "-" if after is None else f"({after}", limit)
    else:
        query = ("due_documents", kind, encoding.encode_time(due_by), limit)
    found = await partitions.read(partitions.of(kind), *query)
    return encoding.decode_readable("document", lambda fields: encoding.decode_document(kind, fields), found)


# --- dead letters ----------------------------------------------------------------------------------------------------


async def dead_letters(
    partitions: Partitions, limit: int, after: str | None, kind: str | None, event: str | None
) -> list[DeadLetter]:
    check_limit(limit)
    last = 0.0 if after is None else await _order_of_dead_letter(partitions, after)
    found: list[DeadLetter] = []
    while len(found) < limit:
        pages = await partitions.read_all("dead_letters", f"{last:.0f}", PAGE_SIZE)
        in_order = sorted((float(score), blob) for page in pages for score, blob in page)[:PAGE_SIZE]
        decoded = encoding.decode_readable("dead letter", encoding.decode_dead_letter, (blob for _, blob in in_order))
        found += [each for each in decoded if kind in (None, each.kind) and event in (None, each.event_name)]
        if len(in_order) < PAGE_SIZE:
            break
        last = in_order[-1][0]
    return found[:limit]


async def _order_of_dead_letter(partitions: Partitions, id: str) -> float:
    scores = await partitions.command_all("ZSCORE", "dead-letter-order:", id)
    found = [float(score) for score in scores if score is not None]
    if not found:
        raise StoreError(f"dead letter {id!r}, the last of the previous page, was removed; start with the first page")
    return found[0]


# --- pruning ---------------------------------------------------------------------------------------------------------


async def prune_runs(partitions: Partitions, now: float, limit: int) -> list[str]:
    """Delete ended runs whose retention is over; return their ids. Runs with an open parent are skipped."""
    pruned: list[str] = []
    at = encoding.encode_time(now)
    for number in range(partitions.count):
        skipped = 0
        while (wanted := limit - len(pruned)) > 0:
            page = await partitions.read(number, "prunable", at, skipped, wanted)
            ids = await _without_open_parent(partitions, page)
            deleted = await partitions.maintain(number, "delete_runs", ids, at) if ids else []
            pruned += [id.decode() for id in deleted]
            skipped += len(page) - len(deleted)
            if len(page) < wanted:
                break
    return pruned


async def delete_run(partitions: Partitions, run_id: str) -> Committed | RunMissing | RunRetained:
    number = partitions.of(run_id)
    status, parent, unfinalized = await partitions.command(
        number, "HMGET", f"run:{run_id}", "status", "parent", "unfinalized"
    )
    if status is None:
        return RunMissing()
    if not _is_terminal(status):
        return RunRetained("open")
    if unfinalized == b"1":
        return RunRetained("unfinalized")
    if not await _without_open_parent(partitions, [(run_id.encode(), parent or b"")]):
        return RunRetained("parent_open")
    deleted = await partitions.maintain(number, "delete_run", run_id)
    # Otherwise the run has been rewound or deleted since it was read.
    return Committed() if deleted else await delete_run(partitions, run_id)


async def _without_open_parent(partitions: Partitions, page: list[tuple[bytes, bytes]]) -> list[str]:
    parents = sorted({parent.decode() for _, parent in page if parent})
    statuses = await gather_calls(
        partitions.command(partitions.of(id), "HGET", f"run:{id}", "status") for id in parents
    )
    is_open = {id for id, status in zip(parents, statuses, strict=True) if status and not _is_terminal(status)}
    return [id.decode() for id, parent in page if parent.decode() not in is_open]


def _is_terminal(status: bytes) -> bool:
    return status.decode(errors="replace") in ("succeeded", "failed", "cancelled")  # a damaged one counts as open
