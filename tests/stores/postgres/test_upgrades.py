"""Stores of earlier versions are upgraded, and processes of earlier versions still work on the upgraded schema."""

from __future__ import annotations

import asyncio

import asyncpg
import msgspec
import pytest

from perdure.model.queries import RunQuery
from perdure.stores.postgres import schema
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.postgres.write_encoding import as_json
from perdure.testing.contract.builders import end, record, run, succeeded, turn, worker
from perdure.testing.contract.queue_builders import admit_now, configure, holders, queued, view_of
from tests.servers.postgres import postgres_url, schema_of_its_own
from tests.stores.postgres.test_store import on, query

__all__ = ["postgres_url"]  # a fixture

BEFORE_DOCUMENTS = 14  # migrations
CLAIM_BEFORE = "SELECT id FROM {schema}.claim_due($1, $2, $2, 'default', ARRAY['flow'], ARRAY[1::bigint], NULL, 10)"


async def ids(store: PostgresStore, **fields: object) -> list[str]:
    return [each.id for each in (await store.runs(RunQuery(**fields))).runs]  # type: ignore[arg-type]


def test_runs_of_an_earlier_version_are_found_by_their_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = schema.migrations()

    async def main(url: str) -> None:
        monkeypatch.setattr(schema, "migrations", lambda: scripts[:BEFORE_DOCUMENTS])
        store = PostgresStore(url)
        await store.open(shards=16)
        await store.join(worker("a"))
        tags = {"team": "red", "größe": "500", "empty": ""}
        for n in range(3):
            await store.commit([run(f"r{n}", owner="a", tags=tags if n % 2 == 0 else {}, created_at=float(n))])
        await store.close()
        monkeypatch.setattr(schema, "migrations", lambda: scripts)
        store = PostgresStore(url)
        await store.open(shards=16)
        assert await ids(store, tags={"team": "red"}) == ["r2", "r0"]
        assert await ids(store, where="größe:500 team:red") == ["r2", "r0"]
        assert await ids(store, where="größe>400") == [], "it was text, and stays text"
        assert await ids(store, tags={"empty": ""}) == ["r2", "r0"]
        assert (await record(store, "r0")).tags == tags
        found = await query(url, "SELECT key, kind, text, number, created_at FROM {schema}.run_tags WHERE key = 'team'")
        assert sorted(map(tuple, found)) == [("team", "text", "red", None, 0.0), ("team", "text", "red", None, 2.0)]
        row = await record(store, "r1")
        assert (row.queue, row.partition, row.priority, row.waiting, row.gate, row.ancestor_queues) == (
            *(None, "", 0, False, ""),
            (),
        )
        await store.close()

    with schema_of_its_own() as url:
        asyncio.run(main(url))


def test_earlier_process_indexes_the_tags_of_its_runs(postgres_url: str) -> None:
    """It sends no rows of the index: `add_runs` derives them."""

    async def test(store: PostgresStore) -> None:
        tags = {"team": "red"}
        given = as_json(run("old", created_at=5.0, tags=tags)) | {"tags": tags}
        assert "tag_rows" not in given
        ((result,),) = await query(
            postgres_url, "SELECT result_kind FROM {schema}.commit_write($1)", msgspec.json.encode(given).decode()
        )
        assert result == "created"
        assert await ids(store, tags={"team": "red"}) == ["old"]

    on(postgres_url, test)


def test_earlier_process_claims_and_ends_runs_of_queues(postgres_url: str) -> None:
    """It knows no gates, and an end that it commits returns the slot."""

    async def test(store: PostgresStore) -> None:
        await store.commit([configure(), configure("gated"), queued("q0"), queued("g0", queue="gated")])
        await admit_now(store, 1)
        await admit_now(store, 1, queue="gated", gate=True)
        claimed = await query(postgres_url, CLAIM_BEFORE, "a", 900.0)
        assert [row[0] for row in claimed] == ["q0"]
        await store.commit([turn(0, id="q0", patch=succeeded(prune_at=950.0))])
        assert await holders(store) == []
        assert (await view_of(store)).held == 0
        ((pruned,),) = await query(postgres_url, "SELECT {schema}.prune_page(1000, 10, 0)")
        assert pruned == 1

    on(postgres_url, test)


def test_upgrade_waits_for_transactions_that_create_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was inserted before the upgrade, and committed during it, is indexed."""
    scripts = schema.migrations()

    async def main(url: str) -> None:
        monkeypatch.setattr(schema, "migrations", lambda: scripts[:BEFORE_DOCUMENTS])
        store = PostgresStore(url)
        await store.open(shards=16)
        await store.join(worker("a"))
        await store.commit([run("r", owner="a", tags={"team": "red"})])
        await store.close()
        monkeypatch.setattr(schema, "migrations", lambda: scripts)
        connection = await asyncpg.connect(parse_url(url).dsn)
        async with connection.transaction():
            await connection.execute(
                f"INSERT INTO {parse_url(url).quoted}.runs SELECT 99, 'late', workflow, version, input, created_at, "
                "created_by, seed, pool, shard, status, generation, epoch, run_attempt, original_workflow, "
                "original_input, result, error, parent, attached, tags, first_executed_at, updated_at "
                f"FROM {parse_url(url).quoted}.runs".replace(".runs SELECT", ".runs OVERRIDING SYSTEM VALUE SELECT")
            )
            store = PostgresStore(url)
            opening = asyncio.ensure_future(store.open(shards=16))
            while not await query(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert not opening.done(), "it must wait for the transaction"
        await opening
        await connection.close()
        assert sorted(await ids(store, tags={"team": "red"})) == ["late", "r"]
        await store.commit([end(id="late")])
        await store.close()

    with schema_of_its_own() as url:
        asyncio.run(main(url))
