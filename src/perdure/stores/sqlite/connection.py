"""A thread with its own SQLite connection, which carries out one piece of work after the other.

SQLite blocks, so that it is kept off the event loop; and a connection serves one thread at a time. Work is a function
of the connection; its answer comes back on the event loop of the caller. Whatever a piece of work raises, the
transaction is rolled back and the next one finds the connection usable. Callers get SQLite's errors as `StoreError`s.

To have another thread do something takes longer than most of what there is to do: it is woken, wakes its caller in
turn, and each waits for Python's global lock. So the rows of a transaction (`transact`) are written by the caller while
the connection is free and nobody else has locked the file. The commit, which takes the disk's time, is left to the
thread if the caller has more to do meanwhile; else the caller does that as well, as long as disks are quick about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import apsw

from perdure.clock import SYSTEM_CLOCK
from perdure.errors import StoreError
from perdure.stores.sqlite.errors import as_store_error

T = TypeVar("T")
Connect = Callable[[], apsw.Connection]
Work = Callable[[apsw.Connection], T]

_POLL_AFTER_JOBS = 16  # a thread that is never idle still looks around now and then
COMMIT_ON_LOOP_MAX = 8  # writes: the next batch is not waiting yet
WRITE_ON_LOOP_MAX = 200  # writes that would keep the event loop from everything else for too long
CHECKPOINT_PAGES = 4000  # after so many the log is written back into the file
FORCED_CHECKPOINT_FACTOR = 2  # times as many: callers have been first each time, and the next of them waits for it
SLOW_COMMIT_SECONDS = 0.002  # seconds for which a commit may hold up the caller's event loop
SLOW_COMMIT_BACKOFF = 200  # commits that are left to the thread


class _Job:
    """Work, and who waits for it."""

    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Work[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()


class ConnectionThread:
    """Runs from `start` to `stop`. `look_around` is called every `interval` seconds while there is no work.

    `undone` is called in the place of a transaction that was rolled back.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        poll: Work[None] | None = None,
        interval: float | None = None,
        on_rollback: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._look_around = poll
        self._interval = interval if poll else None
        self._undone = on_rollback
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._connection: apsw.Connection | None = None
        self._busy_timeout_ms = 0  # milliseconds for which the connection waits for others
        self._in_use = threading.Lock()  # held by the thread that uses the connection
        self._begun: _Job | None = None  # what a caller has begun on the connection and left to the thread
        self._log_pages = 0
        self._slow = 0  # commits that are still left to the thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def call(self, work: Work[T]) -> T:
        """Have the work done in turn. Cancelling the caller does not undo it: the answer is then lost."""
        job = _Job(work, asyncio.get_running_loop())
        self._put(job)
        answer: T = await job.future
        return answer

    async def transact(self, work: Work[T], *, size: int) -> T:
        """Have a work of so many writes done between BEGIN and COMMIT, here as far as that is quicker."""
        written = self._begin_here(work) if size <= WRITE_ON_LOOP_MAX else None
        if written is None:
            return await self.call(partial(_transact, work))
        if size > COMMIT_ON_LOOP_MAX and (commit := self._leave_to_the_thread()):
            await commit.future
        else:
            self._commit_here()
        return written[0]

    async def stop(self) -> None:
        """Finish what was asked before, close the connection, end the thread. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)
        if os.getpid() == self._pid and self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _put(self, job: _Job) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; make and open another one in the child process")
        with self._lock:
            if self._stopped:
                raise StoreError("this store has been closed; open it again")
            self._jobs.put(job)

    # in the caller's thread

    def _begin_here(self, work: Work[T]) -> tuple[T] | None:
        """What the work gave, in a transaction that is still to be committed; None if it has not been done."""
        if self._slow:
            self._slow -= 1
            return None
        if os.getpid() != self._pid or not self._in_use.acquire(blocking=False):
            return None
        try:
            if self._stopped or self._begun is not None or not self._jobs.empty() or not self._locks_at_once():
                self._in_use.release()
                return None
            assert self._connection is not None
            return (work(self._connection),)
        except BaseException as error:
            self._give_up(error)
            raise

    def _locks_at_once(self) -> bool:
        """BEGIN, if nobody else writes; the thread can wait for others, the caller's event loop cannot."""
        connection = self._connection
        if connection is None:
            return False
        connection.set_busy_timeout(0)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            return False
        finally:
            connection.set_busy_timeout(self._busy_timeout_ms)
        return True

    def _commit_here(self) -> None:
        assert self._connection is not None
        began = SYSTEM_CLOCK.now()
        try:
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._give_up(error)
            raise
        self._in_use.release()
        if SYSTEM_CLOCK.now() - began > SLOW_COMMIT_SECONDS:
            self._slow = SLOW_COMMIT_BACKOFF
        if self._log_pages > CHECKPOINT_PAGES:
            self._jobs.put(_NOTHING)  # after which the thread writes the log back

    def _give_up(self, error: BaseException) -> None:
        self._roll_back()
        self._in_use.release()
        outcome = as_store_error(error)
        if outcome is not error:
            raise outcome

    def _leave_to_the_thread(self) -> _Job | None:
        """Hand over the commit, and with it the use of the connection; None if the thread is about to end.

        Comes back when the thread is inside of the commit: it would not get Python's lock before the caller waits.
        """
        inside = threading.Lock()
        inside.acquire()

        def commit(connection: apsw.Connection) -> None:
            inside.release()
            connection.execute("COMMIT")

        job = _Job(commit, asyncio.get_running_loop())
        with self._lock:
            if self._stopped:
                return None
            self._begun = job
            self._jobs.put(_NOTHING)
        self._in_use.release()
        inside.acquire()
        return job

    # in the thread

    def _run(self) -> None:
        since_looking = 0
        while True:
            try:
                job = self._jobs.get(timeout=self._interval)
            except queue.Empty:
                self._look()
                continue
            if job is None:
                break
            with self._in_use:
                answers = self._go_on(job)
            if self._log_pages > FORCED_CHECKPOINT_FACTOR * CHECKPOINT_PAGES:
                self._write_back()
            for answer in answers:  # those who get them find the connection free
                answer()
            if self._log_pages > CHECKPOINT_PAGES:
                self._write_back()
            since_looking += 1
            if since_looking == _POLL_AFTER_JOBS:
                since_looking = 0
                self._look()
        with self._in_use:
            if self._connection is not None:
                with contextlib.suppress(apsw.Error):
                    close_cleanly(self._connection)

    def _go_on(self, job: _Job) -> list[Callable[[], None]]:
        begun, self._begun = self._begun, None
        return [self._carry_out(each) for each in (begun, job) if each is not None and each is not _NOTHING]

    def _carry_out(self, job: _Job) -> Callable[[], None]:
        """Do the work; what comes back tells the answer."""
        try:
            if self._connection is None:
                self._connection = self._connected()
            answer = job.work(self._connection)
        except BaseException as error:
            self._roll_back()
            return partial(_answer, job, job.future.set_exception, as_store_error(error))
        return partial(_answer, job, job.future.set_result, answer)

    def _connected(self) -> apsw.Connection:
        connection = self._connect()
        self._busy_timeout_ms = connection.pragma("busy_timeout")
        connection.set_wal_hook(self._count_pages)
        return connection

    def _count_pages(self, connection: apsw.Connection, name: str, pages: int) -> int:
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _write_back(self) -> None:
        """Write the log back into the file, as SQLite would within a commit, for which somebody would wait."""
        with self._in_use, contextlib.suppress(apsw.Error):
            if self._connection is not None and self._begun is None:  # else a caller was first: after the next commit
                self._log_pages = 0
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _look(self) -> None:
        if self._look_around is not None and self._in_use.acquire(blocking=False):
            try:
                if self._connection is not None:
                    with contextlib.suppress(apsw.Error):
                        self._look_around(self._connection)
            finally:
                self._in_use.release()

    # in either

    def _roll_back(self) -> None:
        """After an error; a connection that cannot even do that is given up, and the next work gets a new one."""
        self._undone()
        connection = self._connection
        if connection is None:
            return
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self._connection = None
            with contextlib.suppress(apsw.Error):
                connection.close(force=True)


_NOTHING = _Job.__new__(_Job)
"""Wakes the thread, for which there is something else to do."""


def _transact(work: Work[T], connection: apsw.Connection) -> T:
    connection.execute("BEGIN IMMEDIATE")
    written = work(connection)
    connection.execute("COMMIT")
    return written


def _answer(job: _Job, settle: Callable[[Any], None], answer: Any) -> None:
    def settle_if_awaited() -> None:
        if not job.future.done():
            settle(answer)

    with contextlib.suppress(RuntimeError):  # the caller's loop was closed meanwhile
        job.loop.call_soon_threadsafe(settle_if_awaited)


def close_cleanly(connection: apsw.Connection) -> None:
    """Close, writing the log back into the file if this is the last connection to it."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    connection.close(force=True)
