"""Change hints over Redis pub/sub: publish changes of this store, and listen to those of other stores.

The listener reconnects by itself. A store that is the only listener publishes nothing (`publish` in `lua/keys.lua`).
To detect that, each store also listens to a channel of its own. If both channels have one listener, it is the store.

Messages of followers (`followed_runs`) have a third channel. The writer's process sends them after its commit, because
it knows whether another process follows, on a cluster too: no script pays for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Connection, Redis
from redis.exceptions import RedisError

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.errors import StoreError
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.followed_runs import FollowedRuns, decode_message
from perdure.stores.redis.connections import RedisProtocol
from perdure.stores.redis.server import RedisServer

LOGGER = logging.getLogger("perdure.stores")
RECONNECT_SECONDS = 0.5
SUBSCRIBE_TIMEOUT_SECONDS = 5.0  # opening a store waits this long for its subscription, then continues without it
CANCEL_RETRY_SECONDS = 0.1
MAX_FOLLOW_MESSAGE_BYTES = 64_000

_decode_hint = msgspec.msgpack.Decoder(tuple[str, list[str] | bool]).decode


class ChangePublisher(NamedTuple):
    """The identity of a store object that publishes changes, in the order in which scripts take it."""

    channel: str  # all stores with this prefix listen to it
    own_channel: str  # only this store object listens to it; empty on a cluster, where no node knows all listeners
    name: str


def build_publisher(prefix: str, name: str, *, cluster: bool) -> ChangePublisher:
    channel = f"{prefix}:changes"
    return ChangePublisher(channel, "" if cluster else f"{channel}:{name}", name)


class Listener:
    """Passes change hints of other stores to the listeners of this one."""

    def __init__(self, server: RedisServer, listeners: ChangeListeners) -> None:
        self._server = server
        self._listeners = listeners
        self._publisher = ChangePublisher("", "", "")
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._hears_followers = False
        self._send_task: asyncio.Task[None] | None = None
        self.followed_runs = FollowedRuns("")

    async def start(self, publisher: ChangePublisher) -> None:
        """Subscribe, and return when no later change can be missed, or when subscribing takes too long.

        In the second case the listener retries in the background.
        """
        if self._task is None:
            self._publisher = publisher
            self.followed_runs = FollowedRuns(publisher.name, self._wake_follow_sender, lambda: self._hears_followers)
            self._tried = asyncio.Event()  # a new one for each start: it is bound to the event loop of its first wait
            self._task = asyncio.create_task(self._listen(), name="perdure-redis-listener")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SUBSCRIBE_TIMEOUT_SECONDS):
                await self._tried.wait()

    async def stop(self) -> None:
        """Cancel the listener until it has ended: redis-py may mistake a cancellation for a timeout."""
        self.followed_runs.close()
        tasks, self._task, self._send_task = (self._task, self._send_task), None, None
        for task in tasks:
            while task is not None and not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=CANCEL_RETRY_SECONDS)

    async def _listen(self) -> None:
        client = self._server.build_single_client()
        try:
            while True:
                try:
                    await self._follow(client)
                except (RedisError, OSError):
                    pass  # the server is unavailable
                except Exception:
                    LOGGER.exception("Listener of %s raised; listening again", self._server.name)
                self._tried.set()
                await sleep_on(SYSTEM_CLOCK, RECONNECT_SECONDS)
        finally:
            await client.aclose()

    async def _follow(self, client: Redis) -> None:
        connection = await SubscriberConnection.open(client.connection_pool, self._on_message, self._on_subscribed)
        try:
            connection.send("SUBSCRIBE", self._publisher.channel)
            await connection.subscribed
            self._tried.set()
            self._listeners.notify(None)  # hints were missed while there was no subscription: any run may have changed
            if self._publisher.own_channel and not connection.is_closed:
                # Only after the first: a listener of the own channel is assumed to listen to the common channel.
                connection.send("SUBSCRIBE", self._publisher.own_channel)
            if not connection.is_closed:
                connection.send("SUBSCRIBE", self._follow_channel)
            await connection.lost
        finally:
            self._hears_followers = False
            await connection.close()

    def _on_subscribed(self, channel: bytes) -> None:
        if channel == self._follow_channel.encode():
            self._hears_followers = True
            self.followed_runs.join()

    def _on_message(self, channel: bytes, data: bytes) -> None:
        if channel == self._follow_channel.encode():
            if (message := decode_message(data)) is not None:
                self.followed_runs.on_message(message)
            return
        sender, ids = _decode_hint(data)
        if sender != self._publisher.name:
            self._listeners.notify(frozenset(ids) if isinstance(ids, list) else None)

    # followers

    @property
    def _follow_channel(self) -> str:
        return f"{self._publisher.channel}:follow"

    def _wake_follow_sender(self) -> None:
        if self._send_task is None or self._send_task.done():
            self._send_task = asyncio.create_task(self._send_to_followers(), name="perdure-redis-followers")

    async def _send_to_followers(self) -> None:
        """Send until nothing is left. Messages that arrive during a call share the next one."""
        while messages := self.followed_runs.take_messages(MAX_FOLLOW_MESSAGE_BYTES):
            for message in messages:
                with contextlib.suppress(StoreError):
                    await self._server.command("PUBLISH", self._follow_channel, message)


class SubscriberConnection(RedisProtocol):
    """A connection that receives published messages. The futures `subscribed` and `lost` report its state."""

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        on_message: Callable[[bytes, bytes], None],
        on_subscribed: Callable[[bytes], None] = lambda channel: None,
    ) -> None:
        super().__init__(connection, transport)
        self._on_message = on_message  # called with the channel and the data
        self._on_subscribed = on_subscribed  # called with the channel, for each but the first
        loop = asyncio.get_running_loop()
        self.subscribed: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    async def close(self) -> None:
        for future in (self.subscribed, self.lost):  # an exception that is never retrieved would be logged
            future.cancel()
        await super().close()

    def on_reply(self, reply: Any) -> None:
        """Handle messages; ignore other notifications, and error replies to all but the first subscription."""
        if not self.subscribed.done():
            if isinstance(reply, Exception):
                self.on_connection_lost(reply)
            elif reply[0] == b"subscribe":
                self.subscribed.set_result(None)
        elif isinstance(reply, Exception):
            return
        elif reply[0] == b"message":
            self._on_message(reply[1], reply[2])
        elif reply[0] == b"subscribe":
            self._on_subscribed(reply[1])

    def on_connection_lost(self, error: Exception) -> None:
        """Fail the future that is awaited now."""
        future = self.lost if self.subscribed.done() else self.subscribed
        if not future.done():
            future.set_exception(error)
