"""The fast path of single writes: it stores what the general path stores, and declines everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from perdure.stores.postgres import fast_path
from perdure.stores.postgres.pool import sql
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Claim
from perdure.stores.results import Committed, Created, IdTaken, WriteResult
from perdure.stores.writes import CreateRun, Write
from perdure.testing.contract.builders import (
    deliver,
    entry,
    finalize,
    observe,
    record,
    run,
    succeeded,
    turn,
)
from tests.servers.postgres import postgres_url, schema_of_its_own
from tests.stores.fast_path_cases import ELIGIBLE, INELIGIBLE, SCENARIOS, prepare
from tests.stores.postgres.test_store import WAITS_FOR_A_LOCK, applied_not_committed, named, on, query

__all__ = ["postgres_url"]  # a fixture

ROWS = (
    "SELECT to_jsonb(r) - 'pk' FROM {schema}.runs r ORDER BY r.id",
    "SELECT r.id, to_jsonb(e) - 'run_pk' FROM {schema}.entries e LEFT JOIN {schema}.runs r ON r.pk = e.run_pk"
    " ORDER BY r.id, e.position",
    "SELECT r.id, s.target FROM {schema}.subscriptions s LEFT JOIN {schema}.runs r ON r.pk = s.run_pk ORDER BY s.pk",
    "SELECT r.id, o.observer FROM {schema}.observers o LEFT JOIN {schema}.runs r ON r.pk = o.run_pk ORDER BY r.id",
)


class RecordingStore(PostgresStore):
    """Records the names of the SQL functions that it calls."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.called: list[str] = []

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.called.clear()
        pool, fetch = self._open, self._open.fetch

        async def recorded(text: str, *values: Any) -> Any:
            if "pg_notify" not in text:
                self.called.append(text.partition("(")[0].rpartition(".")[2])
            return await fetch(text, *values)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pool, "fetch", recorded)
            return await super().commit(batch)


def apply(before: Sequence[Write | Claim], write: Write) -> tuple[list[WriteResult], list[Any], list[str]]:
    """Return the result of a write, the rows and notifications it left, and the functions it called."""

    async def main(url: str) -> tuple[list[WriteResult], list[Any], list[str]]:
        store = RecordingStore(url)
        await store.open(shards=16)
        try:
            await prepare(store, before)
            notified: list[Any] = []
            store.on_change(notified.append)
            results = await store.commit([write])
            left = [await query(url, rows) for rows in ROWS]
            return results, [*left, notified], store.called
        finally:
            await store.close()

    with schema_of_its_own() as url:
        return asyncio.run(main(url))


@pytest.mark.parametrize("what", SCENARIOS)
def test_results_and_rows_equal_those_of_the_general_path(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = SCENARIOS[what]
    fast = apply(before, write)
    monkeypatch.setattr(fast_path, "call", lambda write: None)
    general = apply(before, write)
    assert fast[:2] == general[:2]


@pytest.mark.parametrize("what", ELIGIBLE)
def test_qualifying_write_is_one_statement(what: str) -> None:
    _, _, called = apply((), ELIGIBLE[what])
    assert called == ["fast_create_run" if isinstance(ELIGIBLE[what], CreateRun) else "fast_commit_turn"]


@pytest.mark.parametrize("what", INELIGIBLE)
def test_other_write_does_not_try_the_fast_path(what: str) -> None:
    _, _, called = apply((), INELIGIBLE[what])
    assert called == ["commit_write"]


@pytest.mark.parametrize(
    ("first", "result"),
    [(observe(), Committed()), (deliver(), Committed(has_messages=True))],
    ids=["observer", "message"],
)
def test_end_waits_for_a_concurrent_write_and_then_sees_it(
    postgres_url: str, first: Write, result: WriteResult
) -> None:
    async def test(store: PostgresStore) -> None:
        async with applied_not_committed(postgres_url, [first]):
            ending = asyncio.ensure_future(store.commit([turn(0, entry(), patch=succeeded())]))
            while not await query(postgres_url, WAITS_FOR_A_LOCK, "ending"):
                assert not ending.done(), "it must wait for the transaction that locks the run"
        assert await ending == [result]
        assert [each.record.id for each in await store.unfinalized()] == ["r"], (
            "an observer or a message needs finalization"
        )
        await store.commit([finalize()])

    on(named(postgres_url, "ending"), test)


def test_concurrent_creates_of_one_run_have_one_winner(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        async with applied_not_committed(postgres_url, [run("new", owner="a", created_by="first")]):
            making = asyncio.ensure_future(store.commit([run("new", owner="a", created_by="second")]))
            while not await query(postgres_url, WAITS_FOR_A_LOCK, "making"):
                assert not making.done(), "it must wait for the first create"
        assert await making == [IdTaken(await record(store, "new"))]
        assert await store.commit([run("new", owner="a", created_by="first")]) == [Created(owned=True)]

    on(named(postgres_url, "making"), test)


@pytest.mark.parametrize(("before", "seen"), [(observe(), 0), (deliver(), 1)], ids=["observer", "message"])
def test_run_that_needs_finalization_at_its_end_is_not_locked(postgres_url: str, before: Write, seen: int) -> None:
    """A lock is written to the log, and would have to reach the disk before the general path starts."""

    async def test(store: PostgresStore) -> None:
        await store.commit([before])
        await store.commit([turn(0, entry("first"), seen=seen)])
        fast = fast_path.call(turn(1, entry("last", 1), patch=succeeded()))
        assert fast is not None
        arguments = (*fast.arguments[:3], seen, *fast.arguments[4:])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        async with connection.transaction():
            statement = sql(fast.statement, parse_url(postgres_url))
            assert await connection.fetchval(statement, *arguments) is False
            assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
        await connection.close()

    on(postgres_url, test)
