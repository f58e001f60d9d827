"""Clocks. This is the only module that reads the system time; all others take a `Clock`.

`SystemClock` reads the clock of this machine. `perdure.testing.VirtualClock` is advanced by tests. All waiting uses
`Clock.call_at`. This module knows no other module of perdure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Protocol


class Timer(Protocol):
    """A scheduled callback that can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """A source of time, in seconds since the epoch, that schedules callbacks."""

    def now(self) -> float:
        """Return the current time in seconds since the epoch."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` from the running event loop when `now()` has reached `when`. Return its timer."""
        ...


class SystemClock:
    """Time of this machine when the process started, plus the time that has passed since.

    It never jumps when the machine's clock is set, and it counts the time in which the machine was suspended.
    """

    def __init__(self) -> None:
        self._offset = time.time() - _read_uptime()

    def now(self) -> float:
        return _read_uptime() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


class WallClock(SystemClock):
    """The machine's clock as it is set now. All processes of a machine agree on it, whenever they started."""

    def now(self) -> float:
        return time.time()


# The timers of an event loop do not count a suspension of the machine; `CLOCK_BOOTTIME` does (Linux only).
_read_uptime = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
SYSTEM_CLOCK = SystemClock()
WALL_CLOCK = WallClock()

ReadTime = Callable[[], Awaitable[float]]
# Differences between this clock and the store's that are not corrected: they are smaller than the effects of load.
TOLERANCE_SECONDS = 0.01


class StoreClock:
    """The store's time: a local clock plus an offset that `synchronize` measures.

    Workers use it so that local clocks that are wrong, stand still or have another rate do not matter for longer than
    one synchronization. A correction forwards fires the timers that are due by then. A correction backwards postpones
    no timer, because most timers measure a pause; a callback that needs the exact time compares it with `now()`.
    """

    def __init__(self, clock: Clock, read_store_time: ReadTime) -> None:
        self._clock = clock
        self._read_store_time = read_store_time
        self._offset = 0.0
        self._timers: dict[_StoreTimer, None] = {}  # a dict, because its order is deterministic
        self.synchronized_at: float | None = None

    def now(self) -> float:
        return self._clock.now() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = _StoreTimer(self._timers, when, callback)
        timer.start(self._clock, when - self._offset)
        self._timers[timer] = None
        return timer

    async def synchronize(self) -> float:
        """Read the store's time, correct this clock if it differs, and return the time."""
        before = self._clock.now()
        store_time = await self._read_store_time()
        after = self._clock.now()
        # The store read its clock between the two: only an offset outside of these bounds is wrong.
        lowest, highest = store_time - after, store_time - before
        is_right = lowest - TOLERANCE_SECONDS <= self._offset <= highest + TOLERANCE_SECONDS
        previous = self._offset
        if self.synchronized_at is None or not is_right:
            self._offset = (lowest + highest) / 2
        now = self.synchronized_at = self.now()
        overdue_since = now - TOLERANCE_SECONDS
        if self._offset - previous > TOLERANCE_SECONDS or any(timer.when < overdue_since for timer in self._timers):
            for timer in list(self._timers):
                timer.restart(self._clock, timer.when - self._offset)
        return now


class _StoreTimer:
    """A timer of a `StoreClock`, which can be started again when the offset of the clock changes."""

    __slots__ = ("_callback", "_timer", "_timers", "when")

    def __init__(self, timers: dict[_StoreTimer, None], when: float, callback: Callable[[], object]) -> None:
        self._timers = timers
        self._callback = callback
        self.when = when

    def start(self, clock: Clock, local_when: float) -> None:
        self._timer = clock.call_at(local_when, self._fire)

    def restart(self, clock: Clock, local_when: float) -> None:
        self._timer.cancel()
        self.start(clock, local_when)

    def cancel(self) -> None:
        self._timers.pop(self, None)
        self._timer.cancel()

    def _fire(self) -> None:
        self._timers.pop(self, None)
        self._callback()


async def sleep_on(clock: Clock, seconds: float) -> None:
    """Sleep for `seconds` of the given clock."""
    done = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.now() + seconds, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        timer.cancel()


async def wait_within(clock: Clock, seconds: float, work: Awaitable[object]) -> bool:
    """Wait for `work` for at most `seconds` of the given clock, then cancel it. Return whether it has ended.

    Raises the error of `work`. A cancelled `work` is not waited for: it may hang in its cleanup.
    """
    task = asyncio.ensure_future(work)
    timeout: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.now() + seconds, lambda: None if timeout.done() else timeout.set_result(None))
    try:
        await asyncio.wait((task, timeout), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        if not task.done():
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            task.cancel()
    if task.done():
        await task
    return task.done()


def to_datetime(at: float) -> datetime:
    """Return seconds since the epoch as an aware UTC datetime."""
    return datetime.fromtimestamp(at, UTC)


def to_datetime_or_none(at: float | None) -> datetime | None:
    """Return seconds since the epoch as an aware UTC datetime; None stays None."""
    return None if at is None else to_datetime(at)


def block_thread(seconds: float) -> None:
    """Block the calling thread for a time of the machine, never of a test's clock. Not for event loops."""
    time.sleep(seconds)
