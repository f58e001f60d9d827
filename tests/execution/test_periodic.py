"""PeriodicTask: how often a task is called when the times of clock and timers differ by rounding errors."""

import asyncio
from collections.abc import Callable

from perdure.clock import Timer
from perdure.execution.periodic import PeriodicTask
from perdure.testing import VirtualClock


class EarlyClock:
    """A clock whose timers fire a rounding error early, as with an offset to the time of a store."""

    def __init__(self, inner: VirtualClock) -> None:
        self._inner = inner

    def now(self) -> float:
        return self._inner.now()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._inner.call_at(when - 2e-7, callback)


def test_task_whose_timer_fires_early_does_not_spin():
    calls: list[float] = []

    async def main() -> None:
        inner = VirtualClock()
        clock = EarlyClock(inner)
        due_at = clock.now() + 10

        async def tick(now: float) -> float | None:
            calls.append(now)
            assert len(calls) < 10
            return due_at if now < due_at else None

        task = PeriodicTask("early", tick, clock, 5.0)
        task.start()
        task.trigger()
        await inner.advance(20)
        await task.stop()

    asyncio.run(main())
    assert len(calls) == 3
