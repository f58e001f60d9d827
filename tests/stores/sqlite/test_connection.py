"""ConnectionThread: which thread writes the rows of a transaction, which one commits, and when it checkpoints."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import StoreError
from perdure.stores.sqlite import connection as connection_module
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.connection import ROWS_ON_LOOP_MAX, ConnectionThread

THIS_THREAD = threading.get_ident
SIZES = (1, 2, ROWS_ON_LOOP_MAX + 1)  # committed on the loop if allowed; rows on the loop; all in the thread


class TracedThread:
    """A file with one table, a connection thread on it, and the thread that executed each kind of statement."""

    def __init__(self, folder: Path, *, commit_on_loop: bool = True) -> None:
        self.path = str(folder / "traced.db")
        self.executed_by: dict[str, int] = {}
        self.rollbacks = 0
        self.refuse_commits = False
        self.thread = ConnectionThread(
            "traced", self._connect, on_rollback=self._on_rollback, commit_on_loop=commit_on_loop
        )

    def _connect(self) -> apsw.Connection:
        connection = schema.connect(self.path, synchronous="full", busy_timeout=60.0)
        connection.pragma("journal_mode", "wal")
        connection.execute("CREATE TABLE IF NOT EXISTS t (n)")
        connection.set_exec_trace(self._trace)
        connection.set_commit_hook(lambda: self.refuse_commits)
        return connection

    def _trace(self, cursor: Any, sql: str, values: Any) -> bool:
        self.executed_by[sql.split()[0]] = THIS_THREAD()
        return True

    def _on_rollback(self) -> None:
        self.rollbacks += 1

    async def insert(self, n: int, size: int = 1) -> int:
        return await self.thread.transact(partial(_insert, n), size=size)

    def stored(self) -> list[int]:
        connection = apsw.Connection(self.path)
        try:
            return [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]
        finally:
            connection.close()

    def wal_pages(self) -> float:
        return Path(f"{self.path}-wal").stat().st_size / 4096


def _insert(n: int, connection: apsw.Connection) -> int:
    connection.execute("INSERT INTO t VALUES (?)", (n,))
    return n


@asynccontextmanager
async def traced(folder: Path, *, commit_on_loop: bool = True) -> AsyncIterator[TracedThread]:
    it = TracedThread(folder, commit_on_loop=commit_on_loop)
    it.thread.start()
    await it.thread.call(lambda connection: None)
    try:
        yield it
    finally:
        await it.thread.stop()


@pytest.mark.parametrize(
    ("commit_on_loop", "size", "rows_here", "commit_here"),
    [
        (True, 1, True, True),
        (True, 2, True, False),
        (True, ROWS_ON_LOOP_MAX, True, False),
        (True, ROWS_ON_LOOP_MAX + 1, False, False),
        (False, 1, True, False),
        (False, 2, True, False),
        (False, ROWS_ON_LOOP_MAX + 1, False, False),
    ],
)
def test_size_and_loop_ownership_decide_which_thread_writes_and_commits(
    tmp_path: Path, commit_on_loop: bool, size: int, rows_here: bool, commit_here: bool
) -> None:
    async def main() -> None:
        async with traced(tmp_path, commit_on_loop=commit_on_loop) as it:
            assert await it.insert(7, size) == 7
            assert (it.executed_by["INSERT"] == THIS_THREAD()) is rows_here
            assert (it.executed_by["COMMIT"] == THIS_THREAD()) is commit_here
            assert it.stored() == [7]

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2])
def test_the_thread_waits_for_a_file_that_another_process_has_locked(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with traced(tmp_path) as it:
            other = apsw.Connection(it.path)
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(it.insert(1, size))
            await asyncio.sleep(0.05)  # the event loop runs while the thread waits
            assert not waiting.done(), "a blocked event loop would have waited for the lock in vain"
            other.execute("ROLLBACK")
            other.close()
            assert await waiting == 1
            assert it.executed_by["INSERT"] != THIS_THREAD()
            await it.insert(2, size)
            assert it.executed_by["INSERT"] == THIS_THREAD()
            assert it.stored() == [1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("commit_on_loop", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fails", ["rows", "commit"])
def test_a_failed_transaction_stores_nothing(tmp_path: Path, commit_on_loop: bool, size: int, fails: str) -> None:
    def insert_and_fail(connection: apsw.Connection) -> None:
        _insert(1, connection)
        if fails == "rows":
            raise apsw.ConstraintError("planned")

    async def main() -> None:
        async with traced(tmp_path, commit_on_loop=commit_on_loop) as it:
            it.refuse_commits = fails == "commit"
            with pytest.raises(StoreError, match="refused"):
                await it.thread.transact(insert_and_fail, size=size)
            it.refuse_commits = False
            assert it.rollbacks == 1
            assert await it.insert(2, size) == 2
            assert it.stored() == [2]

    asyncio.run(main())


def test_an_error_that_is_not_from_sqlite_reaches_the_caller_unchanged(tmp_path: Path) -> None:
    error = LookupError("ours")

    def fail(connection: apsw.Connection) -> None:
        raise error

    async def main() -> None:
        async with traced(tmp_path) as it:
            for size in SIZES:
                with pytest.raises(LookupError) as caught:
                    await it.thread.transact(fail, size=size)
                assert caught.value is error
            assert await it.insert(1) == 1

    asyncio.run(main())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_on_loop", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_thread_checkpoints_a_log_that_exceeds_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_on_loop: bool, size: int
) -> None:
    monkeypatch.setattr(connection_module, "CHECKPOINT_PAGES", 10)

    async def main() -> None:
        async with traced(tmp_path, commit_on_loop=commit_on_loop) as it:
            by = _record_checkpoints(it, monkeypatch)
            for n in range(300):
                await it.insert(n, size)
            assert it.wal_pages() < 30
            assert by
            assert THIS_THREAD() not in by

    asyncio.run(main())


def test_callers_cannot_delay_a_checkpoint_that_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose log is over the limit leaves its rows to the thread, which checkpoints before it replies."""
    monkeypatch.setattr(connection_module, "CHECKPOINT_PAGES", 10)

    async def main() -> None:
        async with traced(tmp_path) as it:
            by = _record_checkpoints(it, monkeypatch)
            # The thread is not woken for the checkpoint, as if every caller got the connection before it.
            monkeypatch.setattr(it.thread, "_jobs", _WithoutWakeUps(it.thread._jobs))
            checkpoints_seen = []
            for n in range(300):
                over_limit = it.thread._wal_pages > 10
                before = len(by)
                await it.insert(n)
                if over_limit:
                    assert it.executed_by["INSERT"] != THIS_THREAD()
                    checkpoints_seen.append(len(by) - before)
            assert checkpoints_seen
            assert set(checkpoints_seen) == {1}, "one, and before the result was delivered"
            assert it.wal_pages() < 30

    asyncio.run(main())


def _record_checkpoints(it: TracedThread, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the thread of every checkpoint."""
    by: list[int] = []
    checkpoint = it.thread._checkpoint

    def record_and_checkpoint() -> None:
        by.append(THIS_THREAD())
        checkpoint()

    monkeypatch.setattr(it.thread, "_checkpoint", record_and_checkpoint)
    return by


class _WithoutWakeUps:
    """The queue of a connection thread that drops wake-ups without a commit."""

    def __init__(self, jobs: Any) -> None:
        self._jobs = jobs
        self.get, self.empty = jobs.get, jobs.empty

    def put(self, job: Any) -> None:
        if job is not connection_module._WAKE_UP:
            self._jobs.put(job)


# --- several callers --------------------------------------------------------------------------------------------------


def test_event_loops_in_several_threads_share_one_connection(tmp_path: Path) -> None:
    """Each loop writes rows itself, commits itself, hands commits over and calls jobs, all concurrently."""
    per_thread = 300

    async def insert_some(it: TracedThread, first: int) -> None:
        for n in range(first, first + per_thread):
            if n % 10 == 0:
                await it.thread.call(partial(_insert, n))
            else:
                await it.insert(n, SIZES[n % 3])

    async def main() -> None:
        async with traced(tmp_path) as it:
            others = [
                threading.Thread(target=_run, args=(partial(insert_some, it, first),))
                for first in (per_thread, 2 * per_thread)
            ]
            for other in others:
                other.start()
            await insert_some(it, 0)
            for other in others:
                await asyncio.to_thread(other.join)
            assert it.stored() == list(range(3 * per_thread))

    asyncio.run(main())


def _run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def test_a_thread_that_stops_commits_what_was_handed_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with traced(tmp_path, commit_on_loop=False) as it:

            def insert_and_stop(connection: apsw.Connection) -> None:
                _insert(1, connection)
                it.thread._stopped = True  # as `stop` in another thread would, before the commit is handed over
                it.thread._jobs.put(None)

            await it.thread.transact(insert_and_stop, size=1)
            assert it.executed_by["COMMIT"] != THIS_THREAD()
            assert it.stored() == [1]

    asyncio.run(main())


def test_the_thread_polls_while_jobs_never_stop_coming(tmp_path: Path) -> None:
    async def main() -> None:
        polled = threading.Event()
        path = str(tmp_path / "polled.db")
        thread = ConnectionThread(
            "polled", lambda: apsw.Connection(path), poll=lambda connection: polled.set(), interval=0.01
        )
        thread.start()
        try:
            busy = [asyncio.create_task(_call_until(thread, polled)) for _ in range(3)]
            await asyncio.wait_for(asyncio.gather(*busy), 60.0)
        finally:
            await thread.stop()

    asyncio.run(main())


async def _call_until(thread: ConnectionThread, event: threading.Event) -> None:
    while not event.is_set():
        await thread.call(lambda connection: None)


def test_a_stopped_thread_refuses_jobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with traced(tmp_path) as it:
            await it.thread.stop()
            with pytest.raises(StoreError, match="closed"):
                await it.insert(1)

    asyncio.run(main())
