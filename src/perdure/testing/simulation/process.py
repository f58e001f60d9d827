"""Process: a worker or a client of the simulation, with its own clock. It can be frozen or killed.

The timers of a frozen process wait, and so do its requests to the store and their responses. It then continues with its
old state. Calls of a dead process never return.
"""

from __future__ import annotations

import asyncio
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
        self.skew = 0.0
        self.dead = asyncio.Event()
        self._frozen_until = 0.0

    def count(self, what: str) -> int:
        self.counts[what] = self.counts.get(what, 0) + 1
        return self.counts[what]

    def freeze(self, seconds: float) -> None:
        self.trace(f"{self.name} is frozen for {seconds:g} s")
        self._frozen_until = max(self._frozen_until, self.loop.current_time + seconds)

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

    # --- the Clock protocol

    def now(self) -> float:
        return self.loop.current_time + self.skew

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = _Timer(self, callback)
        timer.set(when - self.skew)
        return timer


class _Timer:
    def __init__(self, process: Process, callback: Callable[[], object]) -> None:
        self._process = process
        self._callback = callback
        self._handle: Any = None

    def set(self, when: float) -> None:
        self._handle = self._process.loop.call_at(when, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        process = self._process
        if process.dead.is_set():
            return
        if process.frozen:
            self.set(process._frozen_until)
        else:
            self._callback()
