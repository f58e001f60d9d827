"""Connections to a PostgreSQL server: a small pool, and what its errors mean to the callers of a store.

Every call is one statement, its own transaction: nothing is locked while a client is awaited, and a pooler in
transaction mode may stand in between. What the server gave up for the sake of others (deadlocks, locks that could not
be had) has stored nothing and is tried again here, a few times; the rest is up to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import asyncpg
from asyncpg import exceptions as pg
from msgspec import Struct

from perdure.errors import StoreError
from perdure.stores.sql_rows import Row

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"  # generic in its stubs only

Number = TypeVar("Number", int, float)

_AGAIN = (pg.DeadlockDetectedError, pg.SerializationError, pg.LockNotAvailableError)
_ATTEMPTS = 10
_POOLED = (pg.InvalidSQLStatementNameError, pg.DuplicatePreparedStatementError)
GOODBYE = 5.0  # seconds
_RETRYABLE = (
    *_AGAIN,
    OSError,
    TimeoutError,
    pg.PostgresConnectionError,
    pg.InternalClientError,
    pg.InsufficientResourcesError,
    pg.OperatorInterventionError,
    pg.ObjectInUseError,
    pg.ReadOnlySQLTransactionError,  # a standby, until it is promoted or the primary is found
    pg.CannotConnectNowError,
    pg.PostgresSystemError,
    pg.InvalidCachedStatementError,
)


class Target(Struct, frozen=True):
    """Where a store lives: a server, as asyncpg's URLs name it, a schema, and how to talk to it."""

    dsn: str
    schema: str = "perdure"
    connections: int = 4
    statement_cache_size: int = 100
    listen: bool = True
    timeout: float = 30.0

    @property
    def quoted(self) -> str:
        """The schema's name as it stands in SQL."""
        return '"' + self.schema.replace('"', '""') + '"'

    @property
    def name(self) -> str:
        """What errors call it: without the password."""
        parts = urlsplit(self.dsn)
        host = parts.netloc.rpartition("@")[2]
        return f"postgresql://{host}{parts.path} (schema {self.schema})"


_OWN_OPTIONS = ("schema", "connections", "statement_cache_size", "listen", "timeout")


def target_of(url: str) -> Target:
    """Our options out of a URL; what is left is asyncpg's."""
    server, _, query = url.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    own = {name: value for name, value in given if name in _OWN_OPTIONS}
    rest = urlencode([(name, value) for name, value in given if name not in _OWN_OPTIONS])
    try:
        return Target(
            dsn=f"{server}?{rest}" if rest else server,
            schema=_schema(own.get("schema", "perdure")),
            connections=_at_least(1, int(own.get("connections", "4"))),
            statement_cache_size=_at_least(0, int(own.get("statement_cache_size", "100"))),
            listen={"yes": True, "no": False}[own.get("listen", "yes")],
            timeout=_at_least(1, float(own.get("timeout", "30"))),
        )
    except (ValueError, KeyError) as error:
        raise StoreError(
            f"a bad option in the URL of a PostgreSQL store ({error}); there are schema=name, connections=4, "
            "statement_cache_size=100, listen=yes|no and timeout=30 (seconds); all others are asyncpg's"
        ) from error


def _schema(name: str) -> str:
    if not name or len(name.encode()) > 63 or name.startswith("pg_") or "\0" in name:
        raise ValueError(f"{name!r} cannot be the name of a schema")
    return name


def _at_least(least: int, number: Number) -> Number:
    if not number >= least:
        raise ValueError(f"{number} is less than {least}")
    return number


class Link:
    """A pool of connections, made when they are needed. It belongs to the event loop on which it was made.

    asyncpg's own pool takes 60 us for a call, because it resets what callers may have done to a connection, in a task.
    Nothing that we do leaves traces in a session; and a connection that was given up in the middle is not used again.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._room = asyncio.Semaphore(target.connections)
        self._idle: list[Connection] = []
        self.lent: set[Connection] = set()
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
                if isinstance(error, _AGAIN) and attempt < _ATTEMPTS:
                    continue
                if (meant := as_store_error(error)) is None:
                    raise
                raise meant from error

    async def _fetch(self, sql: str, values: tuple[Any, ...]) -> list[Row]:
        connection = await self.lend()
        try:
            return cast("list[Row]", await connection.fetch(sql, *values))
        except asyncpg.PostgresError:  # the server's answer
            raise
        except BaseException:  # no answer, or nobody waits for it: it may come yet
            connection.terminate()
            raise
        finally:
            self.take_back(connection)

    async def lend(self) -> Connection:
        """A connection for a while; `take_back` must follow."""
        await self._room.acquire()
        try:
            connection = self._take() or await self._connect(self.target.statement_cache_size)
        except BaseException:
            self._room.release()
            raise
        self.lent.add(connection)
        return connection

    def take_back(self, connection: Connection) -> None:
        self.lent.discard(connection)
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
        with explained():
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
        for connection in self.lent:
            connection.terminate()
        await asyncio.gather(*map(hang_up, self._idle))

    def _check_place(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; make and open another one in the child process")
        if asyncio.get_running_loop() is not self._loop:
            raise StoreError("this store was opened on another event loop; make and open another one on this loop")
        if self._closed:
            raise StoreError("this store has been closed; open it again")


async def hang_up(connection: Connection) -> None:
    """Say goodbye, without waiting long for an answer."""
    try:
        await connection.close(timeout=GOODBYE)
    except Exception:  # whatever is wrong with it: it goes
        connection.terminate()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What asyncpg raises becomes what the callers of a store expect."""
    try:
        yield
    except Exception as error:
        meant = as_store_error(error)
        if meant is None:
            raise
        raise meant from error


def as_store_error(error: Exception) -> StoreError | None:
    """What an error of the server's means: whether the same call may succeed later. None: it is not the server's."""
    if isinstance(error, _POOLED):
        advice = "a pooler that keeps no prepared statements? Then add statement_cache_size=0 to the URL"
        return StoreError(f"PostgreSQL does not know a statement that was prepared ({error}): {advice}", retryable=True)
    if isinstance(error, _RETRYABLE) or _is_lost_connection(error):
        return StoreError(f"PostgreSQL could not do it now ({_describe(error)})", retryable=True)
    if isinstance(error, UnicodeError) or isinstance(error.__cause__, UnicodeError):
        return StoreError(f"text that is not valid Unicode cannot be stored: {error}")
    if isinstance(error, (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError, TypeError, OverflowError)):
        return StoreError(f"PostgreSQL refused it ({_describe(error)})")
    return None


def _is_lost_connection(error: BaseException) -> bool:
    """A connection that was found closed, or is used by nobody any more: the next call gets another one."""
    return isinstance(error, asyncpg.InterfaceError) and not isinstance(error, (ValueError, TypeError))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@cache
def sql(text: str, target: Target) -> str:
    """A statement with the schema in its place."""
    return text.format(schema=target.quoted)
