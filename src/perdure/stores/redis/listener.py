"""Hints over Redis: who tells them, and hearing those of others by a subscription that comes back by itself.

A store that listens alone publishes nothing (`publish` in `lua/keys.lua`). That it does can be seen on the server: a
channel that only this store object listens to says whether the one who listens to the channel of all is itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Connection, Redis
from redis.exceptions import RedisError

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.redis.connections import RedisProtocol
from perdure.stores.redis.server import RedisServer

PAUSE = 0.5  # seconds before the channel is tried again
HEAR_WITHIN = 5.0  # seconds until a store that is being opened does without
STOP_AGAIN = 0.1  # seconds

_note = msgspec.msgpack.Decoder(tuple[str, list[str] | bool])


class ChangePublisher(NamedTuple):
    """A store object that tells others of what it changed, as scripts are told."""

    channel: str  # to which all listen
    mine: str  # to which only this one does; empty where who else listens is not known to the server that is asked
    name: str


def build_publisher(prefix: str, name: str, *, cluster: bool) -> ChangePublisher:
    channel = f"{prefix}:changes"
    return ChangePublisher(channel, "" if cluster else f"{channel}:{name}", name)


class Listener:
    """Passes on what is published, except what this very store object has published itself."""

    def __init__(self, server: RedisServer, hints: ChangeListeners) -> None:
        self._server = server
        self._hints = hints
        self._me = ChangePublisher("", "", "")
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    async def start(self, me: ChangePublisher) -> None:
        """It hears when this returns, so that nothing is missed from here on; or it goes on trying to."""
        if self._task is None:
            self._me = me
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
                await sleep_on(SYSTEM_CLOCK, PAUSE)
        finally:
            await client.aclose()

    async def _follow(self, client: Redis) -> None:
        ear = await Ear.made(client.connection_pool, self._hear)
        try:
            ear.send("SUBSCRIBE", self._me.channel)
            await ear.hears
            self._tried.set()
            self._hints.notify(None)
            if self._me.mine and not ear.closed:
                ear.send("SUBSCRIBE", self._me.mine)  # not before: who listens to it is taken to listen to the other
            await ear.deaf
        finally:
            await ear.close()

    def _hear(self, data: bytes) -> None:
        sender, ids = _note.decode(data)
        if sender != self._me.name:
            self._hints.notify(frozenset(ids) if isinstance(ids, list) else None)


class Ear(RedisProtocol):
    """A connection that is only listened to: once it `hears` what is published, until it is `deaf`."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, hear: Callable[[bytes], None]) -> None:
        super().__init__(connection, transport)
        self._hear = hear
        loop = asyncio.get_running_loop()
        self.hears: asyncio.Future[None] = loop.create_future()
        self.deaf: asyncio.Future[None] = loop.create_future()

    async def close(self) -> None:
        for waiting in (self.hears, self.deaf):  # nobody does any more, and nobody is told that the line is closed
            waiting.cancel()
        await super().close()

    def on_reply(self, answer: Any) -> None:
        """A server may have other news, of which nothing is wanted, and may refuse a second subscription."""
        if not self.hears.done():
            if isinstance(answer, Exception):
                self.on_connection_lost(answer)
            elif answer[0] == b"subscribe":
                self.hears.set_result(None)
        elif not isinstance(answer, Exception) and answer[0] == b"message":
            self._hear(answer[2])

    def on_connection_lost(self, error: Exception) -> None:
        """Told to who waits to hear, or to who waits for the end of it."""
        waiting = self.deaf if self.hears.done() else self.hears
        if not waiting.done():
            waiting.set_exception(error)
