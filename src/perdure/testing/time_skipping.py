"""How time passes under a `TestEngine`: by itself while somebody waits, from one wake-up to the next.

Two kinds of waiting are told apart. A run that sleeps, retries or waits with a deadline has a timer on the virtual
clock, and time is moved to the next of those. A body of a step that waits for the real world (a socket, a subprocess, a
real `asyncio.sleep`) is given real time first, within reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from perdure.clock import SYSTEM_CLOCK, Timer, sleep_on
from perdure.model.validation import MAX_SECONDS
from perdure.testing.clock import VirtualClock, VirtualTimer

T = TypeVar("T")

SWEEP_DISABLED_SECONDS = MAX_SECONDS  # between two sweeps: nothing gets lost in memory that a sweep would have to find
HORIZON = 0.9 * SWEEP_DISABLED_SECONDS  # what is due later than that is a sweep
MANY = 100_000  # wake-ups during a single wait
REAL_PATIENCE = 5.0  # real seconds for the body of a step, or a test, that waits for the real world
REAL_GLANCE = 0.002
SELF_PIPE = 1  # what an event loop always listens to


class NothingDue(AssertionError):
    """Somebody waits, and nothing that could end it is ever due."""


class TooMany(AssertionError):
    """Somebody waits, and wake-up follows wake-up without an end."""


class LazyClock:
    """A clock whose timers nobody waits for: they are called late, when time has passed for other reasons."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._timers: list[tuple[float, VirtualTimer]] = []

    def now(self) -> float:
        return self._clock.now()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = VirtualTimer(callback)
        self._timers.append((when, timer))
        return timer

    def catch_up(self) -> None:
        """Call once each what has become due."""
        standing = [(when, timer) for when, timer in self._timers if not timer.cancelled]
        self._timers = [(when, timer) for when, timer in standing if when > self._clock.now()]
        for when, timer in standing:
            if when <= self._clock.now():
                timer.fire()


class TimeSkipper:
    """Moves a virtual clock. `settle` waits for what happens without time; `bodies` are coroutines of steps at work."""

    def __init__(
        self, clock: VirtualClock, settle: Callable[[], Awaitable[None]], bodies: Callable[[], Sequence[object]]
    ) -> None:
        self.unhurried = LazyClock(clock)
        self._clock = clock
        self._settle = settle
        self._bodies = bodies
        self._given_up: list[object] = []
        clock.settle = self._settled

    async def until(self, work: Awaitable[T]) -> T:
        """Wait for something, and let time pass meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            for _ in range(MANY):
                async with _turn():
                    await self._settled()
                    if not (task.done() or await self._move() or await self._the_world_acts(task)):
                        raise NothingDue("this waits for something that will not happen by itself")
                if task.done():
                    return task.result()
            raise TooMany(f"this is not over after {MANY} wake-ups")
        finally:
            task.cancel()

    async def advance(self, seconds: float) -> None:
        """Let this much time pass, and everything happen that it leads to."""
        async with _turn():
            await self._clock.advance(seconds)
            self.unhurried.catch_up()
            await self._settled()

    async def settled(self) -> None:
        """Everything that can happen has happened, and no time has passed."""
        async with _turn():
            await self._settled()

    async def _move(self) -> bool:
        if not await self._clock.move_to_next(self._clock.now() + HORIZON):
            return False
        self.unhurried.catch_up()
        return True

    async def _settled(self) -> None:
        await self._settle()
        waiting = [body for body in self._bodies() if body not in self._given_up]
        glances = int(REAL_PATIENCE / REAL_GLANCE)
        while waiting and glances and _the_world_may_act():
            await sleep_on(SYSTEM_CLOCK, REAL_GLANCE)
            await self._settle()
            waiting = [body for body in self._bodies() if body not in self._given_up]
            glances -= 1
        if waiting and not glances:  # it waits for virtual time, or for ever
            self._given_up += waiting

    async def _the_world_acts(self, task: asyncio.Future[T]) -> bool:
        """Whether something becomes due, or is done, because the test itself waits for the real world."""
        glances = int(REAL_PATIENCE / REAL_GLANCE)
        while glances and _the_world_may_act():
            await sleep_on(SYSTEM_CLOCK, REAL_GLANCE)
            await self._settled()
            if task.done() or self._is_due():
                return True
            glances -= 1
        return False

    def _is_due(self) -> bool:
        due = self._clock.next_due
        return due is not None and due <= self._clock.now() + HORIZON


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _turn() -> asyncio.Lock:
    """Two who each wait until the loop has nothing to run but them would wait for each other."""
    return _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def _the_world_may_act() -> bool:
    """Whether the event loop waits for anything real: a timer of its own, a socket, a pipe."""
    loop = asyncio.get_running_loop()
    timers, selector = getattr(loop, "_scheduled", None), getattr(loop, "_selector", None)
    if timers is None or selector is None:  # not one of asyncio's own loops: nobody can tell
        return True
    return any(not timer.cancelled() for timer in timers) or len(selector.get_map()) > SELF_PIPE
