"""ConnectionPool: a small pool of connections to a PostgreSQL server.

Every call is one statement in a transaction of its own. So no lock is held while a client is awaited, and a pooler in
transaction mode may stand in between. A statement that the server aborted because of concurrent ones (deadlock, lock
not available) has stored nothing; the pool repeats it a few times. All other errors are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import cache
from typing import Any, TypeAlias, cast

import asyncpg

from perdure.errors import StoreError
from perdure.stores.postgres.errors import RETRY_IMMEDIATELY, as_store_error, translate_errors
from perdure.stores.postgres.url import PostgresUrl
from perdure.stores.sql_rows import Row

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"  # generic in its stubs only


_ATTEMPTS = 10
CLOSE_TIMEOUT_SECONDS = 5.0


class ConnectionPool:
    """A pool of connections, opened when they are needed. It belongs to the event loop that created it.

    asyncpg's own pool costs 60 us per call: it resets the state of a session in a task. No statement of this store
    changes the state of its session, and a connection whose call was abandoned is not used again.
    """

    def __init__(self, target: PostgresUrl) -> None:
        self.target = target
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._free = asyncio.Semaphore(target.connections)
        self._idle: list[Connection] = []
        self.in_use: set[Connection] = set()
        self._closed = False

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        """Execute one statement and return its rows.

        Cancelling the caller does not undo the statement: only its result is lost.
        """
        self._check_usable()
        attempt = 0
        while True:
            attempt += 1
            try:  # no context managers here and below: they cost 10 us per call
                return await self._fetch(sql, values)
            except Exception as error:
                if isinstance(error, RETRY_IMMEDIATELY) and attempt < _ATTEMPTS:
                    continue
                if (store_error := as_store_error(error)) is None:
                    raise
                raise store_error from error

    async def _fetch(self, sql: str, values: tuple[Any, ...]) -> list[Row]:
        connection = await self.acquire()
        try:
            return cast("list[Row]", await connection.fetch(sql, *values))
        except asyncpg.PostgresError:  # the server has completed the call
            raise
        except BaseException:  # the result may still arrive, and would be read as that of the next call
            connection.terminate()
            raise
        finally:
            self.release(connection)

    async def acquire(self) -> Connection:
        """Return a connection for exclusive use, until the caller passes it to `release`."""
        await self._free.acquire()
        try:
            connection = self._take_idle() or await self._connect(self.target.statement_cache_size)
        except BaseException:
            self._free.release()
            raise
        self.in_use.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        self.in_use.discard(connection)
        if not connection.is_closed():
            self._idle.append(connection)
        self._free.release()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():  # the server may have closed it while it was idle
                return connection
        return None

    async def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of the first row, None if there is no row."""
        found = await self.fetch(sql, *values)
        return found[0][0] if found else None

    async def connect(self) -> Connection:
        """Open a connection outside the pool. The caller closes it."""
        self._check_usable()
        with translate_errors():
            return await self._connect(0)

    async def _connect(self, statement_cache_size: int) -> Connection:
        timeout = self.target.timeout
        return await asyncpg.connect(
            self.target.dsn, statement_cache_size=statement_cache_size, command_timeout=timeout, timeout=timeout
        )

    async def close(self) -> None:
        """Wait for running calls, up to the URL's timeout, and close all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.target.timeout):
                    for _ in range(self.target.connections):
                        await self._free.acquire()
            await asyncio.gather(*map(close_connection, self._idle))
        finally:  # also if the caller stops waiting for a server that does not respond
            for connection in (*self.in_use, *self._idle):
                if not connection.is_closed():
                    connection.terminate()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; create and open another one in the child process")
        if asyncio.get_running_loop() is not self._loop:
            raise StoreError("this store was opened on another event loop; create and open another one on this loop")
        if self._closed:
            raise StoreError("this store is closed; open it again")


async def close_connection(connection: Connection) -> None:
    """Close a connection; terminate it if the server does not confirm in time or the connection is broken."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_SECONDS)
    except Exception:
        connection.terminate()


@cache
def sql(text: str, target: PostgresUrl) -> str:
    """Return a statement with the schema's name inserted."""
    return text.format(schema=target.quoted)
