"""The short way of plain writes: it leaves what the long way leaves, and leaves to that whatever is not plain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from perdure.stores.postgres import fast_path as postgres_plainly
from perdure.stores.postgres.pool import sql
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Claim
from perdure.stores.results import Committed, Created, IdTaken, WriteResult
from perdure.stores.writes import CreateRun, Write
from perdure.testing.contract.builders import (
    entry,
    mail,
    observe,
    record,
    run,
    settle,
    succeeded,
    turn,
)
from tests.servers.postgres import postgres_url, schema_of_its_own
from tests.stores.fast_path_cases import NOT_PLAIN, PLAIN, SITUATIONS, set_scene
from tests.stores.postgres.test_store import WAITS_FOR_A_LOCK, ask, halfway, named, on

__all__ = ["postgres_url"]  # a fixture

ROWS = (
    "SELECT to_jsonb(r) - 'no' FROM {schema}.runs r ORDER BY r.id",
    "SELECT r.id, to_jsonb(e) - 'run_no' FROM {schema}.entries e LEFT JOIN {schema}.runs r ON r.no = e.run_no"
    " ORDER BY r.id, e.position",
    "SELECT r.id, s.target FROM {schema}.subscriptions s LEFT JOIN {schema}.runs r ON r.no = s.run_no ORDER BY s.no",
    "SELECT r.id, o.observer FROM {schema}.observers o LEFT JOIN {schema}.runs r ON r.no = o.run_no ORDER BY r.id",
)


class Heard(PostgresStore):
    """Keeps the names of the functions that it calls."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.called: list[str] = []

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.called.clear()
        link, fetch = self._open, self._open.fetch

        async def heard(text: str, *values: Any) -> Any:
            if "pg_notify" not in text:
                self.called.append(text.partition("(")[0].rpartition(".")[2])
            return await fetch(text, *values)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, "fetch", heard)
            return await super().commit(batch)


def play(before: Sequence[Write | Claim], write: Write) -> tuple[list[WriteResult], list[Any], list[str]]:
    """The answer to a write, what it has left and told, and the functions that it called."""

    async def life(url: str) -> tuple[list[WriteResult], list[Any], list[str]]:
        store = Heard(url)
        await store.open(shards=16)
        try:
            await set_scene(store, before)
            told: list[Any] = []
            store.on_change(told.append)
            answers = await store.commit([write])
            left = [await ask(url, rows) for rows in ROWS]
            return answers, [*left, told], store.called
        finally:
            await store.close()

    with schema_of_its_own() as url:
        return asyncio.run(life(url))


@pytest.mark.parametrize("what", SITUATIONS)
def test_answers_and_rows_are_those_of_the_long_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = SITUATIONS[what]
    plainly = play(before, write)
    monkeypatch.setattr(postgres_plainly, "call", lambda write: None)
    at_length = play(before, write)
    assert plainly[:2] == at_length[:2]


@pytest.mark.parametrize("what", PLAIN)
def test_what_is_plain_is_one_statement(what: str) -> None:
    _, _, called = play((), PLAIN[what])
    assert called == ["create_plainly" if isinstance(PLAIN[what], CreateRun) else "turn_plainly"]


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_is_not_is_not_tried(what: str) -> None:
    _, _, called = play((), NOT_PLAIN[what])
    assert called == ["commit_write"]


@pytest.mark.parametrize(
    ("first", "answer"), [(observe(), Committed()), (mail(), Committed(has_messages=True))], ids=["observed", "mailed"]
)
def test_an_end_waits_for_what_is_happening_to_its_run_and_then_knows_of_it(
    postgres_url: str, first: Write, answer: WriteResult
) -> None:
    async def test(store: PostgresStore) -> None:
        async with halfway(postgres_url, [first]):
            ending = asyncio.ensure_future(store.commit([turn(0, entry(), patch=succeeded())]))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "ending"):
                assert not ending.done(), "it must wait for whoever has the run"
        assert await ending == [answer]
        assert [each.record.id for each in await store.unfinalized()] == ["r"], (
            "somebody is still to be told, or mail to be dealt with"
        )
        await store.commit([settle()])

    on(named(postgres_url, "ending"), test)


def test_two_who_make_one_run_are_told_who_did(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        async with halfway(postgres_url, [run("new", owner="a", created_by="first")]):
            making = asyncio.ensure_future(store.commit([run("new", owner="a", created_by="second")]))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "making"):
                assert not making.done(), "it must wait for who was first"
        assert await making == [IdTaken(await record(store, "new"))]
        assert await store.commit([run("new", owner="a", created_by="first")]) == [Created(owned=True)]

    on(named(postgres_url, "making"), test)


@pytest.mark.parametrize(("before", "seen"), [(observe(), 0), (mail(), 1)], ids=["observed", "mailed"])
def test_a_run_that_owes_something_at_its_end_is_not_even_locked(postgres_url: str, before: Write, seen: int) -> None:
    """A lock is written, and would have to reach the disk, only to let the long way begin."""

    async def test(store: PostgresStore) -> None:
        await store.commit([before])
        await store.commit([turn(0, entry("first"), seen=seen)])
        plain = postgres_plainly.call(turn(1, entry("last", 1), patch=succeeded()))
        assert plain is not None
        given = (*plain.given[:3], seen, *plain.given[4:])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        async with connection.transaction():
            statement = sql(plain.statement, parse_url(postgres_url))
            assert await connection.fetchval(statement, *given) is False
            assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
        await connection.close()

    on(postgres_url, test)
