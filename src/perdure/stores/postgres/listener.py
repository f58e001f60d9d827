"""News between the processes that share a PostgreSQL store: LISTEN and NOTIFY.

News are told after the commit that they are about, in a statement of their own: a transaction that notifies holds a
lock of the whole database until it has reached the disk, which would put all commits in line. Many commits share one
notification. A process that dies in between, or whose connection breaks, loses news: they only make things faster,
and everyone who needs to know looks around by himself now and then. Waiting for a network is real time, whatever clock
an engine goes by.

Who listens alone tells nothing, which saves a tenth of what a short run takes. Every listener holds an advisory lock of
the schema, shared, by which all can be counted, and says hello once he holds it. So whoever comes later is heard, and
whoever came before is found.
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
from perdure.stores.postgres.errors import translate_errors
from perdure.stores.postgres.pool import Connection, ConnectionPool, close_connection

RECONNECT_AFTER = 1.0  # seconds
ASK_EVERY = 30.0  # seconds
HEAR_WITHIN = 5.0  # seconds until one's own voice must have come back
MAX_PAYLOAD = 7_900  # bytes; the server takes less than 8,000

_ANNOUNCEMENT: tuple[str, ...] = ()
"""News of no run: somebody has begun to listen, and tries whether he hears himself."""

LOGGER = logging.getLogger("perdure.stores")

_NOTIFY = "SELECT pg_notify($1, $2)"
_ARRIVE = "SELECT pg_advisory_lock_shared($1), pg_notify($2, $3)"
_LISTENERS = """
    SELECT count(*) FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objsubid = 1
          AND (l.classid::bigint << 32 | l.objid::bigint) = $1"""
_news = msgspec.json.Decoder(tuple[str, tuple[str, ...] | None])


class _ListenConnection:
    """A connection that listens. One that goes dead without a word is found out by asking now and then.

    What is asked is whether anybody else listens. Hellos come over the same connection, so that one which is heard
    after an answer is of somebody who was not counted.
    """

    def __init__(self, connection: Connection, lock: int) -> None:
        self.alone = False
        self._connection = connection
        self._lock = lock
        self._look = asyncio.Event()
        connection.add_termination_listener(lambda _: self._look.set())

    async def arrive(self, channel: str, hello: str) -> None:
        await self._connection.fetch(_ARRIVE, self._lock, channel, hello)
        await self._count()

    async def until_broken(self) -> None:
        while not self._connection.is_closed():
            self._look.clear()
            timer = SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + ASK_EVERY, self._look.set)
            try:
                await self._look.wait()
            finally:
                timer.cancel()
            try:
                with translate_errors():
                    await self._count()
            except StoreError:
                return

    async def _count(self) -> None:
        self.alone = await self._connection.fetchval(_LISTENERS, self._lock) == 1

    async def hang_up(self) -> None:
        self.alone = False
        await close_connection(self._connection)


class NotificationListener:
    """Listens from `start` to `stop`, over a connection of its own that is made again whenever it breaks."""

    def __init__(self, link: ConnectionPool, hints: ChangeListeners) -> None:
        self._link = link
        self._hints = hints
        self._me = new_token()  # one's own news come back, and are no news
        mark = hashlib.sha256(link.target.schema.encode()).digest()[:8]
        self._channel = "perdure_" + mark.hex()
        self._lock = int.from_bytes(mark, "big", signed=True)
        self._ear: _ListenConnection | None = None
        self._unsent: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = False
        self._hears = False

    async def start(self) -> None:
        """The first connection is made before this returns, so that nothing is missed from here on."""
        if self._link.target.listen:
            self._spawn(self._stay_tuned(await self._listen()))
            self._spawn(self._warn_if_deaf())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hang_up()

    def notify(self, changed: frozenset[str]) -> None:
        """Tell the others, soon, if there are any."""
        if self._hears and self._ear is not None and self._ear.alone:
            return
        self._unsent |= changed
        if not self._sending:
            self._sending = True
            self._spawn(self._send())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # listening

    async def _warn_if_deaf(self) -> None:
        """Whoever listens through a pooler in transaction mode hears nothing, and is told of no error either."""
        await sleep_on(SYSTEM_CLOCK, HEAR_WITHIN)
        if not self._hears:
            LOGGER.warning(
                "%s: notifications do not arrive, as behind a pooler in transaction mode; changes by other "
                "processes are found by looking only. Connect past the pooler, or add listen=no to the URL",
                self._link.target.name,
            )

    async def _stay_tuned(self, ear: _ListenConnection) -> None:
        while True:
            await ear.until_broken()
            await self._hang_up()
            while True:
                try:
                    ear = await self._listen()
                    break
                except StoreError:
                    await sleep_on(SYSTEM_CLOCK, RECONNECT_AFTER)
            self._hints.notify(None)  # nobody knows what happened meanwhile

    async def _listen(self) -> _ListenConnection:
        connection = await self._link.connect()
        ear = _ListenConnection(connection, self._lock)
        try:
            with translate_errors():
                await connection.add_listener(self._channel, self._heard)
                await ear.arrive(self._channel, self._payload(_ANNOUNCEMENT))
        except BaseException:
            connection.terminate()
            raise
        self._ear = ear
        return ear

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            sender, changed = _news.decode(str(payload))
            self._hears = True
            if sender == self._me:
                return
            if changed == _ANNOUNCEMENT:
                self._on_listener_joined()
            else:
                self._hints.notify(None if changed is None else frozenset(changed))

    def _on_listener_joined(self) -> None:
        """Somebody has come. What was told to nobody a moment ago, he may have been too late to see."""
        if self._ear is not None and self._ear.alone:
            self._ear.alone = False
            self._spawn(self._notify(None))

    async def _hang_up(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            await ear.hang_up()

    # telling

    async def _send(self) -> None:
        """Until there is nothing left to tell. What comes while a notification is under way shares the next one."""
        try:
            while self._unsent:
                changed, self._unsent = self._unsent, set()
                await self._notify(tuple(changed))
        finally:
            self._sending = False

    async def _notify(self, changed: tuple[str, ...] | None) -> None:
        with contextlib.suppress(StoreError):
            await self._link.fetch(_NOTIFY, self._channel, self._payload(changed))

    def _payload(self, changed: tuple[str, ...] | None) -> str:
        encoded = msgspec.json.encode((self._me, changed))
        if len(encoded) > MAX_PAYLOAD:
            encoded = msgspec.json.encode((self._me, None))
        return encoded.decode()
