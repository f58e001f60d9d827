"""Process: a worker or a client of the simulation, with its own clock. It can be frozen or killed.

The timers of a frozen process wait, and so do its requests to the store and their responses. It then continues with its
old state. Calls of a dead process never return. The clock of a process can jump (its timers do not), and it can run at
another rate or stand still (with its timers).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from perdure.clock import Timer
from perdure.testing.simulation.event_loop import SimulatedLoop


class Process:
    """A simulated process. After a crash the next process has the same `name` and continues the call counts."""

    def __init__(self, name: str, loop: SimulatedLoop, trace: Callable[[str], None], counts: dict[str, int]) -> None:
        self.name = name
        self.loop = loop
        self.trace = trace
        self.counts = counts
        self.skew = 0.0  # of the wall clock, relative to the monotonic clock of the process
        self.dead = asyncio.Event()
        self.freezes: list[tuple[float, float]] = []  # start and end of each
        self._frozen_until = 0.0
        self._rate = 1.0
        self._rate_since = self._monotonic_since = loop.current_time
        self._timers: dict[_Timer, None] = {}  # a set with a fixed order

    def count(self, what: str) -> int:
        self.counts[what] = self.counts.get(what, 0) + 1
        return self.counts[what]

    def freeze(self, seconds: float) -> None:
        self.trace(f"{self.name} is frozen for {seconds:g} s")
        self._frozen_until = max(self._frozen_until, self.loop.current_time + seconds)
        self.freezes.append((self.loop.current_time, self._frozen_until))

    def thaw(self) -> None:
        self._frozen_until = 0.0

    def die(self) -> None:
        if not self.dead.is_set():
            self.trace(f"{self.name} dies")
            self.dead.set()

    @property
    def frozen(self) -> bool:
        return self._frozen_until > self.loop.current_time

    async def awake(self) -> None:
        """Wait until the process is not frozen; without end if it is dead."""
        while self.frozen:
            await self.wait(self._frozen_until - self.loop.current_time)
        if self.dead.is_set():
            await self.loop.create_future()

    async def wait(self, seconds: float) -> None:
        """Wait in simulation time, independent of the skew of the process."""
        done = self.loop.create_future()
        handle = self.loop.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            handle.cancel()

    # --- the clock

    def now(self) -> float:
        return self._monotonic() + self.skew

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return _Timer(self, when - self.skew, callback)

    def set_clock_rate(self, rate: float) -> None:
        """Let the clock and the timers run at this rate from now on: 1.5 is too fast, and at 0 they stand still."""
        self.trace(f"the clock of {self.name} runs at {rate:g} times")
        self._monotonic_since, self._rate_since, self._rate = self._monotonic(), self.loop.current_time, rate
        for timer in list(self._timers):
            timer.set()

    def correct_clock(self) -> None:
        """Set the clock to the time of the simulation, at the normal rate."""
        if self._rate != 1.0:
            self.set_clock_rate(1.0)
        self.skew = self.loop.current_time - self._monotonic()

    def _monotonic(self) -> float:
        return self._monotonic_at(self.loop.current_time)

    def _monotonic_at(self, when: float) -> float:
        return self._monotonic_since + self._rate * (when - self._rate_since)

    def _loop_time(self, monotonic: float) -> float | None:
        """Return the time of the simulation at which the clock of the process has reached this value; None: never."""
        if monotonic <= self._monotonic_since:
            return self._rate_since
        if self._rate == 0.0:
            return None
        when = self._rate_since + (monotonic - self._monotonic_since) / self._rate
        while self._monotonic_at(when) < monotonic:  # rounded down
            when = math.nextafter(when, math.inf)
        return when


class _Timer:
    """A timer on the monotonic clock of a process."""

    def __init__(self, process: Process, due: float, callback: Callable[[], object]) -> None:
        self._process = process
        self._due = due
        self._callback = callback
        self._handle: Any = None
        process._timers[self] = None
        self.set()

    def set(self) -> None:
        """Schedule the timer, or schedule it again after the rate of the clock has changed."""
        if self._handle is not None:
            self._handle.cancel()
        when = self._process._loop_time(self._due)
        self._handle = None if when is None else self._process.loop.call_at(when, self._fire)

    def cancel(self) -> None:
        self._process._timers.pop(self, None)
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        process = self._process
        if process.dead.is_set():
            return
        if process.frozen:
            self._handle = process.loop.call_at(process._frozen_until, self._fire)
            return
        process._timers.pop(self, None)
        self._callback()
