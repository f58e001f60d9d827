"""Search of runs in a Redis store: choose the index with the fewest runs, read it newest first, and filter the rows.

Every condition is checked again on the row by the reference (`matches_query`), so that an index only saves reads. Rows
are filtered without their payloads. Each page is merged from all partitions.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord
from perdure.stores.paging import Key, check_limit, cursor_after, key_of, matches_query, without_payloads
from perdure.stores.protocol import SCAN_LIMIT
from perdure.stores.redis import encoding, search_plan
from perdure.stores.redis.partitions import Partitions, gather_calls
from perdure.stores.redis.queries import decode_run_or_mark, records
from perdure.stores.redis.search_plan import Candidate, Range, TimeBounds
from perdure.stores.results import RunPage, UnreadableRun

CHUNK_SIZE = 200  # runs of the first chunk, if the query wants more
MAX_CHUNK_SIZE = 500  # runs per call; the server executes nothing else meanwhile

Found = RunRecord | UnreadableRun | None
"""A run, a mark if it cannot be decoded, or None if it was deleted meanwhile."""


class SearchedRuns(Struct, frozen=True):
    """What a search reads: indexes by creation time, or the keys of all runs that may match, newest first."""

    indexes: tuple[str, ...] = ()
    keys: list[Key] | None = None


async def runs(partitions: Partitions, query: RunQuery, *, bare: bool) -> RunPage:
    """Return a page of matching runs. A run that cannot be decoded matches if it is in the index that is searched."""
    limit = check_limit(query.limit)
    in_full = not bare and query.where is None and not query.tags and query.id_prefix is None
    page: list[tuple[Key, RunRecord | UnreadableRun]] = []
    scanned, following = 0, None
    async for key, found in _newest_first(partitions, query, limit + 1, in_full=in_full):
        scanned += 1
        if found is not None and _matches(query, found):
            if len(page) == limit:
                following = cursor_after(*page[-1][0])
                break
            page.append((key, found))
        if scanned == SCAN_LIMIT:
            following = cursor_after(*key)
            break
    found_runs = [found for _, found in page]
    if not bare and not in_full:
        complete = await records(partitions, [found.id for found in found_runs])
        found_runs = [found for found in complete if found is not None and _matches(query, found)]
    return RunPage(
        tuple(each for each in found_runs if isinstance(each, RunRecord)),
        following,
        tuple(each for each in found_runs if isinstance(each, UnreadableRun)),
        scanned,
    )


async def count(partitions: Partitions, query: RunQuery, cap: int) -> int:
    """Return the number of matching runs, up to `cap`: the size of an index if it contains exactly these runs."""
    check_limit(cap)
    exact = search_plan.find_exact(query)
    if exact is not None:
        bounds = search_plan.find_time_bounds(query)
        internal = Candidate((search_plan.INTERNAL,))
        sizes = await _measure(partitions, [exact, internal], bounds)
        if query.internal or sizes[1] == 0:
            return min(sizes[0], cap)
    counted = 0
    whole = msgspec.structs.replace(query, after=None)
    async for _, found in _newest_first(partitions, whole, cap, in_full=False):
        counted += isinstance(found, RunRecord) and _matches(query, found)
        if counted == cap:
            break
    return counted


def _matches(query: RunQuery, found: RunRecord | UnreadableRun) -> bool:
    return isinstance(found, UnreadableRun) or matches_query(query, found)


# --- what is read ----------------------------------------------------------------------------------------------------


async def _choose_runs(partitions: Partitions, query: RunQuery, bounds: TimeBounds) -> SearchedRuns:
    """Return the indexes that hold the fewest runs."""
    awaited = search_plan.find_awaited(query)
    if awaited is not None and awaited.name is not None:
        return SearchedRuns(keys=await _waiting_runs(partitions, awaited.kind, awaited.name))
    candidates = search_plan.list_candidates(query)
    chosen = candidates[0]
    if len(candidates) > 1:
        sizes = await _measure(partitions, candidates, bounds)
        # A range is read as a whole.
        usable = [n for n, each in enumerate(candidates) if isinstance(each, Candidate) or sizes[n] <= SCAN_LIMIT]
        chosen = candidates[min(usable, key=lambda n: sizes[n])]
    if isinstance(chosen, Range):
        return SearchedRuns(keys=await _runs_in_range(partitions, chosen))
    return SearchedRuns(chosen.indexes)


async def _measure(partitions: Partitions, candidates: Sequence[Candidate | Range], bounds: TimeBounds) -> list[int]:
    """Return the number of runs of each candidate, those of other creation times excluded."""
    ranges: list[tuple[str, str, str]] = []
    owners: list[int] = []
    for number, candidate in enumerate(candidates):
        if isinstance(candidate, Range):
            ranges.append((candidate.index, repr(candidate.lowest), repr(candidate.highest)))
            owners.append(number)
            continue
        ranges += ((index, bounds.lowest, bounds.highest) for index in candidate.indexes)
        owners += [number] * len(candidate.indexes)
    sizes = [0] * len(candidates)
    for page in await partitions.read_all("counts", ranges):
        for number, size in zip(owners, page, strict=True):
            sizes[number] += size
    return sizes


async def _waiting_runs(partitions: Partitions, kind: str, name: str) -> list[Key]:
    """Return the keys of all runs that may wait for this event or run."""
    number = partitions.of(name)
    if kind == "event":
        members = await partitions.command(number, "ZRANGE", f"waiting:{name}", 0, -1)
        subscriptions = (msgspec.msgpack.decode(member) for member in members)
        return sorted({(float(created_at), run_id) for run_id, _, _, created_at in subscriptions}, reverse=True)
    members = await partitions.command(number, "ZRANGE", f"observers:{name}", 0, -1)
    ids = sorted({encoding.decode_observer(member)[0] for member in members})
    found = await _bare_rows(partitions, ids)
    return sorted(((each.created_at, each.id) for each in found if isinstance(each, RunRecord)), reverse=True)


async def _runs_in_range(partitions: Partitions, chosen: Range) -> list[Key]:
    """Return the keys of all runs of an index between two scores."""
    found: list[Key] = []
    for number in range(partitions.count):
        offset, page = 0, [()] * MAX_CHUNK_SIZE
        while len(page) == MAX_CHUNK_SIZE:
            scores = (repr(chosen.lowest), repr(chosen.highest))
            page = await partitions.read(number, "range", chosen.index, *scores, offset, MAX_CHUNK_SIZE)
            found += ((float(created_at), id.decode()) for id, created_at in page if created_at is not None)
            offset += len(page)
    return sorted(set(found), reverse=True)


# --- rows ------------------------------------------------------------------------------------------------------------


async def _newest_first(
    partitions: Partitions, query: RunQuery, wanted: int, *, in_full: bool
) -> AsyncIterator[tuple[Key, Found]]:
    """Yield the rows that may match, newest first from the query's cursor on, in full or bare."""
    bounds = search_plan.find_time_bounds(query)
    before, last_id = bounds.highest, ""
    if query.after is not None:
        created_at, last = key_of(query.after)
        if bounds.until is None or created_at < bounds.until:
            before, last_id = repr(created_at), last
    searched = await _choose_runs(partitions, query, bounds)
    size = min(CHUNK_SIZE, wanted)
    while True:
        if searched.keys is None:
            keys = await _read_keys(partitions, searched.indexes, before, last_id, size)
        else:
            keys = _page_of(searched.keys, before, last_id, size)
        ids = [id for _, id in keys]
        rows = await (records(partitions, ids) if in_full else _bare_rows(partitions, ids))
        for key, row in zip(keys, rows, strict=True):
            if bounds.since is not None and key[0] < bounds.since:
                return
            yield key, row
        if len(keys) < size:
            return
        before, last_id = repr(keys[-1][0]), keys[-1][1]
        size = min(max(CHUNK_SIZE, 2 * size), MAX_CHUNK_SIZE)


async def _read_keys(partitions: Partitions, indexes: Sequence[str], before: str, last_id: str, size: int) -> list[Key]:
    pages = await partitions.read_all("pages", indexes, before, last_id, size)
    found = {
        (float(at), id.decode())
        for of_partition in pages
        for page in of_partition
        for id, at in encoding.iter_pairs(page)
    }
    return heapq.nlargest(size, found)


def _page_of(newest_first: list[Key], before: str, last_id: str, size: int) -> list[Key]:
    """Return a page of these keys, as `_read_keys` does: those before a time, or at this time with a lower id."""
    if before == "+inf":
        return newest_first[:size]
    last = (float(before.removeprefix("(")), last_id)
    is_inclusive = not last_id and not before.startswith("(")
    return list(islice((key for key in newest_first if key < last or (is_inclusive and key[0] == last[0])), size))


async def _bare_rows(partitions: Partitions, ids: Sequence[str]) -> list[Found]:
    """Return the rows of these runs without payloads, in one call per partition."""
    by_partition: dict[int, list[str]] = {}
    for id in ids:
        by_partition.setdefault(partitions.of(id), []).append(id)
    pages = await gather_calls(
        partitions.read(number, "bare", wanted, encoding.BARE_FIELDS) for number, wanted in by_partition.items()
    )
    found: dict[str, Found] = {}
    for wanted, page in zip(by_partition.values(), pages, strict=True):
        found.update(zip(wanted, map(_decode_bare, wanted, page), strict=True))
    return [found[id] for id in ids]


def _decode_bare(id: str, values: list[bytes | None]) -> Found:
    if not any(values):
        return None
    run = decode_run_or_mark(id, encoding.bare_pairs(values))
    return run if isinstance(run, UnreadableRun) else without_payloads(run)
