"""Hearing of changes that other handles made: a subscription to the store's channel that comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from redis.asyncio import Connection, Redis
from redis.exceptions import RedisError

from perdure.clock import SYSTEM_CLOCK, pause
from perdure.store.hints import Hints
from perdure.store.redis_server import RedisServer
from perdure.store.redis_wire import Wire

PAUSE = 0.5  # seconds before the channel is tried again
HEAR_WITHIN = 5.0  # seconds until a store that is being opened does without
STOP_AGAIN = 0.1  # seconds

_note = msgspec.msgpack.Decoder(tuple[str, list[str] | bool])


class Listener:
    """Passes on what is published, except what this very store object has published itself."""

    def __init__(self, server: RedisServer, channel: str, name: str, hints: Hints) -> None:
        self._server = server
        self._channel = channel
        self._name = name
        self._hints = hints
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    async def start(self) -> None:
        """It hears when this returns, so that nothing is missed from here on; or it goes on trying to."""
        if self._task is None:
            self._tried = asyncio.Event()  # each time: it belongs to the loop on which it was first waited for
            self._task = asyncio.create_task(self._listen(), name="perdure-redis-listener")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAR_WITHIN):
                await self._tried.wait()

    async def stop(self) -> None:
        """End it, and say so again until it has: the client library may mistake a cancellation for a time-out."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=STOP_AGAIN)

    async def _listen(self) -> None:
        """For ever. After a silence nobody knows what was missed: any run may have changed."""
        client = self._server.subscriber()
        try:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await self._follow(client)
                self._tried.set()
                await pause(SYSTEM_CLOCK, PAUSE)
        finally:
            await client.aclose()

    async def _follow(self, client: Redis) -> None:
        ear = await Ear.made(client.connection_pool, self._hear)
        try:
            ear.send("SUBSCRIBE", self._channel)
            await ear.deaf
        finally:
            await ear.close()

    def _hear(self, kind: bytes, data: bytes) -> None:
        if kind == b"subscribe":
            self._tried.set()
            self._hints.tell(None)
            return
        sender, ids = _note.decode(data)
        if sender != self._name:
            self._hints.tell(frozenset(ids) if isinstance(ids, list) else None)


class Ear(Wire):
    """A connection that is only listened to, until it is `deaf`."""

    def __init__(
        self, connection: Connection, transport: asyncio.Transport, hear: Callable[[bytes, bytes], None]
    ) -> None:
        super().__init__(connection, transport)
        self._hear = hear
        self.deaf: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def heard(self, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.lost(answer)
        elif answer[0] in (b"subscribe", b"message"):  # a server may have other news, of which nothing is wanted
            self._hear(answer[0], answer[2])

    def lost(self, error: Exception) -> None:
        if not self.deaf.done():
            self.deaf.set_exception(error)
