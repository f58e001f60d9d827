"""The pool of connections to a PostgreSQL server: how many, and which of them are used again."""

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
async def linked(url: str, connections: int) -> AsyncIterator[ConnectionPool]:
    link = ConnectionPool(parse_url(f"{url}&connections={connections}"))
    try:
        yield link
    finally:
        await link.close()


def on(url: str, test: Callable[[ConnectionPool], Awaitable[None]], connections: int = 1) -> None:
    async def life() -> None:
        async with linked(url, connections) as link:
            await test(link)

    asyncio.run(life())


def test_a_connection_is_used_again_also_after_an_error_of_the_server(postgres_url: str) -> None:
    async def test(link: ConnectionPool) -> None:
        first = await link.value(BACKEND)
        with pytest.raises(StoreError, match="division by zero"):
            await link.fetch("SELECT 1 / 0")
        assert await link.value(BACKEND) == first

    on(postgres_url, test)


def test_a_connection_that_was_given_up_in_the_middle_is_not_used_again(postgres_url: str) -> None:
    async def test(link: ConnectionPool) -> None:
        first = await link.value(BACKEND)
        asking = asyncio.ensure_future(link.fetch("SELECT 'the answer to another question' FROM pg_sleep(60)"))
        while not link.in_use:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await link.value("SELECT 1") == 1
        assert await link.value(BACKEND) != first

    on(postgres_url, test)


def test_a_connection_that_the_server_has_closed_meanwhile_is_replaced(postgres_url: str) -> None:
    async def test(link: ConnectionPool) -> None:
        first = await link.value(BACKEND)
        (idle,) = link._idle
        other = await asyncpg.connect(link.target.dsn)
        await other.execute("SELECT pg_terminate_backend($1)", first)
        await other.close()
        while not idle.is_closed():
            await asyncio.sleep(0)
        assert await link.value(BACKEND) != first

    on(postgres_url, test)


def test_there_are_no_more_connections_than_allowed(postgres_url: str) -> None:
    async def test(link: ConnectionPool) -> None:
        backends = await asyncio.gather(*(link.value(f"{BACKEND} FROM pg_sleep(0.01)") for _ in range(10)))
        assert len(set(backends)) == 2
        assert not link.in_use

    on(postgres_url, test, connections=2)


def test_a_link_that_was_closed_says_so(postgres_url: str) -> None:
    async def test(link: ConnectionPool) -> None:
        under_way = asyncio.ensure_future(link.value("SELECT 1 FROM pg_sleep(0.01)"))
        while not link.in_use:
            await asyncio.sleep(0)
        await link.close()
        assert await under_way == 1, "it waits for what is under way"
        with pytest.raises(StoreError, match="closed"):
            await link.fetch("SELECT 1")

    on(postgres_url, test)
