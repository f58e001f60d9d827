"""The PostgreSQL store passes the contract; query plans, concurrent processes, lost connections and notifications."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest
from msgspec.structs import replace

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.errors import StoreError
from perdure.model.records import ErrorRecord, Message, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores import semantics
from perdure.stores.postgres import batch as batches
from perdure.stores.postgres import fast_path, listener, queries, schema
from perdure.stores.postgres import workers as worker_queries
from perdure.stores.postgres.errors import as_store_error
from perdure.stores.postgres.pool import Connection, sql
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.url import PostgresUrl, parse_url
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, MessageDelivered, Superseded, WriteResult
from perdure.stores.writes import FanOut, Observer, RewindRun, RunPatch, Write
from perdure.testing.contract.builders import (
    claim,
    dead_letter,
    deliver,
    end,
    entry,
    finalize,
    load,
    observe,
    observed,
    publish,
    receive,
    record,
    refused,
    run,
    succeeded,
    suspended,
    turn,
    waiting,
    worker,
)
from perdure.testing.contract.commit_turn import CommitTurnCases
from perdure.testing.contract.end_run import EndRunCases
from perdure.testing.contract.finalization import ABOVE, FinalizationCases, ObserverCases
from perdure.testing.contract.history import HistoryCases
from perdure.testing.contract.inbox import InboxCases
from perdure.testing.store_contract import StoreContract
from tests.servers.postgres import postgres_url, schema_of_its_own, shared_url, with_schema

__all__ = ["postgres_url"]  # a fixture


class _WithSchema:
    @pytest.fixture(autouse=True)
    def _schema(self) -> Iterator[None]:
        with schema_of_its_own() as url:
            self.url = url
            yield

    async def make_store(self) -> Store:
        return PostgresStore(self.url)

    async def again(self, store: Store) -> Store:
        return PostgresStore(self.url)


class TestPostgresStore(_WithSchema, StoreContract):
    pass


class TestUngroupedWrites(
    _WithSchema, CommitTurnCases, HistoryCases, InboxCases, EndRunCases, ObserverCases, FinalizationCases
):
    """Writes that are applied one by one follow the same rules as grouped ones."""

    @pytest.fixture(autouse=True)
    def _group_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast_path, "call", lambda write: None)
        monkeypatch.setattr(batches, "needs_only_run_lock", lambda write: False)
        monkeypatch.setattr(batches._BatchPlan, "_is_only_write", lambda self, run_id: False)


class TestGroupedWrites(_WithSchema, StoreContract):
    """A single write follows the same rules as the writes of a large batch."""

    @pytest.fixture(autouse=True)
    def _batch_every_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast_path, "call", lambda write: None)
        monkeypatch.setattr(batches, "needs_only_run_lock", lambda write: False)


class TestWithoutFastPath(_WithSchema, CommitTurnCases, HistoryCases, EndRunCases, ObserverCases):
    """A single write on the general path follows the same rules as on the fast path."""

    @pytest.fixture(autouse=True)
    def _disable_fast_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast_path, "call", lambda write: None)


def on(url: str, test: Callable[[PostgresStore], Awaitable[None]]) -> None:
    """Run a test on an open store in which worker "a" owns run "r"."""

    async def main() -> None:
        store = PostgresStore(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


async def opened(url: str) -> PostgresStore:
    store = PostgresStore(url)
    await store.open(shards=16)
    return store


async def apply_batch(connection: Connection, target: PostgresUrl, batch: Sequence[Write]) -> None:
    """Apply a batch over a connection of the test."""
    fast = fast_path.call(batch[0]) if len(batch) == 1 else None
    if fast is not None and await connection.fetchval(sql(fast.statement, target), *fast.arguments):
        return
    statement, arguments = batches.call(batch)
    await connection.fetch(sql(statement, target), *arguments)


@asynccontextmanager
async def applied_not_committed(url: str, batch: Sequence[Write]) -> AsyncIterator[None]:
    """Apply a batch in a transaction that is open while the body runs, and is committed at its end."""
    connection = await asyncpg.connect(parse_url(url).dsn)
    try:
        async with connection.transaction():
            await apply_batch(connection, parse_url(url), batch)
            yield
    finally:
        connection.terminate()


def schema_in(url: str) -> str:
    return parse_url(url).quoted


def named(url: str, name: str) -> str:
    """Return a URL whose connections have this application name."""
    return f"{url}&application_name={name}"


def in_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


async def query(url: str, text: str, *values: Any) -> list[Any]:
    """Execute a statement over another connection and return its rows."""
    connection = await asyncpg.connect(parse_url(url).dsn)
    try:
        return await connection.fetch(text.format(schema=schema_in(url)), *values)
    finally:
        await connection.close()


async def with_retries(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call while it raises retryable errors, as an engine does."""
    for _ in range(100):
        try:
            return await call()
        except StoreError as error:
            if not error.retryable:
                raise
            await sleep_on(SYSTEM_CLOCK, 0.05)
    raise AssertionError("the store stays unavailable")


# --- cost of a batch ------------------------------------------------------------------------------------------------


def test_batch_of_any_writes_is_one_statement(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: PostgresStore) -> None:
        statements: list[str] = []
        pool = store._open
        fetch = pool.fetch

        async def counted(text: str, *values: Any) -> Any:
            if "notify" not in text:
                statements.append(text)
            return await fetch(text, *values)

        monkeypatch.setattr(pool, "fetch", counted)
        batch = [run("r2"), turn(0, entry()), deliver(id="r2"), *waiting("r3"), publish(), end(id="r2"), finalize("r2")]
        await store.commit(batch)
        await store.commit([observed(run("r4")), deliver("m2"), deliver("m3"), finalize("r2", notified=(ABOVE,))])
        assert len(statements) == 2

    on(postgres_url, test)


def test_step_does_not_update_the_row_of_its_run(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        version = "SELECT ctid, xmin FROM {schema}.runs"
        before = await query(postgres_url, version)
        assert await store.commit([turn(0, entry())]) == [Committed()]
        assert await query(postgres_url, version) == before

    on(postgres_url, test)


def test_grouped_turns_get_independent_results(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([run(f"r{n}", owner="a") for n in range(6)])
        await store.commit([deliver(id="r4"), turn(0, id="r5", patch=succeeded())])
        batch = [
            turn(0, entry("x"), entry("y", 1), id="r0"),
            turn(1, entry(), id="r1"),
            turn(0, entry(), id="r2", worker="b"),
            turn(0, id="r3", patch=suspended(500.0)),
            turn(0, entry(), id="r4"),
            turn(1, entry(), id="r5"),
            turn(0, entry(), id="missing"),
        ]
        names = [type(result).__name__ for result in await store.commit(batch)]
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
            "a repeated call whose results were lost"
        )

    on(postgres_url, test)


HOT_QUERIES = {
    "records": (queries.RECORDS, (["r-0001"],)),
    "load": (queries.LOAD, (["r-0001", "r-0002"],)),
    "inbox": (queries.INBOX, ("r-0001", 0)),
    "history": (queries.HISTORY, ("r-0001", 0, None)),
    "unfinalized": (queries.UNFINALIZED, (100, 500)),
    "open children": (queries.OPEN_CHILDREN, ("p-3", "", 500)),
    "next wake": (worker_queries.NEXT_WAKE, ("default", None)),
    "owned": (worker_queries.OWNED, ("a",)),
    "owned with messages": (worker_queries.OWNED_WITH_MESSAGES, ("a", 100)),
    "release": (worker_queries.RELEASE_RUNS, ("a", 1.0, 1, 500)),
    "retry held": (worker_queries.RETRY_HELD, (["flow"], [1], "diverged", 1.0)),
    "topic": (queries.TOPIC, ("t", 0, 100)),
    "unfinished": (queries.UNFINISHED, (100,)),
    "published": (queries.PUBLISHED, ("r-0001",)),
    "stream": (queries.STREAM, ("r-0001", "log", 0, 500)),
    "documents": (queries.DOCUMENTS, ("schedule", "a", 100)),
    "due documents": (queries.DUE_DOCUMENTS, ("schedule", 1.0, 100)),
    "topics": (queries.TOPICS, ("", 100)),
}


def test_hot_queries_use_indexes(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([run(f"r-{n:04d}", created_at=float(n), parent=f"p-{n // 9}") for n in range(3000)])
        connection = await asyncpg.connect(parse_url(postgres_url).dsn)
        schema = schema_in(postgres_url)
        await connection.execute(f"ANALYZE {schema}.runs")
        # The planner scans small tables whole. The test checks that a suitable index exists.
        await connection.execute("SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan")
        for what, (text, values) in HOT_QUERIES.items():
            statement = await connection.prepare(text.format(schema=schema))
            plan = str(await statement.explain(*values))
            assert "Seq Scan" not in plan, f"{what}\n{plan}"
            assert '"Filter": "(r.id' not in plan, f"{what}\n{plan}"
        await connection.close()

    on(postgres_url, test)


EXPLAIN_ALL = """
    LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on;
    SET client_min_messages = log"""


def test_statements_of_sql_functions_use_indexes(postgres_url: str) -> None:
    """Covers writes that affect other runs: a cost that grows with all runs or topics would show as a scan."""
    target = parse_url(postgres_url)
    batches: list[list[Write]] = [
        [*waiting("s1"), *waiting("s2", "t", "u"), publish(consume=False, page=1), deliver(id="r")],
        [FanOut(topic="t", offset=1, now=125.0), observe(id="s1"), deliver("m2", id="s1")],
        [turn(0, entry(), seen=1, consumed=(1,), patch=suspended()), deliver("m3", id="s2")],
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
        [finalize("s2", returned=(1,), notified=(Observer("above", "0/child"),), orphaned_children=True)],
        [RewindRun(run_id="s2", base=2, turn_id="back", now=300.0, dropped=("x",))],
        [
            observed(run("s3", owner="a")),
            run("s4"),
            deliver("m4", id="s1"),
            deliver("m5", id="s1"),
            deliver("m6", id="s2"),
        ],
        [turn(0, id="s3", patch=succeeded())],
        [finalize("s3", notified=(ABOVE,)), finalize("s4", notified=(ABOVE,))],
        [turn(1, owned=False, id="r", patch=succeeded(prune_at=200.0))],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL)
        for batch in batches:
            await apply_batch(connection, target, batch)
        await connection.fetch(
            sql(worker_queries.CLAIM, target), "a", 900.0, 900.0, "default", ["flow"], [1], [0, 1], 10, 10, [], []
        )
        await connection.fetch(sql(worker_queries.PRUNE, target), 900.0, 10, 50.0)
        await connection.fetch(sql(worker_queries.REMOVE_WORKER, target), "unknown")
        await connection.close()
        ours = [plan for plan in plans if "typeinfo_tree" not in plan]  # asyncpg reads types
        assert len(ours) > 100
        assert [plan for plan in ours if "Seq Scan" in plan] == []

    on(postgres_url, test)


def test_many_messages_and_children_are_looked_up_by_index(postgres_url: str) -> None:
    """With plans made while tables are small: none scans all messages for each message."""
    target = parse_url(postgres_url)
    many = 300
    ids = [f"child-{n}" for n in range(many)]
    others = [deliver(f"o{n}", id=f"other-{n}", kind="child") for n in range(2 * many)]
    batches: list[list[Write]] = [
        [run("warm", owner="a"), deliver(id="warm")],
        [turn(0, id="warm", seen=1, consumed=(1,), patch=suspended())],
        [run(each.run_id) for each in others],
        [*others, *(deliver(f"m{n}", kind="child") for n in range(many))],
        [deliver(f"n{n}", kind="child") for n in range(many)],
        [deliver("m5", kind="child"), deliver("m5", kind="child")],
        [turn(0, entry(), seen=2 * many, consumed=tuple(range(1, 2 * many)), patch=suspended())],
        [observed(run(id, owner="a")) for id in ids],
        [turn(0, id=id, patch=succeeded()) for id in ids],
        [finalize(id, notified=(ABOVE,)) for id in ids],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL + "; SET auto_explain.log_analyze = on")
        for batch in batches:
            await apply_batch(connection, target, batch)
        await connection.close()
        skipped = [(int(rows), plan) for plan in plans for rows in re.findall(r"Rows Removed by[^:]*: (\d+)", plan)]
        assert [plan for rows, plan in skipped if rows > many] == []

    on(postgres_url, test)


def test_many_new_subscriptions_are_looked_up_by_index(postgres_url: str) -> None:
    """With plans made while tables are small: no table is scanned once per write, nor the writes once per row.

    Either would take minutes for a thousand of each.
    """
    target = parse_url(postgres_url)
    many = 200
    ids = [f"reader-{n}" for n in range(many)]
    batches: list[list[Write]] = [
        [*waiting("warm"), publish("e0")],
        [*waiting("warm-2"), publish("e2"), observed(run("warm-3", owner="a")), finalize("warm", notified=(ABOVE,))],
        [run(id, owner="a") for id in ids],
        [receive(0, "t", id=id) for id in ids],
        [publish("e1")],
        [observed(run(f"child-{id}", owner="a")) for id in ids],
        [turn(0, id=f"child-{id}", patch=succeeded()) for id in ids],
        [finalize(f"child-{id}", notified=(ABOVE,)) for id in ids],
        [finalize(f"child-{id}", returned=(1,)) for id in ids],
    ]

    async def test(store: PostgresStore) -> None:
        plans: list[str] = []
        connection = await asyncpg.connect(target.dsn)
        connection.add_log_listener(lambda _, message: plans.append(str(message)))
        await connection.execute(EXPLAIN_ALL + "; SET auto_explain.log_analyze = on")
        for number, batch in enumerate(batches):
            await apply_batch(connection, target, batch)
            if number == 0:
                await connection.execute("ANALYZE")
        await connection.close()
        repeated = [(int(times), plan) for plan in plans for times in re.findall(r"loops=(\d+)", plan)]
        assert [plan for times, plan in repeated if times > 2 * many] == []

    on(postgres_url, test)


# --- one schema, many processes -------------------------------------------------------------------------------------


def test_many_processes_create_the_schema_concurrently(postgres_url: str) -> None:
    async def test() -> None:
        stores = [PostgresStore(postgres_url) for _ in range(6)]
        await asyncio.gather(*(store.open(shards=16) for store in stores))
        await stores[0].join(worker("a"))
        await stores[1].commit([run(owner="a")])
        assert (await record(stores[5])).owner == "a"
        await asyncio.gather(*(store.close() for store in stores))

    asyncio.run(test())


def test_schema_of_another_application_is_refused_and_unchanged(postgres_url: str) -> None:
    async def test() -> None:
        await query(postgres_url, "CREATE SCHEMA {schema}")
        await query(postgres_url, "CREATE TABLE {schema}.runs (theirs text)")
        error = await refused(PostgresStore(postgres_url).open(shards=16))
        assert "not perdure's" in str(error)
        assert await query(postgres_url, "SELECT theirs FROM {schema}.runs") == []

    asyncio.run(test())


def test_empty_existing_schema_is_used(postgres_url: str) -> None:
    async def test() -> None:
        await query(postgres_url, "CREATE SCHEMA {schema}")
        store = await opened(postgres_url)
        assert await store.workers() == []
        await store.close()

    asyncio.run(test())


def test_schema_with_old_table_names_is_refused_and_unchanged(postgres_url: str) -> None:
    """Schemas of unreleased versions carry an earlier comment; their tables would be misread."""

    async def test() -> None:
        (comment,) = schema._OURS_BEFORE
        await query(postgres_url, "CREATE SCHEMA {schema}")
        await query(postgres_url, "CREATE TABLE {schema}.meta (key text, value text)")
        await query(postgres_url, f"COMMENT ON SCHEMA {{schema}} IS '{comment}'")
        error = await refused(PostgresStore(postgres_url).open(shards=16))
        assert "unreleased version" in str(error)
        assert not error.retryable
        assert await query(postgres_url, "SELECT * FROM {schema}.meta") == []

    asyncio.run(test())


def test_server_of_an_unsupported_version_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "OLDEST_SERVER", 10**9)
    assert "needs 14 or later" in str(asyncio.run(refused(PostgresStore(postgres_url).open(shards=16))))


def test_newer_schema_is_refused(postgres_url: str) -> None:
    async def test() -> None:
        await (await opened(postgres_url)).close()
        await query(postgres_url, "UPDATE {schema}.meta SET value = '99' WHERE key = 'version'")
        assert "upgrade perdure" in str(await refused(PostgresStore(postgres_url).open(shards=16)))

    asyncio.run(test())


def test_older_schema_is_migrated(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store = await opened(postgres_url)
        await store.join(worker("a"))
        await store.commit([run(owner="a")])
        scripts = [*schema.migrations(), "ALTER TABLE runs ADD COLUMN new_in_the_next text"]
        monkeypatch.setattr(schema, "migrations", lambda: scripts)
        newer = await opened(postgres_url)
        assert await query(postgres_url, "SELECT new_in_the_next FROM {schema}.runs") == [(None,)]
        assert await store.commit([turn(0, entry())]) == [Committed()], "both versions work while workers are replaced"
        assert await newer.commit([deliver()]) == [MessageDelivered(1, fresh=True, owner="a")]
        await store.close()
        await newer.close()

    asyncio.run(test())


def test_many_processes_migrate_concurrently_under_load(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: PostgresStore) -> None:
        fails_if_repeated = "ALTER TABLE runs ADD COLUMN new_in_the_next text"
        scripts = [*schema.migrations(), fails_if_repeated]
        monkeypatch.setattr(schema, "migrations", lambda: scripts)
        newer = [PostgresStore(postgres_url) for _ in range(6)]
        opening = asyncio.gather(*(each.open(shards=16) for each in newer))
        for base in range(50):
            assert await store.commit([turn(base, entry(f"s{base}", base))]) == [Committed()]
        await opening
        assert await newer[-1].commit([turn(50, entry("new", 50))]) == [Committed()]
        await asyncio.gather(*(each.close() for each in newer))

    on(postgres_url, test)


def test_migration_waits_for_the_migration_lock(postgres_url: str) -> None:
    async def test() -> None:
        other = await asyncpg.connect(parse_url(postgres_url).dsn)
        transaction = other.transaction()
        await transaction.start()
        await other.fetch(schema._LOCK, parse_url(postgres_url).schema)
        opening = asyncio.ensure_future(opened(named(postgres_url, "migrating")))
        while not await query(postgres_url, WAITS_FOR_A_LOCK, "migrating"):
            assert not opening.done(), "it must wait for the lock"
        await transaction.rollback()
        await (await opening).close()
        await other.close()

    asyncio.run(test())


def test_two_schemas_in_one_database_are_isolated(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        with_other = with_schema(shared_url(), quote("t_a_schema_with_'strange\" name"))
        other = await opened(with_other)
        try:
            assert await other.records(["r"]) == [None]
            assert await other.commit([run("theirs")]) == [Created(owned=False)]
            assert await store.records(["theirs"]) == [None]
        finally:
            await other.close()
            await query(with_other, "DROP SCHEMA {schema} CASCADE")

    on(postgres_url, test)


def test_database_in_another_encoding_is_refused() -> None:
    async def test() -> None:
        await query(shared_url(), "DROP DATABASE IF EXISTS perdure_ascii")
        await query(shared_url(), "CREATE DATABASE perdure_ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
        try:
            error = await refused(PostgresStore(in_database(shared_url(), "perdure_ascii")).open(shards=16))
            assert "UTF8" in str(error)
        finally:
            await query(shared_url(), "DROP DATABASE perdure_ascii")

    asyncio.run(test())


# --- races ----------------------------------------------------------------------------------------------------------


def test_concurrent_topic_writes_raise_no_error_and_lose_no_event(postgres_url: str) -> None:
    """A batch that cannot get its locks in order is aborted and repeated; its caller sees no error."""

    async def receiving(store: PostgresStore, id: str) -> list[Message]:
        """Subscribe a run repeatedly and consume what it has got by then."""
        read: list[Message] = []
        for base in range(12):
            unread = await store.inbox(id)
            numbers = tuple(message.number for message in unread)
            write = receive(base, "t", "u", id=id, target=f"{base}/receive", seen=max(numbers, default=0))
            (result,) = await store.commit([replace(write, consumed=numbers)])
            assert isinstance(result, Committed)
            read += unread
        return read + await store.inbox(id)

    async def publishing(store: PostgresStore, name: str) -> None:
        for n in range(12):
            event = publish(f"{name}-{n}", topic="tu"[n % 2], consume=n % 3 > 0)
            later = publish(f"{name}-{n}-too", topic="ut"[n % 2])
            assert len(await store.commit([event, deliver(f"{name}-{n}", id="r"), later])) == 3

    async def test(store: PostgresStore) -> None:
        stores = [store, *[await opened(postgres_url) for _ in range(3)]]
        ids = [f"r{n}" for n in range(8)]
        await store.commit([run(id, owner="a") for id in ids])
        read, _ = await asyncio.gather(
            asyncio.gather(*(receiving(stores[n % 4], id) for n, id in enumerate(ids))),
            asyncio.gather(*(publishing(stores[n % 4], f"p{n}") for n in range(6))),
        )
        for messages in read:
            assert len({message.id for message in messages}) == len(messages), "no run gets an event twice"
        consumable = {f"topic/{row[0]}/{row[1]}" for row in await query(postgres_url, CONSUMABLE)}
        assigned = [message.id for messages in read for message in messages if message.id in consumable]
        assert len(set(assigned)) == len(assigned), "no two runs get the same event"
        assert await query(postgres_url, MISSED) == [], "no event is queued while a run waits for it"
        for other in stores[1:]:
            await other.close()

    on(postgres_url, test)


CONSUMABLE = """
    SELECT t.name, e.event_offset FROM {schema}.topic_events e JOIN {schema}.topics t ON t.pk = e.topic_pk
    WHERE e.consume"""
MISSED = """
    SELECT 1 FROM {schema}.topic_events e JOIN {schema}.subscriptions s ON s.topic_pk = e.topic_pk
    WHERE e.queued AND e.consume"""


def test_batches_in_opposite_order_do_not_deadlock(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        ids = [f"r{n:02d}" for n in range(40)]
        await store.commit([run(id, owner="a") for id in ids])
        for round in range(10):
            there = [deliver(f"there{round}", id=id) for id in ids]
            back = [deliver(f"back{round}", id=id) for id in reversed(ids)]
            new = [run(f"new{round}-{n:02d}") for n in range(40)]
            await asyncio.gather(
                store.commit([*there, *new]), other.commit([*back, *reversed(new)]), store.commit(back[::-1])
            )
        assert (await record(store, "r00")).last_message_no == 20
        await other.close()

    on(postgres_url, test)


def test_new_runs_are_created_in_order_of_their_ids() -> None:
    """Two batches that create the same runs then cannot deadlock."""
    _, arguments = batches.call([run("b"), run("c"), run("a")])
    assert [each["id"] for each in json.loads(arguments[3])] == ["a", "b", "c"]


@pytest.mark.parametrize("others", [(), (run("other"),)], ids=["single", "in a batch"])
@pytest.mark.parametrize(
    "gives",
    [run("given", owner="b"), turn(0, id="r", patch=RunPatch(status=RunStatus.RUNNING, owner="b"))],
    ids=["new", "turn"],
)
def test_worker_that_is_getting_a_run_is_not_removed(
    postgres_url: str, gives: Write, others: tuple[Write, ...]
) -> None:
    async def test(store: PostgresStore) -> None:
        await store.join(worker("b"))
        async with applied_not_committed(postgres_url, [gives, *others]):
            removing = asyncio.ensure_future(store.remove_worker("b"))
            while not await query(postgres_url, WAITS_FOR_A_LOCK, "removing"):
                assert not removing.done(), "it must wait for the commit that gives the worker a run"
        await removing
        assert [(each.id, each.fenced) for each in await store.workers()] == [("a", False), ("b", True)]
        assert await store.release_runs("b", 130.0, recovered=True) == [semantics.run_of(gives)]

    on(named(postgres_url, "removing"), test)


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        (turn(0, entry(), turn_id="first"), turn(0, entry(), turn_id="second"), Superseded()),
        (deliver("m1"), deliver("m2"), MessageDelivered(2, fresh=True, owner="a")),
    ],
    ids=["turns", "messages"],
)
def test_concurrent_single_writes_are_serialized(
    postgres_url: str, first: Write, second: Write, result: WriteResult
) -> None:
    """The second waits for the first, and then sees what it has written."""

    async def test(store: PostgresStore) -> None:
        async with applied_not_committed(postgres_url, [first]):
            committing = asyncio.ensure_future(store.commit([second]))
            while not await query(postgres_url, WAITS_FOR_A_LOCK, "racing"):
                assert not committing.done(), "it must wait for the first write"
        assert await committing == [result]

    on(named(postgres_url, "racing"), test)


# --- connections that break -----------------------------------------------------------------------------------------

WAITS_FOR_A_LOCK = "SELECT 1 FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'"
KILL = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND datname = current_database() AND backend_type = 'client backend'
          AND application_name = $1"""


def test_store_continues_after_its_connections_are_terminated(postgres_url: str) -> None:
    url = named(postgres_url, "cut")

    async def test(store: PostgresStore) -> None:
        notified: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(notified.put_nowait)
        for base in range(3):
            assert await query(postgres_url, KILL, "cut")
            write = turn(base, entry(f"s{base}", base))
            assert await with_retries(partial(store.commit, [write])) == [Committed()]
        assert [row.position for row in await store.history("r")] == [1, 2, 3]
        while await asyncio.wait_for(notified.get(), 60) is not None:
            pass  # None: it listens again, and any run may have changed
        other = await opened(postgres_url)
        await other.commit([run("sent")])
        while (ids := await asyncio.wait_for(notified.get(), 60)) is None or "sent" not in ids:
            pass
        await other.close()

    on(url, test)


def test_dead_listening_connection_is_replaced(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "COUNT_INTERVAL_SECONDS", 0.05)

    async def test(store: PostgresStore) -> None:
        dead = listening_of(store)._connection
        fetchval = asyncpg.Connection.fetchval

        async def time_out(connection: Any, *arguments: Any) -> Any:
            if connection is dead:
                raise TimeoutError
            return await fetchval(connection, *arguments)

        monkeypatch.setattr(asyncpg.Connection, "fetchval", time_out)
        reconnected = asyncio.Event()
        store.on_change(lambda ids: reconnected.set() if ids is None else None)
        await asyncio.wait_for(reconnected.wait(), 60)
        assert listening_of(store)._connection is not dead
        assert dead.is_closed()

    on(postgres_url, test)


def test_batch_whose_connection_is_terminated_stores_nothing(postgres_url: str) -> None:
    url = named(postgres_url, "cut-while-waiting")

    async def test(store: PostgresStore) -> None:
        blocker = await asyncpg.connect(parse_url(postgres_url).dsn)
        await blocker.execute("BEGIN")
        await blocker.fetch(f"SELECT FROM {schema_in(postgres_url)}.runs WHERE id = 'r' FOR UPDATE")
        committing = asyncio.ensure_future(store.commit([run("new"), turn(0, entry())]))
        while not await query(postgres_url, WAITS_FOR_A_LOCK, "cut-while-waiting"):
            assert not committing.done()
        await query(postgres_url, KILL, "cut-while-waiting")
        with pytest.raises(StoreError) as caught:
            await committing
        assert caught.value.retryable
        await blocker.execute("ROLLBACK")
        await blocker.close()
        assert await with_retries(lambda: store.records(["new"])) == [None]
        assert await with_retries(lambda: store.commit([run("new"), turn(0, entry())])) == [
            Created(owned=False),
            Committed(),
        ]

    on(url, test)


def test_unreachable_server_is_a_retryable_error(tmp_path: Any) -> None:
    store = PostgresStore(f"postgresql://user@/none?host={tmp_path}")
    with pytest.raises(StoreError) as caught:
        asyncio.run(store.open(shards=16))
    assert caught.value.retryable


def test_missing_database_is_an_error_without_the_password() -> None:
    error = asyncio.run(refused(PostgresStore(in_database(shared_url(), "nowhere")).open(shards=16)))
    assert "nowhere" in str(error)
    assert "hush" not in parse_url("postgresql://me:hush@h1,h2/db").name


def test_store_is_refused_on_another_event_loop(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    with pytest.raises(StoreError, match="not open"):
        asyncio.run(store.workers())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.open(shards=16))
    assert "another event loop" in str(asyncio.run(refused(store.workers())))
    loop.run_until_complete(store.close())
    loop.close()
    on(postgres_url, lambda store: store.close())


def test_store_opened_twice_is_closed_by_the_last_close(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.open(shards=16)
        await store.close()
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(postgres_url, test)


# --- notifications --------------------------------------------------------------------------------------------------


def test_notification_names_the_runs_unless_there_are_too_many(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        notified: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(notified.put_nowait)
        await other.commit([run("one"), run("two")])
        assert await asyncio.wait_for(notified.get(), 60) == frozenset(("one", "two"))
        await other.commit([run(f"{n:0500d}") for n in range(100)])
        assert await asyncio.wait_for(notified.get(), 60) is None
        await other.close()

    on(postgres_url, test)


def test_own_changes_are_notified_once(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        notified: list[frozenset[str] | None] = []
        received: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        store.on_change(notified.append)
        other.on_change(received.put_nowait)
        await store.commit([run("mine")])
        while (ids := await asyncio.wait_for(received.get(), 60)) != frozenset(["mine"]):
            assert ids is None, "a new listener gets only None"
        await other.commit([run("theirs")])
        while frozenset(["theirs"]) not in notified:
            await asyncio.sleep(0)
        assert notified == [frozenset(["mine"]), frozenset(["theirs"])]
        await other.close()

    on(postgres_url, test)


def test_store_with_listen_no_notifies_without_listening(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = await opened(postgres_url)
        received: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(received.put_nowait)
        await store.commit([run("changed")])
        assert await asyncio.wait_for(received.get(), 60) == frozenset(["changed"])
        listening = (
            "SELECT application_name FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND application_name = 'deaf'"
        )
        assert await query(postgres_url, listening) == []
        await other.close()

    on(named(postgres_url, "deaf") + "&listen=no", test)


def listening_of(store: PostgresStore) -> listener._ListenConnection:
    assert store._listener is not None
    assert store._listener._listening is not None
    return store._listener._listening


class NotificationRecorder:
    """Records notifications without counting as a listener of the store."""

    def __init__(self, connection: Connection, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._payloads: asyncio.Queue[str] = asyncio.Queue()

    def on_notification(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._payloads.put_nowait(str(payload))

    async def take(self) -> list[str]:
        """Return the payloads since the last call."""
        await self._connection.execute(f"NOTIFY {self._channel}, 'now'")
        payloads = []
        while (each := await asyncio.wait_for(self._payloads.get(), 60)) != "now":
            payloads.append(each)
        return payloads


@asynccontextmanager
async def recorded(store: PostgresStore) -> AsyncIterator[NotificationRecorder]:
    assert store._listener is not None
    connection = await asyncpg.connect(store._target.dsn)
    recorder = NotificationRecorder(connection, store._listener._channel)
    await connection.add_listener(store._listener._channel, recorder.on_notification)
    yield recorder
    await connection.close()


async def sent(store: PostgresStore) -> None:
    """Wait until a store has sent its pending notifications."""
    assert store._listener is not None
    while store._listener._sending:
        await asyncio.sleep(0)


async def wait_until(store: PostgresStore, *, only_listener: bool) -> None:
    async with asyncio.timeout(60):
        while listening_of(store).is_only_listener is not only_listener:
            await asyncio.sleep(0.001)


def test_only_listener_sends_nothing_until_another_joins(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "COUNT_INTERVAL_SECONDS", 0.05)

    async def test(store: PostgresStore) -> None:
        async with recorded(store) as recorder:
            assert listening_of(store).is_only_listener
            await store.commit([run("unsent")])
            await sent(store)
            assert await recorder.take() == []
            other = await opened(postgres_url)
            assert not listening_of(other).is_only_listener
            await wait_until(store, only_listener=False)
            await recorder.take()
            await store.commit([run("sent")])
            await sent(store)
            assert [each for each in await recorder.take() if "sent" in each]
            await other.close()
            await wait_until(store, only_listener=True)
            await store.commit([run("unsent again")])
            await sent(store)
            assert await recorder.take() == []

    on(postgres_url, test)


def test_new_listener_is_notified_that_any_run_may_have_changed(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        other = PostgresStore(postgres_url)
        notified: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(notified.put_nowait)
        await other.open(shards=16)
        assert await asyncio.wait_for(notified.get(), 60) is None
        third = await opened(postgres_url)
        await third.commit([run("next")])
        assert await asyncio.wait_for(notified.get(), 60) == frozenset(["next"]), "only once"
        await third.close()
        await other.close()

    on(postgres_url, test)


def test_store_that_receives_nothing_always_notifies(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pooler in transaction mode, or while the connection is being replaced."""
    monkeypatch.setattr(listener.NotificationListener, "_on_notification", lambda *_: None)

    async def test(store: PostgresStore) -> None:
        async with recorded(store) as recorder:
            await store.commit([run("changed")])
            await sent(store)
            assert [each for each in await recorder.take() if "changed" in each]

    on(postgres_url, test)


def test_listeners_of_another_schema_are_not_counted(postgres_url: str) -> None:
    with schema_of_its_own() as elsewhere:

        async def test(store: PostgresStore) -> None:
            other = await opened(elsewhere)
            assert listening_of(other).is_only_listener
            assert listening_of(store).is_only_listener
            await other.close()

        on(postgres_url, test)


# --- values and options ---------------------------------------------------------------------------------------------


def test_nul_in_an_error_or_a_reason_is_stored(postgres_url: str) -> None:
    """Exception messages may quote any text, and PostgreSQL's text cannot store a NUL."""

    async def test(store: PostgresStore) -> None:
        error = ErrorRecord("E", "a\0b", traceback="\0")
        failed = RunPatch(status=RunStatus.FAILED, error=error, ended_at=110.0)
        await store.commit([turn(0, entry(error=error), patch=failed)])
        await store.commit([run("s", owner="a"), turn(0, entry(error=error), id="s", patch=failed)])
        for id in ("r", "s"):
            snapshot = await load(store, id)
            assert (snapshot.entries[0].error, snapshot.record.error) == (error, error)
        await store.commit([run("t", owner="a"), deliver(id="t"), turn(0, id="t", seen=1, patch=succeeded())])
        await store.commit([finalize("t", consumed=(1,), dead_letters=(dead_letter(reason="a\0b"),))])
        assert [each.reason for each in await store.dead_letters()] == ["a\N{REPLACEMENT CHARACTER}b"]

    on(postgres_url, test)


def test_now_is_the_time_of_the_server(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        ((before,),) = await query(postgres_url, "SELECT extract(epoch FROM clock_timestamp())::float8")
        now = await store.now()
        ((after,),) = await query(postgres_url, "SELECT extract(epoch FROM clock_timestamp())::float8")
        assert before <= now <= after

    on(postgres_url, test)


def test_history_view_shows_entries(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit([turn(0, entry("charge")), turn(1)])
        rows = await query(postgres_url, "SELECT run, location, convert_from(value, 'UTF8') FROM {schema}.history")
        assert [tuple(row) for row in rows] == [("r", "charge", '"done"')]

    on(postgres_url, test)


def test_url_options_of_perdure_are_removed_from_the_dsn() -> None:
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
def test_invalid_url_option_is_refused_by_the_constructor(bad: str) -> None:
    with pytest.raises(StoreError, match="option"):
        PostgresStore(f"postgresql://h/db?{bad}")


def test_commit_racing_with_a_takeover_is_refused_or_seen_by_the_new_owner(postgres_url: str) -> None:
    """Whichever is first, the new owner claims the position that is stored."""

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
            (result,), (position,) = await asyncio.gather(store.commit([late]), take_over(id))
            assert result in (Committed(), Superseded())
            assert position == (await load(store, id)).position == (1 if result == Committed() else 0)
        await other.close()

    on(postgres_url, test)


def test_claim_waits_for_a_commit_that_locks_all_due_runs(postgres_url: str) -> None:
    """Skipped runs would stay due until the next sweep, because no further notification follows."""

    async def test(store: PostgresStore) -> None:
        await store.commit([run("late"), run("early")])
        locking = await asyncpg.connect(parse_url(postgres_url).dsn)
        transaction = locking.transaction()
        await transaction.start()
        await locking.fetch(f"SELECT FROM {schema_in(postgres_url)}.runs WHERE id = 'early' FOR NO KEY UPDATE")
        assert [each.id for each in await store.claim(claim("a", 130.0))] == ["late"], "an unlocked run is claimed"
        claiming = asyncio.ensure_future(store.claim(claim("a", 130.0)))
        while not await query(postgres_url, WAITS_FOR_A_LOCK, "claiming"):
            assert not claiming.done(), "it must wait for the transaction that locks the only due run"
        await transaction.rollback()
        assert [each.id for each in await claiming] == ["early"]
        assert await store.claim(claim("a", 130.0)) == []
        await locking.close()

    on(named(postgres_url, "claiming"), test)


def test_missing_notifications_are_logged(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler in transaction mode, which accepts LISTEN without effect."""

    async def warnings() -> list[str]:
        store = PostgresStore(postgres_url)
        await store.open(shards=16)
        checks = [task for task in asyncio.all_tasks() if "_warn_if_deaf" in repr(task)]
        await asyncio.wait_for(asyncio.gather(*checks), 60)
        await store.close()
        assert len(checks) == 1
        return [record.getMessage() for record in caplog.records if "listen=no" in record.getMessage()]

    monkeypatch.setattr(listener, "ECHO_TIMEOUT_SECONDS", 2.0)
    assert asyncio.run(warnings()) == []
    monkeypatch.setattr(listener, "ECHO_TIMEOUT_SECONDS", 0.0)
    monkeypatch.setattr(listener.NotificationListener, "_on_notification", lambda *_: None)
    assert len(asyncio.run(warnings())) == 1


@pytest.mark.parametrize("kind", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError])
def test_lost_prepared_statement_is_retryable_and_names_the_option(kind: type[Exception]) -> None:
    error = as_store_error(kind("prepared statement does not exist"))
    assert error is not None
    assert error.retryable
    assert "statement_cache_size=0" in str(error)
