"""Duties: what happens because time passes. One loop owns all sleeping, on the engine's clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from perdure.clock import Clock, Timer
from perdure.errors import StoreError

LOGGER = logging.getLogger("perdure.execution")

Tick = Callable[[float], Awaitable[float | None]]


class PeriodicTask:
    """Calls `tick(now)` again and again, each time at the moment that the last call returned, or earlier if poked.

    A tick that fails is logged and tried again after `interval`: no duty ends because a store was away.
    """

    def __init__(self, name: str, tick: Tick, clock: Clock, interval: float) -> None:
        self.name = name
        self._tick = tick
        self._clock = clock
        self._interval = interval
        self._due_at: float | None = None
        self._timer: Timer | None = None
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.ticking = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"perdure-{self.name}")

    def trigger(self, at: float | None = None) -> None:
        """Tick no later than at this moment; now, if none is given."""
        if at is None or at <= self._clock.now():
            self._poked.set()
        elif self._due_at is None or at < self._due_at:
            self._set_timer(at)

    @property
    def pending(self) -> bool:
        """Whether it is ticking or about to."""
        return self.ticking or self._poked.is_set()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stopped = True  # a driver may lose a cancel that meets its answer
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while not self._stopped:
            await self._poked.wait()
            self._poked.clear()
            self._set_timer(None)
            self.ticking = True
            try:
                next_at = await self._tick(self._clock.now())
            except StoreError as error:
                LOGGER.warning("duty %s: %s", self.name, error)
                next_at = self._clock.now() + self._interval
            except Exception:
                LOGGER.exception("duty %s failed", self.name)
                next_at = self._clock.now() + self._interval
            finally:
                self.ticking = False
            if next_at is not None and (self._due_at is None or next_at < self._due_at):
                self._set_timer(next_at)  # unless it was poked for an earlier moment while it ticked

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_at = at
        if at is not None:
            self._timer = self._clock.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._due_at = None
        self._timer = None
        self._poked.set()
