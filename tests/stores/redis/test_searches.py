"""Searches of runs: which index is read, and what is left of deleted runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import ErrorRecord, RunStatus
from perdure.model.tags import TagValue
from perdure.model.turns import TurnExtras
from perdure.stores.redis import run_search, upgrades
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Committed
from perdure.stores.writes import ContinueAs, CreateRun, Predecessor, PutDocument, RewindRun, RunPatch, TagRun
from perdure.testing.contract.builders import (
    end,
    entry,
    finalize,
    publish,
    run,
    succeeded,
    suspended,
    turn,
    waiting,
    worker,
)
from tests.servers.redis import prefix_of_its_own

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
TAGS = {"tenant": "acme", "amount": 2.5, "rush": True, "at": NOON, "n": 10**18 + 1}
INDEXES = ("workflow:", "internal:", "run-queue:", "error:", "ended:", "tag:", "tag-number:")
FAILED = RunPatch(status=RunStatus.FAILED, error=ErrorRecord("ValueError", "no"), ended_at=110.0)


def with_store(partitions: int, test: Callable[[RedisStore], Awaitable[None]]) -> None:
    async def scenario(url: str) -> None:
        store = RedisStore(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await test(store)
        finally:
            await store.close()

    with prefix_of_its_own(partitions=partitions) as url:
        asyncio.run(scenario(url))


async def names_of(store: RedisStore, *kinds: str) -> list[str]:
    """Return the names of all keys of these kinds, without the prefix."""
    tags = [store._partitions.tag(number) for number in range(store._partitions.count)]
    found = [(tag, name) for tag in tags for name in await store._server.command("KEYS", f"{tag}:*")]
    names = [name.decode().removeprefix(f"{tag}:") for tag, name in found]
    return sorted(name for name in names if name.startswith(kinds))


async def ids(store: RedisStore, where: str, **options: Any) -> list[str]:
    return [record.id for record in (await store.runs(RunQuery(where=where, **options))).runs]


@pytest.mark.parametrize("partitions", [1, 3])
def test_deleted_runs_leave_no_index_entries(partitions: int) -> None:
    async def scenario(store: RedisStore) -> None:
        for id in ("deleted", "pruned", "internal"):
            workflow = "~bulk" if id == "internal" else "flow"
            await store.commit([run(id, owner="a", tags=TAGS, workflow=workflow)])
            await store.commit([turn(0, entry(), id=id, extras=TurnExtras(tags={"tenant": None, "stage": "x"}))])
            await store.commit([turn(1, entry("b", 1), id=id, patch=FAILED)])
        assert await names_of(store, *INDEXES) != []
        assert await store.delete_run("deleted") == Committed()
        assert await store.delete_run("internal") == Committed()
        await store.commit([RewindRun(run_id="pruned", base=2, turn_id="w", now=120.0, dropped=())])
        assert await ids(store, "error:ValueError") == []
        await store.commit([end(id="pruned", prune_after=1.0), finalize("pruned", orphaned_children=True)])
        assert await store.prune(1_000.0) == ["pruned"]
        assert await names_of(store, *INDEXES) == []

    with_store(partitions, scenario)


def test_replaced_run_has_only_the_index_entries_of_its_successor() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", owner="a", tags={"old": 1.0}, workflow="before")])
        await store.commit([turn(0, entry(), patch=FAILED)])
        again = CreateRun(run("r", created_by="again", tags={"new": "x"}).record, replaces=Predecessor("call-r", 0))
        await store.commit([again])
        assert await names_of(store, *INDEXES) == ["tag:new\0x", "workflow:flow"]

    with_store(1, scenario)


def test_run_that_continues_as_another_workflow_moves_in_the_index() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", owner="a", workflow="~before")])
        restart = ContinueAs(workflow="after", version=1, input=b"{}", first_executed_at=None)
        patch = RunPatch(status=RunStatus.RUNNING, wake_at=300.0)
        await store.commit([turn(0, entry(), continue_as=restart, patch=patch)])
        assert await names_of(store, *INDEXES) == ["workflow:after"]
        assert await ids(store, "workflow:after") == ["r"]

    with_store(1, scenario)


def test_rare_tag_among_many_runs_is_found_without_reading_the_others() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([run(f"r{n}", tags={"n": n, "rare": str(n % 100 == 0)}) for n in range(500)])
        for where in ("rare:True", "n>=495", "n:7", "(n:1 OR n:2)", "status:pending rare:True workflow:flow"):
            page = await store.runs(RunQuery(where=where), bare=True)
            assert page.scanned == len(page.runs) > 0, where
        assert await ids(store, "n>=497 n<499") == ["r498", "r497"]

    with_store(1, scenario)


def test_range_is_read_in_pages_from_every_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_search, "MAX_CHUNK_SIZE", 7)

    async def scenario(store: RedisStore) -> None:
        await store.commit([run(f"r{n:03}", tags={"n": n % 50}, created_at=100.0 + n // 10) for n in range(200)])
        query = RunQuery(where="n>=25", limit=30)
        found: list[str] = []
        while True:
            page = await store.runs(query)
            found += [record.id for record in page.runs]
            if page.next is None:
                break
            query = RunQuery(where="n>=25", limit=30, after=page.next)
        expected = [(100.0 + n // 10, f"r{n:03}") for n in range(200) if n % 50 >= 25]
        assert found == [id for _, id in sorted(expected, reverse=True)]

    with_store(4, scenario)


def test_bare_page_reads_no_payloads() -> None:
    """Neither the input nor the turn state of a run that succeeded, which contains its result, is read."""

    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", owner="a", input=b"x" * 100)])
        await store.commit([turn(0, entry(), patch=succeeded())])
        await store._partitions.command(0, "HSET", "run:r", "turn_state", b"\xff damaged")
        bare = await store.runs(RunQuery(), bare=True)
        assert [(record.id, record.input, record.result) for record in bare.runs] == [("r", b"", None)]
        assert [mark.id for mark in (await store.runs(RunQuery())).unreadable] == ["r"]

    with_store(1, scenario)


def test_tags_of_an_earlier_version_are_read_and_changed() -> None:
    """Text tags have the form that earlier versions read, too."""

    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", tags={"team": "a"})])
        assert await store._partitions.command(0, "HGET", "run:r", "tags") == b"\x81\xa4team\xa1a"
        changes: dict[str, TagValue | None] = {"team": "b", "big": 10**18 + 1, "at": NOON, "temporary": 1}
        assert await store.commit([TagRun(run_id="r", tags=changes)]) == [Committed()]
        assert await store.commit([TagRun(run_id="r", tags={"temporary": None})]) == [Committed()]
        (record,) = await store.records(["r"])
        assert record.tags == {"team": "b", "big": 10**18 + 1, "at": NOON}  # type: ignore[union-attr]

    with_store(1, scenario)


def test_damaged_tags_do_not_block_changes_and_deletion() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", owner="a", tags={"team": "a"})])
        await store.commit([turn(0, entry(), patch=succeeded())])
        await store._partitions.command(0, "HSET", "run:r", "tags", b"\xff\xfe garbage")
        assert await store.commit([TagRun(run_id="r", tags={"n": 5})]) == [Committed()]
        assert await ids(store, "n:5") == ["r"]
        assert await store.delete_run("r") == Committed()

    with_store(1, scenario)


def test_page_of_a_history_skips_markers_and_dropped_entries() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([run("r", owner="a")])
        for n in range(60):
            dropped = TurnExtras(dropped=tuple(f"e{each}" for each in range(n))) if n == 50 else None
            await store.commit([turn(n, *((entry(f"e{n}", n),) if n % 5 else ()), extras=dropped)])
        left = await store.history("r")
        assert [each.position for each in left] == [52, 53, 54, 55, 57, 58, 59, 60]
        pages: list[int] = []
        while page := await store.history("r", after=pages[-1] if pages else 0, limit=3):
            assert len(page) == 3 or page[-1].position == 60
            pages += [each.position for each in page]
        assert pages == [each.position for each in left]

    with_store(1, scenario)


def test_list_of_topics_forgets_topics_without_events_and_receives() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([publish("e1", topic="queued"), publish("e2", topic="queued"), *waiting("w", "awaited")])
        found = [(topic.name, topic.queued, topic.waiting) for topic in await store.topics()]
        assert found == [("awaited", 0, 1), ("queued", 2, 0)]
        assert [topic.name for topic in await store.topics(after="awaited", limit=1)] == ["queued"]
        await store.commit([end(id="w")])
        assert [topic.name for topic in await store.topics()] == ["queued"]
        assert await names_of(store, "topic-names:") != []

    with_store(2, scenario)


@pytest.mark.parametrize("partitions", [1, 3])
def test_version_of_a_document_is_never_given_twice(partitions: int) -> None:
    async def scenario(store: RedisStore) -> None:
        def put(base: int, body: bytes | None, write_id: str) -> PutDocument:
            return PutDocument(kind="k", id="d", base=base, body=body, write_id=write_id, expires_at=50.0, due_at=9.0)

        (first,) = await store.commit([put(0, b"1", "w1")])
        assert isinstance(first, Committed)
        assert await store.commit([put(first.version, None, "w2"), put(first.version, None, "w2")]) == [Committed()] * 2
        (second,) = await store.commit([put(0, b"", "w3")])
        assert isinstance(second, Committed)
        assert second.version > first.version
        assert await store.prune(60.0) == []
        assert await store.document("k", "d") is None
        assert await names_of(store, "document", "due-documents", "expiring-documents") == []

    with_store(partitions, scenario)


class TestUpgrade:
    """A store of format 4 has no indexes of searches."""

    @pytest.mark.parametrize("partitions", [1, 3])
    def test_existing_runs_are_indexed(self, partitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upgrades, "PAGE_SIZE", 4)

        async def scenario(store: RedisStore) -> None:
            expected = await self._fill_and_make_old(store)
            await self._reopen(store)
            assert await self._all_indexes(store) == expected
            assert await names_of(store, "upgrade:") == []
            assert await store.count(RunQuery(where="error:ValueError"), 10) == 1
            assert [topic.name for topic in await store.topics()] == ["t[1]"]

        with_store(partitions, scenario)

    def test_interrupted_upgrade_continues_behind_the_last_page(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upgrades, "PAGE_SIZE", 4)

        async def scenario(store: RedisStore) -> None:
            expected = await self._fill_and_make_old(store)
            execute = store._partitions.execute
            indexed: list[list[str]] = []

            async def interrupted(number: int, *command: Any) -> Any:
                if command[0] == "index_runs":
                    if len(indexed) == 2:
                        raise StoreError("the process dies")
                    indexed.append([id for id, _, _ in command[1]])
                return await execute(number, *command)

            monkeypatch.setattr(store._partitions, "execute", interrupted)
            with pytest.raises(StoreError, match="dies"):
                await self._reopen(store)
            assert await store._partitions.command(0, "HGET", "meta:", "format") == b"4"
            first = indexed[:]
            monkeypatch.setattr(store._partitions, "execute", self._record(execute, indexed))
            await self._reopen(store)
            assert await self._all_indexes(store) == expected
            again = [id for page in indexed[len(first) :] for id in page]
            assert not {id for page in first for id in page} & set(again), "a page was indexed twice"

        with_store(1, scenario)

    @staticmethod
    def _record(execute: Callable[..., Awaitable[Any]], indexed: list[list[str]]) -> Callable[..., Awaitable[Any]]:
        async def record(number: int, *command: Any) -> Any:
            if command[0] == "index_runs":
                indexed.append([id for id, _, _ in command[1]])
            return await execute(number, *command)

        return record

    async def _fill_and_make_old(self, store: RedisStore) -> dict[str, Any]:
        await store.commit([run(f"r{n}", owner="a", tags={"team": str(n % 3)}, created_at=100.0 + n) for n in range(9)])
        await store.commit([run("odd", owner="a", workflow="~odd"), publish("e", topic="t[1]")])
        await store.commit([turn(0, entry(), id="r1", patch=FAILED), turn(0, entry(), id="r2", patch=succeeded())])
        await store.commit([turn(0, entry(), id="r3", patch=suspended(500.0))])
        expected = await self._all_indexes(store)
        assert len(expected) >= 7
        for number in range(store._partitions.count):
            for name in await names_of(store, *INDEXES, "topic-names:"):
                await store._partitions.command(number, "DEL", name)
        await store._partitions.command(0, "HSET", "meta:", "format", "4")
        for number in range(store._partitions.count):
            await store._partitions.command(number, "HDEL", "run:r1", "error_type")
        return expected

    async def _reopen(self, store: RedisStore) -> None:
        await store._partitions.initialize(16)

    async def _all_indexes(self, store: RedisStore) -> dict[str, Any]:
        names = set(await names_of(store, *INDEXES, "topic-names:"))
        return {name: await store._partitions.command_all("ZRANGE", name, 0, -1, "WITHSCORES") for name in names}
