"""Queries for held runs use an index on every store, also on a store that was created before the index existed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import apsw
import asyncpg
import pytest

from perdure.model.queries import RunQuery
from perdure.model.records import Hold
from perdure.stores.postgres import run_pages
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Store
from perdure.stores.redis.store import RedisStore
from perdure.stores.redis.upgrades import current_format
from perdure.stores.sql_filters import numbered
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import run, suspended, turn, worker
from tests.servers.postgres import schema_of_its_own
from tests.servers.redis import prefix_of_its_own
from tests.stores.sqlite.old_schemas import copy_to_schema
from tests.stores.sqlite.traced_reads import plans_of

ALL, OF_KIND = RunQuery(held=True), RunQuery(held="diverged")


async def create_held_runs(store: Store, count: int = 3) -> None:
    await store.open(shards=16)
    await store.join(worker("a"))
    for n in range(count):
        held = Hold("diverged", "why") if n % 2 == 0 else None
        await store.commit([run(f"r{n:04}", created_at=float(n), owner="a")])
        await store.commit([turn(0, id=f"r{n:04}", patch=suspended(held=held))])


async def held_ids(store: Store) -> list[str]:
    return [record.id for record in (await store.runs(ALL)).runs]


def test_sqlite_uses_the_index_of_held_runs(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(str(tmp_path / "store.db"), synchronous="off")
        await create_held_runs(store)
        for query in (ALL, OF_KIND):
            plans = await plans_of(store, partial(store.runs, query))
            assert ["SCAN runs USING INDEX runs_held_newest"] in plans, plans
        await store.close()

    asyncio.run(main())


def test_sqlite_file_of_the_first_schema_gets_the_index(tmp_path: Path) -> None:
    path = str(tmp_path / "old.db")

    async def main() -> None:
        store = SqliteStore(str(tmp_path / "store.db"), synchronous="off")
        await create_held_runs(store)
        await store.close()
        copy_to_schema(tmp_path / "store.db", tmp_path / "old.db", version=1)
        store = SqliteStore(path, synchronous="off")
        await store.open(shards=16)
        assert await held_ids(store) == ["r0002", "r0000"]
        await store.close()

    asyncio.run(main())
    indexes = apsw.Connection(path).execute("SELECT name FROM sqlite_schema WHERE type = 'index'")
    assert ("runs_held_newest",) in list(indexes)


def test_postgres_uses_the_index_of_held_runs() -> None:
    async def main(url: str) -> None:
        schema = parse_url(url).schema
        store = PostgresStore(url)
        await create_held_runs(store, count=20)
        connection = await asyncpg.connect(parse_url(url).dsn)
        await connection.execute(f"ANALYZE {schema}.runs; SET enable_seqscan = off; SET enable_sort = off")
        for query in (ALL, OF_KIND):
            piece = run_pages.piece_of_page(await run_pages.plan(store._open, query), None, 5, 5, bare=False)
            statement = await connection.prepare(numbered(piece.sql).format(schema=schema))
            plan = str(await statement.explain(*piece.values))
            assert "runs_held_newest" in plan, plan
        await connection.close()
        await store.close()

    with schema_of_its_own() as url:
        asyncio.run(main(url))


@pytest.mark.parametrize("partitions", [1, 4])
def test_redis_store_without_the_index_is_upgraded_when_it_is_opened(partitions: int) -> None:
    async def main(url: str) -> None:
        store = RedisStore(url)
        await create_held_runs(store, count=1201)
        before = sorted(await held_ids(store))
        for number in range(partitions):  # as a store of an earlier version
            await store._partitions.command(number, "DEL", "held-runs:")
        await store._partitions.command(0, "HSET", "meta:", "format", "3")
        assert await held_ids(store) == []
        await store.close()
        store = RedisStore(url)
        await store.open(shards=16)
        assert sorted(await held_ids(store)) == before
        assert await store._partitions.command(0, "HGET", "meta:", "format") == b"%d" % current_format()
        await store.close()

    with prefix_of_its_own(partitions=partitions) as url:
        asyncio.run(main(url))
