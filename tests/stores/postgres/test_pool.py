"""The connection pool: how many connections it opens, and which of them it reuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from perdure.errors import StoreError
from perdure.stores.postgres.pool import ConnectionPool
from perdure.stores.postgres.url import parse_url
from tests.servers.postgres import postgres_url

__all__ = ["postgres_url"]  # a fixture

BACKEND = "SELECT pg_backend_pid()"


@asynccontextmanager
async def opened(url: str, connections: int) -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(parse_url(f"{url}&connections={connections}"))
    try:
        yield pool
    finally:
        await pool.close()


def on(url: str, test: Callable[[ConnectionPool], Awaitable[None]], connections: int = 1) -> None:
    async def main() -> None:
        async with opened(url, connections) as pool:
            await test(pool)

    asyncio.run(main())


def test_connection_is_reused_after_an_error_of_the_server(postgres_url: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        first = await pool.value(BACKEND)
        with pytest.raises(StoreError, match="division by zero"):
            await pool.fetch("SELECT 1 / 0")
        assert await pool.value(BACKEND) == first

    on(postgres_url, test)


def test_connection_of_a_cancelled_call_is_not_reused(postgres_url: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        first = await pool.value(BACKEND)
        call = asyncio.ensure_future(pool.fetch("SELECT 'the result of another call' FROM pg_sleep(60)"))
        while not pool.in_use:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await pool.value("SELECT 1") == 1
        assert await pool.value(BACKEND) != first

    on(postgres_url, test)


def test_idle_connection_closed_by_the_server_is_replaced(postgres_url: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        first = await pool.value(BACKEND)
        (idle,) = pool._idle
        other = await asyncpg.connect(pool.target.dsn)
        await other.execute("SELECT pg_terminate_backend($1)", first)
        await other.close()
        while not idle.is_closed():
            await asyncio.sleep(0)
        assert await pool.value(BACKEND) != first

    on(postgres_url, test)


def test_pool_opens_at_most_the_configured_connections(postgres_url: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        backends = await asyncio.gather(*(pool.value(f"{BACKEND} FROM pg_sleep(0.01)") for _ in range(10)))
        assert len(set(backends)) == 2
        assert not pool.in_use

    on(postgres_url, test, connections=2)


def test_closed_pool_waits_for_running_calls_and_refuses_new_ones(postgres_url: str) -> None:
    async def test(pool: ConnectionPool) -> None:
        running = asyncio.ensure_future(pool.value("SELECT 1 FROM pg_sleep(0.01)"))
        while not pool.in_use:
            await asyncio.sleep(0)
        await pool.close()
        assert await running == 1, "close waits for running calls"
        with pytest.raises(StoreError, match="closed"):
            await pool.fetch("SELECT 1")

    on(postgres_url, test)
