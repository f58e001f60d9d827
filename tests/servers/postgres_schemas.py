"""Schemas of the session's PostgreSQL that tests borrow: to make one takes a third of a second, to empty one nothing.

A schema has one borrower at a time. It is returned when the stores over it are closed and the borrower requests another
one (a test with a hundred rounds needs only a few), or when the test ends. The next one finds it empty, and
free of statements that the one before left behind on the server.

Connections are returned too, for the next borrower on the same event loop: a new one costs a server's process that
has to learn all functions of a store first, which is most of what a short scenario takes.
"""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

import asyncpg

from perdure.clock import SYSTEM_CLOCK, Clock, sleep_on
from perdure.stores.postgres import schema as postgres_schema
from perdure.stores.postgres.pool import Connection, ConnectionPool
from perdure.stores.postgres.store import PostgresStore
from tests.servers.postgres import shared_url, with_schema
from tests.servers.session_cleanup import when_the_loop_ends

# Its name is that of its connections, too: the server can tell which of them are left over. Tests that use these
# schemas kill no server, so that no test waits for the disk.
OPTIONS = "&application_name={schema}&synchronous_commit=off"
_LEFT_OVER = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 AND pid <> pg_backend_pid()"""
_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1 AND tablename <> 'meta'"


class Schema:
    """A schema, and the stores that its borrower has made over it."""

    def __init__(self) -> None:
        self.name = f"t_{os.urandom(6).hex()}"
        self.url = with_schema(shared_url(), self.name) + OPTIONS.format(schema=self.name)
        self.stores: list[BorrowedStore] = []
        self.made = False
        self.dirty = False
        self._kept: WeakKeyDictionary[asyncio.AbstractEventLoop, _KeptLinks] = WeakKeyDictionary()

    @property
    def in_use(self) -> bool:
        return any(store._opened for store in self.stores)

    def store(self, clock: Clock) -> BorrowedStore:
        made = BorrowedStore(self, clock)
        self.stores.append(made)
        return made

    async def links(self) -> _KeptLinks:
        """Those of this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            self._kept[loop] = _KeptLinks(alone=not self.dirty)
            await when_the_loop_ends(self._kept[loop].close)
        return self._kept[loop]

    async def clean(self, connection: Connection, shards: int) -> None:
        """Empty the schema; once per borrower, before its first store is open."""
        links = await self.links()
        while not links.alone and await connection.fetch(_LEFT_OVER, self.name):
            await sleep_on(SYSTEM_CLOCK, 0.001)
        links.alone = True
        tables = [row[0] for row in await connection.fetch(_TABLES, self.name)]
        await connection.execute("; ".join(f'DELETE FROM {self.name}."{table}"' for table in tables))
        await connection.execute(f"UPDATE {self.name}.meta SET value = $1 WHERE key = 'shards'", str(shards))
        self.dirty = False


class _KeptLinks:
    """Unused connection pools. Pools of earlier event loops may be left over until they are `alone`."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
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
        if self._link is None and (idle := (await self.schema.links()).idle):
            self._link = idle.pop()
        await super().open(shards=shards)

    async def close(self) -> None:
        link = self._link
        if self._opened == 1 and link is not None and not link.in_use:
            self._link = None  # no call is open: the next borrower can use the pool
            (await self.schema.links()).idle.append(link)
        await super().close()

    async def now(self) -> float:
        return self._clock.now()

    async def _prepare(self, link: ConnectionPool, shards: int) -> None:
        connection = await link.acquire()
        try:
            if self.schema.dirty:
                await self.schema.clean(connection, shards)
            await postgres_schema.prepare(connection, self._target, shards)
        finally:
            link.release(connection)
        self.schema.made = True


_free: list[Schema] = []
_lent: list[Schema] = []


def borrow(clock: Clock) -> BorrowedStore:
    """A store over an empty schema."""
    give_back(but_open=True)
    schema = _free.pop() if _free else Schema()
    _lent.append(schema)
    return schema.store(clock)


def give_back(*, but_open: bool = False) -> None:
    """Return the schemas of the borrower; with `but_open`, except for those with open stores."""
    for schema in [each for each in _lent if not (but_open and each.in_use)]:
        _lent.remove(schema)
        schema.stores.clear()
        schema.dirty = schema.made
        _free.append(schema)


def drop_all() -> None:
    """Drop the schemas at the end of the session, because the server may keep running."""
    names = [schema.name for schema in (*_free, *_lent) if schema.made]
    _free.clear()
    _lent.clear()
    if names:
        asyncio.run(_drop(names))


async def _drop(names: list[str]) -> None:
    connection = await asyncpg.connect(shared_url())
    for name in names:  # one by one: a server has only so many locks for a transaction
        await connection.execute(f"SET client_min_messages = warning; DROP SCHEMA IF EXISTS {name} CASCADE")
    await connection.close()
