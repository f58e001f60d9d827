"""The connections that scripts go over: no call gets the answer to another one, and none is left open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlencode, urlsplit

import pytest
from redis import exceptions as failures
from redis.asyncio import ConnectionPool

from perdure.stores.redis.connections import ScriptConnectionPool
from tests.servers.redis import new_prefix, shared_url, with_options

NO_CERTIFICATES = "aNULL:@SECLEVEL=0"


class Counted(ConnectionPool):
    """Remembers the connections that it has made."""

    def make_connection(self):
        connection = super().make_connection()
        self.made = [*getattr(self, "made", []), connection]
        return connection


@asynccontextmanager
async def linked(
    most: int = 4, patience: float = 30.0, url: str = ""
) -> AsyncIterator[tuple[ScriptConnectionPool, Counted]]:
    pool = Counted.from_url(url or shared_url())
    link = ScriptConnectionPool(pool, most, patience)
    try:
        yield link, pool
    finally:
        await link.close()
        assert not any(connection.is_connected for connection in pool.made)


@asynccontextmanager
async def behind_tls() -> AsyncIterator[str]:
    """The URL of a door to the server that speaks TLS, without certificates."""
    parts, words = urlsplit(shared_url()), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    words.maximum_version = ssl.TLSVersion.TLSv1_2
    words.set_ciphers(NO_CERTIFICATES)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while some := await reader.read(1 << 16):
                writer.write(some)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def open_door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_connection(parts.hostname, parts.port)
        passing.extend(map(asyncio.create_task, (pass_on(reader, questions), pass_on(answers, writer))))

    passing: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(open_door, "127.0.0.1", ssl=words)
    host = parts.netloc.rpartition(":")[0]
    options = {"ssl_cert_reqs": "none", "ssl_check_hostname": "false", "ssl_ciphers": NO_CERTIFICATES}
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"rediss://{host}:{port}{parts.path}?{urlencode(options)}"
        await asyncio.gather(*passing)


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
        with pytest.raises(failures.TimeoutError, match=r"no reply within 0\.05 seconds"):
            await link.execute("BLPOP", new_prefix(), 60)
        assert await link.execute("ECHO", "back") == b"back"


@on_a_link
async def test_each_call_has_the_whole_time() -> None:
    async with linked(patience=0.4) as (link, pool):
        assert await link.execute("ECHO", "first") == b"first"
        await asyncio.sleep(0.25)
        assert await link.execute("BLPOP", new_prefix(), "0.25") is None  # over 0.4 seconds after the first
        with pytest.raises(failures.TimeoutError):
            await link.execute("BLPOP", new_prefix(), 60)
        assert len(pool.made) == 1


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


@on_a_link
async def test_a_long_answer_comes_in_pieces() -> None:
    async with linked() as (link, _):
        assert await link.execute("EVAL", "return string.rep('x', 5000000)", 0) == b"x" * 5000000


@on_a_link
async def test_over_tls() -> None:
    async with behind_tls() as url, linked(url=url) as (link, pool):
        answers = await asyncio.gather(*(link.execute("ECHO", "x" * n) for n in (1, 100, 100000)))
        assert answers == [b"x" * n for n in (1, 100, 100000)]
        assert len(pool.made) == 3


@on_a_link
async def test_what_the_server_says_unasked_is_no_answer() -> None:
    key = new_prefix()
    async with linked(url=with_options(shared_url(), protocol=3)) as (link, pool), linked() as (other, _):
        await link.execute("CLIENT", "TRACKING", "ON")
        assert await link.execute("GET", key) is None
        await other.execute("SET", key, "news", "EX", 1)
        await asyncio.sleep(0.05)  # it has been told that what it knows of the key is old
        assert await link.execute("ECHO", "mine") == b"mine"
        assert len(pool.made) == 1


class MeddledWith(ConnectionPool):
    """Something happens to its connections once they are made, before anybody has them."""

    def make_connection(self):
        connection = super().make_connection()
        connect = connection.connect

        async def connect_and_meddle() -> None:
            await connect()
            await self.meddle(connection)

        connection.connect = connect_and_meddle
        return connection

    async def meddle(self, connection) -> None:
        raise NotImplementedError


class Cut(MeddledWith):
    """They are closed."""

    async def meddle(self, connection) -> None:
        connection._writer.transport.abort()
        await asyncio.sleep(0.01)


@on_a_link
async def test_a_connection_that_is_cut_while_it_is_made_is_known_at_once() -> None:
    link = ScriptConnectionPool(Cut.from_url(shared_url()), 4, 30.0)
    async with asyncio.timeout(10):
        with pytest.raises(failures.ConnectionError, match="as soon as it was opened"):
            await link.execute("ECHO", "lost")


class Stubborn(MeddledWith):
    """They are made even if nobody wants them any more."""

    async def meddle(self, connection) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@on_a_link
async def test_a_cancel_that_is_lost_while_a_connection_is_made_is_heard_all_the_same() -> None:
    link = ScriptConnectionPool(Stubborn.from_url(shared_url()), 4, 30.0)
    waiting = asyncio.create_task(link.execute("ECHO", "nobody wants it"))
    await asyncio.sleep(0.05)  # it is being made
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await link.close()
