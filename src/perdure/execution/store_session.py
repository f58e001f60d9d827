"""Link: an open store, the engine's time, the committer and the hub: what asking and executing both stand on."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.clock import Clock, OffsetClock, Timer, sleep_on
from perdure.codec import JSON, Codec
from perdure.config import EngineConfig
from perdure.errors import StoreError
from perdure.execution.committer import Committer
from perdure.execution.waiters import RunWaiters
from perdure.model.records import ChangeCallback
from perdure.retry import Retry
from perdure.stores.protocol import Store

LOGGER = logging.getLogger("perdure.execution")
T = TypeVar("T")
CLOSE_TIMEOUT_SECONDS = 5.0  # how long leaving and closing wait for the store to answer what was submitted before


class StoreSession:
    """Made in a running event loop, and used from that one only."""

    def __init__(self, store: Store, clock: Clock, config: EngineConfig, codec: Codec = JSON) -> None:
        self.store = store
        self.config = config
        self.codec = codec
        self.clock = clock
        self.hub = RunWaiters()
        self.committer = Committer(store, clock, config.store_retry)
        self.active_broadcasts: set[tuple[str, str]] = set()  # events (topic and id) that are being published from here
        self._listeners: tuple[ChangeCallback, ...] = ()
        self._leave: Callable[[], None] | None = None
        self._sweeper: Timer | None = None

    async def open(self, *, for_ever: bool) -> None:
        await self.read(lambda: self.store.open(shards=self.config.shards), for_ever=for_ever)
        try:
            offset = await self.store.now() - self.clock.now()
        except BaseException:
            await self.store.close()
            raise
        if abs(offset) > 0.001:
            self.clock = OffsetClock(self.clock, offset)
        self.committer.start()
        self._leave = self.store.on_change(self._hinted)
        self._sweep()

    def on_change(self, hint: ChangeCallback) -> Callable[[], None]:
        """Pass on to one more what the store tells of changes; call what comes back to be rid of it."""
        self._listeners = (*self._listeners, hint)

        def leave() -> None:
            self._listeners = tuple(each for each in self._listeners if each is not hint)

        return leave

    def _hinted(self, run_ids: frozenset[str] | None) -> None:
        self.hub.on_store_hint(run_ids)
        for hint in self._listeners:
            hint(run_ids)

    def _sweep(self) -> None:
        """Whoever waits looks again now and then, even if every notification got lost."""
        self.hub.changed(None)
        self._sweeper = self.clock.call_at(self.clock.now() + self.config.seconds("sweep_interval"), self._sweep)

    async def read(self, question: Callable[[], Awaitable[T]], *, for_ever: bool = False) -> T:
        """Ask the store on behalf of a caller, who gives up after some attempts while it is away."""
        return await retry_store_call(question, self.clock, self.config.store_retry, for_ever=for_ever)

    async def close(self) -> None:
        """Let what was submitted be answered, then close the store."""
        await self.committer.wait_idle(CLOSE_TIMEOUT_SECONDS)
        await self.abandon()
        await self.store.close()

    async def abandon(self) -> None:
        """Stop at once, as a crash would: what is queued is lost, and the store is left as it is."""
        if self._leave is not None:
            self._leave()
            self._leave = None
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.committer.stop()


async def retry_store_call(read: Callable[[], Awaitable[T]], clock: Clock, retry: Retry, *, for_ever: bool = True) -> T:
    """Call until it answers, or for the attempts of `retry`; an error that no waiting mends is raised at once."""
    tries = 0
    while True:
        try:
            return await read()
        except StoreError as error:
            tries += 1
            if not error.retryable or (tries >= retry.max_attempts and not for_ever):
                raise
            LOGGER.warning("the store is away, a read waits (try %d): %s", tries, error)
        await sleep_on(clock, retry.delay_after(min(tries, 32), random.random()))
