"""A scheduler that runs a scenario in every order in which its processes can reach the store.

The scheduler holds every store call of the engines and clients before it is executed, and commits again before their
results are returned. When nothing else can happen, it releases one held call or lets time pass. `in_every_order`
repeats the scenario until every choice has been made at every point.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure.testing import Harness

Choose = Callable[[int], int]
Scenario = Callable[[Choose], Awaitable[None]]

HELD = frozenset(("commit", "claim", "load", "inbox"))
"""The calls whose order can decide a race; the others only read."""


class CallScheduler:
    """Holds calls and lets them through one by one, as `choose` says. `passed` is the order in which it did."""

    def __init__(self, harness: Harness, choose: Choose) -> None:
        self._harness = harness
        self._choose = choose
        self._held: list[tuple[str, asyncio.Future[None]]] = []
        self._open = False
        self._time: list[float] = []
        self.passed: list[str] = []

    def hold(self, who: str, party: Any, calls: frozenset[str] = HELD, *, answers: bool = True) -> None:
        """Hold the calls of this engine or client from now on; commits a second time before their results return."""
        faults = party._session.store
        through = faults._forward

        async def held(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
            if name in calls:
                await self._wait(f"{who} {name}")
            answer = await through(name, call)
            if answers and name == "commit":
                await self._wait(f"{who} hears of it")
            return answer

        faults._forward = held

    def let_pass(self, seconds: float) -> None:
        """Let this much time pass at any one point."""
        self._time.append(seconds)

    async def play(self) -> None:
        """Release held calls in the chosen order until none is left."""
        while True:
            await self._harness.settle()
            options = [who for who, _ in self._held] + [f"{seconds} seconds pass" for seconds in self._time]
            if not options:
                return
            chosen = self._choose(len(options)) if len(options) > 1 else 0
            self.passed.append(options[chosen])
            if chosen < len(self._held):
                self._held.pop(chosen)[1].set_result(None)
            else:
                await self._harness.clock.jump(self._time.pop(chosen - len(self._held)))

    def leave(self) -> None:
        """Stop holding calls."""
        self._open = True

    async def _wait(self, who: str) -> None:
        if not self._open:
            scheduler: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append((who, scheduler))
            await scheduler


def in_every_order(scenario: Scenario, at_most: int = 5_000) -> int:
    """Run the scenario once for each sequence of choices; return their number."""
    prefix: Sequence[int] = ()
    with asyncio.Runner() as runner:  # one event loop for all, so that connections to a server can be used again
        for played in range(1, at_most + 1):
            taken: list[tuple[int, int]] = []

            def choose(options: int, prefix: Sequence[int] = prefix, taken: list[tuple[int, int]] = taken) -> int:
                chosen = prefix[len(taken)] if len(taken) < len(prefix) else 0
                assert chosen < options, "the scenario took another path than before"
                taken.append((chosen, options))
                return chosen

            runner.run(scenario(choose))  # type: ignore[arg-type]
            while taken and taken[-1][0] + 1 == taken[-1][1]:
                taken.pop()
            if not taken:
                return played
            prefix = [chosen for chosen, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError(f"there are more than {at_most} orders")
