"""A thread with its own SQLite connection, which executes one job after the other.

SQLite calls block, and a connection serves one thread at a time. A job is a function of the connection; its result
comes back on the caller's event loop. If a job raises, its transaction is rolled back, and the next job finds a usable
connection. Callers get SQLite's errors as `StoreError`s.

Handing work to another thread takes longer than most work (ADR 11): the thread is woken, wakes the caller in turn, and
each of them waits for Python's global lock. So the caller's thread writes the rows of a transaction (`transact`) if the
connection is free and no other process has locked the file. The commit waits for the disk. It is made in the thread,
unless `commit_on_loop` is set: then the caller commits a single write itself.

This module does not know what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import apsw

from perdure.clock import SYSTEM_CLOCK, block_thread
from perdure.errors import StoreError
from perdure.stores.sqlite.errors import as_store_error

LOGGER = logging.getLogger("perdure.stores")
T = TypeVar("T")
Connect = Callable[[], apsw.Connection]
Job = Callable[[apsw.Connection], T]

ROWS_ON_LOOP_MAX = 200
"""Writes of the largest batch whose rows the caller's thread writes.

Up to it, the handover to the thread costs more than the rows: writing them on the loop gave 1.07 to 1.19 times the
steps per second with 100 concurrent runs (ADR 11). Beyond it, the rows would block the event loop for too long: 200
turns of one entry take 1.2 ms of CPU time, and the committer's largest batch of 2,000 writes would take ten times that.
"""

FIRST_LOCK_WAIT_SECONDS = 0.0001
MAX_LOCK_WAIT_SECONDS = 0.005

CHECKPOINT_PAGES = 4000
"""Pages (of 4 KiB) of the write-ahead log after which the thread checkpoints it, before it delivers results.

It bounds the file of the log to 16 MB plus one batch. A checkpoint writes a page back once, however often it changed
since the last one, so rare checkpoints are cheaper. One of 4,000 pages takes about 24 ms, for which callers wait.
"""


class _PendingJob:
    """A job and the future of its caller."""

    __slots__ = ("future", "job", "loop")

    def __init__(self, job: Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()


class ConnectionThread:
    """Executes jobs from `start` to `stop`.

    `poll` is called about every `interval` seconds, whenever the connection is free. `on_rollback` is called when a
    transaction was rolled back. `commit_on_loop` allows commits, and so waiting for the disk, in the caller's thread.
    `close` closes the connection at the end.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        poll: Job[None] | None = None,
        interval: float | None = None,
        on_rollback: Callable[[], None] = lambda: None,
        commit_on_loop: bool = False,
        close: Job[None] | None = None,
    ) -> None:
        self._connect = connect
        self._close = close or close_cleanly
        self._poll_job = poll
        self._interval = interval if poll else None
        self._on_rollback = on_rollback
        self._commit_on_loop = commit_on_loop
        self._jobs: queue.SimpleQueue[_PendingJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._connection: apsw.Connection | None = None
        self._busy_timeout_s = 0.0
        self._waited_s = 0.0  # for the write lock, by the statement that is executed
        self._in_use = threading.Lock()  # held by the thread that uses the connection
        self._open_commit: _PendingJob | None = None  # the commit of a transaction that a caller has left to the thread
        self._wal_pages = 0
        self._polled_at = SYSTEM_CLOCK.now()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def call(self, job: Job[T]) -> T:
        """Execute the job in the thread, in turn, and return its result.

        Cancelling the caller does not undo the job; its result is lost.
        """
        pending = _PendingJob(job, asyncio.get_running_loop())
        self._put(pending)
        result: T = await pending.future
        return result

    async def transact(self, job: Job[T], *, size: int) -> T:
        """Execute a job of `size` writes between BEGIN and COMMIT, and return its result when it is committed."""
        written = self._write_here(job) if size <= ROWS_ON_LOOP_MAX else None
        if written is None:
            return await self.call(partial(_transact, job))
        # A batch of several writes means that other runs are busy: the loop serves them while the thread commits.
        if self._commit_on_loop and size == 1:
            self._commit_here()
        else:
            await self._hand_over_commit().future
        return written[0]

    def call_here(self, job: Job[T | None]) -> T | None:
        """Execute a short job in the caller's thread and return its result; None if the caller would have to wait.

        The job must not wait for the disk. If another process has locked the file, a transaction of it does not begin.
        """
        connection = self._take_connection()
        if connection is None:
            return None
        result: T | None = None
        try:
            connection.set_busy_handler(None)
            try:
                with contextlib.suppress(apsw.BusyError):
                    result = job(connection)
            finally:
                with contextlib.suppress(apsw.ConnectionClosedError):  # the job may have closed it after an error
                    connection.set_busy_handler(self._wait_for_lock)
        except BaseException as error:
            self._abort_here(error)
            raise
        self._release_connection()
        return result

    async def stop(self) -> None:
        """Finish the jobs submitted before, close the connection and end the thread. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)
        if os.getpid() == self._pid and self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _put(self, pending: _PendingJob) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; create and open another one in the child process")
        with self._lock:
            if self._stopped:
                raise StoreError("this store has been closed; open it again")
            self._jobs.put(pending)

    # in the caller's thread

    def _write_here(self, job: Job[T]) -> tuple[T] | None:
        """Execute the job in a transaction that is left open, and return its result.

        Return None, without a change, if the caller would have to wait: the connection is in use, jobs are queued,
        another process has locked the file, or a checkpoint is due.
        """
        connection = self._take_connection()
        if connection is None:
            return None
        try:
            if not self._begin_without_waiting(connection):
                self._in_use.release()
                return None
            return (job(connection),)
        except BaseException as error:
            self._abort_here(error)
            raise

    def _take_connection(self) -> apsw.Connection | None:
        """Return the connection, to be released by the caller, or None if something else needs it.

        That may be another thread, a job or a checkpoint: without the latter, callers could delay one forever.
        """
        if os.getpid() != self._pid or not self._in_use.acquire(blocking=False):
            return None
        waiting = self._stopped or self._open_commit is not None or not self._jobs.empty()
        if self._connection is not None and not waiting and self._wal_pages <= CHECKPOINT_PAGES:
            return self._connection
        self._in_use.release()
        return None

    def _release_connection(self) -> None:
        self._in_use.release()
        if self._wal_pages > CHECKPOINT_PAGES:
            self._jobs.put(_WAKE_UP)  # the thread checkpoints

    def _begin_without_waiting(self, connection: apsw.Connection) -> bool:
        """Begin a transaction if no other process writes. The thread can wait for others, the event loop cannot."""
        connection.set_busy_handler(None)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            return False
        finally:
            connection.set_busy_handler(self._wait_for_lock)
        return True

    def _wait_for_lock(self, waits: int) -> bool:
        """Wait a little while another process writes; `waits`: how often the statement has waited before.

        SQLite's own handler waits for 1 ms and then longer, but most commits of other processes take less.
        """
        if waits == 0:
            self._waited_s = 0.0
        if self._waited_s >= self._busy_timeout_s:
            return False
        pause = min(FIRST_LOCK_WAIT_SECONDS * 1.3 ** min(waits, 50), MAX_LOCK_WAIT_SECONDS)
        self._waited_s += pause
        block_thread(pause)
        return True

    def _commit_here(self) -> None:
        assert self._connection is not None
        try:
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._abort_here(error)
            raise
        self._release_connection()

    def _hand_over_commit(self) -> _PendingJob:
        """Leave the commit, and with it the use of the connection, to the thread. A thread that stops commits first.

        Returns when the thread has reached the commit, about 50 us later. Otherwise the thread would get Python's
        global lock only when the caller is idle, and commit only then.
        """
        reached = threading.Lock()
        reached.acquire()

        def commit(connection: apsw.Connection) -> None:
            reached.release()
            connection.execute("COMMIT")

        pending = _PendingJob(commit, asyncio.get_running_loop())
        self._open_commit = pending
        self._jobs.put(_WAKE_UP)
        self._in_use.release()
        reached.acquire()
        return pending

    def _abort_here(self, error: BaseException) -> None:
        self._roll_back()
        self._in_use.release()
        outcome = as_store_error(error)
        if outcome is not error:
            raise outcome

    # in the thread

    def _run(self) -> None:
        while True:
            try:
                pending = self._jobs.get(timeout=self._interval)
            except queue.Empty:
                self._poll()
                continue
            if pending is None:
                break
            with self._in_use:
                deliveries = self._execute_with_open_commit(pending)
                # Before the results: a caller that gets its result may use the connection again at once.
                if self._wal_pages > CHECKPOINT_PAGES:
                    self._checkpoint()
            for deliver in deliveries:
                deliver()
            if self._interval is not None and SYSTEM_CLOCK.now() - self._polled_at >= self._interval:
                self._poll()  # also while jobs never stop coming
        with self._in_use:
            deliveries = self._execute_with_open_commit(_WAKE_UP)
            if self._connection is not None:
                with contextlib.suppress(apsw.Error):
                    self._close(self._connection)
        for deliver in deliveries:
            deliver()

    def _execute_with_open_commit(self, pending: _PendingJob) -> list[Callable[[], None]]:
        """Execute an open commit, then the job. Return the functions that deliver their results."""
        commit, self._open_commit = self._open_commit, None
        jobs = (commit, None if pending is _WAKE_UP else pending)
        return [self._execute(each) for each in jobs if each is not None]

    def _execute(self, pending: _PendingJob) -> Callable[[], None]:
        try:
            if self._connection is None:
                self._connection = self._open_connection()
            result = pending.job(self._connection)
        except BaseException as error:
            self._roll_back()
            return partial(_deliver, pending, pending.future.set_exception, as_store_error(error))
        return partial(_deliver, pending, pending.future.set_result, result)

    def _open_connection(self) -> apsw.Connection:
        connection = self._connect()
        self._busy_timeout_s = connection.pragma("busy_timeout") / 1000
        connection.set_busy_handler(self._wait_for_lock)
        connection.set_wal_hook(self._on_commit)  # replaces SQLite's own checkpoint, which is part of the commit
        return connection

    def _on_commit(self, connection: apsw.Connection, name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        """Write the log back into the file. If a reader needs the log, the next commit makes it due again."""
        self._wal_pages = 0
        if self._connection is not None:
            with contextlib.suppress(apsw.Error):
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _poll(self) -> None:
        if self._poll_job is None or not self._in_use.acquire(blocking=False):
            return
        try:
            self._polled_at = SYSTEM_CLOCK.now()
            if self._connection is not None:
                self._poll_job(self._connection)
        except apsw.Error:
            pass  # the file is locked or was changed: the next poll repeats it
        except Exception:
            LOGGER.exception("Check for commits of other processes raised; it is repeated")
        finally:
            self._in_use.release()

    # in either thread

    def _roll_back(self) -> None:
        """Roll back after an error. A connection that cannot is closed; the next job gets a new one."""
        self._on_rollback()
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


_WAKE_UP = _PendingJob.__new__(_PendingJob)
"""Wakes the thread for an open commit or a checkpoint."""


def _transact(job: Job[T], connection: apsw.Connection) -> T:
    connection.execute("BEGIN IMMEDIATE")
    result = job(connection)
    connection.execute("COMMIT")
    return result


def _deliver(pending: _PendingJob, complete: Callable[[Any], None], result: Any) -> None:
    def complete_if_awaited() -> None:
        if not pending.future.done():
            complete(result)

    with contextlib.suppress(RuntimeError):  # the caller's loop was closed meanwhile
        pending.loop.call_soon_threadsafe(complete_if_awaited)


def close_cleanly(connection: apsw.Connection) -> None:
    """Close the connection. The last connection to a file writes the log back into it."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    connection.close(force=True)
