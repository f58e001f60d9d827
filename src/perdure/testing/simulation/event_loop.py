"""SimulatedLoop: a deterministic event loop with virtual time.

`current_time` moves to the next timer when no callback is ready. There is no I/O, and there are no threads. Futures and
tasks hash by the order of their creation, not by address, so that a set of them has the same order in every execution
of a seed.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine, Generator
from itertools import count
from typing import Any

from perdure.testing.clock import START

TOO_MANY_ROUNDS = 100_000


class Spinning(AssertionError):
    """The loop iterates without end while virtual time stands still, or waits without a timer."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The event loop of a simulation. All processes and the simulation itself run on this one loop."""

    def __init__(self, start: float = START) -> None:
        self.current_time = start
        self._numbers = count(1)
        self._rounds = 0
        super().__init__(_NoSelector(self))
        # The smallest resolution: only timers that are due exactly now are ready.
        self._clock_resolution = math.ulp(start)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.current_time

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def next_number(self) -> int:
        return next(self._numbers)

    def idle(self, timeout: float | None) -> None:
        """Move to the time of the next timer. A `timeout` of 0 means that callbacks are ready, so time stands still."""
        if timeout == 0:
            self._rounds += 1
            if self._rounds > TOO_MANY_ROUNDS:
                raise Spinning(f"{TOO_MANY_ROUNDS} iterations of the event loop without time passing")
            return
        self._rounds = 0
        timers = self._scheduled  # type: ignore[attr-defined]
        if not timers:
            raise Spinning("the simulation waits, but no timer or callback is left")
        self.current_time = max(self.current_time, timers[0].when())


class _NoSelector(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._simulated = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._simulated.idle(timeout)
        return []


class _Future(asyncio.Future[Any]):
    def __init__(self, loop: SimulatedLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    def __init__(self, work: Any, loop: SimulatedLoop, **options: Any) -> None:
        self._number = loop.next_number()  # first: the base constructor adds the task to a set
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    assert isinstance(loop, SimulatedLoop)
    return _Task(work, loop, **options)
