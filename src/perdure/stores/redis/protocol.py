"""A connection to a Redis server: commands out, and what the server says as soon as the event loop has it.

redis-py makes the connection, for it knows what a URL can say: TLS, names, passwords, time-outs. From then on its
streams are left out, with which a small call takes 40 us of this process; so it takes 15.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

import hiredis
from redis import exceptions as failures
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.connection import DefaultParser

PUSHED: Any = getattr(hiredis, "PushNotification", ())  # what a server says unasked, if that can be told
_MORE = object()  # has yet to come


async def hearing_cancels(call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """What a call of redis-py answers, unless it was cancelled: `wait_for` of 3.11 prefers an answer to a cancel."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    answer = await call(*arguments)
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return answer


class Wire(asyncio.Protocol):
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
            await hearing_cancels(connection.connect)
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

    def heard(self, answer: Any) -> None:
        """An answer; a refusal is an exception of redis-py's, which is not raised."""
        raise NotImplementedError

    def lost(self, error: Exception) -> None:
        raise NotImplementedError

    # what the event loop calls

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not _MORE:
                self.heard(answer)
        except failures.InvalidResponse as error:
            self.lost(failures.ConnectionError(f"the server does not speak as Redis does ({error})"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost(failures.ConnectionError(f"the connection was lost ({error or 'closed by the server'})"))
