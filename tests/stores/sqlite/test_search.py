"""Searches on SQLite: the index that drives a page, the limit of examined rows, and tags of earlier files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from perdure.model.queries import RunQuery
from perdure.model.records import ErrorRecord, RunRecord, RunStatus
from perdure.stores.paging import matches_query
from perdure.stores.results import RunPage
from perdure.stores.sqlite import search
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import RunPatch, TagRun, Write
from perdure.testing.contract.builders import run, succeeded, suspended, turn, worker
from perdure.testing.contract.queue_builders import configure, queued
from tests.stores.sqlite.old_schemas import copy_to_schema
from tests.stores.sqlite.traced_reads import plans_of

RUNS = 60
CAP = 20  # of estimates, in these tests


@pytest.fixture(autouse=True)
def _small_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "ESTIMATE_CAP", CAP)


def on(path: Path, test: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store with `RUNS` runs of many kinds."""

    async def main() -> None:
        store = SqliteStore(str(path), synchronous="off")
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            for n in range(RUNS):
                await store.commit(_run(n))
            await store.commit([configure(), queued("in queue")])
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


def _run(n: int) -> list[Write]:
    """Build run n: rare values every tenth time, frequent ones every second time."""
    id = f"r{n:03}"
    tags: dict[str, Any] = {"order": f"o{n}", "amount": n, "region": "eu" if n % 2 else "us", "all": True}
    workflow = "rare" if n % 10 == 0 else "flow"
    create = run(id, created_at=float(n // 3), owner="a", workflow=workflow, tags=tags, parent="p" if n % 10 else None)
    error = RunPatch(status=RunStatus.FAILED, error=ErrorRecord("Rare", "message"), ended_at=float(n))
    match n % 10:
        case 1:
            return [create, turn(0, id=id, patch=error)]
        case 2:
            return [create, turn(0, id=id, patch=suspended())]
        case 3 | 4 | 5:
            return [create, turn(0, id=id, patch=succeeded(float(n)))]
        case _:
            return [create]


ORDERED = [
    (RunQuery(), "runs_newest"),
    (RunQuery(created_after=5.0), "runs_newest"),
    (RunQuery(where="created>1970-01-01T00:00:05 created<=1970-01-01T00:00:09"), "runs_newest"),
    (RunQuery(status=RunStatus.FAILED), "runs_by_status"),
    (RunQuery(where="waiting:*"), "runs_by_status"),
    (RunQuery(parent="p"), "runs_by_parent"),
    (RunQuery(workflow="flow"), "runs_by_workflow"),
    (RunQuery(where="error:Rare"), "runs_by_error"),
    (RunQuery(where="queue:q"), "runs_by_queue"),
    (RunQuery(held=True), "runs_held_newest"),
    (RunQuery(tags={"order": "o7"}), "run_tags_by_text"),
    (RunQuery(where="region:eu all:true"), "run_tags_by_text"),
    (RunQuery(where="amount>=0 -region:eu"), "runs_newest"),  # the range has too many runs to be sorted
]
UNORDERED = [
    (RunQuery(where="amount>55"), "run_tags_by_number"),
    (RunQuery(where="ended>1970-01-01T00:00:50"), "runs_by_end"),
    (RunQuery(id_prefix="r01"), "sqlite_autoindex_runs_1"),
    (RunQuery(where="worker:b"), "runs_owned"),
]


@pytest.mark.parametrize(("query", "index"), [*ORDERED, *UNORDERED])
def test_a_page_reads_the_index_of_its_most_selective_condition(tmp_path: Path, query: RunQuery, index: str) -> None:
    async def test(store: SqliteStore) -> None:
        for plan in await plans_of(store, lambda: store.runs(replace(query, limit=5))):
            assert not any(line in ("SCAN runs", "SCAN tag", "SCAN t") for line in plan), plan
        assert any(index in line for line in plan), plan  # of the last statements, which read the page
        for line in plan:
            assert "TEMP B-TREE" not in line or (query, index) in UNORDERED or "LAST TERM" in line, plan

    on(tmp_path / "store.db", test)


@pytest.mark.parametrize("query", [query for query, _ in [*ORDERED, *UNORDERED]])
def test_a_count_scans_no_table(tmp_path: Path, query: RunQuery) -> None:
    async def test(store: SqliteStore) -> None:
        for plan in await plans_of(store, lambda: store.count(query, 50)):
            assert not any(line in ("SCAN runs", "SCAN tag", "SCAN t") for line in plan), plan

    on(tmp_path / "store.db", test)


def test_the_rarest_of_several_conditions_drives_the_query(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        for where in ("region:eu order:o7", "order:o7 region:eu", "status:succeeded order:o7", "amount>0 order:o7"):
            page = await store.runs(RunQuery(where=where))
            assert page.scanned == 1, where

    on(tmp_path / "store.db", test)


@pytest.mark.parametrize("query", [query for query, _ in [*ORDERED, *UNORDERED]])
def test_pages_that_end_at_the_scan_limit_find_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: RunQuery
) -> None:
    monkeypatch.setattr(search, "SCAN_LIMIT", 7)
    monkeypatch.setattr(search, "FIRST_SCANS", (3, 5))

    async def test(store: SqliteStore) -> None:
        records = await _all(store, RunQuery(internal=True))
        assert await _all(store, replace(query, limit=2)) == [row for row in records if matches_query(query, row)]

    on(tmp_path / "store.db", test)


async def _all(store: SqliteStore, query: RunQuery) -> list[RunRecord]:
    """Return the runs of all pages of a query."""
    found: list[RunRecord] = []
    after: str | None = None
    while True:
        page: RunPage = await store.runs(replace(query, after=after))
        assert page.scanned <= CAP
        found += page.runs
        if page.next is None:
            return found
        assert page.next != after
        after = page.next


def test_a_page_without_matches_examines_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SCAN_LIMIT", 7)

    async def test(store: SqliteStore) -> None:
        page = await store.runs(RunQuery(where="all:true region:ap"))
        assert (page.runs, page.scanned) == ((), 0)  # nothing has the rarer tag
        page = await store.runs(RunQuery(where="all:true -region:eu -region:us"))
        assert (page.runs, page.scanned) == ((), 7)
        assert page.next is not None

    on(tmp_path / "store.db", test)


def test_a_bare_page_reads_no_payload_columns(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        await store._write(lambda connection: connection.execute("UPDATE runs SET input = x'ff', result = 'r'"))
        (row,) = (await store.runs(RunQuery(tags={"order": "o7"}), bare=True)).runs
        assert (row.input, row.result, row.tags["order"]) == (b"", None, "o7")

    on(tmp_path / "store.db", test)
    columns = {column.split(".")[-1] for column in search.BARE_COLUMNS.split(", ")}
    assert not columns & {"input", "original_input", "result"}


def test_a_change_of_one_tag_writes_only_its_row_of_the_index(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run("tagged", tags={"a": "1", "b": "2", "c": "3"})])
        before = await store._write(lambda connection: connection.total_changes())
        await store.commit([TagRun(run_id="tagged", tags={"a": "1", "b": "4", "c": None})])
        changes = await store._write(lambda connection: connection.total_changes()) - before
        assert changes == 3, "the run, the new value of b, the row of c"
        before += changes
        await store.commit([TagRun(run_id="tagged", tags={"b": "4"})])
        assert await store._write(lambda connection: connection.total_changes()) == before

    on(tmp_path / "store.db", test)


def test_tags_of_an_earlier_version_are_found(tmp_path: Path) -> None:
    current, old = tmp_path / "store.db", tmp_path / "old.db"

    async def write(store: SqliteStore) -> None:
        await store.commit([run("tagged", tags={"tenant": "acme", "n": "1"}), run("damaged", tags={"tenant": "acme"})])

    on(current, write)
    copy_to_schema(current, old, version=3)
    connection = apsw.Connection(str(old))
    connection.execute("UPDATE runs SET tags = 'no JSON' WHERE id = 'damaged'")
    connection.execute("DELETE FROM runs WHERE id LIKE 'r%'")
    connection.close()

    async def read() -> None:
        store = SqliteStore(str(old), synchronous="off")
        await store.open(shards=16)
        assert [row.id for row in (await store.runs(RunQuery(where="tenant:acme n:1"))).runs] == ["tagged"]
        (row,) = (await store.runs(RunQuery(tags={"n": "1"}))).runs
        assert row.tags == {"tenant": "acme", "n": "1"}
        (mark,) = (await store.runs(RunQuery(id_prefix="damaged"))).unreadable
        assert "column tags" in mark.reason
        await store.close()

    asyncio.run(read())
