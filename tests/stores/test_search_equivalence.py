"""Random searches over random runs find what `filter_match` finds, on every store, in pages and as counts."""

from __future__ import annotations

import asyncio
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.model.filters import AllOf, AnyOf, Filter, Not, Term
from perdure.model.queries import RunQuery
from perdure.model.records import ErrorRecord, Hold, RunRecord, RunStatus, Wait
from perdure.model.turns import TurnExtras
from perdure.stores.paging import matches_query
from perdure.stores.protocol import Store
from perdure.stores.writes import RunPatch, TagRun, Write
from perdure.testing import VirtualClock
from perdure.testing.contract.builders import receive, run, succeeded, suspended, turn, worker
from tests.engine.store_matrix import STORES, make_store
from tests.repetitions import repetitions
from tests.servers import postgres_schemas as schemas
from tests.servers import redis_prefixes as prefixes

KEYS = ("a", "b", "status", 'a "b"')
WORDS = ("x", "X", "1", "1.5", "true", "", "é", "%", "_")
NUMBERS = (-1.0, 0.0, 1.0, 1.5, 1e6, 2.0**53)
TIMES = tuple(datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))

tag_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(WORDS), st.sampled_from(NUMBERS), st.integers(0, 2), st.booleans(), st.sampled_from(TIMES)
)
tags = st.dictionaries(st.sampled_from(KEYS), tag_values, max_size=3)
changes = st.dictionaries(st.sampled_from(KEYS), st.none() | tag_values, max_size=2)
ids = st.sampled_from(["r", "r1", "R1", "r_1", "é", "r%", "s", "t"])
instants = st.integers(0, 3).map(float)
errors = st.sampled_from(["E", "TimeoutError"]).map(lambda name: ErrorRecord(name, "message"))
patches = st.one_of(
    st.none(),
    st.builds(suspended, st.none() | instants, held=st.none() | st.just(Hold("diverged", "why"))),
    st.just(suspended(waits=(Wait("deferred", "0/x", "review"), Wait("timer", "0/t", None, 5.0)))),
    st.builds(succeeded, instants),
    st.builds(RunPatch, status=st.just(RunStatus.FAILED), error=errors, ended_at=instants),
)


def build_run(
    id: str, patch: RunPatch | None, topics: list[str], changed: dict[str, Any], **fields: Any
) -> list[Write]:
    """Build the writes of one run: its creation, a turn that may change its tags, a receive."""
    create = run(id, owner="a", **fields)
    extras = TurnExtras(tags=changed) if changed else None
    if topics:
        waits = suspended(waits=(Wait("event", "0/receive", ",".join(topics)),))
        return [create, turn(0, id=id, extras=extras), receive(1, *topics, id=id, patch=waits)]
    return [create, turn(0, id=id, patch=patch, extras=extras)]


runs = st.builds(
    build_run,
    ids,
    patches,
    st.just([]) | st.lists(st.sampled_from(["paid", "sent"]), min_size=1, max_size=2, unique=True),
    st.just({}) | changes,
    created_at=instants,
    workflow=st.sampled_from(["flow", "other", "~internal"]),
    version=st.integers(1, 2),
    pool=st.sampled_from(["default", "gpu"]),
    parent=st.none() | ids,
    tags=tags,
)

comparisons = st.sampled_from([">", "<", ">=", "<="])
texts = [
    *("status:running", "status:failed", "status:suspended", "status:*", "workflow:flow", "workflow:~internal"),
    *("version:1", "version>1", "pool:gpu", "parent:r", "parent:*", "held:*", "held:diverged", "held:poison"),
    *("waiting:*", "waiting:event", "waiting:event:paid", "waiting:deferred:review", "waiting:timer", "waiting:held"),
    *("error:E", "error:*", "worker:a", "worker:*", "queue:*", "id:r", "id:R1", 'id:"%"', "ended:*"),
]
terms: st.SearchStrategy[Filter] = st.one_of(
    st.sampled_from(texts).map(lambda text: _term(text)),
    st.builds(Term, st.sampled_from(["a", "b", 'a "b"']), st.just(":"), st.none() | st.sampled_from(WORDS)),
    st.builds(Term, st.sampled_from(["a", "b", 'a "b"']), comparisons, st.sampled_from(NUMBERS)),
    st.builds(Term, st.just("a"), comparisons, st.sampled_from([time.timestamp() for time in TIMES])),
    st.builds(Term, st.sampled_from(["created", "ended", "updated"]), comparisons, instants | st.just(110.0)),
)
filters: st.SearchStrategy[Filter] = st.recursive(
    terms,
    lambda parts: st.one_of(
        st.builds(Not, parts),
        st.builds(AllOf, st.lists(parts, min_size=1, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(parts, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=5,
)
queries = st.builds(
    RunQuery,
    where=filters,
    limit=st.integers(1, 4),
    internal=st.booleans(),
    status=st.none() | st.none() | st.sampled_from(["failed", "suspended"]),
    workflow=st.none() | st.none() | st.just("flow"),
    tags=st.none() | st.none() | st.dictionaries(st.sampled_from(["a", "b"]), tag_values, max_size=1),
    created_after=st.none() | st.none() | instants,
    waiting_for=st.none() | st.none() | st.just("event:sent"),
)
outside = st.lists(st.builds(TagRun, run_id=ids, tags=changes), max_size=2)


def _term(text: str) -> Filter:
    return RunQuery(where=text).filter or AllOf()


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=repetitions(40, 400))
@given(st.lists(runs, max_size=8), outside, st.lists(queries, min_size=1, max_size=5))
def test_every_search_finds_what_the_reference_finds(
    kind: str, created: list[list[Write]], tagged: list[TagRun], searches: list[RunQuery]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(_compare(make_store(kind, Path(folder), VirtualClock()), created, tagged, searches))
        finally:
            schemas.release_all()
            prefixes.release_all()


async def _compare(store: Store, created: list[list[Write]], tagged: list[TagRun], searches: list[RunQuery]) -> None:
    try:
        await store.open(shards=16)
        await store.join(worker("a"))
        for writes in created:
            await store.commit(writes)
        await store.commit(tagged)
        records = list((await store.runs(RunQuery(internal=True))).runs)
        assert [row.id for row in records] == [row.id for row in _by_age(records)]
        for query in searches:
            expected = [row for row in records if matches_query(query, row)]
            assert await _pages(store, query) == expected, query
            assert await store.count(query, 100) == len(expected), query
            assert await store.count(query, 1) == min(1, len(expected)), query
    finally:
        await store.close()


def _by_age(records: list[RunRecord]) -> list[RunRecord]:
    return sorted(records, key=lambda row: (row.created_at, row.id), reverse=True)


async def _pages(store: Store, query: RunQuery) -> list[RunRecord]:
    found: list[RunRecord] = []
    after = None
    while True:
        page = await store.runs(replace(query, after=after))
        found += page.runs
        if page.next is None:
            return found
        after = page.next
