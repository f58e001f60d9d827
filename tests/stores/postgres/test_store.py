"""The PostgreSQL store passes the contract; and what only a server can do: lose connections, be shared, plan badly."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from msgspec.structs import replace

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import ErrorRecord, Message, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores import semantics as rules
from perdure.stores.postgres import batch as postgres_batch
from perdure.stores.postgres import fast_path as postgres_plainly
from perdure.stores.postgres import listener as postgres_news
from perdure.stores.postgres import queries as postgres_queries
from perdure.stores.postgres import schema as postgres_schema
from perdure.stores.postgres import workers as postgres_fleet
from perdure.stores.postgres.errors import as_store_error
from perdure.stores.postgres.pool import Connection, sql
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import PostgresUrl, parse_url
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, MessageDelivered, Superseded, WriteResult
from perdure.stores.writes import FanOut, Observer, RewindRun, RunPatch, Write
from perdure.testing.contract.builders import (
    claim,
    end,
    entry,
    letter,
    load,
    mail,
    observe,
    observed,
    publish,
    receive,
    record,
    refused,
    run,
    settle,
    succeeded,
    suspended,
    turn,
    waiting,
    worker,
)
from perdure.testing.contract.commit_turn import TurnCases
from perdure.testing.contract.end_run import EndingCases
from perdure.testing.contract.finalization import ABOVE, DutyCases, ObservingCases
from perdure.testing.contract.history import HistoryCases
from perdure.testing.contract.inbox import MailCases
from perdure.testing.store_contract import StoreContract
from tests.servers.postgres import postgres_url, schema_of_its_own, shared_url, with_schema

__all__ = ["postgres_url"]  # a fixture


class _InASchema:
    @pytest.fixture(autouse=True)
    def _in_a_schema(self) -> Iterator[None]:
        with schema_of_its_own() as url:
            self.url = url
            yield

    async def make_store(self) -> Store:
        return PostgresStore(self.url)

    async def again(self, store: Store) -> Store:
        return PostgresStore(self.url)


class TestPostgresStore(_InASchema, StoreContract):
    pass


class TestOneByOne(_InASchema, TurnCases, HistoryCases, MailCases, EndingCases, ObservingCases, DutyCases):
    """Turns and mail that are judged all at once, and those that are carried out one by one, obey the same rules."""

    @pytest.fixture(autouse=True)
    def _nothing_is_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(postgres_plainly, "call", lambda write: None)
        monkeypatch.setattr(postgres_batch, "is_carried_out_alone", lambda write: False)
        monkeypatch.setattr(postgres_batch._BatchPlan, "_is_alone", lambda self, run_id: False)


class TestAllAtOnce(_InASchema, StoreContract):
    """A write that is alone in its batch obeys the same rules as the many of a large one."""

    @pytest.fixture(autouse=True)
    def _no_write_is_carried_out_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(postgres_plainly, "call", lambda write: None)
        monkeypatch.setattr(postgres_batch, "is_carried_out_alone", lambda write: False)


class TestNothingIsPlain(_InASchema, TurnCases, HistoryCases, EndingCases, ObservingCases):
    """What is left to the rules of a write that is alone obeys the same ones as what is plain."""

    @pytest.fixture(autouse=True)
    def _nothing_is_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(postgres_plainly, "call", lambda write: None)


def on(url: str, test: Callable[[PostgresStore], Awaitable[None]]) -> None:
    """Run a test on an open store in which worker "a" owns run "r"."""

    async def life() -> None:
        store = PostgresStore(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            await test(store)
        finally:
            await store.close()

    asyncio.run(life())


async def opened(url: str) -> PostgresStore:
    store = PostgresStore(url)
    await store.open(shards=16)
    return store


async def carry_out(connection: Connection, target: PostgresUrl, batch: Sequence[Write]) -> None:
    """A commit over a connection of the test's own."""
    plain = postgres_plainly.call(batch[0]) if len(batch) == 1 else None
    if plain is not None and await connection.fetchval(sql(plain.statement, target), *plain.given):
        return
    statement, given = postgres_batch.call(batch)
    await connection.fetch(sql(statement, target), *given)


@asynccontextmanager
async def halfway(url: str, batch: Sequence[Write]) -> AsyncIterator[None]:
    """While a batch is carried out, but not committed yet."""
    connection = await asyncpg.connect(parse_url(url).dsn)
    try:
        async with connection.transaction():
            await carry_out(connection, parse_url(url), batch)
            yield
    finally:
        connection.terminate()


def schema_in(url: str) -> str:
    return parse_url(url).quoted


def named(url: str, name: str) -> str:
    """Connections by this URL can be told from others."""
    return f"{url}&application_name={name}"


def in_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


async def ask(url: str, text: str, *values: Any) -> list[Any]:
    """Something that only another connection can tell."""
    connection = await asyncpg.connect(parse_url(url).dsn)
    try:
        return await connection.fetch(text.format(schema=schema_in(url)), *values)
    finally:
        await connection.close()


async def patiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """What an engine does: try again while the store says that it may help."""
    for _ in range(100):
        try:
            return await call()
        except StoreError as error:
            if not error.retryable:
                raise
            await sleep_on(SYSTEM_CLOCK, 0.05)
    raise AssertionError("the store does not come back")


# --- what a batch costs ----------------------------------------------------------------------------------------------


def test_a_batch_of_any_writes_is_one_statement(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: PostgresStore) -> None:
        said: list[str] = []
        link = store._open
        fetch = link.fetch

        async def counted(text: str, *values: Any) -> Any:
            if "notify" not in text:
                said.append(text)
            return await fetch(text, *values)

        monkeypatch.setattr(link, "fetch", counted)
        batch = [run("r2"), turn(0, entry()), mail(id="r2"), *waiting("r3"), publish(), end(id="r2"), settle("r2")]
        await store.commit(batch)
        await store.commit([observed(run("r4")), mail("m2"), mail("m3"), settle("r2", notified=(ABOVE,))])
        assert len(said) == 2

    on(postgres_url, test)


def test_a_step_leaves_the_row_of_its_run_alone(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        version = "SELECT ctid, xmin FROM {schema}.runs"
        before = await ask(postgres_url, version)
        assert await store.commit([turn(0, entry())]) == [Committed()]
        assert await ask(postgres_url, version) == before

    on(postgres_url, test)


def test_plain_turns_are_judged_at_once_and_each_for_itself(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([run(f"r{n}", owner="a") for n in range(6)])
        await store.commit([mail(id="r4"), turn(0, id="r5", patch=succeeded())])
        batch = [
            turn(0, entry("x"), entry("y", 1), id="r0"),
            turn(1, entry(), id="r1"),
            turn(0, entry(), id="r2", worker="b"),
            turn(0, id="r3", patch=suspended(500.0)),
            turn(0, entry(), id="r4"),
            turn(1, entry(), id="r5"),
            turn(0, entry(), id="missing"),
        ]
        names = [type(answer).__name__ for answer in await store.commit(batch)]
        assert names == [
            "Committed",
            "Superseded",
            "Superseded",
            "Committed",
            "Committed",
            "AlreadyEnded",
            "RunMissing",
        ]
        positions = [(await load(store, f"r{n}")).position for n in range(6)]
        assert positions == [2, 0, 0, 1, 1, 1]
        assert await store.commit([batch[4], batch[3]]) == [Committed(has_messages=True), Committed()], (
            "their answers were lost"
        )

    on(postgres_url, test)


HOT = {
    "records": (postgres_queries.RECORDS, (["r-0001"],)),
    "load": (postgres_queries.LOAD, (["r-0001", "r-0002"],)),
    "inbox": (postgres_queries.INBOX, ("r-0001", 0)),
    "history": (postgres_queries.HISTORY, ("r-0001", 0)),
    "unsettled": (postgres_queries.UNSETTLED, (100, 500)),
    "open children": (postgres_queries.OPEN_CHILDREN, ("p-3", "", 500)),
    "next wake": (postgres_fleet.NEXT_WAKE, ("default",)),
    "owned": (postgres_fleet.OWNED, ("a",)),
    "mailed": (postgres_fleet.MAILED, ("a", 100)),
    "release": (postgres_fleet.RELEASE, ("a", 1.0, 1, 500)),
    "wake held": (postgres_fleet.WAKE_HELD, (["flow"], [1], "diverged", 1.0)),
    "topic": (postgres_queries.TOPIC, ("t", 0, 100)),
    "unfinished": (postgres_queries.UNFINISHED, (100,)),
    "published": (postgres_queries.PUBLISHED, ("r-0001",)),
    "stream": (postgres_queries.STREAM, ("r-0001", "log", 0, 500)),
    "a page of runs": (
        f"SELECT * FROM {{schema}}.runs r WHERE {postgres_queries.conditions(RunQuery())[0]} "
        "ORDER BY r.created_at DESC, r.id DESC LIMIT 101",
        (),
    ),
}


def test_hot_questions_are_answered_by_indexes(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([run(f"r-{n:04d}", created_at=float(n), parent=f"p-{n // 9}") for n in range(3000)])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        schema = schema_in(postgres_url)
        await connection.execute(f"ANALYZE {schema}.runs")
        # Small tables are read whole, whatever there is to help: what matters is that there is an index that fits.
        await connection.execute("SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan")
        for what, (text, values) in HOT.items():
            statement = await connection.prepare(text.format(schema=schema))
            plan = str(await statement.explain(*values))
            assert "Seq Scan" not in plan, f"{what}\n{plan}"
            assert '"Filter": "(r.id' not in plan, f"{what}\n{plan}"
        await connection.close()

    on(postgres_url, test)


EXPLAIN_ALL = """
    LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
    SET client_min_messages = log"""


def test_what_the_functions_ask_is_answered_by_indexes(postgres_url: str) -> None:
    """Also where writes touch other runs: a cost that grew with all runs or all topics would show as a scan."""
    target = parse_url(postgres_url)
    batches: list[list[Write]] = [
        [*waiting("s1"), *waiting("s2", "t", "u"), publish(consume=False, page=1), mail(id="r")],
        [FanOut(topic="t", offset=1, now=125.0), observe(id="s1"), mail("m2", id="s1")],
        [turn(0, entry(), seen=1, consumed=(1,), patch=suspended()), mail("m3", id="s2")],
        [
            turn(
                1,
                id="s1",
                owned=False,
                seen=9,
                patch=suspended(),
                extras=TurnExtras(released_assignments=(1,), dropped=("x",)),
            )
        ],
        [receive(2, "t", id="s1", seen=9), end(id="s2"), publish("e2", topic="u", limit=5)],
        [settle("s2", returned=(1,), notified=(Observer("above", "0/child"),), orphans=True)],
        [RewindRun(run_id="s2", base=2, turn_id="back", now=300.0, dropped=("x",))],
        [observed(run("s3", owner="a")), run("s4"), mail("m4", id="s1"), mail("m5", id="s1"), mail("m6", id="s2")],
        [turn(0, id="s3", patch=succeeded())],
        [settle("s3", notified=(ABOVE,)), settle("s4", told=(ABOVE,))],
        [turn(1, owned=False, id="r", patch=succeeded(prune_at=200.0))],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL)
        for batch in batches:
            await carry_out(connection, target, batch)
        await connection.fetch(
            sql(postgres_fleet.CLAIM, target), "a", 900.0, 900.0, "default", ["flow"], [1], [0, 1], 10
        )
        await connection.fetch(sql(postgres_fleet.PRUNE, target), 900.0, 10, 50.0)
        await connection.fetch(sql(postgres_fleet.RETIRE, target), "nobody")
        await connection.close()
        ours = [plan for plan in plans if "typeinfo_tree" not in plan]  # asyncpg's, to learn of types
        assert len(ours) > 100
        assert [plan for plan in ours if "Seq Scan" in plan] == []

    on(postgres_url, test)


def test_much_mail_and_many_children_are_looked_up_one_by_one(postgres_url: str) -> None:
    """With plans as they are made when tables are still small: none goes through all mail for each message of it."""
    target = parse_url(postgres_url)
    many = 300
    ids = [f"child-{n}" for n in range(many)]
    others = [mail(f"o{n}", id=f"other-{n}", kind="child") for n in range(2 * many)]
    batches: list[list[Write]] = [
        [run("warm", owner="a"), mail(id="warm")],
        [turn(0, id="warm", seen=1, consumed=(1,), patch=suspended())],
        [run(mail.run_id) for mail in others],
        [*others, *(mail(f"m{n}", kind="child") for n in range(many))],
        [mail(f"n{n}", kind="child") for n in range(many)],
        [mail("m5", kind="child"), mail("m5", kind="child")],
        [turn(0, entry(), seen=2 * many, consumed=tuple(range(1, 2 * many)), patch=suspended())],
        [observed(run(id, owner="a")) for id in ids],
        [turn(0, id=id, patch=succeeded()) for id in ids],
        [settle(id, notified=(ABOVE,)) for id in ids],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL + "; SET auto_explain.log_analyze = on")
        for batch in batches:
            await carry_out(connection, target, batch)
        await connection.close()
        passed_over = [(int(rows), plan) for plan in plans for rows in re.findall(r"Rows Removed by[^:]*: (\d+)", plan)]
        assert [plan for rows, plan in passed_over if rows > many] == []

    on(postgres_url, test)


def test_many_who_begin_to_wait_for_a_topic_are_looked_up_one_by_one(postgres_url: str) -> None:
    """With plans as they are made when tables are still small: no table is gone through for each write, or the other
    way round, which would take minutes for a thousand of each."""
    target = parse_url(postgres_url)
    many = 200
    ids = [f"reader-{n}" for n in range(many)]
    batches: list[list[Write]] = [
        [*waiting("warm"), publish("e0")],
        [*waiting("warm-2"), publish("e2"), observed(run("warm-3", owner="a")), settle("warm", notified=(ABOVE,))],
        [run(id, owner="a") for id in ids],
        [receive(0, "t", id=id) for id in ids],
        [publish("e1")],
        [observed(run(f"child-{id}", owner="a")) for id in ids],
        [turn(0, id=f"child-{id}", patch=succeeded()) for id in ids],
        [settle(f"child-{id}", notified=(ABOVE,)) for id in ids],
        [settle(f"child-{id}", returned=(1,)) for id in ids],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL + "; SET auto_explain.log_analyze = on")
        for number, batch in enumerate(batches):
            await carry_out(connection, target, batch)
            if number == 0:
                await connection.execute("ANALYZE")
        await connection.close()
        repeated = [(int(times), plan) for plan in plans for times in re.findall(r"loops=(\d+)", plan)]
        assert [plan for times, plan in repeated if times > 2 * many] == []

    on(postgres_url, test)


# --- one schema, many processes --------------------------------------------------------------------------------------


def test_many_processes_make_the_schema_at_once(postgres_url: str) -> None:
    async def test() -> None:
        stores = [PostgresStore(postgres_url) for _ in range(6)]
        await asyncio.gather(*(store.open(shards=16) for store in stores))
        await stores[0].join(worker("a"))
        await stores[1].commit([run(owner="a")])
        assert (await record(stores[5])).owner == "a"
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(test())


def test_a_schema_that_is_not_ours_is_refused_and_left_alone(postgres_url: str) -> None:
    async def test() -> None:
        await ask(postgres_url, "CREATE SCHEMA {schema}")
        await ask(postgres_url, "CREATE TABLE {schema}.runs (theirs text)")
        error = await refused(PostgresStore(postgres_url).open(shards=16))
        assert "not perdure's" in str(error)
        assert await ask(postgres_url, "SELECT theirs FROM {schema}.runs") == []

    asyncio.run(test())


def test_an_empty_schema_that_somebody_made_for_us_will_do(postgres_url: str) -> None:
    async def test() -> None:
        await ask(postgres_url, "CREATE SCHEMA {schema}")
        store = await opened(postgres_url)
        assert await store.workers() == []
        await store.close()

    asyncio.run(test())


def test_a_server_that_is_too_old_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_schema, "OLDEST_SERVER", 10**9)
    assert "needs 14 or later" in str(asyncio.run(refused(PostgresStore(postgres_url).open(shards=16))))


def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    async def test() -> None:
        await (await opened(postgres_url)).close()
        await ask(postgres_url, "UPDATE {schema}.meta SET value = '99' WHERE key = 'version'")
        assert "upgrade perdure" in str(await refused(PostgresStore(postgres_url).open(shards=16)))

    asyncio.run(test())


def test_an_older_schema_is_brought_up_to_date(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store = await opened(postgres_url)
        await store.join(worker("a"))
        await store.commit([run(owner="a")])
        scripts = [*postgres_schema.migrations(), "ALTER TABLE runs ADD COLUMN new_in_the_next text"]
        monkeypatch.setattr(postgres_schema, "migrations", lambda: scripts)
        newer = await opened(postgres_url)
        assert await ask(postgres_url, "SELECT new_in_the_next FROM {schema}.runs") == [(None,)]
        assert await store.commit([turn(0, entry())]) == [Committed()], "both go on while workers are replaced"
        assert await newer.commit([mail()]) == [MessageDelivered(1, fresh=True, owner="a")]
        await store.close()
        await newer.close()

    asyncio.run(test())


def test_many_processes_bring_it_up_to_date_at_once_under_load(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(store: PostgresStore) -> None:
        done_twice_it_fails = "ALTER TABLE runs ADD COLUMN new_in_the_next text"
        scripts = [*postgres_schema.migrations(), done_twice_it_fails]
        monkeypatch.setattr(postgres_schema, "migrations", lambda: scripts)
        newer = [PostgresStore(postgres_url) for _ in range(6)]
        opening = asyncio.gather(*(each.open(shards=16) for each in newer))
        for base in range(50):
            assert await store.commit([turn(base, entry(f"s{base}", base))]) == [Committed()]
        await opening
        assert await newer[-1].commit([turn(50, entry("new", 50))]) == [Committed()]
        await asyncio.gather(*(each.close() for each in newer))

    on(postgres_url, test)


def test_who_migrates_waits_for_whoever_is_at_it(postgres_url: str) -> None:
    async def test() -> None:
        other = await asyncpg.connect(parse_url(postgres_url).dsn)
        transaction = other.transaction()
        await transaction.start()
        await other.fetch(postgres_schema._LOCK, parse_url(postgres_url).schema)
        opening = asyncio.ensure_future(opened(named(postgres_url, "migrating")))
        while not await ask(postgres_url, WAITS_FOR_A_LOCK, "migrating"):
            assert not opening.done(), "it must wait for its turn"
        await transaction.rollback()
        await (await opening).close()
        await other.close()

    asyncio.run(test())


def test_two_schemas_in_one_database_know_nothing_of_each_other(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        with_other = with_schema(shared_url(), "t_a_schema_with_'strange\" name")
        other = await opened(with_other)
        try:
            assert await other.records(["r"]) == [None]
            assert await other.commit([run("theirs")]) == [Created(owned=False)]
            assert await store.records(["theirs"]) == [None]
        finally:
            await other.close()
            await ask(with_other, "DROP SCHEMA {schema} CASCADE")

    on(postgres_url, test)


def test_a_database_in_another_encoding_is_refused() -> None:
    async def test() -> None:
        await ask(shared_url(), "DROP DATABASE IF EXISTS perdure_ascii")
        await ask(shared_url(), "CREATE DATABASE perdure_ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
        try:
            error = await refused(PostgresStore(in_database(shared_url(), "perdure_ascii")).open(shards=16))
            assert "UTF8" in str(error)
        finally:
            await ask(shared_url(), "DROP DATABASE perdure_ascii")

    asyncio.run(test())


# --- races -----------------------------------------------------------------------------------------------------------


def test_stores_that_race_over_topics_and_runs_answer_everyone(postgres_url: str) -> None:
    """Locks that cannot be had in order are given up and tried again: nobody sees an error, no event gets lost."""

    async def receiving(store: PostgresStore, id: str) -> list[Message]:
        """A run that waits again and again, and takes what it has got by then."""
        read: list[Message] = []
        for base in range(12):
            unread = await store.inbox(id)
            numbers = tuple(message.number for message in unread)
            write = receive(base, "t", "u", id=id, target=f"{base}/receive", seen=max(numbers, default=0))
            (answer,) = await store.commit([replace(write, consumed=numbers)])
            assert isinstance(answer, Committed)
            read += unread
        return read + await store.inbox(id)

    async def publishing(store: PostgresStore, name: str) -> None:
        for n in range(12):
            event = publish(f"{name}-{n}", topic="tu"[n % 2], consume=n % 3 > 0)
            later = publish(f"{name}-{n}-too", topic="ut"[n % 2])
            assert len(await store.commit([event, mail(f"{name}-{n}", id="r"), later])) == 3

    async def test(store: PostgresStore) -> None:
        stores = [store, *[await opened(postgres_url) for _ in range(3)]]
        ids = [f"r{n}" for n in range(8)]
        await store.commit([run(id, owner="a") for id in ids])
        read, _ = await asyncio.gather(
            asyncio.gather(*(receiving(stores[n % 4], id) for n, id in enumerate(ids))),
            asyncio.gather(*(publishing(stores[n % 4], f"p{n}") for n in range(6))),
        )
        for messages in read:
            assert len({message.id for message in messages}) == len(messages), "no run is given an event twice"
        for_one = {f"topic/{row[0]}/{row[1]}" for row in await ask(postgres_url, FOR_ONE)}
        given = [message.id for messages in read for message in messages if message.id in for_one]
        assert len(set(given)) == len(given), "what one run has is no other's"
        assert await ask(postgres_url, MISSED) == [], "no event waits for a run that waits for it"
        for other in stores[1:]:
            await other.close()

    on(postgres_url, test)


FOR_ONE = (
    "SELECT t.name, e.place FROM {schema}.topic_events e JOIN {schema}.topics t ON t.no = e.topic_no WHERE e.consume"
)
MISSED = """
    SELECT 1 FROM {schema}.topic_events e JOIN {schema}.subscriptions s ON s.topic_no = e.topic_no
    WHERE e.queued AND e.consume"""


def test_batches_in_opposite_order_do_not_wait_for_each_other_in_a_circle(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        ids = [f"r{n:02d}" for n in range(40)]
        await store.commit([run(id, owner="a") for id in ids])
        for round in range(10):
            there = [mail(f"there{round}", id=id) for id in ids]
            back = [mail(f"back{round}", id=id) for id in reversed(ids)]
            new = [run(f"new{round}-{n:02d}") for n in range(40)]
            await asyncio.gather(
                store.commit([*there, *new]), other.commit([*back, *reversed(new)]), store.commit(back[::-1])
            )
        assert (await record(store, "r00")).last_message_no == 20
        await other.close()

    on(postgres_url, test)


def test_new_runs_are_made_in_the_order_of_their_ids() -> None:
    """Two batches that make the same ones do not wait for each other, which only the server would end."""
    _, given = postgres_batch.call([run("b"), run("c"), run("a")])
    assert [each["id"] for each in json.loads(given[3])] == ["a", "b", "c"]


@pytest.mark.parametrize("company", [(), (run("other"),)], ids=["alone", "in a batch"])
@pytest.mark.parametrize(
    "gives",
    [run("given", owner="b"), turn(0, id="r", patch=RunPatch(status=RunStatus.RUNNING, owner="b"))],
    ids=["new", "turn"],
)
def test_a_worker_that_is_just_given_a_run_is_not_forgotten(
    postgres_url: str, gives: Write, company: tuple[Write, ...]
) -> None:
    async def test(store: PostgresStore) -> None:
        await store.join(worker("b"))
        async with halfway(postgres_url, [gives, *company]):
            retiring = asyncio.ensure_future(store.remove_worker("b"))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "retiring"):
                assert not retiring.done(), "it must wait for who gives the worker a run"
        await retiring
        assert [(each.id, each.fenced) for each in await store.workers()] == [("a", False), ("b", True)]
        assert await store.release_runs("b", 130.0, recovered=True) == [rules.run_of(gives)]

    on(named(postgres_url, "retiring"), test)


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        (turn(0, entry(), turn_id="first"), turn(0, entry(), turn_id="second"), Superseded()),
        (mail("m1"), mail("m2"), MessageDelivered(2, fresh=True, owner="a")),
    ],
    ids=["turns", "mail"],
)
def test_writes_that_come_at_the_same_time_are_judged_one_after_the_other(
    postgres_url: str, first: Write, second: Write, answer: WriteResult
) -> None:
    """Each alone in its batch: the second waits for the first, and then knows of it."""

    async def test(store: PostgresStore) -> None:
        async with halfway(postgres_url, [first]):
            committing = asyncio.ensure_future(store.commit([second]))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "racing"):
                assert not committing.done(), "it must wait for the one that was first"
        assert await committing == [answer]

    on(named(postgres_url, "racing"), test)


# --- connections that break ------------------------------------------------------------------------------------------

WAITS_FOR_A_LOCK = "SELECT 1 FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'"
KILL = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND datname = current_database() AND backend_type = 'client backend'
          AND application_name = $1"""


def test_a_store_whose_connections_are_cut_goes_on(postgres_url: str) -> None:
    url = named(postgres_url, "cut")

    async def test(store: PostgresStore) -> None:
        told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(told.put_nowait)
        for base in range(3):
            assert await ask(postgres_url, KILL, "cut")
            write = turn(base, entry(f"s{base}", base))
            assert await patiently(partial(store.commit, [write])) == [Committed()]
        assert [row.position for row in await store.history("r")] == [1, 2, 3]
        while await asyncio.wait_for(told.get(), 20) is not None:
            pass  # None: it listens again, and cannot know what it missed
        other = await opened(postgres_url)
        await other.commit([run("heard")])
        while (ids := await asyncio.wait_for(told.get(), 20)) is None or "heard" not in ids:
            pass
        await other.close()

    on(url, test)


def test_a_listener_that_went_dead_without_a_word_is_replaced(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_news, "ASK_EVERY", 0.05)

    async def test(store: PostgresStore) -> None:
        dead = ear_of(store)._connection
        fetchval = asyncpg.Connection.fetchval

        async def no_answer(connection: Any, *given: Any) -> Any:
            if connection is dead:
                raise TimeoutError
            return await fetchval(connection, *given)

        monkeypatch.setattr(asyncpg.Connection, "fetchval", no_answer)
        told = asyncio.Event()
        store.on_change(lambda ids: told.set() if ids is None else None)
        await asyncio.wait_for(told.wait(), 20)
        assert ear_of(store)._connection is not dead
        assert dead.is_closed()

    on(postgres_url, test)


def test_a_connection_that_is_cut_in_the_middle_of_a_batch_leaves_nothing(postgres_url: str) -> None:
    url = named(postgres_url, "cut-while-waiting")

    async def test(store: PostgresStore) -> None:
        blocker = await asyncpg.connect(parse_url(postgres_url).dsn)
        await blocker.execute("BEGIN")
        await blocker.fetch(f"SELECT FROM {schema_in(postgres_url)}.runs WHERE id = 'r' FOR UPDATE")
        committing = asyncio.ensure_future(store.commit([run("new"), turn(0, entry())]))
        while not await ask(postgres_url, WAITS_FOR_A_LOCK, "cut-while-waiting"):
            assert not committing.done()
        await ask(postgres_url, KILL, "cut-while-waiting")
        with pytest.raises(StoreError) as caught:
            await committing
        assert caught.value.retryable
        await blocker.execute("ROLLBACK")
        await blocker.close()
        assert await patiently(lambda: store.records(["new"])) == [None]
        assert await patiently(lambda: store.commit([run("new"), turn(0, entry())])) == [
            Created(owned=False),
            Committed(),
        ]

    on(url, test)


def test_a_server_that_is_not_there_may_come_later(tmp_path: Any) -> None:
    store = PostgresStore(f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(StoreError) as caught:
        asyncio.run(store.open(shards=16))
    assert caught.value.retryable


def test_a_wrong_database_is_refused_for_good_and_no_password_is_told() -> None:
    error = asyncio.run(refused(PostgresStore(in_database(shared_url(), "nowhere")).open(shards=16)))
    assert "nowhere" in str(error)
    assert "hush" not in parse_url("postgresql://me:hush@h1,h2/db").name


def test_a_store_belongs_to_the_loop_that_opened_it(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    with pytest.raises(StoreError, match="not open"):
        asyncio.run(store.workers())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.open(shards=16))
    assert "another event loop" in str(asyncio.run(refused(store.workers())))
    loop.run_until_complete(store.close())
    loop.close()
    on(postgres_url, lambda store: store.close())


def test_a_store_that_two_opened_is_closed_by_the_last(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.open(shards=16)
        await store.close()
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(postgres_url, test)


# --- news ------------------------------------------------------------------------------------------------------------


def test_news_of_others_name_the_runs_unless_there_are_too_many(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(told.put_nowait)
        await other.commit([run("one"), run("two")])
        assert await asyncio.wait_for(told.get(), 20) == frozenset(("one", "two"))
        await other.commit([run(f"{n:0500d}") for n in range(100)])
        assert await asyncio.wait_for(told.get(), 20) is None
        await other.close()

    on(postgres_url, test)


def test_ones_own_news_are_heard_once(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        told: list[frozenset[str] | None] = []
        heard: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(told.append)
        other.on_change(heard.put_nowait)
        await store.commit([run("mine")])
        while (ids := await asyncio.wait_for(heard.get(), 20)) != frozenset(["mine"]):
            assert ids is None, "whoever comes is told to look around, and nothing else"
        await other.commit([run("theirs")])
        while frozenset(["theirs"]) not in told:
            await asyncio.sleep(0)
        assert told == [frozenset(["mine"]), frozenset(["theirs"])]
        await other.close()

    on(postgres_url, test)


def test_a_store_need_not_listen(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        heard: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(heard.put_nowait)
        await store.commit([run("told")])
        assert await asyncio.wait_for(heard.get(), 20) == frozenset(["told"])
        listening = (
            "SELECT application_name FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND application_name = 'deaf'"
        )
        assert await ask(postgres_url, listening) == []
        await other.close()

    on(named(postgres_url, "deaf") + "&listen=no", test)


def ear_of(store: PostgresStore) -> postgres_news._ListenConnection:
    assert store._news is not None
    assert store._news._ear is not None
    return store._news._ear


class Wire:
    """Hears what is notified, without being one of those who listen for a store."""

    def __init__(self, connection: Connection, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._said: asyncio.Queue[str] = asyncio.Queue()

    def hear(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._said.put_nowait(str(payload))

    async def so_far(self) -> list[str]:
        """All that was notified since the last time."""
        await self._connection.execute(f"NOTIFY {self._channel}, 'now'")
        said = []
        while (each := await asyncio.wait_for(self._said.get(), 20)) != "now":
            said.append(each)
        return said


@asynccontextmanager
async def tapped(store: PostgresStore) -> AsyncIterator[Wire]:
    assert store._news is not None
    connection = await asyncpg.connect(store._target.dsn)
    wire = Wire(connection, store._news._channel)
    await connection.add_listener(store._news._channel, wire.hear)
    yield wire
    await connection.close()


async def sent(store: PostgresStore) -> None:
    """Until all news are out that a store has begun to tell."""
    assert store._news is not None
    while store._news._sending:
        await asyncio.sleep(0)


async def until(store: PostgresStore, *, alone: bool) -> None:
    async with asyncio.timeout(20):
        while ear_of(store).alone is not alone:
            await asyncio.sleep(0.001)


def test_who_listens_alone_tells_nobody_and_whoever_comes_later_everything(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_news, "ASK_EVERY", 0.05)

    async def test(store: PostgresStore) -> None:
        async with tapped(store) as wire:
            assert ear_of(store).alone
            await store.commit([run("unheard")])
            await sent(store)
            assert await wire.so_far() == []
            other = await opened(postgres_url)
            assert not ear_of(other).alone
            await until(store, alone=False)
            await wire.so_far()
            await store.commit([run("heard")])
            await sent(store)
            assert [each for each in await wire.so_far() if "heard" in each]
            await other.close()
            await until(store, alone=True)
            await store.commit([run("unheard again")])
            await sent(store)
            assert await wire.so_far() == []

    on(postgres_url, test)


def test_whoever_comes_looks_for_what_was_told_to_nobody(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = PostgresStore(postgres_url)
        told: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(told.put_nowait)
        await other.open(shards=16)
        assert await asyncio.wait_for(told.get(), 20) is None
        third = await opened(postgres_url)
        await third.commit([run("next")])
        assert await asyncio.wait_for(told.get(), 20) == frozenset(["next"]), "once is enough"
        await third.close()
        await other.close()

    on(postgres_url, test)


def test_who_does_not_hear_himself_cannot_know_that_he_is_alone(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler in transaction mode, or while the connection is made again."""
    monkeypatch.setattr(postgres_news.NotificationListener, "_heard", lambda *told: None)

    async def test(store: PostgresStore) -> None:
        async with tapped(store) as wire:
            await store.commit([run("told")])
            await sent(store)
            assert [each for each in await wire.so_far() if "told" in each]

    on(postgres_url, test)


def test_listeners_of_another_schema_are_no_company(postgres_url: str) -> None:
    with schema_of_its_own() as elsewhere:

        async def test(store: PostgresStore) -> None:
            other = await opened(elsewhere)
            assert ear_of(other).alone
            assert ear_of(store).alone
            await other.close()

        on(postgres_url, test)


# --- values and options ----------------------------------------------------------------------------------------------


def test_a_nul_in_an_error_or_a_reason_does_not_stop_a_run(postgres_url: str) -> None:
    """Messages of exceptions may quote anything, and PostgreSQL's text cannot hold a NUL."""

    async def test(store: PostgresStore) -> None:
        error = ErrorRecord("E", "a\0b", traceback="\0")
        failed = RunPatch(status=RunStatus.FAILED, error=error, ended_at=110.0)
        await store.commit([turn(0, entry(error=error), patch=failed)])
        await store.commit([run("s", owner="a"), turn(0, entry(error=error), id="s", patch=failed)])
        for id in ("r", "s"):
            snapshot = await load(store, id)
            assert (snapshot.entries[0].error, snapshot.record.error) == (error, error)
        await store.commit([run("t", owner="a"), mail(id="t"), turn(0, id="t", seen=1, patch=succeeded())])
        await store.commit([settle("t", consumed=(1,), dead_letters=(letter(reason="a\0b"),))])
        assert [each.reason for each in await store.dead_letters()] == ["a\N{REPLACEMENT CHARACTER}b"]

    on(postgres_url, test)


def test_the_time_is_the_servers(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        ((before,),) = await ask(postgres_url, "SELECT extract(epoch FROM clock_timestamp())::float8")
        now = await store.now()
        ((after,),) = await ask(postgres_url, "SELECT extract(epoch FROM clock_timestamp())::float8")
        assert before <= now <= after

    on(postgres_url, test)


def test_people_can_read_histories(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([turn(0, entry("charge")), turn(1)])
        rows = await ask(postgres_url, "SELECT run, location, convert_from(value, 'UTF8') FROM {schema}.history")
        assert [tuple(row) for row in rows] == [("r", "charge", '"done"')]

    on(postgres_url, test)


def test_our_options_are_taken_out_of_the_url_and_the_others_left() -> None:
    target = parse_url(
        "postgresql://u:p@h1,h2/db?schema=shop&connections=9&timeout=2.5&listen=no&statement_cache_size=0"
        "&target_session_attrs=primary&sslmode=require"
    )
    assert target.dsn == "postgresql://u:p@h1,h2/db?target_session_attrs=primary&sslmode=require"
    assert (target.schema, target.connections, target.timeout, target.listen) == ("shop", 9, 2.5, False)
    assert target.statement_cache_size == 0
    assert parse_url("postgresql:///db?schema=shop").dsn == "postgresql:///db"
    assert parse_url("postgresql://h/db").schema == "perdure"


@pytest.mark.parametrize(
    "bad",
    [
        "schema=",
        f"schema={'x' * 64}",
        "schema=pg_mine",
        "connections=0",
        "connections=many",
        "listen=maybe",
        "timeout=0",
    ],
)
def test_a_bad_option_is_refused_before_anything_is_opened(bad: str) -> None:
    with pytest.raises(StoreError, match="option"):
        PostgresStore(f"postgresql://h/db?{bad}")


def test_a_zombie_that_commits_while_it_is_taken_over_changes_nothing_or_is_seen(postgres_url: str) -> None:
    """The takeover and the late commit race; whichever is first, the new owner works on what is there."""

    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        await other.join(worker("b"))

        async def take_over(id: str) -> Sequence[int]:
            await other.fence_worker(f"w-{id}")
            await other.release_runs(f"w-{id}", 120.0, recovered=True)
            return [claimed.position for claimed in await other.claim(claim("b", 130.0)) if claimed.id == id]

        for n in range(20):
            id = f"z{n}"
            await store.join(worker(f"w-{id}"))
            await store.commit([run(id, owner=f"w-{id}")])
            late = turn(0, entry("late"), id=id, worker=f"w-{id}")
            (answer,), (position,) = await asyncio.gather(store.commit([late]), take_over(id))
            assert answer in (Committed(), Superseded())
            assert position == (await load(store, id)).position == (1 if answer == Committed() else 0)
        await other.close()

    on(postgres_url, test)


def test_a_claim_waits_for_a_commit_that_is_at_all_that_is_due(postgres_url: str) -> None:
    """Passed over, they would stay due until the next sweep: nobody tells of them once more."""

    async def test(store: PostgresStore) -> None:
        await store.commit([run("late"), run("early")])
        telling = await asyncpg.connect(parse_url(postgres_url).dsn)
        transaction = telling.transaction()
        await transaction.start()
        await telling.fetch(f"SELECT FROM {schema_in(postgres_url)}.runs WHERE id = 'early' FOR NO KEY UPDATE")
        assert [each.id for each in await store.claim(claim("a", 130.0))] == ["late"], "what can be had is not delayed"
        claiming = asyncio.ensure_future(store.claim(claim("a", 130.0)))
        while not await ask(postgres_url, WAITS_FOR_A_LOCK, "claiming"):
            assert not claiming.done(), "it must wait for who is at the only run that is due"
        await transaction.rollback()
        assert [each.id for each in await claiming] == ["early"]
        assert await store.claim(claim("a", 130.0)) == []
        await telling.close()

    on(named(postgres_url, "claiming"), test)


def test_whoever_hears_nothing_is_told_so(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler in transaction mode, which takes LISTEN and forgets it."""

    async def warnings() -> list[str]:
        store = PostgresStore(postgres_url)
        await store.open(shards=16)
        trying = [task for task in asyncio.all_tasks() if "_warn_if_deaf" in repr(task)]
        await asyncio.wait_for(asyncio.gather(*trying), 60)
        await store.close()
        assert len(trying) == 1
        return [record.getMessage() for record in caplog.records if "listen=no" in record.getMessage()]

    monkeypatch.setattr(postgres_news, "HEAR_WITHIN", 2.0)
    assert asyncio.run(warnings()) == []
    monkeypatch.setattr(postgres_news, "HEAR_WITHIN", 0.0)
    monkeypatch.setattr(postgres_news.NotificationListener, "_heard", lambda *told: None)
    assert len(asyncio.run(warnings())) == 1


@pytest.mark.parametrize("kind", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError])
def test_a_pooler_without_prepared_statements_delays_and_says_what_to_do(kind: type[Exception]) -> None:
    meant = as_store_error(kind("prepared statement does not exist"))
    assert meant is not None
    assert meant.retryable
    assert "statement_cache_size=0" in str(meant)
