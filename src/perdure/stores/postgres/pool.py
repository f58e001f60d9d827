"""Connections to a PostgreSQL server: a small pool, and what its errors mean to the callers of a store.

Every call is one statement, its own transaction: nothing is locked while a client is awaited, and a pooler in
transaction mode may stand in between. What the server gave up for the sake of others (deadlocks, locks that could not
be had) has stored nothing and is tried again here, a few times; the rest is up to the caller.
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
CLOSE_TIMEOUT_SECONDS = 5.0  # seconds


class ConnectionPool:
    """A pool of connections, made when they are needed. It belongs to the event loop on which it was made.

    asyncpg's own pool takes 60 us for a call, because it resets what callers may have done to a connection, in a task.
    Nothing that we do leaves traces in a session; and a connection that was given up in the middle is not used again.
    """

    def __init__(self, target: PostgresUrl) -> None:
        self.target = target
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._room = asyncio.Semaphore(target.connections)
        self._idle: list[Connection] = []
        self.in_use: set[Connection] = set()
        self._closed = False

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        """Carry out one statement. Cancelling the caller does not undo it: the answer is then lost."""
        self._check_place()
        attempt = 0
        while True:
            attempt += 1
            try:  # no context managers here and below: they take 10 us for a call
                return await self._fetch(sql, values)
            except Exception as error:
                if isinstance(error, RETRY_IMMEDIATELY) and attempt < _ATTEMPTS:
                    continue
                if (meant := as_store_error(error)) is None:
                    raise
                raise meant from error

    async def _fetch(self, sql: str, values: tuple[Any, ...]) -> list[Row]:
        connection = await self.acquire()
        try:
            return cast("list[Row]", await connection.fetch(sql, *values))
        except asyncpg.PostgresError:  # the server's answer
            raise
        except BaseException:  # no answer, or nobody waits for it: it may come yet
            connection.terminate()
            raise
        finally:
            self.release(connection)

    async def acquire(self) -> Connection:
        """A connection for a while; `take_back` must follow."""
        await self._room.acquire()
        try:
            connection = self._take() or await self._connect(self.target.statement_cache_size)
        except BaseException:
            self._room.release()
            raise
        self.in_use.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        self.in_use.discard(connection)
        if not connection.is_closed():
            self._idle.append(connection)
        self._room.release()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():  # by the server, while nobody used it
                return connection
        return None

    async def value(self, sql: str, *values: Any) -> Any:
        """The first column of the first row; None if there is no row."""
        found = await self.fetch(sql, *values)
        return found[0][0] if found else None

    async def connect(self) -> Connection:
        """A connection of the caller's own, to be closed by him."""
        self._check_place()
        with translate_errors():
            return await self._connect(0)

    async def _connect(self, statement_cache_size: int) -> Connection:
        timeout = self.target.timeout
        return await asyncpg.connect(
            self.target.dsn, statement_cache_size=statement_cache_size, command_timeout=timeout, timeout=timeout
        )

    async def close(self) -> None:
        """Wait for what is under way, and say goodbye. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.target.timeout):
                for _ in range(self.target.connections):
                    await self._room.acquire()
        for connection in self.in_use:
            connection.terminate()
        await asyncio.gather(*map(close_connection, self._idle))

    def _check_place(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; make and open another one in the child process")
        if asyncio.get_running_loop() is not self._loop:
            raise StoreError("this store was opened on another event loop; make and open another one on this loop")
        if self._closed:
            raise StoreError("this store has been closed; open it again")


async def close_connection(connection: Connection) -> None:
    """Say goodbye, without waiting long for an answer."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_SECONDS)
    except Exception:  # whatever is wrong with it: it goes
        connection.terminate()


@cache
def sql(text: str, target: PostgresUrl) -> str:
    """A statement with the schema in its place."""
    return text.format(schema=target.quoted)
