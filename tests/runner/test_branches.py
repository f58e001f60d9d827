"""join, race and map: what comes back, what is named how, and what happens to the others."""

import asyncio

import pytest

from perdure import CriticalError, JoinError, RaceError, step
from tests.runner.turn_driver import Play, note


@step(retry=None)
async def fetch(what):
    if what == "boom":
        raise CriticalError("boom")
    return what


async def pair(first, second):
    return [await fetch(first), await fetch(second)]


def asked(play):
    return [row.location for row in sorted(play.entries.values(), key=lambda row: row.call_seq) if row.kind == "step"]


# --- join


def test_join_of_keywords_returns_a_dict_and_names_its_branches():
    async def joined(ctx):
        return await ctx.join(user=fetch("ada"), posts=pair(1, 2))

    play = Play(joined).run()
    assert play.value == {"user": "ada", "posts": [1, 2]}
    assert asked(play) == ["join/user/fetch", "join/posts/fetch", "join/posts/fetch#1"]


def test_join_returns_a_tuple_for_positions_and_accepts_a_dict_and_a_name():
    async def joined(ctx):
        by_position = await ctx.join(fetch(1), fetch(2))
        assert isinstance(by_position, tuple)
        return by_position, await ctx.join({"a/b": fetch(3)}, name="all of them"), await ctx.join()

    play = Play(joined).run()
    assert play.value == [[1, 2], {"a/b": 3}, {}]
    assert asked(play) == ["join/~0/fetch", "join/~1/fetch", "all of them/a%2Fb/fetch"]


def test_join_waits_for_all_branches_and_collects_their_failures():
    async def joined(ctx):
        try:
            await ctx.join(good=pair(1, 2), bad=fetch("boom"), worse=pair("boom", 3))
        except JoinError as error:
            return {branch: type(each).__name__ for branch, each in error.errors.items()}

    play = Play(joined).run()
    assert play.value == {"bad": "StepFailed", "worse": "StepFailed"}
    assert "join/good/fetch#1" in asked(play), "the good branch was not seen to its end"


def test_cancelled_join_cancels_its_branches_and_waits_for_them():
    async def tidy():
        try:
            await fetch("work")
        finally:
            note("tidying")
            await fetch("tidied")

    async def joined(ctx):
        await ctx.join(a=tidy(), b=tidy())

    play = Play(joined).begin()
    play.cancel()
    assert play.cancelled == ["join/a/fetch", "join/b/fetch"]
    assert list(play.attempts) == ["join/a/fetch#1", "join/b/fetch#1"]
    while play.running:
        play.complete()
    assert play.was_cancelled
    assert play.notes == ["tidying", "tidying"]


def test_branches_by_position_and_by_name_are_rejected():
    async def mixed(ctx):
        work = fetch(1), fetch(2)
        try:
            await ctx.join(work[0], other=work[1])
        finally:
            for each in work:
                each.close()

    assert Play(mixed).run().failure.type == "InvalidArgument"


# --- race


def test_race_returns_first_success_and_cancels_steps_of_losers_at_once():
    async def raced(ctx):
        winner, value = await ctx.race(slow=fetch("slow"), fast=fetch("fast"), limit=ctx.sleep(5))
        return winner, value

    play = Play(raced).begin()
    play.complete("race/fast/fetch")
    assert play.value == ["fast", "fast"]
    assert play.cancelled == ["race/slow/fetch"]
    assert play.entries["race"].value == b'"fast"'
    assert str(play.entries["race/limit/sleep"].status) == "cancelled"


def test_race_does_not_wait_for_losers_but_runs_their_handlers():
    async def slow():
        try:
            await fetch("slow")
        finally:
            await fetch("cleanup")
            note("cleaned up")

    async def raced(ctx):
        winner = await ctx.race(work=slow(), limit=ctx.sleep(5))
        note(winner[0])
        return await fetch("after")

    play = Play(raced).begin()
    play.advance(now=play.turn.wake_at)
    assert play.notes == ["limit"]
    assert set(play.attempts) == {"race/work/fetch#1", "fetch"}
    play.complete("race/work/fetch#1")
    play.complete("fetch")
    assert play.notes == ["limit", "cleaned up"]
    assert play.value == "after"


def test_failed_branch_does_not_win_a_race():
    async def raced(ctx):
        return await ctx.race(bad=fetch("boom"), good=pair(1, 2))

    assert Play(raced).run().value == ["good", [1, 2]]


def test_race_raises_if_all_branches_fail():
    async def raced(ctx):
        try:
            await ctx.race(a=fetch("boom"), b=fetch("boom"))
        except RaceError as error:
            return sorted(error.errors)

    assert Play(raced).run().value == ["a", "b"]


def test_race_without_branches_is_rejected():
    async def raced(ctx):
        await ctx.race()

    assert Play(raced).run().failure.type == "InvalidArgument"


# --- map


def test_map_returns_results_in_order_and_limits_concurrency():
    async def mapped(ctx):
        return await ctx.map(fetch, range(7), concurrency=3)

    play = Play(mapped).begin()
    most = 0
    while play.running:
        most = max(most, len(play.running))
        play.complete(list(play.running)[-1])
    assert play.value == [0, 1, 2, 3, 4, 5, 6]
    assert most == 3
    assert "map/~6/fetch" in play.entries


def test_first_failure_of_a_map_cancels_the_other_calls():
    async def mapped(ctx):
        return await ctx.map(fetch, [1, "boom", 2, 3, 4], concurrency=3, name="pages")

    play = Play(mapped).begin()
    play.complete("pages/~1/fetch")
    assert play.failure.type == "StepFailed"
    assert play.cancelled == ["pages/~0/fetch", "pages/~2/fetch"]
    assert "pages/~3/fetch" not in play.entries


def test_map_without_items_returns_an_empty_list():
    async def mapped(ctx):
        return await ctx.map(fetch, [])

    assert Play(mapped).run().value == []


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_invalid_concurrency_is_rejected(bad):
    async def mapped(ctx):
        return await ctx.map(fetch, [1], concurrency=bad)

    assert Play(mapped).run().failure.type == "InvalidArgument"


def test_asyncio_tasks_and_branches_can_be_nested():
    async def nested(ctx):
        async def inner(number):
            return await ctx.race(work=ctx.map(fetch, [number, number + 1]), limit=ctx.sleep(50))

        joined = ctx.join(a=inner(1), b=asyncio.gather(fetch(3), fetch(4)))
        return await asyncio.wait_for(joined, 100)

    assert Play(nested).run().value == {"a": ["work", [1, 2]], "b": [3, 4]}
