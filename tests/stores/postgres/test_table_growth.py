"""No table grows without bound: repeated updates are HOT updates, and the space of deleted rows is reused.

The tests use a server of their own, where no other transactions delay VACUUM and autovacuum is off.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from perdure import Context, Engine, EngineConfig, event, step, workflow
from perdure.model.queries import RunQuery
from perdure.stores.postgres.store import PostgresStore
from perdure.testing.contract.builders import claim, deliver, entry, publish, run, succeeded, suspended, turn, worker
from tests.servers.postgres import Server

RETAINED = {"meta", "signing_keys", "topics", "documents", "queues"}  # a fixed number of rows (documents: schemas)
WAVE = 200
STATISTICS = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = 'perdure' AND relname = $1"
SIZES = "SELECT relname, pg_total_relation_size(relid) FROM pg_stat_user_tables WHERE schemaname = 'perdure'"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(Path(tempfile.mkdtemp(prefix="perdure-pg-")), autovacuum="off")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(autouse=True)
def _empty_database(server: Server) -> None:
    asyncio.run(server.execute("SET client_min_messages = warning", "DROP SCHEMA IF EXISTS perdure CASCADE"))


async def query(server: Server, text: str, *values: Any) -> list[Any]:
    connection = await asyncpg.connect(server.url)
    try:
        return await connection.fetch(text, *values)
    finally:
        await connection.close()


async def sizes(server: Server) -> dict[str, int]:
    """The bytes of every table, with its indexes."""
    return {row[0]: row[1] for row in await query(server, SIZES)}


async def counted(server: Server, table: str, updates: int) -> int:
    """Return how many updates were HOT, after the server has counted all: sessions report at their end or later."""
    async with asyncio.timeout(60):
        while True:
            [(seen, hot)] = await query(server, STATISTICS, table)
            if seen >= updates:
                return int(hot)
            await asyncio.sleep(0.02)


# --- rows that are updated repeatedly -------------------------------------------------------------------------------


def test_leases_and_topic_offsets_are_hot_updates(server: Server) -> None:
    """HOT updates change no index and reuse space of their page, without VACUUM."""
    times = 400

    async def test() -> None:
        store = PostgresStore(server.url)
        await store.open(shards=16)
        await store.join(worker("a"))
        await store.commit([publish("first")])
        before = {table: (await sizes(server))[table] for table in ("workers", "topics")}
        for n in range(times):
            await store.renew(worker("a", lease_until=1000.0 + n))
            await store.commit([publish(f"e{n}", expires_at=200.0)])
        after = await sizes(server)
        assert {table: after[table] for table in before} == before
        await store.close()
        for table, updates in (("workers", times), ("topics", times + 1)):
            assert await counted(server, table, updates) == updates, table

    asyncio.run(test())


def test_settings_in_the_docs_are_valid(server: Server) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "postgres.md"
    recommended = [line for line in page.read_text().splitlines() if line.startswith("ALTER TABLE perdure.")]
    assert len(recommended) > 3

    async def test() -> None:
        store = PostgresStore(server.url)
        await store.open(shards=16)
        await store.close()
        await server.execute(*recommended)

    asyncio.run(test())


# --- runs that end and are pruned -----------------------------------------------------------------------------------


@event(name="upkeep.word")
class Word:
    text: str


@event(name="upkeep.shout")
class Shout:
    text: str


@step
async def upkeep_work(text: str) -> str:
    return text * 100


@workflow(name="upkeep.child")
async def child(ctx: Context, text: str) -> str:
    return await upkeep_work(text)


@workflow(name="upkeep.parent")
async def parent(ctx: Context, n: int) -> str:
    """Write to every table except dead_letters."""
    word = await ctx.receive(Word)
    shout = await ctx.receive(Shout)
    await ctx.publish("word", word.text)
    await ctx.stream("words").write(word.text)
    for _ in range(5):
        await upkeep_work(word.text)
    handle = await ctx.start_child(child, shout.text)
    return await handle.result()


def test_pruned_runs_leave_no_rows(server: Server) -> None:
    async def test() -> None:
        async with Engine(server.url, [parent, child], EngineConfig(run_retention=0)) as engine:
            runs = [await engine.start(parent, n) for n in range(5)]
            for each in runs:
                await each.send(Word("word"))
                await engine.broadcast(Shout("shout"))
            assert await asyncio.gather(*(each.result() for each in runs)) == ["shout" * 100] * 5
            store = engine._session.store
            while (await store.runs(RunQuery(limit=1))).runs:  # children after their parents, all after finalization
                await store.prune(await store.now() + 1, keep_ids_for=0)
            await store.prune(await store.now() + 2, keep_ids_for=0)  # events deleted just now
        tables = sorted(await sizes(server))
        counts = await server.execute(*(f"SELECT count(*) FROM perdure.{table}" for table in tables))
        assert {table for table, rows in zip(tables, counts, strict=True) if rows} <= RETAINED

    asyncio.run(test())


async def wave(store: PostgresStore, number: int) -> None:
    """Create runs that are claimed and suspended repeatedly, get messages, end and are pruned."""
    ids = [f"run-{number}-{n}" for n in range(WAVE)]
    await store.commit([run(id, owner="a") for id in ids])
    for base in range(4):
        await store.commit([turn(base, entry(f"s#{base}", base), id=id, patch=suspended(140.0)) for id in ids])
        assert len(await store.claim(claim("a", 150.0, limit=WAVE))) == WAVE
    await store.commit([deliver(f"m-{id}", id=id) for id in ids])
    ended = succeeded(prune_at=200.0)
    await store.commit([turn(4, id=id, seen=1, consumed=(1,), patch=ended) for id in ids])
    assert len(await store.prune(300.0)) == WAVE


def test_tables_do_not_grow_with_pruned_runs(server: Server) -> None:
    async def test() -> None:
        store = PostgresStore(server.url)
        await store.open(shards=16)
        await store.join(worker("a"))
        after = []
        for number in range(8):
            await wave(store, number)
            after.append(await sizes(server))
            await server.execute(*(f"VACUUM perdure.{table}" for table in after[-1]))
        await store.close()
        # Compare with the fourth wave: an index reuses a freed page two waves later.
        grown = {table: (size, after[-1][table]) for table, size in after[3].items() if after[-1][table] > 1.2 * size}
        assert grown == {}, "bytes after the fourth wave, and after twice as many"

    asyncio.run(test())
