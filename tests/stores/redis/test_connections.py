"""Script connections: no call gets the reply of another call, and no connection is left open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from unittest import mock
from urllib.parse import urlencode, urlsplit

import pytest
from redis import exceptions as failures
from redis.asyncio import ConnectionPool

from perdure.stores.redis import connections
from perdure.stores.redis.connections import ScriptConnectionPool
from perdure.testing import VirtualClock
from tests.servers.redis import new_prefix, shared_url, with_options

NO_CERTIFICATES = "aNULL:@SECLEVEL=0"


class RecordingPool(ConnectionPool):
    """Records the connections that it opens."""

    def make_connection(self):
        connection = super().make_connection()
        self.opened = [*getattr(self, "opened", []), connection]
        return connection


@asynccontextmanager
async def open_pool(
    max_connections: int = 4, response_timeout: float = 30.0, url: str = ""
) -> AsyncIterator[tuple[ScriptConnectionPool, RecordingPool]]:
    factory = RecordingPool.from_url(url or shared_url())
    pool = ScriptConnectionPool(factory, max_connections, response_timeout)
    try:
        yield pool, factory
    finally:
        await pool.close()
        assert not any(connection.is_connected for connection in factory.opened)


@asynccontextmanager
async def tls_proxy() -> AsyncIterator[str]:
    """Yield the URL of a TLS proxy to the server, without certificates."""
    parts, context = urlsplit(shared_url()), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(NO_CERTIFICATES)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
        tasks.extend(map(asyncio.create_task, (forward(reader, to_server), forward(from_server, writer))))

    tasks: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(connect, "127.0.0.1", ssl=context)
    host = parts.netloc.rpartition(":")[0]
    options = {"ssl_cert_reqs": "none", "ssl_check_hostname": "false", "ssl_ciphers": NO_CERTIFICATES}
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"rediss://{host}:{port}{parts.path}?{urlencode(options)}"
        await asyncio.gather(*tasks)


async def until_blocked(id: int) -> None:
    """Wait until the server executes a blocking command of the connection with this id."""
    async with open_pool() as (other, _):
        while b" cmd=blpop " not in await other.execute("CLIENT", "LIST", "ID", id):
            await asyncio.sleep(0)


def in_event_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@in_event_loop
async def test_sequential_calls_share_a_connection() -> None:
    async with open_pool() as (pool, factory):
        for n in range(5):
            assert await pool.execute("ECHO", str(n)) == str(n).encode()
        with pytest.raises(failures.ResponseError):
            await pool.execute("NO-SUCH-COMMAND")
        assert await pool.execute("ECHO", "after") == b"after"
        assert len(factory.opened) == 1


@in_event_loop
async def test_pool_opens_at_most_max_connections() -> None:
    async with open_pool(max_connections=3) as (pool, factory):
        replies = await asyncio.gather(*(pool.execute("ECHO", str(n)) for n in range(20)))
        assert replies == [str(n).encode() for n in range(20)]
        assert len(factory.opened) == 3


@in_event_loop
async def test_reply_of_a_cancelled_call_is_not_given_to_another_call() -> None:
    async with open_pool() as (pool, factory):
        id = await pool.execute("CLIENT", "ID")
        waiting = asyncio.create_task(pool.execute("BLPOP", new_prefix(), 60))
        await until_blocked(id)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await pool.execute("ECHO", "mine") == b"mine"
        assert len(factory.opened) == 2


@in_event_loop
async def test_call_without_a_reply_times_out() -> None:
    async with open_pool(response_timeout=0.05) as (pool, _):
        with pytest.raises(failures.TimeoutError, match=r"no reply within 0\.05 seconds"):
            await pool.execute("BLPOP", new_prefix(), 60)
        pool._response_timeout = 60.0  # the next call must not depend on the speed of the server
        assert await pool.execute("ECHO", "back") == b"back"


@in_event_loop
async def test_each_call_has_the_full_timeout() -> None:
    clock = VirtualClock()
    with mock.patch.object(connections, "SYSTEM_CLOCK", clock):
        async with open_pool(response_timeout=10.0) as (pool, factory):
            id = await pool.execute("CLIENT", "ID")
            await clock.advance(6.0)
            waiting = asyncio.create_task(pool.execute("BLPOP", new_prefix(), 60))
            await until_blocked(id)
            await clock.advance(6.0)
            assert not waiting.done(), "12 seconds after the first call, 6 after the second"
            await clock.advance(5.0)
            with pytest.raises(failures.TimeoutError):
                await waiting
            assert len(factory.opened) == 1


@in_event_loop
async def test_killed_connection_is_not_used_again() -> None:
    async with open_pool() as (pool, _):
        id = await pool.execute("CLIENT", "ID")
        async with open_pool() as (other, _):
            await other.execute("CLIENT", "KILL", "ID", id)
        [idle] = pool._idle
        while not idle.is_closed:
            await asyncio.sleep(0)
        assert await pool.execute("ECHO", "again") == b"again"
        assert await pool.execute("CLIENT", "ID") != id


@in_event_loop
async def test_call_fails_when_its_connection_is_killed() -> None:
    async with open_pool() as (pool, factory):
        id = await pool.execute("CLIENT", "ID")
        waiting = asyncio.create_task(pool.execute("BLPOP", new_prefix(), 60))
        await until_blocked(id)
        async with open_pool() as (other, _):
            await other.execute("CLIENT", "KILL", "ID", id)
        with pytest.raises(failures.ConnectionError, match="lost"):
            await waiting
        assert not any(connection.is_connected for connection in factory.opened)


@in_event_loop
async def test_call_in_progress_at_close_leaves_no_connection() -> None:
    async with open_pool() as (pool, factory):
        key, id = new_prefix(), await pool.execute("CLIENT", "ID")
        waiting = asyncio.create_task(pool.execute("BLPOP", key, 60))
        await until_blocked(id)
        await pool.close()
        async with open_pool() as (other, _):
            await other.execute("LPUSH", key, "here")
        assert await waiting == [key.encode(), b"here"]
        assert not any(connection.is_connected for connection in factory.opened)


@in_event_loop
async def test_long_reply_is_assembled() -> None:
    async with open_pool() as (pool, _):
        assert await pool.execute("EVAL", "return string.rep('x', 5000000)", 0) == b"x" * 5000000


@in_event_loop
async def test_pool_works_over_tls() -> None:
    async with tls_proxy() as url, open_pool(url=url) as (pool, factory):
        replies = await asyncio.gather(*(pool.execute("ECHO", "x" * n) for n in (1, 100, 100000)))
        assert replies == [b"x" * n for n in (1, 100, 100000)]
        assert len(factory.opened) == 3


@in_event_loop
async def test_push_notification_is_not_taken_for_a_reply() -> None:
    key = new_prefix()
    async with open_pool(url=with_options(shared_url(), protocol=3)) as (pool, factory), open_pool() as (other, _):
        await pool.execute("CLIENT", "TRACKING", "ON")
        assert await pool.execute("GET", key) is None
        await other.execute("SET", key, "new", "EX", 1)
        await asyncio.sleep(0.05)  # the notification arrives
        assert await pool.execute("ECHO", "mine") == b"mine"
        assert len(factory.opened) == 1


class ChangingPool(ConnectionPool):
    """Changes its connections after they are opened and before they are used."""

    def make_connection(self):
        connection = super().make_connection()
        connect = connection.connect

        async def connect_and_change() -> None:
            await connect()
            await self.change(connection)

        connection.connect = connect_and_change
        return connection

    async def change(self, connection) -> None:
        raise NotImplementedError


class ClosingPool(ChangingPool):
    """Its connections are closed at once."""

    async def change(self, connection) -> None:
        connection._writer.transport.abort()
        await asyncio.sleep(0.01)


@in_event_loop
async def test_connection_lost_while_it_is_opened_is_an_error() -> None:
    pool = ScriptConnectionPool(ClosingPool.from_url(shared_url()), 4, 30.0)
    async with asyncio.timeout(60):
        with pytest.raises(failures.ConnectionError, match="as soon as it was opened"):
            await pool.execute("ECHO", "lost")


class UncancellablePool(ChangingPool):
    """Opening a connection ignores a cancellation."""

    opening = asyncio.Event()

    async def change(self, connection) -> None:
        self.opening.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@in_event_loop
async def test_cancellation_lost_while_a_connection_is_opened_is_raised() -> None:
    factory = UncancellablePool.from_url(shared_url())
    pool = ScriptConnectionPool(factory, 4, 30.0)
    waiting = asyncio.create_task(pool.execute("ECHO", "cancelled"))
    await factory.opening.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await pool.close()
