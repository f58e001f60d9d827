"""Who does what of a transaction: the caller's thread writes the rows, and who commits depends on what is quicker."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import apsw
import pytest

from perdure.errors import StoreError
from perdure.stores.sqlite import connection as sqlite_thread
from perdure.stores.sqlite import schema as sqlite_file
from perdure.stores.sqlite.connection import (
    COMMIT_ON_LOOP_MAX,
    FORCED_CHECKPOINT_FACTOR,
    WRITE_ON_LOOP_MAX,
    ConnectionThread,
)

HERE = threading.get_ident


class Traced:
    """A file with one table, a connection thread on it, and who has executed which statement."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "traced.db")
        self.by: dict[str, int] = {}
        self.undone = 0
        self.refuse = False
        self.thread = ConnectionThread("traced", self._connect, on_rollback=self._undo)

    def _connect(self) -> apsw.Connection:
        connection = sqlite_file.connect(self.path, synchronous="full", busy_timeout=5.0)
        connection.pragma("journal_mode", "wal")
        connection.execute("CREATE TABLE IF NOT EXISTS t (n)")
        connection.set_exec_trace(self._trace)
        connection.set_commit_hook(lambda: self.refuse)
        return connection

    def _trace(self, cursor: Any, sql: str, values: Any) -> bool:
        self.by[sql.split()[0]] = HERE()
        return True

    def _undo(self) -> None:
        self.undone += 1

    async def insert(self, n: int, size: int = 1) -> int:
        return await self.thread.transact(partial(_insert, n), size=size)

    def stored(self) -> list[int]:
        connection = apsw.Connection(self.path)
        try:
            return [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]
        finally:
            connection.close()


def _insert(n: int, connection: apsw.Connection) -> int:
    connection.execute("INSERT INTO t VALUES (?)", (n,))
    return n


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_thread, "SLOW_COMMIT_SECONDS", 3600.0)


@asynccontextmanager
async def traced(folder: Path) -> AsyncIterator[Traced]:
    it = Traced(folder)
    it.thread.start()
    await it.thread.call(lambda connection: None)
    try:
        yield it
    finally:
        await it.thread.stop()


@pytest.mark.parametrize(
    ("size", "rows_here", "commit_here"),
    [(1, True, True), (COMMIT_ON_LOOP_MAX + 1, True, False), (WRITE_ON_LOOP_MAX + 1, False, False)],
)
def test_who_writes_and_who_commits(tmp_path: Path, size: int, rows_here: bool, commit_here: bool) -> None:
    async def scenario() -> None:
        async with traced(tmp_path) as it:
            assert await it.insert(7, size) == 7
            assert (it.by["INSERT"] == HERE()) is rows_here
            assert (it.by["COMMIT"] == HERE()) is commit_here
            assert it.stored() == [7]

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, COMMIT_ON_LOOP_MAX + 1])
def test_a_file_that_somebody_else_has_locked_is_waited_for_by_the_thread(tmp_path: Path, size: int) -> None:
    async def scenario() -> None:
        async with traced(tmp_path) as it:
            other = apsw.Connection(it.path)
            other.execute("BEGIN IMMEDIATE")
            waiting, began = asyncio.create_task(it.insert(1, size)), monotonic()
            await asyncio.sleep(0.05)  # for which the thread waits too
            assert not waiting.done()
            assert monotonic() - began < 2.0  # it would have waited for 5 s here
            other.execute("ROLLBACK")
            other.close()
            assert await waiting == 1
            assert it.by["INSERT"] != HERE()
            await it.insert(2, size)
            assert it.by["INSERT"] == HERE()
            assert it.stored() == [1, 2]

    asyncio.run(scenario())


def test_after_a_slow_commit_the_next_are_left_to_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self, step: float) -> None:
            self.step, self.time = step, 0.0

        def now(self) -> float:
            self.time += self.step
            return self.time

    monkeypatch.setattr(sqlite_thread, "SLOW_COMMIT_BACKOFF", 3)

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            monkeypatch.setattr(sqlite_thread, "SYSTEM_CLOCK", Slow(10_000.0))
            by = []
            for n in range(6):
                await it.insert(n)
                by.append(it.by["COMMIT"] == HERE())
                monkeypatch.setattr(sqlite_thread, "SYSTEM_CLOCK", Slow(0.0))
            assert by == [True, False, False, False, True, True]

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, COMMIT_ON_LOOP_MAX + 1, WRITE_ON_LOOP_MAX + 1])
@pytest.mark.parametrize("fails", ["rows", "commit"])
def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path, size: int, fails: str) -> None:
    def broken(connection: apsw.Connection) -> None:
        _insert(1, connection)
        it_fails()

    def it_fails() -> None:
        if fails == "rows":
            raise apsw.ConstraintError("planned")

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            it.refuse = fails == "commit"
            with pytest.raises(StoreError, match="refused"):
                await it.thread.transact(broken, size=size)
            it.refuse = False
            assert it.undone == 1
            assert await it.insert(2, size) == 2
            assert it.stored() == [2]

    asyncio.run(scenario())


def test_what_is_no_error_of_sqlite_reaches_the_caller_as_it_is(tmp_path: Path) -> None:
    error = LookupError("ours")

    def broken(connection: apsw.Connection) -> None:
        raise error

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            for size in (1, WRITE_ON_LOOP_MAX + 1):
                with pytest.raises(LookupError) as caught:
                    await it.thread.transact(broken, size=size)
                assert caught.value is error
            assert await it.insert(1) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, COMMIT_ON_LOOP_MAX + 1, WRITE_ON_LOOP_MAX + 1])
def test_the_log_is_written_back_by_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sqlite_thread, "CHECKPOINT_PAGES", 10)

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            for n in range(300):
                await it.insert(n, size)
            assert Path(f"{it.path}-wal").stat().st_size < 100 * 4096

    asyncio.run(scenario())


def test_a_log_that_callers_always_forestall_is_written_back_before_one_of_them_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_thread, "CHECKPOINT_PAGES", 10)

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            go_on, write_back, answered = it.thread._go_on, it.thread._write_back, threading.Event()

            def go_on_and_tell(job: Any) -> list[Callable[[], None]]:
                answered.clear()
                return [*go_on(job), answered.set]

            def write_back_unless_forestalled() -> None:
                if not answered.is_set():
                    write_back()

            monkeypatch.setattr(it.thread, "_go_on", go_on_and_tell)
            monkeypatch.setattr(it.thread, "_write_back", write_back_unless_forestalled)
            for n in range(300):
                await it.insert(n, COMMIT_ON_LOOP_MAX + 1)
            assert Path(f"{it.path}-wal").stat().st_size < (FORCED_CHECKPOINT_FACTOR + 1) * 10 * 4096

    asyncio.run(scenario())


def test_event_loops_in_several_threads_share_one_connection(tmp_path: Path) -> None:
    """Each of them writes here, leaves commits to the thread and has it do everything, all at once."""
    each = 300

    async def insert_some(it: Traced, first: int) -> None:
        for n in range(first, first + each):
            if n % 10 == 0:
                await it.thread.call(partial(_insert, n))
            else:
                await it.insert(n, (1, COMMIT_ON_LOOP_MAX + 1, WRITE_ON_LOOP_MAX + 1)[n % 3])

    async def scenario() -> None:
        async with traced(tmp_path) as it:
            others = [
                threading.Thread(target=_run, args=(partial(insert_some, it, first),)) for first in (each, 2 * each)
            ]
            for other in others:
                other.start()
            await insert_some(it, 0)
            for other in others:
                await asyncio.to_thread(other.join)
            assert it.stored() == list(range(3 * each))

    asyncio.run(scenario())


def _run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with traced(tmp_path) as it:
            await it.thread.stop()
            with pytest.raises(StoreError, match="closed"):
                await it.insert(1)

    asyncio.run(scenario())
