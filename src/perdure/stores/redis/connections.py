"""Connections to one Redis server: the pool that scripts are called over, and the protocol of one connection.

redis-py opens a connection (address, TLS, authentication). Then this module takes over its transport and does without
what the client of redis-py does around a command: a pool with a lock, retries, a task for each timeout. A call takes
15 us instead of 40 (ADR 5).

Reading order: `ScriptConnectionPool` hands out connections, `RedisProtocol` writes commands and parses replies (the
listener uses it too), `ScriptConnection` adds one call at a time and its timeout. The private attributes of redis-py
that this needs are listed in `tests/stores/redis/test_client_library.py`. This module knows no scripts and no runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import hiredis
from redis import exceptions as failures
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.connection import DefaultParser

from perdure.clock import SYSTEM_CLOCK, Timer

# Replies that belong to no command (RESP3). Older versions of hiredis have no class for them.
PUSH_NOTIFICATION: Any = getattr(hiredis, "PushNotification", ())

_INCOMPLETE = object()  # the reader of hiredis returns this until a reply is complete


class ScriptConnectionPool:
    """As many connections as calls are in progress, up to `max_connections`. `pool` says how to open one."""

    def __init__(self, pool: ConnectionPool, max_connections: int, response_timeout: float) -> None:
        self._pool = pool
        self._idle: list[ScriptConnection] = []
        self._slots = asyncio.Semaphore(max_connections)
        self._closed = False
        self._response_timeout = pool.connection_kwargs.get("socket_timeout") or response_timeout

    async def execute(self, *command: bytes | str | int) -> Any:
        """Return the reply of the server. Its errors are raised with the exceptions of redis-py."""
        await self._slots.acquire()
        try:
            connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_closed:
                connection = await self._replace(connection)
            try:
                return await connection.call(command)
            finally:
                if connection.is_busy or self._closed:  # busy: a reply may still arrive, and belongs to no later call
                    await connection.close()
                else:
                    self._idle.append(connection)
        finally:
            self._slots.release()

    async def _replace(self, connection: ScriptConnection | None) -> ScriptConnection:
        """Return an idle connection that is not closed, or a new one; dispose of closed ones."""
        while connection is not None and connection.is_closed:
            await connection.close()
            connection = self._idle.pop() if self._idle else None
        return connection or await ScriptConnection.open(self._pool, self._response_timeout)

    async def close(self) -> None:
        """Close idle connections. Calls in progress close theirs when they finish."""
        self._closed = True
        await self.drop_idle()

    async def drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()


class RedisProtocol(asyncio.Protocol):
    """One connection: writes commands and parses replies. Subclasses handle replies and the loss of the connection."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._reader = hiredis.Reader(
            protocolError=failures.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_INCOMPLETE
        )

    @classmethod
    async def open(cls, pool: ConnectionPool, *arguments: Any) -> Self:
        """Open a connection as the pool would; `arguments` are for the constructor of the subclass."""
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await propagate_cancellation(connection.connect)
            transport: Any = connection._writer.transport  # type: ignore[union-attr]
            if transport.is_closing():  # the loop would not report this to the new protocol
                raise failures.ConnectionError("the connection was lost as soon as it was opened")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        protocol = cls(connection, transport, *arguments)
        transport.set_protocol(protocol)
        return protocol

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    async def close(self) -> None:
        self._transport.abort()
        await self._connection.disconnect(nowait=True)

    def send(self, *command: bytes | str | int) -> None:
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]

    def on_reply(self, reply: Any) -> None:
        """Handle a reply. An error reply is an exception of redis-py, which is passed and not raised."""
        raise NotImplementedError

    def on_connection_lost(self, error: Exception) -> None:
        raise NotImplementedError

    # called by the event loop

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                self.on_reply(reply)
        except failures.InvalidResponse as error:
            self.on_connection_lost(failures.ConnectionError(f"the server sent an invalid Redis reply ({error})"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.on_connection_lost(
            failures.ConnectionError(f"the connection was lost ({error or 'closed by the server'})")
        )


class ScriptConnection(RedisProtocol):
    """One connection with one call at a time. A call fails if no reply comes within `response_timeout` seconds."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, response_timeout: float) -> None:
        super().__init__(connection, transport)
        self._response_timeout = response_timeout
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Future[Any] | None = None
        self._called_at = 0.0
        self._timer: Timer | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a reply is still to come, also if its caller was cancelled."""
        return self._pending is not None

    def call(self, command: tuple[bytes | str | int, ...]) -> asyncio.Future[Any]:
        """Send a command at once; return a future of its reply."""
        pending = self._pending = self._loop.create_future()
        self._called_at = SYSTEM_CLOCK.now()
        if self._timer is None:  # it outlives the call: setting and cancelling a timer per call costs 2 us
            self._timer = SYSTEM_CLOCK.call_at(self._called_at + self._response_timeout, self._check_timeout)
        self.send(*command)
        return pending

    def _check_timeout(self) -> None:
        """Fail the pending call if it timed out. It may have started later than the call that set the timer."""
        self._timer = None
        if self._pending is None:
            return
        if SYSTEM_CLOCK.now() < self._called_at + self._response_timeout:
            self._timer = SYSTEM_CLOCK.call_at(self._called_at + self._response_timeout, self._check_timeout)
        else:
            _fail(self._pending, failures.TimeoutError(f"no reply within {self._response_timeout:g} seconds"))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await super().close()

    def on_reply(self, reply: Any) -> None:
        if isinstance(reply, PUSH_NOTIFICATION):
            return
        pending, self._pending = self._pending, None
        assert pending is not None, f"the server sent a reply without a command: {reply!r}"
        if isinstance(reply, Exception):
            _fail(pending, reply)
        elif not pending.done():
            pending.set_result(reply)

    def on_connection_lost(self, error: Exception) -> None:
        if self._pending is not None:
            _fail(self._pending, error)


async def propagate_cancellation(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Return the result of a call of redis-py, or raise `CancelledError` if the caller was cancelled meanwhile.

    redis-py uses `wait_for`, which on Python 3.11 can return a result and lose the cancellation.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await call(*arguments)
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _fail(pending: asyncio.Future[Any], error: Exception) -> None:
    if not pending.done():
        pending.set_exception(error)
