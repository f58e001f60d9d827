"""`ctx.removed` for a join, race, map or scope: it accounts for all entries below, completed or pending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Break, Context, Continue
from tests.runner.crash_after_every_turn import check_call_order, check_replay, crashed
from tests.runner.turn_driver import CLOCK, Play
from tests.runner.workflows import fetch


async def inside(ctx: Context, n: int) -> Any:
    async def body(ctx: Context, i: int) -> Any:
        await fetch(f"{n}.{i}")
        return Continue(i + 1) if i < 2 else Break(i)

    await fetch(n)
    async with asyncio.timeout(100):
        await ctx.join(left=fetch("left"), right=ctx.sleep(n))
    return await ctx.loop("pages", body, 0)


async def joined(ctx: Context) -> Any:
    return await ctx.join(inside(ctx, 1), inside(ctx, 2), name="both")


async def raced(ctx: Context) -> Any:
    return await ctx.race(a=inside(ctx, 1), b=inside(ctx, 2), name="both")


async def mapped(ctx: Context) -> Any:
    return await ctx.map(lambda n: inside(ctx, n), [1, 2, 3], concurrency=2, name="both")


async def scoped(ctx: Context) -> Any:
    with ctx.scope("both"):
        return await asyncio.gather(inside(ctx, 1), inside(ctx, 2))


BLOCKS = {"join": joined, "race": raced, "map": mapped, "scope": scoped}


def before(kind: str) -> Any:
    async def run(ctx: Context) -> Any:
        async def aside() -> Any:
            await fetch("aside")
            await ctx.sleep(2)
            return await fetch("aside")

        other = asyncio.create_task(aside(), name="aside")
        await BLOCKS[kind](ctx)
        await ctx.join(one=fetch("kept"), name="both")
        await other
        return await fetch("end")

    return run


def after(kind: str) -> Any:
    async def run(ctx: Context) -> Any:
        async def aside() -> Any:
            await fetch("aside")
            await ctx.sleep(2)
            return await fetch("aside")

        other = asyncio.create_task(aside(), name="aside")
        ctx.removed("both", kind)
        await ctx.join(one=fetch("kept"), name="both")
        await other
        return await fetch("end")

    return run


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("moves", range(0, 40, 3))
def test_run_continues_without_the_block_at_any_time(kind, moves):
    play = Play(before(kind)).begin()
    for _ in range(moves):
        if not play.alive or not (choices := play.choices()):
            break
        play.move(choices[-1] if choices[-1] == CLOCK and len(choices) == 1 else choices[0])
    if not play.alive:
        assert play.replayed_by(after(kind)).begin().value == play.value
        return
    play.close()
    play = play.replayed_by(after(kind)).begin()
    while play.alive and (choices := play.choices()):
        check_replay(play)
        play = crashed(play)
        play.move(play.choices()[0])
    assert play.value == Play(after(kind)).run().value
    check_call_order(play)


@pytest.mark.parametrize("kind", BLOCKS)
def test_new_run_is_not_mistaken_for_one_with_the_block(kind):
    """The new code has a join of the same name. Its entries must not be skipped as those of the removed block."""
    play = Play(after(kind)).begin()
    while play.alive and (choices := play.choices()):
        check_replay(play)
        play = crashed(play)
        play.move(choices[0])
    assert play.value == play.replayed_by(after(kind)).begin().value
    assert "both/one/fetch" in play.entries


def test_without_removed_the_missing_block_diverges():
    async def missing(ctx: Context) -> Any:
        return await fetch("end")

    play = Play(joined).begin()
    play.complete()
    play.close()
    assert play.replayed_by(missing).begin().held.kind == "diverged"


def test_removed_loop_accounts_for_its_iterations():
    async def with_loop(ctx: Context) -> Any:
        async def body(ctx: Context, i: int) -> Any:
            await fetch(i)
            return Continue(i + 1) if i < 3 else Break(i)

        await ctx.loop("pages", body, 0)
        return await fetch("end")

    async def without_loop(ctx: Context) -> Any:
        ctx.removed("pages", "loop")
        return await fetch("end")

    for completed in range(6):
        play = Play(with_loop).begin()
        for _ in range(completed):
            play.complete()
        play.close()
        assert play.replayed_by(without_loop).run().value == Play(without_loop).run().value


def test_deferred_that_a_removed_branch_has_received_keeps_its_value():
    async def wait(ctx: Context) -> Any:
        return await ctx.deferred("review", int)

    async def old(ctx: Context) -> Any:
        await ctx.join(review=wait(ctx))
        return await ctx.sleep(5)

    async def new(ctx: Context) -> Any:
        ctx.removed("join", "join")
        await ctx.sleep(5)
        return await wait(ctx)

    play = Play(old).begin()
    play.settle_deferred("review", 7)
    play.close()
    play = play.replayed_by(new).begin()
    play = crashed(play)
    play.advance(now=1_005.0)
    assert play.value == 7
