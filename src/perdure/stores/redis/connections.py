"""Connections to one Redis server that a store's scripts go over.

They do without what redis-py's client does around a command (a pool with a lock, a retry, a task for each time-out).
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

PUSHED: Any = getattr(hiredis, "PushNotification", ())  # what a server says unasked, if that can be told


_MORE = object()  # has yet to come


async def propagate_cancellation(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """What a call of redis-py answers, unless it was cancelled: `wait_for` of 3.11 prefers an answer to a cancel."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    answer = await call(*arguments)
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return answer


class RedisProtocol(asyncio.Protocol):
    """Subclasses say what becomes of an answer (`heard`), and of those who wait when there will be none (`lost`)."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._reader = hiredis.Reader(
            protocolError=failures.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_MORE
        )

    @classmethod
    async def made(cls, pool: ConnectionPool, *more: Any) -> Self:
        """A new connection of the kind that the pool has; `more` is for the constructor."""
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await propagate_cancellation(connection.connect)
            transport: Any = connection._writer.transport  # type: ignore[union-attr]
            if transport.is_closing():  # nobody would tell us later
                raise failures.ConnectionError("the connection was lost as soon as it was made")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        wire = cls(connection, transport, *more)
        transport.set_protocol(wire)
        return wire

    @property
    def closed(self) -> bool:
        return self._transport.is_closing()

    async def close(self) -> None:
        self._transport.abort()
        await self._connection.disconnect(nowait=True)

    def send(self, *command: bytes | str | int) -> None:
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]

    def on_reply(self, answer: Any) -> None:
        """An answer; a refusal is an exception of redis-py's, which is not raised."""
        raise NotImplementedError

    def on_connection_lost(self, error: Exception) -> None:
        raise NotImplementedError

    # what the event loop calls

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not _MORE:
                self.on_reply(answer)
        except failures.InvalidResponse as error:
            self.on_connection_lost(failures.ConnectionError(f"the server does not speak as Redis does ({error})"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.on_connection_lost(
            failures.ConnectionError(f"the connection was lost ({error or 'closed by the server'})")
        )


class ScriptConnectionPool:
    """As many connections as are in use at once, up to `most`; `pool` says how one is made."""

    def __init__(self, pool: ConnectionPool, most: int, response_timeout: float) -> None:
        self._pool = pool
        self._idle: list[ScriptConnection] = []
        self._room = asyncio.Semaphore(most)
        self._closed = False
        self._patience = pool.connection_kwargs.get("socket_timeout") or response_timeout

    async def execute(self, *command: bytes | str | int) -> Any:
        """What the server answers; its refusals are raised as redis-py does."""
        await self._room.acquire()
        try:
            line = self._idle.pop() if self._idle else None
            if line is None or line.closed:
                line = await self._another(line)
            try:
                return await line.ask(command)
            finally:
                if line.busy or self._closed:  # an answer may still be on its way
                    await line.close()
                else:
                    self._idle.append(line)
        finally:
            self._room.release()

    async def _another(self, line: ScriptConnection | None) -> ScriptConnection:
        """In place of one that was closed meanwhile, if there was one: the next that is not, or a new one."""
        while line is not None and line.closed:
            await line.close()
            line = self._idle.pop() if self._idle else None
        return line or await ScriptConnection.made(self._pool, self._patience)

    async def close(self) -> None:
        """Calls that are under way close their connections themselves."""
        self._closed = True
        await self.drop_idle()

    async def drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for line in idle:
            await line.close()


class ScriptConnection(RedisProtocol):
    """One connection, and one call at a time, which fails if the server says nothing for `patience` seconds."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, response_timeout: float) -> None:
        super().__init__(connection, transport)
        self._patience = response_timeout
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Future[Any] | None = None
        self._asked_at = 0.0
        self._watch: Timer | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come, though nobody may wait for it any more."""
        return self._asked is not None

    def ask(self, command: tuple[bytes | str | int, ...]) -> asyncio.Future[Any]:
        """Send a command at once; its answer can be awaited."""
        asked = self._asked = self._loop.create_future()
        self._asked_at = SYSTEM_CLOCK.now()
        if self._watch is None:  # it outlasts the call: to make one for each and cancel it would take 2 us
            self._watch = SYSTEM_CLOCK.call_at(self._asked_at + self._patience, self._look)
        self.send(*command)
        return asked

    def _look(self) -> None:
        """Some call had begun so long ago; the one that is under way, if there is one, may have begun later."""
        self._watch = None
        if self._asked is None:
            return
        if SYSTEM_CLOCK.now() < self._asked_at + self._patience:
            self._watch = SYSTEM_CLOCK.call_at(self._asked_at + self._patience, self._look)
        else:
            _fail(self._asked, failures.TimeoutError(f"no answer within {self._patience:g} seconds"))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().close()

    def on_reply(self, answer: Any) -> None:
        if isinstance(answer, PUSHED):
            return
        asked, self._asked = self._asked, None
        assert asked is not None, f"the server answers what nobody has asked: {answer!r}"
        if isinstance(answer, Exception):
            _fail(asked, answer)
        elif not asked.done():
            asked.set_result(answer)

    def on_connection_lost(self, error: Exception) -> None:
        if self._asked is not None:
            _fail(self._asked, error)


def _fail(asked: asyncio.Future[Any], error: Exception) -> None:
    if not asked.done():
        asked.set_exception(error)
