"""Change notifications between the processes that share a PostgreSQL store, by LISTEN and NOTIFY.

A notification follows the commit that it is about, in a statement of its own. A transaction that notifies holds a lock
of the whole database until its commit is on disk, which would serialize all commits. Many commits share one
notification. Notifications are change hints: one is lost when its process dies or its connection breaks. They only
reduce latency, because every worker also sweeps its store periodically. Timeouts here use the system clock: a network
is slow in real time, whatever clock an engine uses.

A process that is the only listener sends nothing, which saves a tenth of the time of a short run. Every listener holds
a shared advisory lock of the schema, so that listeners can be counted. When it holds the lock, a listener announces
itself. So a later listener is heard by the earlier ones, and an earlier listener is counted by the later ones.

Messages of followers (`followed_runs`) have a channel of their own. They are sent and lost in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.errors import StoreError
from perdure.model.ids import new_token
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.followed_runs import FollowedRuns, decode_message
from perdure.stores.postgres.errors import translate_errors
from perdure.stores.postgres.pool import Connection, ConnectionPool, close_connection

RECONNECT_DELAY_SECONDS = 1.0
COUNT_INTERVAL_SECONDS = 30.0
ECHO_TIMEOUT_SECONDS = 5.0
"""The time after which a process must have received its own announcement."""
MAX_PAYLOAD_BYTES = 7_900
"""The server accepts less than 8,000 bytes."""

_ANNOUNCEMENT: tuple[str, ...] = ()
"""A notification about no run: its sender has started to listen, and checks that it receives notifications."""

LOGGER = logging.getLogger("perdure.stores")

_NOTIFY = "SELECT pg_notify($1, $2)"
_ANNOUNCE = "SELECT pg_advisory_lock_shared($1), pg_notify($2, $3)"
_COUNT_LISTENERS = """
    SELECT count(*) FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objsubid = 1
          AND (l.classid::bigint << 32 | l.objid::bigint) = $1"""
_notifications = msgspec.json.Decoder(tuple[str, tuple[str, ...] | None])


class _ListenConnection:
    """A connection that listens. It counts all listeners periodically, which also detects a dead connection.

    Announcements arrive over the same connection. So an announcement that arrives after a count is of a listener that
    was not counted.
    """

    def __init__(self, connection: Connection, lock: int) -> None:
        self.is_only_listener = False
        self._connection = connection
        self._lock = lock
        self._count_now = asyncio.Event()
        connection.add_termination_listener(lambda _: self._count_now.set())

    async def announce(self, channel: str, announcement: str) -> None:
        await self._connection.fetch(_ANNOUNCE, self._lock, channel, announcement)
        await self._count()

    async def wait_until_broken(self) -> None:
        while not self._connection.is_closed():
            self._count_now.clear()
            timer = SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + COUNT_INTERVAL_SECONDS, self._count_now.set)
            try:
                await self._count_now.wait()
            finally:
                timer.cancel()
            try:
                with translate_errors():
                    await self._count()
            except StoreError:
                return

    async def _count(self) -> None:
        self.is_only_listener = await self._connection.fetchval(_COUNT_LISTENERS, self._lock) == 1

    async def close(self) -> None:
        self.is_only_listener = False
        await close_connection(self._connection)


class NotificationListener:
    """Listens from `start` to `stop`, over a connection of its own that it opens again when it breaks."""

    def __init__(self, pool: ConnectionPool, change_listeners: ChangeListeners) -> None:
        self._pool = pool
        self._change_listeners = change_listeners
        self._sender = new_token()  # the server returns a process its own notifications too
        digest = hashlib.sha256(pool.target.schema.encode()).digest()[:8]
        self._channel = "perdure_" + digest.hex()
        self._lock = int.from_bytes(digest, "big", signed=True)
        self._listening: _ListenConnection | None = None
        self._unsent: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = False
        self._sending_to_followers = False
        self._receives = False
        self._follow_channel = self._channel + "_follow"
        self.followed_runs = FollowedRuns(self._sender, self._wake_follow_sender, self._has_others)

    async def start(self) -> None:
        """Open the first connection, so that no notification is missed after this returns."""
        if self._pool.target.listen:
            self._spawn(self._keep_listening(await self._listen()))
            self._spawn(self._warn_if_deaf())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.followed_runs.close()
        await self._close_connection()

    def notify(self, changed: frozenset[str]) -> None:
        """Notify other processes soon. Does nothing if this process is the only listener."""
        if self._is_only_listener:
            return
        self._unsent |= changed
        if not self._sending:
            self._sending = True
            self._spawn(self._send())

    @property
    def _is_only_listener(self) -> bool:
        return self._receives and self._listening is not None and self._listening.is_only_listener

    def _has_others(self) -> bool:
        """Return whether this process listens and other processes may do so too."""
        return self._listening is not None and not self._is_only_listener

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # receiving

    async def _warn_if_deaf(self) -> None:
        """Log a warning if notifications do not arrive: a pooler in transaction mode drops LISTEN without an error."""
        await sleep_on(SYSTEM_CLOCK, ECHO_TIMEOUT_SECONDS)
        if not self._receives:
            LOGGER.warning(
                "Notifications of %s do not arrive, as behind a pooler in transaction mode; changes by other processes "
                "are found by periodic sweeps only. Connect without the pooler, or add listen=no to the URL",
                self._pool.target.name,
            )

    async def _keep_listening(self, connection: _ListenConnection) -> None:
        listening: _ListenConnection | None = connection
        while True:
            try:
                if listening is not None:
                    await listening.wait_until_broken()
                    await self._close_connection()
                listening = await self._listen()
                self._change_listeners.notify(None)  # any run may have changed while the connection was broken
                self.followed_runs.announce()
            except Exception as error:
                if not isinstance(error, StoreError):
                    LOGGER.exception("Listener of %s raised; listening again", self._pool.target.name)
                await self._close_connection()
                listening = None
                await sleep_on(SYSTEM_CLOCK, RECONNECT_DELAY_SECONDS)

    async def _listen(self) -> _ListenConnection:
        connection = await self._pool.connect()
        listening = _ListenConnection(connection, self._lock)
        try:
            with translate_errors():
                await connection.add_listener(self._channel, self._on_notification)
                await connection.add_listener(self._follow_channel, self._on_follow_message)
                await listening.announce(self._channel, self._payload(_ANNOUNCEMENT))
        except BaseException:
            connection.terminate()
            raise
        self._listening = listening
        return listening

    def _on_notification(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            sender, changed = _notifications.decode(str(payload))
            self._receives = True
            if sender == self._sender:
                return
            if changed == _ANNOUNCEMENT:
                self._on_listener_joined()
            else:
                self._change_listeners.notify(None if changed is None else frozenset(changed))

    def _on_listener_joined(self) -> None:
        """Notify a new listener that any run may have changed.

        It may have read its runs before a change that this process, as the only listener, did not send.
        """
        self.followed_runs.announce()
        if self._listening is not None and self._listening.is_only_listener:
            self._listening.is_only_listener = False
            self._spawn(self._notify(None))

    def _on_follow_message(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        if (message := decode_message(str(payload))) is not None:
            self.followed_runs.on_message(message)

    async def _close_connection(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.close()

    # sending

    async def _send(self) -> None:
        """Send until nothing is left. Changes that arrive during a notification share the next one."""
        try:
            while self._unsent:
                changed, self._unsent = self._unsent, set()
                await self._notify(tuple(changed))
        finally:
            self._sending = False

    async def _notify(self, changed: tuple[str, ...] | None) -> None:
        with contextlib.suppress(StoreError):
            await self._pool.fetch(_NOTIFY, self._channel, self._payload(changed))

    def _wake_follow_sender(self) -> None:
        if not self._sending_to_followers:
            self._sending_to_followers = True
            self._spawn(self._send_to_followers())

    async def _send_to_followers(self) -> None:
        try:
            while messages := self.followed_runs.take_messages(MAX_PAYLOAD_BYTES):
                for message in messages:
                    with contextlib.suppress(StoreError):
                        await self._pool.fetch(_NOTIFY, self._follow_channel, message.decode())
        finally:
            self._sending_to_followers = False

    def _payload(self, changed: tuple[str, ...] | None) -> str:
        encoded = msgspec.json.encode((self._sender, changed))
        if len(encoded) > MAX_PAYLOAD_BYTES:
            encoded = msgspec.json.encode((self._sender, None))
        return encoded.decode()
