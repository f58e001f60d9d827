"""PostgreSQL as a store of the simulation: every call is complete before the simulated loop continues.

The calls run on an event loop of their own, in the same thread, while the simulated loop stands still. The store has
one connection, sends and receives no notifications, and its time is the time of the simulation. So a seed determines
the trace, as it does in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import asyncpg
from msgspec.structs import replace

from perdure.clock import Clock
from perdure.model.records import ChangeCallback
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.protocol import Store
from perdure.stores.queue_rules import is_clock_wrong
from perdure.stores.results import WriteResult
from perdure.stores.writes import Admit, Write
from perdure.testing.faults import FaultyStore
from perdure.testing.simulation.simulation import MakeStore
from tests.servers.postgres import schema_of_its_own

T = TypeVar("T")
OPTIONS = "connections=1&listen=no&synchronous_commit=off"  # the server does not crash here
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1 AND tablename <> 'meta' ORDER BY tablename"


class CompletedCalls(FaultyStore):
    """Runs each call of a store to its end on `server_loop`, while the loop of the caller stands still."""

    def __init__(self, store: Store, clock: Clock, server_loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store)
        self._clock = clock
        self._server_loop = server_loop

    async def _forward(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        return run_beside(self._server_loop, _as_coroutine(call))

    async def now(self) -> float:
        return self._clock.now()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        return await super().commit([self._with_own_clock(write) for write in batch])

    def _with_own_clock(self, write: Write) -> Write:
        """Check the time of an admission by the simulated clock, which the server does not know."""
        if isinstance(write, Admit) and not is_clock_wrong(write, self._clock.now()):
            return replace(write, tolerance=None)
        return write

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        """Subscribe to nothing: the simulated workers and clients depend on their sweeps."""
        return lambda: None


async def _as_coroutine(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


def run_beside(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` on this loop, although another loop is running in the thread."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(work)
    finally:
        asyncio._set_running_loop(running)


@contextmanager
def postgres() -> Iterator[MakeStore]:
    """A way to make an empty store on the tests' server. All stores use one schema, one after the other."""
    with schema_of_its_own() as url:
        server_loop = asyncio.new_event_loop()
        opened: list[PostgresStore] = []

        def close() -> None:
            while opened:
                store = opened.pop()
                while store._opened:
                    run_beside(server_loop, store.close())

        def make(clock: Clock) -> Store:
            close()
            run_beside(server_loop, _empty(url))
            opened.append(PostgresStore(f"{url}&{OPTIONS}"))
            return CompletedCalls(opened[0], clock, server_loop)

        try:
            yield make
        finally:
            close()
            server_loop.close()


async def _empty(url: str) -> None:
    """Remove all rows, and number new ones from 1 on."""
    address, _, schema = url.rpartition("schema=")
    connection = await asyncpg.connect(address.rstrip("?&"))
    try:
        tables = [f'"{schema}"."{row[0]}"' for row in await connection.fetch(TABLES, schema)]
        if tables:
            await connection.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")
    finally:
        await connection.close()
