"""An event loop whose time passes only when nothing else is left to do, and in which nothing depends on addresses.

`moment` is its virtual time: when no call-back is ready it becomes that of the next timer at once. There is no I/O, and
there are no threads. Futures and tasks hash by the order in which they were made, so that a set of them has the same
order in every course of the same seed.
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
    """The loop goes round and round, and no time passes."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Each process and the world itself live on this one loop."""

    def __init__(self, start: float = START) -> None:
        self.moment = start
        self._numbers = count(1)
        self._rounds = 0
        super().__init__(_NoSelector(self))
        # What is due now is ready, and nothing that is due later: the next larger number is too late.
        self._clock_resolution = math.ulp(start)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.moment

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def next_number(self) -> int:
        return next(self._numbers)

    def idle(self, timeout: float | None) -> None:
        """Nothing is ready unless `timeout` is 0: go to the moment of the next timer."""
        if timeout == 0:
            self._rounds += 1
            if self._rounds > TOO_MANY_ROUNDS:
                raise Spinning(f"{TOO_MANY_ROUNDS} rounds of the event loop at one moment")
            return
        self._rounds = 0
        timers = self._scheduled  # type: ignore[attr-defined]
        if not timers:
            raise Spinning("the simulation waits for something, and nothing is left that could happen")
        self.moment = max(self.moment, timers[0].when())


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
        self._number = loop.next_number()  # first: it is put into a set while it is being made
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    assert isinstance(loop, SimulatedLoop)
    return _Task(work, loop, **options)
