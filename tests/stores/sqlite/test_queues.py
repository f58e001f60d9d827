"""Queues on SQLite: the cost of runs without a queue, the waiting rule as a constraint, and damaged settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest

from perdure.model.queue_records import QueueOverride
from perdure.stores.results import Committed
from perdure.stores.sqlite import queue_reads
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import Write
from perdure.testing.contract.builders import claim, claim_ids, entry, refused, run, succeeded, turn, worker
from perdure.testing.contract.queue_builders import admit_now, configure, place_of, queued, summary_of
from tests.stores.sqlite.traced_reads import plans_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def on(path: str, test: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store with the worker "a" and the queue "q"."""

    async def main() -> None:
        store = SqliteStore(path, synchronous="off")
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([configure()])
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


async def tables_written(store: SqliteStore, *batch: Write) -> list[str]:
    """Return the verb and table of each statement of a batch that writes."""
    seen: list[str] = []

    def trace(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        words = sql.split()
        if words[0] in ("INSERT", "UPDATE", "DELETE"):
            table = next(word for word in words[1:] if word not in ("INTO", "FROM", "OR", "IGNORE"))
            seen.append(f"{words[0]} {table}")
        return True

    writer = store._thread(store._writer)
    await writer.call(lambda connection: setattr(connection, "exec_trace", trace))
    await store.commit(batch)
    await writer.call(lambda connection: setattr(connection, "exec_trace", None))
    return seen


def test_a_run_without_queue_and_tags_costs_no_statement_more(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        assert await tables_written(store, run(owner="a")) == ["INSERT runs"]
        assert await tables_written(store, turn(0, entry())) == ["INSERT entries"]
        ended = await tables_written(store, turn(1, entry("b", 1), patch=succeeded()))
        assert ended == ["INSERT entries", "UPDATE runs"]

    on(path, test)


def test_starts_into_one_partition_count_it_once_per_commit(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        written = await tables_written(store, *(queued(f"r{n}") for n in range(20)))
        assert {table: written.count(table) for table in written} == {
            "INSERT runs": 20,
            "INSERT places": 20,
            "INSERT partitions": 1,
            "UPDATE partitions": 1,
            "INSERT counters": 1,
        }

    on(path, test)


def test_a_write_that_makes_a_waiting_run_due_is_refused_by_the_file(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([queued()])
        for change in ("wake_at = 5.0", "owner = 'a'", "ended_at = 5.0", "waiting = 2"):
            sql = f"UPDATE runs SET {change} WHERE id = 'r'"
            with pytest.raises(apsw.ConstraintError):
                apsw.Connection(path).execute(sql)

    on(path, test)


def test_settings_that_cannot_be_read_are_replaced_by_the_next_declaration(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([configure("p"), queued()])
        connection = apsw.Connection(path)
        connection.execute("UPDATE queues SET override = 'garbage' WHERE name = 'q'")
        connection.close()
        assert [queue.name for queue in await store.queues()] == ["p"]
        assert "queue 'q' cannot be read" in str(await refused(store.queue_view("q", 200.0)))
        assert await store.commit([configure(concurrency=3)]) == [Committed(version=2)]
        summary = await summary_of(store)
        assert (summary.declared.concurrency, summary.override, summary.waiting) == (3, QueueOverride(), 1)
        assert await admit_now(store, 1) == ["r"]

    on(path, test)


def test_the_end_of_a_run_that_was_admitted_by_another_process_returns_its_slot(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        other = SqliteStore(path, synchronous="off")
        await other.open(shards=16)
        await store.commit([queued(), queued("s")])
        assert await admit_now(other, 1) == ["r"]
        assert await claim_ids(store, claim()) == ["r"]
        await store.commit([turn(0, entry(), patch=succeeded())])
        assert await other.place("r") is None
        assert (await summary_of(other)).held == 0
        assert not (await place_of(other, "s")).held
        await other.close()

    on(path, test)


def test_reads_of_queues_scan_no_table(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([*(queued(f"r{n}", priority=n, expires_at=900.0) for n in range(9)), queued("later")])
        await store.commit([queued("delayed", eligible_at=500.0)])
        await admit_now(store, 2)
        cursor = (await place_of(store, "r3")).cursor
        for read in (
            lambda: store.queue_view("q", 200.0),
            lambda: store.places("q"),
            lambda: store.places("q", "", cursor, 3),
            lambda: store.places("q", held=True),
            lambda: store.place("r4"),
            lambda: store.places_ahead("r4"),
        ):
            for plan in await plans_of(store, read):
                assert not any(line.startswith("SCAN") and "(subquery" not in line for line in plan), plan
                sorts_rows = "USE TEMP B-TREE FOR ORDER BY" in plan  # only partitions whose time has come
                assert not sorts_rows or "partitions_timed" in plan[0], plan

    on(path, test)


def test_the_summaries_of_queues_read_only_indexes(path: str) -> None:
    async def test(store: SqliteStore) -> None:
        await store.commit([configure("p"), queued()])
        [plan] = await plans_of(store, store.queues)
        scans = [line for line in plan if line.startswith("SCAN") and "(subquery" not in line]
        assert all(line.startswith("SCAN queues USING INDEX") for line in scans), plan
        assert queue_reads.QUEUES.count("?") == 2

    on(path, test)
