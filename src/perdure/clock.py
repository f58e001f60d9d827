"""Clocks. This is the only module that reads the system time; all others take a `Clock`.

`SystemClock` reads the clock of this machine. `perdure.testing.VirtualClock` is advanced by tests. All waiting uses
`Clock.call_at`. This module knows no other module of perdure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
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
    """Wall clock of this machine, advanced by the monotonic clock so that it never jumps within a process."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


SYSTEM_CLOCK = SystemClock()


class OffsetClock:
    """Another clock plus an offset.

    Workers use it to follow the time of the store, so that skewed local clocks do not matter.
    """

    def __init__(self, clock: Clock, offset: float) -> None:
        self._clock = clock
        self._offset = offset

    def now(self) -> float:
        return self._clock.now() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._clock.call_at(when - self._offset, callback)


async def sleep_on(clock: Clock, seconds: float) -> None:
    """Sleep for `seconds` of the given clock."""
    done = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.now() + seconds, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        timer.cancel()


def to_datetime(at: float) -> datetime:
    """Return seconds since the epoch as an aware UTC datetime."""
    return datetime.fromtimestamp(at, UTC)


def to_datetime_or_none(at: float | None) -> datetime | None:
    """Return seconds since the epoch as an aware UTC datetime; None stays None."""
    return None if at is None else to_datetime(at)
