"""News between the processes that share a PostgreSQL store: LISTEN and NOTIFY.

News are told after the commit that they are about, in a statement of their own: a transaction that notifies holds a
lock of the whole database until it has reached the disk, which would put all commits in line. Many commits share one
notification. A process that dies in between, or whose connection breaks, loses news: they only make things faster,
and everyone who needs to know looks around by himself now and then. Waiting for a network is real time, whatever clock
an engine goes by.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from perdure.clock import SYSTEM_CLOCK, pause
from perdure.errors import StoreError
from perdure.ids import new_token
from perdure.store.hints import Hints
from perdure.store.postgres_link import Connection, Link, explained, hang_up

RECONNECT_AFTER = 1.0  # seconds
ASK_EVERY = 30.0  # seconds
HEAR_WITHIN = 5.0  # seconds until one's own voice must have come back
MAX_PAYLOAD = 7_900  # bytes; the server takes less than 8,000

LOGGER = logging.getLogger("perdure.store")

_NOTIFY = "SELECT pg_notify($1, $2)"
_news = msgspec.json.Decoder(tuple[str, tuple[str, ...] | None])


class _Ear:
    """A connection that listens. One that goes dead without a word is found out by asking now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._look = asyncio.Event()
        connection.add_termination_listener(lambda _: self._look.set())

    async def until_broken(self) -> None:
        while not self._connection.is_closed():
            self._look.clear()
            timer = SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + ASK_EVERY, self._look.set)
            try:
                await self._look.wait()
            finally:
                timer.cancel()
            try:
                with explained():
                    await self._connection.execute("SELECT")
            except StoreError:
                return


class News:
    """Listens from `start` to `stop`, over a connection of its own that is made again whenever it breaks."""

    def __init__(self, link: Link, hints: Hints) -> None:
        self._link = link
        self._hints = hints
        self._me = new_token()  # one's own news come back, and are no news
        self._channel = "perdure_" + hashlib.sha256(link.target.schema.encode()).hexdigest()[:16]
        self._connection: Connection | None = None
        self._unsent: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = False
        self._hears = False

    async def start(self) -> None:
        """The first connection is made before this returns, so that nothing is missed from here on."""
        if self._link.target.listen:
            self._spawn(self._stay_tuned(await self._listen()))
            self._spawn(self._try_ear())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hang_up()

    def tell(self, changed: frozenset[str]) -> None:
        """Tell the others, soon."""
        self._unsent |= changed
        if not self._sending:
            self._sending = True
            self._spawn(self._send())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # listening

    async def _try_ear(self) -> None:
        """Whoever listens through a pooler in transaction mode hears nothing, and is told of no error either."""
        with contextlib.suppress(StoreError):
            await self._link.fetch(_NOTIFY, self._channel, self._payload(set()))
            await pause(SYSTEM_CLOCK, HEAR_WITHIN)
            if not self._hears:
                LOGGER.warning(
                    "%s: notifications do not arrive, as behind a pooler in transaction mode; changes by other "
                    "processes are found by looking only. Connect past the pooler, or add listen=no to the URL",
                    self._link.target.name,
                )

    async def _stay_tuned(self, ear: _Ear) -> None:
        while True:
            await ear.until_broken()
            await self._hang_up()
            while True:
                try:
                    ear = await self._listen()
                    break
                except StoreError:
                    await pause(SYSTEM_CLOCK, RECONNECT_AFTER)
            self._hints.tell(None)  # nobody knows what happened meanwhile

    async def _listen(self) -> _Ear:
        connection = self._connection = await self._link.connect()
        try:
            with explained():
                await connection.add_listener(self._channel, self._heard)
        except BaseException:
            self._connection = None
            connection.terminate()
            raise
        return _Ear(connection)

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            sender, changed = _news.decode(str(payload))
            self._hears = True
            if sender != self._me and changed != ():  # nothing: somebody tries whether he hears himself
                self._hints.tell(None if changed is None else frozenset(changed))

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await hang_up(connection)

    # telling

    async def _send(self) -> None:
        """Until there is nothing left to tell. What comes while a notification is under way shares the next one."""
        try:
            while self._unsent:
                changed, self._unsent = self._unsent, set()
                with contextlib.suppress(StoreError):
                    await self._link.fetch(_NOTIFY, self._channel, self._payload(changed))
        finally:
            self._sending = False

    def _payload(self, changed: set[str]) -> str:
        encoded = msgspec.json.encode((self._me, tuple(changed)))
        if len(encoded) > MAX_PAYLOAD:
            encoded = msgspec.json.encode((self._me, None))
        return encoded.decode()
