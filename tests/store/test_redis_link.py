"""The connections that scripts go over: no call gets the answer to another one, and none is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis import exceptions as failures
from redis.asyncio import ConnectionPool

from perdure.store.redis_link import Link
from tests.servers.redis import new_prefix, shared_url


class Counted(ConnectionPool):
    """Remembers the connections that it has made."""

    def make_connection(self):
        connection = super().make_connection()
        self.made = [*getattr(self, "made", []), connection]
        return connection


@asynccontextmanager
async def linked(most: int = 4, patience: float = 30.0) -> AsyncIterator[tuple[Link, Counted]]:
    pool = Counted.from_url(shared_url())
    link = Link(pool, most, patience)
    try:
        yield link, pool
    finally:
        await link.close()
        assert not any(connection.is_connected for connection in pool.made)


def on_a_link(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@on_a_link
async def test_calls_one_after_the_other_share_a_connection() -> None:
    async with linked() as (link, pool):
        for n in range(5):
            assert await link.execute("ECHO", str(n)) == str(n).encode()
        with pytest.raises(failures.ResponseError):
            await link.execute("NO-SUCH-COMMAND")
        assert await link.execute("ECHO", "after") == b"after"
        assert len(pool.made) == 1


@on_a_link
async def test_no_more_connections_than_there_may_be() -> None:
    async with linked(most=3) as (link, pool):
        answers = await asyncio.gather(*(link.execute("ECHO", str(n)) for n in range(20)))
        assert answers == [str(n).encode() for n in range(20)]
        assert len(pool.made) == 3


@on_a_link
async def test_the_answer_to_a_call_that_was_given_up_reaches_nobody() -> None:
    async with linked() as (link, pool):
        waiting = asyncio.create_task(link.execute("BLPOP", new_prefix(), 60))
        await asyncio.sleep(0.05)  # it is on its way
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await link.execute("ECHO", "mine") == b"mine"
        assert len(pool.made) == 2


@on_a_link
async def test_a_server_that_says_nothing_counts_as_lost() -> None:
    async with linked(patience=0.05) as (link, _):
        with pytest.raises(failures.TimeoutError, match=r"no answer within 0\.05 seconds"):
            await link.execute("BLPOP", new_prefix(), 60)
        assert await link.execute("ECHO", "back") == b"back"


@on_a_link
async def test_a_connection_that_was_cut_is_not_used_again() -> None:
    async with linked() as (link, _):
        id = await link.execute("CLIENT", "ID")
        async with linked() as (other, _):
            await other.execute("CLIENT", "KILL", "ID", id)
        await asyncio.sleep(0.05)  # it is known
        assert await link.execute("ECHO", "again") == b"again"
        assert await link.execute("CLIENT", "ID") != id


@on_a_link
async def test_a_call_whose_connection_is_cut_fails() -> None:
    async with linked() as (link, pool):
        id = await link.execute("CLIENT", "ID")
        waiting = asyncio.create_task(link.execute("BLPOP", new_prefix(), 60))
        async with linked() as (other, _):
            await asyncio.sleep(0.05)
            await other.execute("CLIENT", "KILL", "ID", id)
        with pytest.raises(failures.ConnectionError, match="lost"):
            await waiting
        assert not any(connection.is_connected for connection in pool.made)


@on_a_link
async def test_a_call_that_is_under_way_when_it_is_closed_leaves_no_connection() -> None:
    async with linked() as (link, pool):
        key = new_prefix()
        waiting = asyncio.create_task(link.execute("BLPOP", key, 60))
        await asyncio.sleep(0.05)
        await link.close()
        async with linked() as (other, _):
            await other.execute("LPUSH", key, "here")
        assert await waiting == [key.encode(), b"here"]
        assert not any(connection.is_connected for connection in pool.made)
