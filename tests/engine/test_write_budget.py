"""What a run may cost the store, counted in commits, rows, statements and calls: the budgets of the architecture.

Counted where SQLite executes it, so that nothing between the engine and the file can hide a statement. Times are in
`benchmarks/`.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import apsw
import pytest

from perdure import Context, step, workflow
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import Harness, VirtualClock

STEPS = 10
RUNS = 5  # few enough that nothing is moved from the log into the file meanwhile
WAL_BYTES_PER_RUN = 146_000


@step
async def add(a: int, b: int) -> int:
    return a + b


@workflow
async def ten_steps(ctx: Context) -> int:
    total = 0
    for i in range(STEPS):
        total = await add(total, i)
    return total


@workflow
async def add_one(ctx: Context, n: int) -> int:
    return await add(n, 1)


@workflow
async def hundred_children(ctx: Context) -> int:
    return len(await ctx.join(*(ctx.run_child(add_one, n) for n in range(100))))


@workflow
async def ten_steps_and_a_nap(ctx: Context) -> int:
    total = await ten_steps.fn(ctx)
    await ctx.sleep(20)
    return total


class Statements:
    """The statements that SQLite executed, once per row, on every connection of the test."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def hook(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._trace

    def _trace(self, cursor: apsw.Cursor, sql: str, values: object) -> bool:
        self.seen.append(" ".join(sql.split()))
        return True

    def beginning(self, words: str) -> int:
        return sum(sql.startswith(words) for sql in self.seen)

    def reading_histories(self) -> int:
        return sum("FROM entries" in sql and "ORDER BY position" in sql for sql in self.seen)

    def clear(self) -> None:
        self.seen.clear()


@pytest.fixture
def statements() -> Iterator[Statements]:
    watching = Statements()
    apsw.connection_hooks.append(watching.hook)
    yield watching
    apsw.connection_hooks.remove(watching.hook)


def on_sqlite(folder: Path, test: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = VirtualClock()
        store = SqliteStore(str(folder / "runs.db"), clock=clock, synchronous="off")
        async with Harness(store, clock=clock) as harness:
            await test(harness)

    asyncio.run(main())


def test_ten_steps_are_eleven_commits(tmp_path, statements):
    """The start, ten steps; the last one carries the end."""

    async def test(h):
        engine = await h.engine(ten_steps)
        statements.clear()
        assert await h.drive(engine.execute(ten_steps)) == 45
        assert statements.beginning("BEGIN") == 11
        assert statements.beginning("COMMIT") == 11

    on_sqlite(tmp_path, test)


def test_a_step_writes_one_row_and_leaves_the_row_of_its_run_alone(tmp_path, statements):
    async def test(h):
        engine = await h.engine(ten_steps)
        statements.clear()
        await h.drive(engine.execute(ten_steps))
        writes = Counter(re.split(r" VALUES| SET| \(", sql)[0] for sql in statements.seen if is_write(sql))
        # The row of the run is written when it is made, and when the last step's commit ends it.
        assert writes == {"INSERT INTO entries": STEPS, "INSERT INTO runs": 1, "UPDATE runs": 1}

    on_sqlite(tmp_path, test)


def test_bytes_in_the_log_per_run(tmp_path):
    """A limit a fifth above what was measured when it was set: a new column or index is noticed, and then weighed."""

    async def test(h):
        engine = await h.engine(ten_steps)
        await h.drive(engine.execute(ten_steps))
        log = tmp_path / "runs.db-wal"
        before = log.stat().st_size
        for _ in range(RUNS):
            await h.drive(engine.execute(ten_steps))
        assert 0 < (log.stat().st_size - before) / RUNS < WAL_BYTES_PER_RUN

    on_sqlite(tmp_path, test)


def test_a_batch_of_turns_is_one_round_trip_and_one_transaction(tmp_path, statements):
    async def test(h):
        engine = await h.engine(ten_steps)
        statements.clear()
        before = engine.faults.calls.copy()
        await h.drive(asyncio.gather(*(engine.execute(ten_steps, id=f"run-{i}") for i in range(100))))
        calls = engine.faults.calls - before
        assert set(calls) == {"commit"}
        assert statements.beginning("BEGIN") == calls["commit"]
        assert sum(len(batch) for batch in engine.faults.committed) == 100 * (1 + STEPS)
        assert calls["commit"] < 100

    on_sqlite(tmp_path, test)


def test_a_run_is_replayed_from_one_load(tmp_path, statements):
    async def test(h):
        first = await h.engine(ten_steps_and_a_nap)
        run = await first.start(ten_steps_and_a_nap)
        await h.settle()
        await h.drive(first.shutdown())
        second = await h.engine(ten_steps_and_a_nap)
        executed = len(h.executions)
        statements.clear()
        assert await h.run_to_end(second.get(run.id)) == 45
        assert len(h.executions) == executed
        assert second.faults.calls["load"] == 1
        assert statements.reading_histories() == 1

    on_sqlite(tmp_path, test)


def test_many_runs_are_loaded_together(tmp_path):
    async def test(h):
        first = await h.engine(ten_steps_and_a_nap)
        runs = [await first.start(ten_steps_and_a_nap, id=f"run-{i}") for i in range(100)]
        await h.settle()
        await h.drive(first.shutdown())
        second = await h.engine(ten_steps_and_a_nap)
        await h.drive(asyncio.gather(*(second.get(run.id).result() for run in runs)))
        assert second.faults.calls["load"] == 1

    on_sqlite(tmp_path, test)


def test_cached_run_is_not_loaded(tmp_path, statements):
    async def test(h):
        engine = await h.engine(ten_steps_and_a_nap)
        statements.clear()
        assert await h.drive(engine.execute(ten_steps_and_a_nap)) == 45
        assert engine.faults.calls["load"] == 0
        assert statements.reading_histories() == 0

    on_sqlite(tmp_path, test)


def test_a_child_is_four_writes_and_the_children_of_a_run_share_their_commits(tmp_path, statements):
    """The child is created and observed, it ends, its parent is notified, and it is finalized."""

    async def test(h):
        engine = await h.engine(hundred_children, add_one)
        assert await h.drive(engine.execute(hundred_children)) == 100
        engine.faults.committed.clear()
        statements.clear()
        assert await h.drive(engine.execute(hundred_children)) == 100
        await h.settle()
        kinds = Counter(type(write).__name__ for batch in engine.faults.committed for write in batch)
        turns_of_the_parent = kinds.pop("CommitTurn") - 100
        assert kinds == {"CreateRun": 101, "DeliverMessage": 100, "FinalizeRun": 100}
        assert turns_of_the_parent < 10
        assert len(engine.faults.committed) < 30
        assert statements.beginning("INSERT INTO runs") == 101
        assert statements.beginning("INSERT INTO observers") == 100
        assert statements.beginning("DELETE FROM observers") == 100

    on_sqlite(tmp_path, test)


def is_write(sql: str) -> bool:
    return sql.startswith(("INSERT", "UPDATE", "DELETE", "REPLACE"))
