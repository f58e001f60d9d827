"""MachineClock: the clock of one machine in a test. It may stand still, have a wrong rate, be set or be suspended."""

from __future__ import annotations

from collections.abc import Callable

from perdure.clock import Timer
from perdure.testing import VirtualClock


class MachineClock:
    """Implements `perdure.clock.Clock` on top of the true time."""

    def __init__(self, truth: VirtualClock, rate: float = 1.0) -> None:
        self._truth = truth
        self._rate = rate
        self._true_base = self._local_base = truth.now()
        self._timers: dict[MachineTimer, None] = {}

    def now(self) -> float:
        return self._local_base + (self._truth.now() - self._true_base) * self._rate

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = MachineTimer(self, callback)
        self._timers[timer] = None
        timer.set(when)
        return timer

    def run_at(self, rate: float) -> None:
        """Change the rate; 0 means that the clock and its timers stand still."""
        self._local_base, self._true_base, self._rate = self.now(), self._truth.now(), rate
        for timer in list(self._timers):
            timer.set(timer.when)

    def step(self, seconds: float) -> None:
        """Set the clock. Timers are not affected, like those of an event loop."""
        self._local_base += seconds
        for timer in self._timers:
            timer.when += seconds

    def delay_timers(self, seconds: float) -> None:
        """Delay all timers, as a suspension does to the timers of an event loop. The clock counts the suspension."""
        for timer in list(self._timers):
            timer.set(timer.when + seconds)

    def true_time(self, when: float) -> float | None:
        """Return the true time at which this clock shows `when`; None if it stands still."""
        return None if self._rate == 0 else self._true_base + (when - self._local_base) / self._rate


class MachineTimer:
    """A callback that is scheduled on a `MachineClock`."""

    def __init__(self, clock: MachineClock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback = callback
        self._timer: Timer | None = None
        self.when = 0.0

    def set(self, when: float) -> None:
        self.when = when
        if self._timer is not None:
            self._timer.cancel()
        at = self._clock.true_time(when)
        self._timer = None if at is None else self._clock._truth.call_at(at, self._fire)

    def cancel(self) -> None:
        self._clock._timers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._clock._timers.pop(self, None)
        self._callback()
