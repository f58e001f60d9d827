"""Lists of a Redis store: each partition reads its own indexes, and this module merges the results."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from itertools import islice

import msgspec

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import DeadLetter, Message, RunRecord, RunStatus
from perdure.stores.paging import (
    Key,
    check_limit,
    created_between,
    cursor_after,
    key_of,
    matches_hold,
    matches_wait,
    statuses_of,
)
from perdure.stores.redis import encoding
from perdure.stores.redis.partitions import Partitions, gather_calls
from perdure.stores.results import Committed, RunMissing, RunPage, RunRetained, UnfinalizedRun, UnreadableRun
from perdure.stores.writes import Observer

PAGE_SIZE = 200  # ids per partition and call while a list is searched
FINALIZATION_PAGE_SIZE = 500  # observers, and messages, of an ended run that are returned at a time


async def records(partitions: Partitions, ids: list[str]) -> list[RunRecord | UnreadableRun | None]:
    found = await gather_calls(partitions.command(partitions.of(id), "HGETALL", f"run:{id}") for id in ids)
    return [_run_or_mark(id, flatten(pairs)) if pairs else None for id, pairs in zip(ids, found, strict=True)]


def _run_or_mark(id: str, pairs: list[bytes]) -> RunRecord | UnreadableRun:
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


# --- runs ------------------------------------------------------------------------------------------------------------


async def runs(partitions: Partitions, query: RunQuery) -> RunPage:
    limit = check_limit(query.limit)
    page: list[tuple[Key, RunRecord | UnreadableRun]] = []
    following: str | None = None
    async for found in _newest_first(partitions, query):
        if len(page) == limit:
            following = cursor_after(*page[-1][0])
            break
        page.append(found)
    return RunPage(
        tuple(each for _, each in page if isinstance(each, RunRecord)),
        following,
        tuple(each for _, each in page if isinstance(each, UnreadableRun)),
    )


async def _newest_first(
    partitions: Partitions, query: RunQuery
) -> AsyncIterator[tuple[Key, RunRecord | UnreadableRun]]:
    """Yield the runs that match the query, with their keys. Each page is merged from all partitions.

    A run that cannot be decoded matches if it is in the index that is searched.
    """
    since, until = created_between(query)
    before, last_id = ("+inf", "") if until is None else (f"({until!r}", "")
    if query.after is not None:
        created_at, id = key_of(query.after)
        if until is None or created_at < until:
            before, last_id = repr(created_at), id
    size = min(PAGE_SIZE, query.limit + 1)
    waiting = await _waiting_runs(partitions, query)
    while True:
        if waiting is None:
            keys = await _read_page(partitions, query, before, last_id, size)
        else:
            keys = _page_of(waiting, before, last_id, size)
        for key, record in zip(keys, await records(partitions, [id for _, id in keys]), strict=True):
            if record is None:
                continue  # it was pruned meanwhile
            if since is not None and key[0] < since:
                return
            if isinstance(record, UnreadableRun) or _matches(query, record):
                yield key, record
        if len(keys) < size:
            return
        before, last_id = repr(keys[-1][0]), keys[-1][1]
        size = PAGE_SIZE


async def _read_page(
    partitions: Partitions, query: RunQuery, before: str, last_id: str, size: int
) -> list[tuple[float, str]]:
    pages = await partitions.read_all("pages", _choose_indexes(query), before, last_id, size)
    found = (
        (float(at), id.decode())
        for of_partition in pages
        for page in of_partition
        for id, at in encoding.iter_pairs(page)
    )
    return heapq.nlargest(size, found)


async def _waiting_runs(partitions: Partitions, query: RunQuery) -> list[Key] | None:
    """Return the keys of all runs that may wait for the event or run of the query; None if it has neither."""
    awaited = query.awaited
    if awaited is None or awaited.name is None or awaited.kind not in ("event", "child"):
        return None
    number = partitions.of(awaited.name)
    if awaited.kind == "event":
        members = await partitions.command(number, "ZRANGE", f"waiting:{awaited.name}", 0, -1)
        subscriptions = (msgspec.msgpack.decode(member) for member in members)
        return sorted({(float(created_at), run_id) for run_id, _, _, created_at in subscriptions}, reverse=True)
    members = await partitions.command(number, "ZRANGE", f"observers:{awaited.name}", 0, -1)
    ids = sorted({encoding.decode_observer(member)[0] for member in members})
    found = await records(partitions, ids)
    return sorted(((each.created_at, each.id) for each in found if isinstance(each, RunRecord)), reverse=True)


def _page_of(newest_first: list[Key], before: str, last_id: str, size: int) -> list[Key]:
    """Return a page of these keys, as `_read_page` does: those before a time, or at this time with a lower id."""
    if before == "+inf":
        return newest_first[:size]
    last = (float(before.removeprefix("(")), last_id)
    return list(islice((key for key in newest_first if key < last), size))


def _choose_indexes(query: RunQuery) -> list[str]:
    """Return the indexes that hold the fewest runs that do not match."""
    if query.parent is not None:
        return [f"children:{query.parent}"]
    if query.held is not None or (query.awaited is not None and query.awaited.kind == "held"):
        return ["held-runs:"]
    if query.waiting_for is not None:
        return [f"status:{RunStatus.SUSPENDED}"]
    statuses = statuses_of(query)
    return [f"status:{status}" for status in dict.fromkeys(RunStatus if statuses is None else statuses)]


def _matches(query: RunQuery, record: RunRecord) -> bool:
    statuses = statuses_of(query)
    return (
        (statuses is None or record.status in statuses)
        and query.workflow in (None, record.workflow)
        and query.parent in (None, record.parent)
        and (query.id_prefix is None or record.id.startswith(query.id_prefix))
        and matches_hold(query, record)
        and matches_wait(query, record)
        and all(record.tags.get(key) == value for key, value in (query.tags or {}).items())
    )


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


async def prune_runs(partitions: Partitions, now: float, limit: int) -> int:
    """Delete ended runs whose retention is over; return how many. Runs with an open parent are skipped."""
    pruned, at = 0, encoding.encode_time(now)
    for number in range(partitions.count):
        skipped = 0
        while pruned < limit:
            page = await partitions.read(number, "prunable", at, skipped, limit - pruned)
            ids = await _without_open_parent(partitions, page)
            deleted = await partitions.maintain(number, "delete_runs", ids, at) if ids else 0
            pruned += deleted
            skipped += len(page) - deleted
            if len(page) < limit - pruned + deleted:
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
