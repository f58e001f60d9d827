"""Lists of a Redis store: each slice answers from its own indexes, and the answers are merged."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import DeadLetter, Message, RunRecord, RunStatus
from perdure.stores.paging import check_limit, created_between, cursor_after, key_of, statuses_of
from perdure.stores.redis import encoding as rows
from perdure.stores.redis.partitions import Partitions, gathered
from perdure.stores.results import RunPage, UnfinalizedRun
from perdure.stores.writes import Observer

PAGE = 200  # ids that a slice is asked for at once while a list is looked through
DUTIES = 500  # observers, and messages, of an ended run that are named at once


async def records(slices: Partitions, ids: list[str]) -> list[RunRecord | None]:
    found = await gathered(slices.ask(slices.of(id), "HGETALL", f"run:{id}") for id in ids)
    return [rows.run_of(flat(pairs)) if pairs else None for pairs in found]


def flat(pairs: object) -> list[bytes]:
    """A hash as field, value, field, value: the client gives a dictionary, or (from a script) just that."""
    if isinstance(pairs, dict):
        return [part for pair in pairs.items() for part in pair]
    return list(pairs) if isinstance(pairs, list) else []


# --- runs ------------------------------------------------------------------------------------------------------------


async def runs(slices: Partitions, query: RunQuery) -> RunPage:
    limit = check_limit(query.limit)
    page: list[RunRecord] = []
    async for record in _newest_first(slices, query):
        if len(page) == limit:
            return RunPage(tuple(page), cursor_after(page[-1].created_at, page[-1].id))
        page.append(record)
    return RunPage(tuple(page))


async def _newest_first(slices: Partitions, query: RunQuery) -> AsyncIterator[RunRecord]:
    """Runs that fit the query, in pages of all slices together."""
    since, until = created_between(query)
    before, last_id = ("+inf", "") if until is None else (f"({until!r}", "")
    if query.after is not None:
        created_at, id = key_of(query.after)
        if until is None or created_at < until:
            before, last_id = repr(created_at), id
    size = min(PAGE, query.limit + 1)
    while True:
        keys = await _page(slices, query, before, last_id, size)
        for record in await records(slices, [id for _, id in keys]):
            if record is None:
                continue  # it was pruned meanwhile
            if since is not None and record.created_at < since:
                return
            if _matches(query, record):
                yield record
        if len(keys) < size:
            return
        before, last_id = repr(keys[-1][0]), keys[-1][1]
        size = PAGE


async def _page(slices: Partitions, query: RunQuery, before: str, last_id: str, size: int) -> list[tuple[float, str]]:
    pages = await slices.read_all("pages", _indexes(query), before, last_id, size)
    found = ((float(at), id.decode()) for of_slice in pages for page in of_slice for id, at in rows.pairs_of(page))
    return heapq.nlargest(size, found)


def _indexes(query: RunQuery) -> list[str]:
    """Those that hold fewest runs that do not fit."""
    if query.parent is not None:
        return [f"children:{query.parent}"]
    statuses = statuses_of(query)
    return [f"status:{status}" for status in dict.fromkeys(RunStatus if statuses is None else statuses)]


def _matches(query: RunQuery, record: RunRecord) -> bool:
    statuses = statuses_of(query)
    return (
        (statuses is None or record.status in statuses)
        and query.workflow in (None, record.workflow)
        and query.parent in (None, record.parent)
        and (query.id_prefix is None or record.id.startswith(query.id_prefix))
        and all(record.tags.get(key) == value for key, value in (query.tags or {}).items())
    )


# --- duties and families ---------------------------------------------------------------------------------------------


async def unsettled(slices: Partitions, limit: int) -> list[UnfinalizedRun]:
    found = [_unsettled(*owing) for page in await slices.read_all("unsettled", limit, DUTIES) for owing in page]
    return sorted(found, key=lambda owing: (owing.record.ended_at or 0.0, owing.record.id))[:limit]


def _unsettled(run: list[bytes], observers: list[bytes], mail: list[bytes]) -> UnfinalizedRun:
    unread: list[Message] = [message for message in rows.inbox_of(mail) if message.kind in ("event", "assignment")]
    told = tuple(Observer(*rows.observer_of(member)) for member in observers)
    return UnfinalizedRun(rows.run_of(run), told, tuple(unread[:DUTIES]), rows.orphans_of(run))


async def open_children(slices: Partitions, run_id: str, limit: int, after: str | None) -> list[str]:
    first = "-" if after is None else f"({after}"
    pages = await slices.ask_all("ZRANGEBYLEX", f"open-children:{run_id}", first, "+", "LIMIT", 0, check_limit(limit))
    return sorted(id.decode() for page in pages for id in page)[:limit]


# --- dead letters ----------------------------------------------------------------------------------------------------


async def dead_letters(
    slices: Partitions, limit: int, after: str | None, kind: str | None, event: str | None
) -> list[DeadLetter]:
    check_limit(limit)
    last = 0.0
    if after is not None:
        scores = [float(score) for score in await slices.ask_all("ZSCORE", "letter-order:", after) if score is not None]
        if not scores:
            raise StoreError(f"dead letter {after!r}, where the page before ended, is gone; begin with the first page")
        last = scores[0]
    found: list[DeadLetter] = []
    while len(found) < limit:
        pages = await slices.read_all("letters", f"{last:.0f}", PAGE)
        came = sorted((float(at), blob) for page in pages for at, blob in page)[:PAGE]
        letters = [rows.letter_of(blob) for _, blob in came]
        found += [each for each in letters if kind in (None, each.kind) and event in (None, each.event_name)]
        if len(came) < PAGE:
            break
        last = came[-1][0]
    return found[:limit]


# --- forgetting ------------------------------------------------------------------------------------------------------


async def prune_runs(slices: Partitions, now: float, limit: int) -> int:
    """Forget finished runs whose time has come; those with an open parent are passed over."""
    pruned, moment = 0, rows.moment(now)
    for number in range(slices.count):
        passed = 0
        while pruned < limit:
            page = await slices.read(number, "prunable", moment, passed, limit - pruned)
            ids = await _without_open_parent(slices, page)
            gone = await slices.forget(number, "forget_runs", ids, moment) if ids else 0
            pruned += gone
            passed += len(page) - gone
            if len(page) < limit - pruned + gone:
                break
    return pruned


async def _without_open_parent(slices: Partitions, page: list[tuple[bytes, bytes]]) -> list[str]:
    parents = sorted({parent.decode() for _, parent in page if parent})
    asked = await gathered(slices.ask(slices.of(id), "HGET", f"run:{id}", "status") for id in parents)
    is_open = {id for id, status in zip(parents, asked, strict=True) if status and not _terminal(status)}
    return [id.decode() for id, parent in page if parent.decode() not in is_open]


def _terminal(status: bytes) -> bool:
    return RunStatus(status.decode()).terminal
