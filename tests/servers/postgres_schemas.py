"""Reusable schemas on the session's PostgreSQL: creating one takes a third of a second, emptying one nothing.

A schema has one borrower at a time. It is released when the borrower has closed its stores and borrows another schema
(a test with a hundred examples then needs a few schemas), or when its test ends. The next borrower finds it empty, and
free of statements that the previous one left on the server.

Connections are reused too, by the next borrower of the schema on the same event loop. A new connection is a new server
process that must first plan all functions of a store, which takes most of the time of a short example.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import asyncpg
from msgspec.structs import replace

from perdure.clock import SYSTEM_CLOCK, Clock, sleep_on
from perdure.stores.postgres.pool import Connection, ConnectionPool
from perdure.stores.postgres.schema import prepare
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.queue_rules import is_clock_wrong
from perdure.stores.results import WriteResult
from perdure.stores.writes import Admit, Write
from tests.servers.postgres import shared_url, with_schema
from tests.servers.session_cleanup import when_the_loop_ends

# The schema's name is also the application name, by which the server finds leftover connections. Tests that use these
# schemas kill no server, so that commits need not wait for the disk.
OPTIONS = "&application_name={schema}&synchronous_commit=off"
_TERMINATE_LEFTOVER = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND pid <> pg_backend_pid()"""
_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1 AND tablename <> 'meta'"


class Schema:
    """A schema, and the stores that its borrower has created on it."""

    def __init__(self) -> None:
        self.name = f"t_{os.urandom(6).hex()}"
        self.url = with_schema(shared_url(), self.name) + OPTIONS.format(schema=self.name)
        self.stores: list[BorrowedStore] = []
        self.is_created = False
        self.is_dirty = False
        self._idle_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _IdlePools] = WeakKeyDictionary()

    @property
    def in_use(self) -> bool:
        return any(store._opened for store in self.stores)

    def store(self, clock: Clock) -> BorrowedStore:
        store = BorrowedStore(self, clock)
        self.stores.append(store)
        return store

    async def idle_pools(self) -> _IdlePools:
        """Return the idle pools of this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._idle_pools:
            self._idle_pools[loop] = _IdlePools(is_exclusive=not self.is_dirty)
            await when_the_loop_ends(self._idle_pools[loop].close)
        return self._idle_pools[loop]

    async def clean(self, connection: Connection, shards: int) -> None:
        """Empty the schema. Called once per borrower, before its first store is open."""
        pools = await self.idle_pools()
        while not pools.is_exclusive and await connection.fetch(_TERMINATE_LEFTOVER, self.name):
            await sleep_on(SYSTEM_CLOCK, 0.001)
        pools.is_exclusive = True
        tables = [row[0] for row in await connection.fetch(_TABLES, self.name)]
        await connection.execute("; ".join(f'DELETE FROM {self.name}."{table}"' for table in tables))
        await connection.execute(f"UPDATE {self.name}.meta SET value = $1 WHERE key = 'shards'", str(shards))
        self.is_dirty = False


class _IdlePools:
    """Unused connection pools. Until `is_exclusive`, connections of earlier event loops may still be open."""

    def __init__(self, *, is_exclusive: bool) -> None:
        self.is_exclusive = is_exclusive
        self.idle: list[ConnectionPool] = []

    async def close(self) -> None:
        while self.idle:
            await self.idle.pop().close()


class BorrowedStore(PostgresStore):
    """A PostgreSQL store with the clock of a test."""

    def __init__(self, schema: Schema, clock: Clock) -> None:
        super().__init__(schema.url)
        self.schema = schema
        self._clock = clock

    async def open(self, *, shards: int) -> None:
        if self._pool is None and (idle := (await self.schema.idle_pools()).idle):
            self._pool = idle.pop()
        await super().open(shards=shards)

    async def close(self) -> None:
        pool = self._pool
        if self._opened == 1 and pool is not None and not pool.in_use:
            self._pool = None  # no call is running: the next borrower can use it
            (await self.schema.idle_pools()).idle.append(pool)
        await super().close()

    async def now(self) -> float:
        return self._clock.now()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        """Commit writes; the time of an admission is compared with the clock of the test."""
        return await super().commit([self._with_checked_time(write) for write in batch])

    def _with_checked_time(self, write: Write) -> Write:
        if not isinstance(write, Admit) or is_clock_wrong(write, self._clock.now()):
            return write
        return replace(write, tolerance=None)

    async def _prepare(self, pool: ConnectionPool, shards: int) -> None:
        connection = await pool.acquire()
        try:
            if self.schema.is_dirty:
                await self.schema.clean(connection, shards)
            await prepare(connection, self._target, shards)
        finally:
            pool.release(connection)
        self.schema.is_created = True


_free: list[Schema] = []
_borrowed: list[Schema] = []


def borrow(clock: Clock) -> BorrowedStore:
    """Return a store on an empty schema."""
    release_all(keep_open=True)
    schema = _free.pop() if _free else Schema()
    _borrowed.append(schema)
    return schema.store(clock)


def release_all(*, keep_open: bool = False) -> None:
    """Release the borrowed schemas; with `keep_open`, except those with open stores."""
    for schema in [each for each in _borrowed if not (keep_open and each.in_use)]:
        _borrowed.remove(schema)
        schema.stores.clear()
        schema.is_dirty = schema.is_created
        _free.append(schema)


def drop_all() -> None:
    """Drop all schemas when the session ends: the server may outlive it."""
    names = [schema.name for schema in (*_free, *_borrowed) if schema.is_created]
    _free.clear()
    _borrowed.clear()
    if names:
        asyncio.run(_drop(names))


async def _drop(names: list[str]) -> None:
    connection = await asyncpg.connect(shared_url())
    for name in names:  # one by one: a transaction can take a limited number of locks
        await connection.execute(f"SET client_min_messages = warning; DROP SCHEMA IF EXISTS {name} CASCADE")
    await connection.close()
