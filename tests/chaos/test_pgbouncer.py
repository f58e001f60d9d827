"""PgBouncer in transaction mode, where two statements of a client may use different sessions.

The store passes its contract there and workers finish all runs, with `statement_cache_size=0` and `listen=no`. If
the pooler lacks support, an error message says what to do.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import Client, Context, Engine, EngineConfig, StoreError, workflow
from perdure.model.queries import RunQuery
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.protocol import Store
from perdure.testing import StoreContract
from perdure.testing.contract.builders import run, worker
from tests.chaos.store_servers import Place
from tests.chaos.worker_group import WorkerGroup
from tests.chaos.workflows import plan
from tests.servers.pgbouncer import PgBouncer, version
from tests.servers.postgres import Server, with_schema

OPTIONS = "&statement_cache_size=0&listen=no"
LEASE = 3.0
WORKERS = 3
RUNS = 150


@workflow(name="pgbouncer.counts")
async def counts(ctx: Context) -> None:
    for n in range(3):
        await ctx.stream("numbers").write(n)
        await ctx.sleep(0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(Path(tempfile.mkdtemp(prefix="perdure-pg-")))
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def pooler(server: Server) -> Iterator[PgBouncer]:
    pooler = PgBouncer(Path(tempfile.mkdtemp(prefix="perdure-pgb-")), server)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.remove()


def new_schema(pooler: PgBouncer) -> str:
    return with_schema(pooler.url, f"t_{os.urandom(6).hex()}")


class TestThroughPgBouncer(StoreContract):
    @pytest.fixture(autouse=True)
    def _schema(self, pooler: PgBouncer) -> None:
        self._url = new_schema(pooler) + OPTIONS

    async def make_store(self) -> Store:
        return PostgresStore(self._url)

    async def again(self, store: Store) -> Store:
        return PostgresStore(self._url)

    # With `listen=no` a store receives no notifications: sweeps and polls find changes, as the tests below show.
    test_a_change_through_another_handle_notifies_listeners = None  # type: ignore[assignment]
    test_a_follower_is_notified_of_every_commit_through_another_handle = None  # type: ignore[assignment]
    test_a_follower_is_not_notified_of_other_runs = None  # type: ignore[assignment]


def test_workers_without_notifications_finish_all_runs(pooler: PgBouncer, tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with Client(url, config=EngineConfig(sweep_interval=0.5)) as client:
            group = WorkerGroup(tmp_path, Place(url, url), client, "worker", LEASE)

            async def kill_one() -> None:
                await group.kill(group.living()[0])

            try:
                await asyncio.gather(*(group.start() for _ in range(WORKERS)))
                await group.carry(plan(range(RUNS), str(group.log)), kill_one)
            finally:
                group.close()

    asyncio.run(main(new_schema(pooler) + OPTIONS))


def test_reader_without_notifications_follows_a_stream(pooler: PgBouncer) -> None:
    async def main(url: str) -> list[int]:
        config = EngineConfig(sweep_interval=0.5)
        async with Engine(url, [counts], config=config) as engine, Client(url, config=config) as reader:
            run = await engine.start(counts)
            return [item async for item in reader.read_stream(run.id, "numbers")]

    assert asyncio.run(main(new_schema(pooler) + OPTIONS)) == [0, 1, 2]


async def store_concurrently(url: str) -> int:
    """Store a hundred runs, ten at a time, over more connections than the pooler has. Return how many are stored."""
    store = PostgresStore(url)
    await store.open(shards=16)
    try:
        await store.join(worker("a"))

        async def work(number: int) -> None:
            for n in range(10):
                await store.commit([run(f"r{number}-{n}", owner="a")])
                await store.load([f"r{number}-{n}"])

        await asyncio.gather(*(work(number) for number in range(10)))
        return len((await store.runs(RunQuery(limit=200))).runs)
    finally:
        await store.close()


def test_prepared_statements_work_if_the_pooler_supports_them(pooler: PgBouncer) -> None:
    if version() < (1, 21):
        pytest.skip("this PgBouncer does not support them: it needs 1.21")
    assert asyncio.run(store_concurrently(new_schema(pooler) + "&listen=no")) == 100


def test_unsupported_prepared_statements_are_an_error_that_names_the_option(server: Server) -> None:
    none = {"max_prepared_statements": "0"} if version() >= (1, 21) else {}
    pooler = PgBouncer(Path(tempfile.mkdtemp(prefix="perdure-pgb-")), server, **none)
    try:
        pooler.start()
        with pytest.raises(StoreError, match=r"pgbouncer[\s\S]*statement_cache_size"):
            asyncio.run(store_concurrently(new_schema(pooler) + "&listen=no"))
    finally:
        pooler.remove()
