"""VirtualClock: a clock that tests advance explicitly. Waiting for a month takes no real time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count

from perdure.clock import Timer
from perdure.errors import InvalidArgument

START = 1_750_000_000.0  # some day in June 2025
MANY_ROUNDS = 200

Settle = Callable[[], Awaitable[None]]


class VirtualClock:
    """Implements `perdure.clock.Clock`. Only `advance`, `move_to`, `move_to_next` and `jump` change the time.

    `settle` is awaited between two timers, so that all effects of the first timer are complete before the second fires.
    By default it waits until the event loop has nothing to run. A harness whose store uses threads replaces it.
    """

    def __init__(self, start: float = START, settle: Settle | None = None) -> None:
        if not start > 0:
            raise InvalidArgument(f"the start of a virtual clock must be after the epoch, not {start}")
        self._now = float(start)
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = count()
        self.settle: Settle = settle or drain_loop

    # --- the Clock protocol

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` when `now()` reaches `when`; in the next loop iteration if `when` has passed already."""
        timer = VirtualTimer(callback)
        if when <= self._now:
            asyncio.get_running_loop().call_soon(timer.fire)
        else:
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    # --- moving time

    @property
    def next_due(self) -> float | None:
        """The time at which the earliest timer is due; None without timers."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    async def advance(self, seconds: float) -> None:
        """Move time forward. Timers fire in order, each at its own time, and `settle` is awaited after each of them."""
        await self.move_to(self._now + seconds)

    async def move_to(self, when: float) -> None:
        """Move time forward to `when`, as `advance` does. A time that has passed changes nothing."""
        await self.settle()
        while (due := self.next_due) is not None and due <= when:
            self._fire_next()
            await self.settle()
        self._now = max(self._now, when)

    async def move_to_next(self, limit: float | None = None) -> bool:
        """Move to the next timer and fire it. Return False, without moving time, if no timer is due up to `limit`."""
        due = self.next_due
        if due is None or (limit is not None and due > limit):
            return False
        self._fire_next()
        await self.settle()
        return True

    async def jump(self, seconds: float) -> None:
        """Move time forward in one step, as for a paused process: all timers of the interval fire at its end."""
        self._now += seconds
        await self.move_to(self._now)

    def _fire_next(self) -> None:
        due, _, timer = heapq.heappop(self._timers)
        self._now = max(self._now, due)
        timer.fire()


class VirtualTimer:
    """A callback that is scheduled on a `VirtualClock`."""

    __slots__ = ("_callback", "cancelled")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._callback()


async def drain_loop() -> None:
    """Wait until the running event loop has no other callback to run. Work in threads is not waited for."""
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    if ready is None:  # not one of asyncio's own loops: readiness is not visible, so yield many times
        for _ in range(MANY_ROUNDS):
            await asyncio.sleep(0)
        return
    while True:
        await asyncio.sleep(0)
        if not ready:
            return
