"""Time skipping of the testing kit: while a caller waits, time moves from one wake-up to the next.

There are two kinds of waits. A run that sleeps, retries or waits with a deadline has a timer on the virtual clock, and
time moves to the next timer. A step body that waits for real I/O (a socket, a subprocess, a real `asyncio.sleep`) gets
real time first, up to a limit (`RealWaits`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from perdure.clock import SYSTEM_CLOCK, Timer, sleep_on
from perdure.model.validation import MAX_SECONDS
from perdure.testing.clock import VirtualClock, VirtualTimer

T = TypeVar("T")

SWEEP_DISABLED_SECONDS = MAX_SECONDS  # interval between sweeps; memory loses no notification that a sweep would find
HORIZON = 0.9 * SWEEP_DISABLED_SECONDS  # only sweeps are due later than this
MANY = 100_000  # wake-ups during a single wait
REAL_WAIT_SECONDS = 5.0  # for a step body, or a test, that waits for real I/O
REAL_POLL_SECONDS = 0.002
SELF_PIPE = 1  # every event loop listens to its own pipe


class NothingDue(AssertionError):
    """A caller waits, and no timer is due that could end the wait."""


class TooMany(AssertionError):
    """A caller waits, and the number of wake-ups exceeds the limit."""


class LazyClock:
    """A clock whose timers do not move time: they fire late, when time has passed for another reason."""

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
        """Fire each due timer once."""
        pending = [(when, timer) for when, timer in self._timers if not timer.cancelled]
        self._timers = [(when, timer) for when, timer in pending if when > self._clock.now()]
        for when, timer in pending:
            if when <= self._clock.now():
                timer.fire()


class RunningBody(Protocol):
    """The identity of a running step body."""

    @property
    def idempotency_key(self) -> str: ...

    @property
    def attempt(self) -> int: ...


class RealWaits:
    """Gives real time to step bodies that wait for real I/O, up to a limit for each attempt.

    `settle` waits until only time can change anything; `bodies` returns the running steps. `given_up` contains the
    attempts that reached the limit: they wait for virtual time, or without end.
    """

    def __init__(
        self,
        settle: Callable[[], Awaitable[None]],
        bodies: Callable[[], Sequence[RunningBody]],
        given_up: set[tuple[str, int]] | None = None,
    ) -> None:
        self._settle = settle
        self._bodies = bodies
        self._given_up = set() if given_up is None else given_up

    async def settle(self) -> None:
        """Wait until only virtual time can change anything: also for the real I/O of step bodies."""
        await self._settle()
        polls = int(REAL_WAIT_SECONDS / REAL_POLL_SECONDS)
        while (waiting := self._waiting()) and polls and _may_wait_for_io():
            await sleep_on(SYSTEM_CLOCK, REAL_POLL_SECONDS)
            await self._settle()
            polls -= 1
        if not polls:
            self._given_up |= waiting

    def _waiting(self) -> set[tuple[str, int]]:
        return {(body.idempotency_key, body.attempt) for body in self._bodies()} - self._given_up


class TimeSkipper:
    """Moves a virtual clock. `settle` waits until only time can change anything; `bodies` returns the running steps."""

    def __init__(
        self, clock: VirtualClock, settle: Callable[[], Awaitable[None]], bodies: Callable[[], Sequence[RunningBody]]
    ) -> None:
        self.lazy_clock = LazyClock(clock)
        self._clock = clock
        self._settled = RealWaits(settle, bodies).settle
        clock.settle = self._settled

    async def until(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, and skip time while it waits.

        Raises `NothingDue` if no timer could end the wait, and `TooMany` after too many wake-ups.
        """
        task = asyncio.ensure_future(work)
        try:
            for _ in range(MANY):
                async with _idle_lock():
                    await self._settled()
                    if not (task.done() or await self._move() or await self._wait_for_io(task)):
                        raise NothingDue("the wait cannot end: no timer is due and no step is running")
                if task.done():
                    return task.result()
            raise TooMany(f"the wait has not ended after {MANY} wake-ups")
        finally:
            task.cancel()

    async def advance(self, seconds: float) -> None:
        """Move time forward, and wait until all effects are complete."""
        async with _idle_lock():
            await self._clock.advance(seconds)
            self.lazy_clock.catch_up()
            await self._settled()

    async def settled(self) -> None:
        """Wait until nothing can happen without time passing."""
        async with _idle_lock():
            await self._settled()

    async def _move(self) -> bool:
        if not await self._clock.move_to_next(self._clock.now() + HORIZON):
            return False
        self.lazy_clock.catch_up()
        return True

    async def _wait_for_io(self, task: asyncio.Future[T]) -> bool:
        """Wait in real time for the test's own I/O. Return whether the task is done or a timer is due."""
        polls = int(REAL_WAIT_SECONDS / REAL_POLL_SECONDS)
        while polls and _may_wait_for_io():
            await sleep_on(SYSTEM_CLOCK, REAL_POLL_SECONDS)
            await self._settled()
            if task.done() or self._is_due():
                return True
            polls -= 1
        return False

    def _is_due(self) -> bool:
        due = self._clock.next_due
        return due is not None and due <= self._clock.now() + HORIZON


_IDLE_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _idle_lock() -> asyncio.Lock:
    """Return the lock of this loop. Two tasks that both wait for an idle loop would wait for each other."""
    return _IDLE_LOCKS.setdefault(asyncio.get_running_loop(), asyncio.Lock())


def _may_wait_for_io() -> bool:
    """Return whether the event loop waits for a real timer, a socket or a pipe."""
    loop = asyncio.get_running_loop()
    timers, selector = getattr(loop, "_scheduled", None), getattr(loop, "_selector", None)
    if timers is None or selector is None:  # not one of asyncio's own loops: not visible
        return True
    return any(not timer.cancelled() for timer in timers) or len(selector.get_map()) > SELF_PIPE
