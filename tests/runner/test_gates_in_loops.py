"""Gates in the body of a loop are pinned per iteration: a living loop takes new code from its next iteration on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Break, Context, Continue
from tests.runner.crash_after_every_turn import check_replay, crashed
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

LAST = 9


async def old(ctx: Context) -> Any:
    async def body(ctx: Context, n: int) -> Any:
        await fetch(n)
        await ctx.sleep(1)
        return Continue(n + 1) if n < LAST else Break(n)

    return await ctx.loop("pages", body, 0)


def new(**options: Any) -> Any:
    async def run(ctx: Context) -> Any:
        async def body(ctx: Context, n: int) -> Any:
            await fetch(n)
            if ctx.patched("checks"):
                note(("new", n))
                await fetch.options(name="check")(n)
            else:
                note(("old", n))
            await ctx.sleep(1)
            assert ctx.version("checks", latest=2) == (2 if ctx.patched("checks") else 1)
            return Continue(n + 1) if n < LAST else Break(n)

        return await ctx.loop("pages", body, 0, **options)

    return run


def play_to(fn: Any, sleeping_in: int) -> Play:
    """Run until the sleep of this iteration."""
    play = Play(fn).begin()
    while f"pages/~{sleeping_in}/sleep" not in play.entries:
        play.move(play.choices()[0])
    return play


@pytest.mark.parametrize("options", [{}, {"prune_every": 1, "keep": 0}])
def test_iteration_under_way_keeps_the_old_branch_and_the_next_one_takes_the_new(options):
    play = play_to(old, 5)
    play.close()
    play = play.replayed_by(new(**options)).begin()
    assert play.notes == [("old", 5)]
    while play.alive:
        check_replay(play)
        notes = play.notes
        play = crashed(play)
        play.notes[:] = notes
        play.move(play.choices()[0])
    assert play.value == LAST
    branches = dict(reversed(each) for each in play.notes)
    assert branches == {5: "old", **dict.fromkeys(range(6, LAST + 1), "new")}


def test_commits_of_several_iterations_are_replayed_with_their_own_pins():
    async def before(ctx: Context) -> Any:
        async def body(ctx: Context, n: int) -> Any:
            await fetch(n)
            return Continue(n + 1) if n < LAST else Break(n)

        return await ctx.loop("pages", body, 0, commit_every=4)

    async def gated(ctx: Context) -> Any:
        async def body(ctx: Context, n: int) -> Any:
            note((n, ctx.version("gate", latest=3)))
            await fetch(n)
            return Continue(n + 1) if n < LAST else Break(n)

        return await ctx.loop("pages", body, 0, commit_every=4)

    play = Play(before).begin()
    for _ in range(6):
        play.complete()
    play.close()
    play = play.replayed_by(gated).begin()
    assert play.notes == [(4, 1), (5, 1), (6, 1)]
    play.complete()
    play.complete()
    play = crashed(play)
    assert play.notes == [(8, 3)]


def test_gates_in_nested_loops_and_tasks_belong_to_the_innermost_iteration():
    async def inner(ctx: Context, n: int) -> Any:
        async def gate() -> int:
            return ctx.version("gate", latest=2)

        task = asyncio.create_task(gate())
        await fetch(n)
        note(await task)
        return Continue(n + 1) if n < 1 else Break(n)

    async def outer(ctx: Context, n: int) -> Any:
        await ctx.loop("inner", inner, 0)
        note(ctx.version("gate", latest=3))
        return Continue(n + 1) if n < 1 else Break(n)

    async def run(ctx: Context) -> Any:
        await ctx.loop("outer", outer, 0)
        return ctx.version("gate", latest=4)

    play = Play(run).run()
    assert play.value == 4
    assert sorted(each for each in play.entries if "~version" in each) == [
        "outer/~0/inner/~0/~version/gate",
        "outer/~0/inner/~1/~version/gate",
        "outer/~0/~version/gate",
        "outer/~1/inner/~0/~version/gate",
        "outer/~1/inner/~1/~version/gate",
        "outer/~1/~version/gate",
        "~version/gate",
    ]


def test_pins_of_pruned_iterations_are_deleted():
    play = play_to(new(prune_every=1, keep=1), 8)
    assert {each for each in play.entries if "~version" in each} == {
        "pages/~7/~version/checks",
        "pages/~8/~version/checks",
    }
    versions = play.runner.state.versions
    assert list(versions._versions) == ["pages/~8"]
    play.close()


def test_iterations_of_one_turn_leave_no_pins_when_they_are_pruned():
    async def run(ctx: Context) -> Any:
        async def body(ctx: Context, n: int) -> Any:
            ctx.version("gate", latest=2)
            if n == 50:
                await ctx.sleep(1)
            return Continue(n + 1) if n < 50 else Break(n)

        return await ctx.loop("pages", body, 0, prune_every=1, keep=1)

    play = Play(run).begin()
    assert {each for each in play.entries if "~version" in each} == {
        "pages/~49/~version/gate",
        "pages/~50/~version/gate",
    }
    play.close()


def test_pin_of_the_whole_run_by_an_older_version_of_perdure_counts_for_the_iteration_under_way():
    play = play_to(new(), 5)
    play.close()
    pin = play.entries["pages/~0/~version/checks"]
    rows = [row for row in play.rows if row.kind != "version"] + [replace(pin, location="~version/checks")]
    later = play.replayed_by(new(), rows=rows).begin()
    assert later.notes == [("new", 5)]
    later.close()
    older = [row for row in rows if row.kind != "version" and row.name != "check"]
    ordinals = [replace(row, ordinal=1) if row.kind == "sleep" else row for row in older]
    later = play.replayed_by(new(), rows=[*ordinals, replace(pin, location="~version/checks", call_seq=0)]).begin()
    assert later.notes == [("old", 5)], "a gate outside of the loop has its own pin"
    later.close()
