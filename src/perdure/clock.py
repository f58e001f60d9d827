"""The only room that reads time.

Everything else is given a `Clock`. `SystemClock` is the machine's; `perdure.testing.VirtualClock` is one that tests
move by hand, so that a month of waiting takes no time. All sleeping is a call-back from `call_at`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class Timer(Protocol):
    """A call-back that has not come yet."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds since the epoch, and call-backs at a moment."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call once `now()` has reached `when`, from the running event loop."""
        ...


class SystemClock:
    """The machine's wall clock, advanced by its monotonic clock so that it never jumps within a process."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


SYSTEM_CLOCK = SystemClock()


class OffsetClock:
    """Another clock, shifted: the store's time, by which workers with wrong clocks agree."""

    def __init__(self, clock: Clock, offset: float) -> None:
        self._clock = clock
        self._offset = offset

    def now(self) -> float:
        return self._clock.now() + self._offset

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._clock.call_at(when - self._offset, callback)


async def sleep_on(clock: Clock, seconds: float) -> None:
    """Wait on the given clock."""
    done = asyncio.get_running_loop().create_future()
    timer = clock.call_at(clock.now() + seconds, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        timer.cancel()


def to_datetime(at: float) -> datetime:
    """Stored seconds as an aware UTC datetime."""
    return datetime.fromtimestamp(at, UTC)


def to_datetime_or_none(at: float | None) -> datetime | None:
    return None if at is None else to_datetime(at)
