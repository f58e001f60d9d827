"""The SQLite store passes the contract. Tests of its own: query plans, errors of the file, threads, readable rows."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import apsw
import pytest

from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Committed
from perdure.stores.sqlite import (
    batch,
    finalization,
    maintenance,
    queries,
    run_state_cache,
    streams,
    topics,
    unread,
    workers,
)
from perdure.stores.sqlite.errors import as_store_error
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import Write
from perdure.testing.contract.builders import (
    claim,
    claim_ids,
    deliver,
    entry,
    load,
    refused,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)
from perdure.testing.store_contract import StoreContract


class TestSqliteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _in_a_file(self, tmp_path: Path) -> None:
        self.path = str(tmp_path / "store.db")

    async def make_store(self) -> Store:
        return SqliteStore(self.path)

    async def again(self, store: Store) -> Store:
        return SqliteStore(self.path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def on(store: SqliteStore, test: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store in which worker "a" owns run "r"."""

    async def main() -> None:
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run(owner="a")])
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


# --- cost of steps and queries ----------------------------------------------------------------------------------------


def test_a_batch_of_steps_is_one_insert_each_and_does_not_change_the_runs(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(f"r{n}", owner="a") for n in range(100)])
        before = await store._write(lambda connection: connection.total_changes())
        assert await store.commit([turn(0, entry(), id=f"r{n}") for n in range(100)]) == [Committed()] * 100
        assert await store._write(lambda connection: connection.total_changes()) == before + 100

    on(SqliteStore(path), test)


# Partial indexes that contain only the rows of the query.
ALLOWED_SCANS = (
    "SCAN json_each",
    "SCAN runs USING INDEX runs_unfinalized",
    "SCAN topic_events USING INDEX topic_events_unfinished",
)


def plans(connection: apsw.Connection, sql: str) -> list[str]:
    numbered = [int(number) for number in re.findall(r"\?(\d)", sql)]
    values = (None,) * (max(numbered) if numbered else sql.count("?"))
    return [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, values)]


@pytest.mark.parametrize(
    "sql",
    [
        workers.DUE,
        workers.DUE_IN_SHARDS,
        workers.NEXT_VERSION,
        workers.NEXT_WORKFLOW,
        workers.CLAIM,
        workers.OWNED_WITH_MESSAGES,
        workers.OWNED,
        workers.RETRY_HELD,
        workers.FENCE_WORKER,
        run_state_cache.RUN_STATE,
        run_state_cache.RUN_STATE_BY_PK,
        batch.TURN_AT,
        unread.UNREAD,
        unread.FIRST_UNREAD_OF_NAME,
        unread.UNREAD_OF_NAME,
        finalization.MESSAGE_NUMBER,
        finalization.DEAD_LETTER_EXISTS,
        finalization.REMOVE_DEAD_LETTER,
        batch.DROP_ALL,
        batch.DROP_BELOW,
        batch.DROP_MARKERS,
        batch.PATCH,
        unread.UNREAD_EVENT,
        queries.RUN_AND_PK,
        queries.POSITION,
        queries.ENTRIES,
        queries.INBOX,
        queries.INBOX_AFTER,
        queries.HISTORY,
        queries.DEAD_LETTER,
        queries.dead_letters_query(False, False),
        queries.dead_letters_query(True, False),
        queries.dead_letters_query(False, True),
        queries.OPEN_CHILDREN,
        queries.UNFINISHED_BROADCASTS,
        queries.TOPIC,
        finalization.REMOVE_OBSERVER,
        finalization.UPDATE_UNFINALIZED,
        queries.UNFINALIZED,
        queries.OBSERVERS,
        queries.UNREAD_EVENTS,
        finalization.DROP_AT,
        streams.VALUES_OF_RUN,
        streams.NEXT_WRITER_SEQ,
        streams.SUPERSEDE,
        streams.SUPERSEDE_ALL,
        streams.ITEMS,
        topics.OFFSET_OF_ID,
        topics.LAST_OFFSET,
        topics.LAST_SUBSCRIPTION,
        topics.QUEUED_COUNT,
        topics.FIRST_UNFINISHED,
        topics.SUBSCRIPTION_PAGE,
        topics.ANY_SUBSCRIPTION,
        topics.SET_FAN_OUT_CURSOR,
        topics.EVENT,
        topics.ASSIGN,
        topics.DELETE_EVENT,
        topics.OLDEST_SUBSCRIPTION,
        topics.OLDEST_SUBSCRIPTION_OF_RUN,
        topics.ANY_UNREAD_ASSIGNMENT,
        topics.CONSUME,
        topics.RELEASE_ASSIGNMENT,
        topics.FIRST_TO_CONSUME,
        topics.FIRST_TO_READ,
        topics.LOWER_CURSOR,
        topics.IS_SUBSCRIBED,
        topics.UNSUBSCRIBE,
        topics.UNSUBSCRIBE_ALL,
        maintenance.PRUNABLE,
        maintenance.EXPIRED_EVENTS,
        maintenance.EXPIRED_VALUES,
        maintenance.DELETED_EVENTS,
        maintenance.CONSUMED_EVENTS,
        *finalization.DROP_RUN,
        *maintenance.DROP_EVENT,
        maintenance.KEYS,
    ],
)
def test_no_query_scans_a_table(path: str, sql: str) -> None:
    async def test(store: SqliteStore) -> None:
        plan = await store._write(lambda connection: plans(connection, sql))
        assert plan
        for line in plan:
            assert not line.startswith("SCAN") or line.startswith(ALLOWED_SCANS), plan
            assert "TEMP B-TREE" not in line, plan

    on(SqliteStore(path), test)


@pytest.mark.parametrize(
    ("query", "index"),
    [
        (RunQuery(), "runs_newest"),
        (RunQuery(status=RunStatus.FAILED), "runs_by_status"),
        (RunQuery(parent="p"), "runs_by_parent"),
        (RunQuery(created_after=5.0), "runs_newest"),
    ],
)
def test_pages_of_runs_follow_an_index(path: str, query: RunQuery, index: str) -> None:
    async def test(store: SqliteStore) -> None:
        where, _ = queries.conditions(query)
        sql = f"SELECT * FROM runs WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ?"
        (line,) = await store._read(lambda connection: plans(connection, sql))
        assert index in line

    on(SqliteStore(path), test)


def test_the_cost_of_a_claim_is_independent_of_suspended_and_unknown_runs(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        for n in range(0, 3000, 500):
            await store.commit([run(f"suspended {i}", wake_at=9e9) for i in range(n, n + 500)])
            await store.commit([run(f"unknown {i}", workflow="unknown") for i in range(n, n + 500)])
        await store.commit([run("due")])

        def count_vm_steps_of_claim(connection: apsw.Connection) -> int:
            calls = 0

            def count() -> bool:
                nonlocal calls
                calls += 1
                return False

            connection.set_progress_handler(count, 10)
            assert [claimed.id for claimed in workers.claim(connection, claim("a"))] == ["due"]
            assert workers.next_wake(connection, "default") == 100.0
            connection.set_progress_handler(None)
            return calls * 10

        assert await store._write(count_vm_steps_of_claim) < 1000, "virtual machine steps, for 6,000 runs"

    on(SqliteStore(path, synchronous="off"), test)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_batch_whose_last_write_fails_stores_nothing(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        bad: list[Write] = [
            turn(0, entry("\ud800"), id="r2"),
            run("\udfff"),
            run("r3", version=2**70),
            run("r3", tags={"a": "\ud800"}),
            deliver("\ud800", id="r2"),
        ]
        for write in bad:
            error = await refused(store.commit([turn(0, entry()), deliver(), run("r2", owner="a"), write]))
            assert error.__cause__ is not None
            snapshot = await load(store)
            assert (snapshot.position, snapshot.inbox) == (0, ())
            assert await store.records(["r2", "r3"]) == [None, None]
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(SqliteStore(path), test)


def test_a_locked_file_raises_a_retryable_error(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        other = apsw.Connection(path)
        other.execute("BEGIN IMMEDIATE")
        for call in (
            lambda: store.commit([turn(0, entry())]),
            lambda: store.renew(worker("a")),
            lambda: store.keys("s", 100.0),
        ):
            with pytest.raises(StoreError) as caught:
                await call()
            assert caught.value.retryable
        assert (await load(store)).position == 0, "readers do not wait for writers"
        other.execute("ROLLBACK")
        other.close()
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(SqliteStore(path, busy_timeout=0.01), test)


def test_idle_claims_do_not_wait_for_the_write_lock(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        other = apsw.Connection(path)
        other.execute("BEGIN IMMEDIATE")
        assert await store.claim(claim("a")) == []
        assert await store.prune(500.0) == []
        assert await store.owned_with_messages("a") == []
        other.close()

    on(SqliteStore(path, busy_timeout=0.01), test)


def test_a_full_disk_raises_a_retryable_error_and_stores_nothing(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        pages = await store._write(lambda connection: connection.pragma("page_count"))
        await store._write(lambda connection: connection.pragma("max_page_count", pages))
        with pytest.raises(StoreError) as caught:
            await store.commit([turn(0, entry()), run("big", input=b"x" * 1_000_000)])
        assert caught.value.retryable
        assert (await load(store)).position == 0
        await store._write(lambda connection: connection.pragma("max_page_count", 1_000_000))
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(SqliteStore(path), test)


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (apsw.BusyError("locked"), True),
        (apsw.LockedError("locked"), True),
        (apsw.IOError("disk"), True),
        (apsw.FullError("disk"), True),
        (apsw.CantOpenError("files"), True),
        (apsw.ConstraintError("twice"), False),
        (apsw.TooBigError("huge"), False),
        (apsw.MismatchError("type"), False),
        (apsw.CorruptError("bits"), False),
        (apsw.SQLError("syntax"), False),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"), False),
        (OverflowError("big"), False),
        (TypeError("odd"), False),
    ],
)
def test_errors_say_whether_they_are_retryable(error: Exception, retryable: bool) -> None:
    mapped = as_store_error(error)
    assert isinstance(mapped, StoreError)
    assert mapped.retryable is retryable
    assert mapped.__cause__ is error


def test_errors_that_are_not_from_sqlite_are_unchanged() -> None:
    fault, ours = ZeroDivisionError(), StoreError("ours", retryable=True)
    assert as_store_error(fault) is fault
    assert as_store_error(ours) is ours


def test_a_broken_connection_is_replaced(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        def break_it(connection: apsw.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.close(force=True)
            raise apsw.IOError("closed")

        with pytest.raises(StoreError):
            await store._write(break_it)
        assert await store.commit([turn(0, entry())]) == [Committed()]

    on(SqliteStore(path), test)


# --- opening, closing, cancelling -------------------------------------------------------------------------------------


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("perdure")]
    assert left == []


@pytest.mark.usefixtures("no_threads_left")
def test_close_ends_the_threads_and_checkpoints_the_log(path: str) -> None:
    async def main() -> None:
        store = SqliteStore(path)
        await store.open(shards=16)
        await store.commit([run()])
        assert Path(path + "-wal").exists()
        await store.close()
        await store.close()
        assert not Path(path + "-wal").exists()
        await refused(store.commit([run("r2")]))
        await refused(store.load(["r"]))
        await store.open(shards=16)
        assert (await load(store)).record.id == "r"
        await store.close()

    asyncio.run(main())


@pytest.mark.usefixtures("no_threads_left")
def test_a_store_object_shared_by_engines_closes_with_the_last_of_them(path: str) -> None:
    async def main() -> None:
        store = SqliteStore(path)
        await asyncio.gather(store.open(shards=16), store.open(shards=16))
        await store.close()
        await store.commit([run()])
        await refused(store.open(shards=17))
        await store.commit([run("r2")])
        await store.close()

    asyncio.run(main())


def test_an_open_store_can_be_used_from_another_event_loop(path: str) -> None:
    store = SqliteStore(path)
    asyncio.run(store.open(shards=16))
    asyncio.run(store.commit([run()]))
    assert asyncio.run(store.records(["r"]))[0] is not None
    asyncio.run(store.close())


def test_a_cancelled_caller_does_not_stop_the_store(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        call = asyncio.create_task(store.commit([turn(0, entry())]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await store.commit([turn(0, entry())]) == [Committed()], "committed, or recognised as a repeated call"
        assert (await load(store)).position == 1

    on(SqliteStore(path), test)


def test_synchronous_sets_the_pragma(path: str) -> None:
    for synchronous, pragma in (("full", 2), ("NORMAL", 1), ("off", 0)):

        async def test(store: SqliteStore, pragma: int = pragma) -> None:
            assert await store._write(lambda connection: connection.pragma("synchronous")) == pragma
            assert await store._write(lambda connection: connection.pragma("journal_mode")) == "wal"

        on(SqliteStore(path, synchronous=synchronous), test)
    with pytest.raises(StoreError, match="full, normal, off"):
        SqliteStore(path, synchronous="maybe")


def test_the_read_connection_cannot_write(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await refused(store._read(lambda connection: connection.execute("DELETE FROM runs").get))

    on(SqliteStore(path), test)


# --- stored rows ------------------------------------------------------------------------------------------------------


def test_the_history_view_shows_readable_values_as_text(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([turn(0, entry(value=b'{"receipt":42}'), entry("raw", 1, value=b"\xff")), turn(2)])
        await store.commit([turn(3, patch=suspended(500.0)), deliver(), turn(4, owned=False, patch=succeeded())])

    on(SqliteStore(path), test)
    rows = apsw.Connection(path).execute("SELECT run, position, location, value, typeof(value) FROM history").fetchall()
    assert rows == [("r", 1, "charge", '{"receipt":42}', "text"), ("r", 2, "raw", b"\xff", "blob")]


def test_markers_do_not_accumulate_in_a_loop(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        position = 0
        for n in range(50):
            await store.commit(
                [turn(position), turn(position + 1, entry(f"~{n}", n), extras=TurnExtras(dropped=(f"~{n - 1}",)))]
            )
            position += 2
        count = "SELECT count(*) FROM entries"
        assert await store._read(lambda connection: connection.execute(count).get) < 60
        assert (await load(store)).position == 100

    on(SqliteStore(path), test)


def test_a_claim_with_repeated_workflows_returns_each_run_once(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([run(f"n{n}", workflow=f"w{n}") for n in range(30)])
        pairs = tuple((f"w{n}", 1) for n in range(30))
        assert len(await claim_ids(store, claim("a", workflows=pairs + pairs, limit=100))) == 30

    on(SqliteStore(path), test)
