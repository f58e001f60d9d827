"""StoreSession: an open store with the clock, the committer and the waiters that client and worker share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.clock import Clock, StoreClock, Timer, sleep_on, wait_within
from perdure.codec import Codec, JsonCodec
from perdure.config import EngineConfig
from perdure.errors import StoreError
from perdure.execution.committer import Committer
from perdure.execution.periodic import is_cancelled_from_outside
from perdure.execution.waiters import RunWaiters
from perdure.model.records import ChangeCallback
from perdure.retry import Retry
from perdure.stores.protocol import Store

LOGGER = logging.getLogger("perdure.execution")
T = TypeVar("T")
WRITES_TIMEOUT_SECONDS = 3.0  # how long a shutdown waits for the results of submitted writes
CLOSE_TIMEOUT_SECONDS = 1.0  # how long a shutdown waits for connections that do not respond


class StoreSession:
    """A store as one process uses it. Created in a running event loop, and used from that loop only."""

    def __init__(self, store: Store, clock: Clock, config: EngineConfig) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.process = os.getpid()
        self.store = store
        self.config = config
        self.codec: Codec = JsonCodec(config.max_payload_bytes)
        self.clock = StoreClock(clock, store.now)
        self.waiters = RunWaiters()
        self.committer = Committer(store, self.clock, config.store_retry)
        # Topic and id of the events whose fan-out a caller in this process executes; `BroadcastResumer` skips them.
        self.active_broadcasts: set[tuple[str, str]] = set()
        self._listeners: tuple[ChangeCallback, ...] = ()
        self._unsubscribe: Callable[[], None] | None = None
        self._sweep_timer: Timer | None = None
        self._synchronizing: asyncio.Task[None] | None = None

    async def open(self, *, retry_forever: bool) -> None:
        """Open the store, set the clock to the store's time, and start the committer and the sweep."""
        await self.read(lambda: self.store.open(shards=self.config.shards), retry_forever=retry_forever)
        try:
            await self.clock.synchronize()
        except BaseException:
            await self.store.close()
            raise
        self.committer.start()
        self._unsubscribe = self.store.on_change(self._on_change_hint)
        self._sweep()

    def on_change(self, listener: ChangeCallback) -> Callable[[], None]:
        """Pass the store's change hints to one more listener; return a function that removes the listener."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

        return unsubscribe

    async def read(self, call: Callable[[], Awaitable[T]], *, retry_forever: bool = False) -> T:
        """Return the result of a store call; retry it while the store is unavailable.

        Raises `StoreError` after the attempts of the retry policy, unless `retry_forever` is set.
        """
        return await retry_store_call(call, self.clock, self.config.store_retry, retry_forever=retry_forever)

    async def close(self, writes_timeout: float = WRITES_TIMEOUT_SECONDS) -> None:
        """Wait for the results of submitted writes, then close the store. Callers without a result get an error."""
        if not await self.committer.wait_idle(writes_timeout):
            error = StoreError("closed before the store confirmed the write; repeat the call", retryable=True)
            self.committer.reject_callers(error)
        await self.abandon()
        if not await wait_within(self.clock, CLOSE_TIMEOUT_SECONDS, self.store.close()):
            LOGGER.warning("Connections to the store do not respond; closed them without waiting")

    async def abandon(self) -> None:
        """Stop at once, as in a crash: queued writes are lost, and the store stays open."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._synchronizing is not None:
            self._synchronizing.cancel()
        await self.committer.stop()

    def _on_change_hint(self, run_ids: frozenset[str] | None) -> None:
        # The waiters last: a worker claims a due run before callers read it.
        for listener in (*self._listeners, self.waiters.on_change_hint):
            try:
                listener(run_ids)
            except Exception:  # one listener must not keep the hint from the others; the sweep repeats it
                LOGGER.exception("Listener for change hints raised")

    def _sweep(self) -> None:
        """Wake all waiters, so that they read the store again: change hints are best effort and may be lost."""
        sweep_at = self.clock.now() + self.config.seconds("sweep_interval")
        self._sweep_timer = self.clock.call_at(sweep_at, self._sweep)  # first: the sweep continues whatever is raised
        self._synchronize_if_needed()
        self.waiters.notify(None)

    def _synchronize_if_needed(self) -> None:
        """Measure the store's time, unless a worker in this process did so when it renewed its lease."""
        synchronized_at = self.clock.synchronized_at or 0.0
        is_due = self.clock.now() - synchronized_at > self.config.seconds("lease") / 2
        if is_due and (self._synchronizing is None or self._synchronizing.done()):
            self._synchronizing = asyncio.get_running_loop().create_task(self._synchronize())

    async def _synchronize(self) -> None:
        with contextlib.suppress(StoreError):  # the next sweep tries again
            await self.clock.synchronize()


async def retry_store_call(
    call: Callable[[], Awaitable[T]], clock: Clock, retry: Retry, *, retry_forever: bool = True
) -> T:
    """Return the result of a store call; retry it while the store is unavailable.

    Raises at once an error that is not retryable; raises any error after the attempts of `retry`, unless
    `retry_forever` is set.
    """
    attempts = 0
    while True:
        try:
            return await call()
        except (StoreError, asyncio.CancelledError) as error:
            if is_cancelled_from_outside(error):
                raise
            attempts += 1
            failed = error if isinstance(error, StoreError) else StoreError("the store cancelled it", retryable=True)
            if not failed.retryable or (attempts >= retry.max_attempts and not retry_forever):
                raise failed from error.__cause__
            LOGGER.warning("Store unavailable, retrying read (attempt %d): %s", attempts, failed)
        await sleep_on(clock, retry.delay_after(min(attempts, 32), random.random()))
