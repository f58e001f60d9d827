"""TimeSlices: bounds how long the turns of a worker keep the event loop in one iteration.

A replay of a long history, or a thousand turns that become ready together, would stop everything else in the process:
lease renewals, timers, other runs, calls of clients. Turns therefore share a slice of time per iteration of the event
loop. When it is used up, running turns are paused and further ones are queued; both continue in the next iterations.

The clock is the only input. With virtual time a slice is never used up, and a test stays deterministic.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from perdure.clock import Clock

SLICE_SECONDS = 0.01
"""Two slices may meet in one iteration: the rest of one, and the next. Together they stay below 20 ms."""


class TimeSlices:
    """The time slices of one worker. Queued callbacks run as plain callbacks of the event loop, in order."""

    def __init__(self, clock: Clock, seconds: float = SLICE_SECONDS) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._started_at = self._until = 0.0
        self._queue: deque[Callable[[], None]] = deque()
        self._is_marked = False  # the iteration of the event loop in which the present slice started has not ended

    @property
    def is_busy(self) -> bool:
        """Whether callbacks are queued."""
        return bool(self._queue)

    def admits(self, now: float) -> bool:
        """Return whether a turn may start now; otherwise it must be queued."""
        if self._started_at <= now < self._until:
            return True
        if self._is_marked:
            return False
        self._start(now)
        return True

    def is_used_up(self) -> bool:
        """Return whether the present slice is used up. A clock that was set back ends it too."""
        return not self._started_at <= self._clock.now() < self._until

    def queue(self, callback: Callable[[], None]) -> None:
        """Call `callback` in a later iteration of the event loop, when the callbacks queued before have run."""
        self._queue.append(callback)
        self._mark()

    def _start(self, now: float) -> None:
        self._started_at, self._until = now, now + self._seconds
        self._mark()

    def _mark(self) -> None:
        if not self._is_marked:
            self._is_marked = True
            self._loop.call_soon(self._on_next_iteration)

    def _on_next_iteration(self) -> None:
        self._is_marked = False
        if not self._queue:
            return
        self._start(self._clock.now())  # also schedules the next iteration, for what remains queued
        self._queue.popleft()()
        while self._queue and not self.is_used_up():
            self._queue.popleft()()
