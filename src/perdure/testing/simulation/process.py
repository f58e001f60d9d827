"""A process of the simulation: a worker or a client with a clock of its own, which can be frozen or dead.

A frozen process does nothing: its timers wait, and its calls wait at the door of the store, on the way there and on the
way back. When it goes on it goes on with what it knew. What a dead one had begun never comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from perdure.clock import Timer
from perdure.testing.simulation.event_loop import SimulatedLoop


class Process:
    """`name` is that of its place, which another process takes after a crash; calls are counted on."""

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
        self._frozen_until = max(self._frozen_until, self.loop.moment + seconds)

    def thaw(self) -> None:
        self._frozen_until = 0.0

    def die(self) -> None:
        if not self.dead.is_set():
            self.trace(f"{self.name} dies")
            self.dead.set()

    @property
    def frozen(self) -> bool:
        return self._frozen_until > self.loop.moment

    async def awake(self) -> None:
        """Wait until the process is not frozen; for ever if it is dead."""
        while self.frozen:
            await self.wait(self._frozen_until - self.loop.moment)
        if self.dead.is_set():
            await self.loop.create_future()

    async def wait(self, seconds: float) -> None:
        """Let time pass, by nobody's clock."""
        done = self.loop.create_future()
        handle = self.loop.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            handle.cancel()

    # --- the Clock protocol

    def now(self) -> float:
        return self.loop.moment + self.skew

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
