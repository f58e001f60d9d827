"""Queries by event and by child read the runs that wait, not all suspended runs."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from perdure.model.queries import RunQuery
from perdure.model.records import Wait
from perdure.stores.postgres import run_pages
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Store
from perdure.stores.redis.store import RedisStore
from perdure.stores.sql_filters import numbered
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import observe, receive, run, suspended, worker
from tests.servers.postgres import schema_of_its_own
from tests.servers.redis import prefix_of_its_own
from tests.stores.sqlite.traced_reads import plans_of

BY_EVENT, BY_CHILD = RunQuery(waiting_for="event:rare"), RunQuery(waiting_for="child:kid")


async def create_waiting_runs(store: Store, count: int = 20) -> None:
    """Create runs of which one waits for the event "rare" and for the run "kid", and all others for "frequent"."""
    await store.open(shards=16)
    await store.join(worker("a"))
    await store.commit([run("kid", owner="a")])
    for n in range(count):
        id, topic = f"r{n:04}", "rare" if n == 5 else "frequent"
        waits = (Wait("event", "receive", topic), *([Wait("child", "kid", "kid")] if n == 5 else []))
        await store.commit([run(id, created_at=float(n), owner="a")])
        await store.commit([receive(0, topic, id=id, patch=suspended(waits=waits))])
    await store.commit([observe("r0005", id="kid")])


async def check_results(store: Store) -> None:
    for query in (BY_EVENT, BY_CHILD):
        assert [record.id for record in (await store.runs(query)).runs] == ["r0005"]


def test_sqlite_reads_subscriptions_and_observers(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(str(tmp_path / "store.db"), synchronous="off")
        await create_waiting_runs(store)
        await check_results(store)
        for query, index in ((BY_EVENT, "subscriptions_by_topic"), (BY_CHILD, "observers USING PRIMARY KEY")):
            plan = (await plans_of(store, partial(store.runs, query)))[-1]
            assert plan[0].startswith("SEARCH runs USING"), plan
            assert any(index in line for line in plan), plan
        await store.close()

    asyncio.run(main())


def test_postgres_reads_subscriptions_and_observers() -> None:
    async def main(url: str) -> None:
        store = PostgresStore(url)
        await create_waiting_runs(store)
        await check_results(store)
        connection = await asyncpg.connect(parse_url(url).dsn)
        await connection.execute("SET enable_seqscan = off")
        for query, index in ((BY_EVENT, "subscriptions_of_topic"), (BY_CHILD, "observers_of_run")):
            search = await run_pages.plan(store._open, query)
            piece = run_pages.piece_of_page(search, None, 5, 5, bare=False)
            statement = await connection.prepare(numbered(piece.sql).format(schema=parse_url(url).quoted))
            plan = str(await statement.explain(*piece.values))
            assert index in plan, plan
            assert "runs_by_status" not in plan, plan
        await connection.close()
        await store.close()

    with schema_of_its_own() as url:
        asyncio.run(main(url))


def test_redis_reads_subscriptions_and_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(url: str) -> None:
        store = RedisStore(url)
        await create_waiting_runs(store)
        monkeypatch.setattr("perdure.stores.redis.run_search._read_keys", None)  # it reads all suspended runs
        await check_results(store)
        await store.close()

    with prefix_of_its_own() as url:
        asyncio.run(main(url))
