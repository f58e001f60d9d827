"""Hearing of changes that other handles made: a subscription to the store's channel that comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from perdure.clock import SYSTEM_CLOCK, pause
from perdure.store.hints import Hints
from perdure.store.redis_server import RedisServer

PAUSE = 0.5  # seconds before the channel is tried again
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

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="perdure-redis-listener")

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
                await pause(SYSTEM_CLOCK, PAUSE)
        finally:
            await client.aclose()

    async def _follow(self, client: Redis) -> None:
        async with client.pubsub() as channel:
            await channel.subscribe(self._channel)
            while True:
                message: dict[str, Any] | None = await channel.get_message(timeout=None)
                if message is not None and message["type"] == "subscribe":
                    self._hints.tell(None)
                elif message is not None:
                    self._pass_on(message["data"])

    def _pass_on(self, data: bytes) -> None:
        sender, ids = _note.decode(data)
        if sender != self._name:
            self._hints.tell(frozenset(ids) if isinstance(ids, list) else None)
