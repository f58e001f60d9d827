"""The cost of a branch, item or iteration does not depend on how many others run. Counted in calls, not in time."""

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from perdure import Break, Context, Continue, RaceError, step
from tests.runner.turn_driver import Play

FEW, MANY = 8, 160
FACTOR = 1.5  # a cost in proportion to the number of running branches would give 20


@step(retry=None)
async def visit(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return number


async def map_items(ctx: Context, count: int) -> int:
    return len(await ctx.map(visit, range(2 * count), concurrency=count))


async def join_branches(ctx: Context, count: int) -> int:
    return len(await ctx.join(*(visit(number) for number in range(count))))


async def race_that_all_lose(ctx: Context, count: int) -> int:
    try:
        await ctx.race(*(visit(-1 - number) for number in range(count)))
    except RaceError as error:
        return len(error.errors)
    raise AssertionError("no branch can win")


async def loops_side_by_side(ctx: Context, count: int) -> int:
    async def iteration(ctx: Context, number: int) -> Continue[int] | Break[int]:
        extra = asyncio.create_task(asyncio.sleep(1_000))
        await visit(number)
        extra.cancel()
        return Continue(number + 1) if number < 3 else Break(number)

    async def branch(number: int) -> int:
        return await ctx.loop("loop", iteration, 0, prune_every=1, keep=1)

    return len(await ctx.join(*(branch(number) for number in range(count))))


async def tasks_as_completed(ctx: Context, count: int) -> int:
    return len([await each for each in asyncio.as_completed([visit(number) for number in range(count)])])


def count_calls(fn: Callable[[], Any]) -> int:
    """Return the number of calls of Python and C functions that a function makes."""
    count = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def calls_live_and_on_replay(program: Any, count: int) -> tuple[float, float]:
    """Execute a program. Return the calls of the runner per branch, live and for a replay of the whole run."""
    play = Play(program, count)
    counted = 0
    advance = play.runner.advance

    def counting(*args: Any) -> Any:
        nonlocal counted
        turns: list[Any] = []
        counted += count_calls(lambda: turns.append(advance(*args)))
        return turns[0]

    play.runner = Counted(play.runner, counting)  # type: ignore[assignment]
    play.run()
    assert play.turn.held is None, play.turn.held
    cold = play.replayed_by(program)
    replay = count_calls(lambda: cold.runner.advance(cold.now))
    return counted / count, replay / count


class Counted:
    """A runner whose turns are counted."""

    def __init__(self, runner: Any, advance: Callable[..., Any]) -> None:
        self._runner = runner
        self.advance = advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


PROGRAMS = [map_items, join_branches, race_that_all_lose, loops_side_by_side, tasks_as_completed]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_cost_of_a_branch_does_not_depend_on_the_number_of_branches(program):
    live_of_few, replay_of_few = calls_live_and_on_replay(program, FEW)
    live_of_many, replay_of_many = calls_live_and_on_replay(program, MANY)
    assert live_of_many < FACTOR * live_of_few
    assert replay_of_many < FACTOR * replay_of_few
