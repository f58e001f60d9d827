"""A thread with its own SQLite connection, which carries out one piece of work after the other.

SQLite blocks, so that it must not run on the event loop; and a connection serves one thread at a time. Work is a
function of the connection; its answer comes back on the event loop of the caller. Whatever a piece of work raises,
the transaction is rolled back and the next one finds the connection usable. The errors of SQLite become `StoreError`s
here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import apsw

from perdure.errors import PerdureError, StoreError

T = TypeVar("T")
Connect = Callable[[], apsw.Connection]
Work = Callable[[apsw.Connection], T]

_RETRYABLE = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.IOError,
    apsw.FullError,
    apsw.CantOpenError,
    apsw.InterruptError,
    apsw.ProtocolError,
    apsw.NoMemError,
    apsw.SchemaChangeError,
)

_POLL_AFTER_JOBS = 16  # a thread that is never idle still looks around now and then


class _Job:
    """Work, and who waits for it."""

    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Work[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()


class ConnectionThread:
    """Runs from `start` to `stop`. `look_around` is called every `interval` seconds while there is no work."""

    def __init__(
        self, name: str, connect: Connect, *, look_around: Work[None] | None = None, interval: float | None = None
    ) -> None:
        self._connect = connect
        self._look_around = look_around
        self._interval = interval if look_around else None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._pid = os.getpid()
        self._connection: apsw.Connection | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def call(self, work: Work[T]) -> T:
        """Have the work done in turn. Cancelling the caller does not undo it: the answer is then lost."""
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; make and open another one in the child process")
        job = _Job(work, asyncio.get_running_loop())
        with self._lock:
            if self._stopped:
                raise StoreError("this store has been closed; open it again")
            self._jobs.put(job)
        answer: T = await job.future
        return answer

    async def stop(self) -> None:
        """Finish what was asked before, close the connection, end the thread. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)
        if os.getpid() == self._pid and self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

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
            self._carry_out(job)
            since_looking += 1
            if since_looking == _POLL_AFTER_JOBS:
                since_looking = 0
                self._look()
        if self._connection is not None:
            with contextlib.suppress(apsw.Error):
                close_cleanly(self._connection)

    def _carry_out(self, job: _Job) -> None:
        try:
            if self._connection is None:
                self._connection = self._connect()
            answer = job.work(self._connection)
        except BaseException as error:
            self._roll_back()
            _answer(job, job.future.set_exception, as_store_error(error))
        else:
            _answer(job, job.future.set_result, answer)

    def _roll_back(self) -> None:
        """After an error; a connection that cannot even do that is given up, and the next work gets a new one."""
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

    def _look(self) -> None:
        if self._look_around is not None and self._connection is not None:
            with contextlib.suppress(apsw.Error):
                self._look_around(self._connection)


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


def as_store_error(error: BaseException) -> BaseException:
    """What the callers of a store see: ours as they are, SQLite's by whether the same call may succeed later."""
    if isinstance(error, PerdureError):
        return error
    if isinstance(error, _RETRYABLE):
        return _caused(StoreError(f"SQLite could not do it now ({_describe(error)})", retryable=True), error)
    if isinstance(error, UnicodeError):
        return _caused(StoreError(f"text that is not valid Unicode cannot be stored: {error}"), error)
    if isinstance(error, (apsw.Error, ValueError, TypeError, OverflowError)):
        return _caused(StoreError(f"SQLite refused it ({_describe(error)})"), error)
    return error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _caused(outcome: StoreError, cause: BaseException) -> StoreError:
    outcome.__cause__ = cause
    return outcome
