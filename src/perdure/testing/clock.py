"""A clock that tests move by hand: a month of waiting takes no time, and nothing sleeps."""

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
    """Implements `perdure.clock.Clock`. Time stands still but for `advance`, `move_to` and `jump`.

    `settle` is awaited between two timers, until what the first has led to has happened; by default until the event
    loop has nothing to run. A harness whose store has threads puts its own in its place.
    """

    def __init__(self, start: float = START, settle: Settle | None = None) -> None:
        if not start > 0:
            raise InvalidArgument(f"a virtual clock starts after the epoch, not at {start}")
        self._now = float(start)
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = count()
        self.settle: Settle = settle or let_the_loop_settle

    # --- the Clock protocol

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call once `now()` has reached `when`: soon, if that has passed already."""
        timer = VirtualTimer(callback)
        if when <= self._now:
            asyncio.get_running_loop().call_soon(timer.fire)
        else:
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    # --- moving time

    @property
    def next_due(self) -> float | None:
        """When the earliest timer is due; None if there is none."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    async def advance(self, seconds: float) -> None:
        """Let this much time pass. Timers fire in order, each at its own moment, with everything settled in between."""
        await self.move_to(self._now + seconds)

    async def move_to(self, moment: float) -> None:
        """`advance` up to a moment; one that has passed changes nothing."""
        await self.settle()
        while (due := self.next_due) is not None and due <= moment:
            self._fire_next()
            await self.settle()
        self._now = max(self._now, moment)

    async def move_to_next(self, limit: float | None = None) -> bool:
        """Fire the next timer at its moment. False, and no time passes, if there is none (up to `limit`)."""
        due = self.next_due
        if due is None or (limit is not None and due > limit):
            return False
        self._fire_next()
        await self.settle()
        return True

    async def jump(self, seconds: float) -> None:
        """Let time pass in one leap, as for a process that was paused: timers that fall into it fire at its end."""
        self._now += seconds
        await self.move_to(self._now)

    def _fire_next(self) -> None:
        due, _, timer = heapq.heappop(self._timers)
        self._now = max(self._now, due)
        timer.fire()


class VirtualTimer:
    """A call-back that has not come yet."""

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


async def let_the_loop_settle() -> None:
    """Wait until the running event loop has nothing left to run but us; what threads will bring is not waited for."""
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    if ready is None:  # not one of asyncio's own loops: nobody can tell, so be generous
        for _ in range(MANY_ROUNDS):
            await asyncio.sleep(0)
        return
    while True:
        await asyncio.sleep(0)
        if not ready:
            return
