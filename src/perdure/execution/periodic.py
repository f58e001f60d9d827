"""PeriodicTask: work that happens because time passes. All sleeping of the engine is here, on the engine's clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from perdure.clock import Clock, Timer
from perdure.errors import StoreError

LOGGER = logging.getLogger("perdure.execution")

SHORTEST_PAUSE_SECONDS = 0.001  # of a task that is not due again at once

Tick = Callable[[float], Awaitable[float | None]]  # receives the current time, returns the time of the next call


class PeriodicTask:
    """Calls `tick(now)` again and again: at the time that the last call returned, or earlier if triggered.

    A failed tick is logged, counted in `failures`, and repeated after `interval` seconds. So neither an unavailable
    store nor a defect ends a periodic task.
    """

    def __init__(self, name: str, tick: Tick, clock: Clock, interval: float) -> None:
        self.name = name
        self._tick = tick
        self._clock = clock
        self._interval = interval
        self._due_at: float | None = None
        self._timer: Timer | None = None
        self._triggered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.ticking = False
        self.failures = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"perdure-{self.name}")

    def trigger(self, at: float | None = None) -> None:
        """Call `tick` no later than at this time; at once if no time is given."""
        if at is None or at <= self._clock.now():
            self._triggered.set()
        elif self._due_at is None or at < self._due_at:
            self._set_timer(at)

    @property
    def pending(self) -> bool:
        """Whether a tick is in progress or about to start."""
        return self.ticking or self._triggered.is_set()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stopped = True  # a database driver may lose a cancellation that arrives together with a result
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while not self._stopped:
            await self._triggered.wait()
            self._triggered.clear()
            self._set_timer(None)
            self.ticking = True
            now = self._clock.now()
            try:
                next_at = await self._tick(now)
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled_from_outside(error):
                    raise
                next_at = self._on_failure(error)
            finally:
                self.ticking = False
            if next_at is not None and now < next_at < now + SHORTEST_PAUSE_SECONDS:
                # The timer fired a rounding error early, and would do so again without end.
                next_at = now + SHORTEST_PAUSE_SECONDS
            if next_at is not None:  # a clock that was corrected backwards during the tick must not extend the pause
                next_at = min(next_at, self._clock.now() + max(0.0, next_at - now))
            if next_at is not None and (self._due_at is None or next_at < self._due_at):
                self._set_timer(next_at)  # unless `trigger` set an earlier time during the tick

    def _on_failure(self, error: BaseException) -> float:
        """Log and count a failed tick; return when to repeat it."""
        self.failures += 1
        if isinstance(error, StoreError):
            LOGGER.warning("Periodic task %s failed, will retry: %s", self.name, error)
        else:
            LOGGER.error("Periodic task %s raised, will retry: %r", self.name, error, exc_info=error)
        return self._clock.now() + self._interval

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_at = at
        if at is not None:
            self._timer = self._clock.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._due_at = None
        self._timer = None
        self._triggered.set()


def is_cancelled_from_outside(error: BaseException) -> bool:
    """Return whether the current task is being cancelled, so that it must end.

    A `CancelledError` may also come from something that the task awaits. Then the task has no request to end.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
