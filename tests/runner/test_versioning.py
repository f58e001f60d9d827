"""Changing code under running workflows: `ctx.version`, `ctx.patched`, `ctx.removed`."""

import asyncio

import pytest

from tests.runner.turn_driver import BEGUN_AT, Play, note
from tests.runner.workflows import fetch


async def before(ctx):
    await fetch("a")
    await fetch("b")


def gated(latest):
    async def after(ctx):
        await fetch("a")
        note(ctx.version("gate", latest=latest))
        await fetch("b")
        note(ctx.version("gate", latest=latest))

    return after


def test_a_new_run_gets_the_latest_version_and_keeps_it():
    play = Play(gated(2)).begin()
    play.complete("fetch")
    assert play.notes == [2]
    assert (play.entries["~version/gate"].kind, play.entries["~version/gate"].name) == ("version", "2")
    again = play.replayed_by(gated(3)).begin()
    again.complete("fetch#1")
    assert again.notes == [2, 2]
    play.close()


def test_a_gate_reached_while_replaying_gives_one_and_is_pinned():
    old = Play(before).begin()
    old.complete("fetch")
    old.close()
    play = old.replayed_by(gated(2)).begin()
    assert play.notes == [1]
    assert play.turn.entries == ()
    play.complete("fetch#1")
    assert play.notes == [1, 1]
    assert play.entries["~version/gate"].name == "1"


def test_a_gate_past_the_committed_history_gets_the_latest():
    old = Play(before).begin()
    old.close()
    play = old.replayed_by(gated(2)).begin()
    play.complete("fetch")
    assert play.notes == [2]
    play.close()


def test_a_gate_in_the_first_turn_is_pinned_with_the_first_write():
    def first(latest):
        async def run(ctx):
            note(ctx.version("gate", latest=latest))
            await fetch("a")
            await ctx.sleep(5)

        return run

    play = Play(first(2)).begin()
    assert play.rows == []
    later = play.replayed_by(first(3)).begin()  # nothing was committed: the newer code may still choose
    assert later.notes == [3]
    later.close()
    play.complete("fetch")
    assert "~version/gate" in play.entries
    again = play.replayed_by(first(3)).begin()
    assert again.notes == [2]
    again.close()
    play.close()


def test_patched_is_the_boolean_form():
    async def patched(ctx):
        await fetch("a")
        note(ctx.patched("fix"))
        await fetch("b")

    new = Play(patched).begin()
    new.complete("fetch")
    assert new.notes == [True]
    new.close()
    old = Play(before).begin()
    old.complete("fetch")
    old.close()
    replayed = old.replayed_by(patched).begin()
    assert replayed.notes == [False]
    replayed.close()


def test_gates_are_pinned_each_on_its_own():
    async def two(ctx):
        return [ctx.version("one", latest=4), ctx.version("a/b", latest=5), ctx.version("one", latest=9)]

    assert Play(two).begin().value == [4, 5, 4]


@pytest.mark.parametrize("latest", [0, -1, "2", None])
def test_a_bad_latest_is_refused(latest):
    async def bad(ctx):
        ctx.version("gate", latest=latest)

    assert Play(bad).begin().failure.type == "InvalidArgument"


# --- removed


async def with_old(ctx):
    await fetch("a")
    await fetch.options(name="old")("x")
    await fetch("b")
    return "end"


async def without_old(ctx):
    await fetch("a")
    ctx.removed("old")
    await fetch("b")
    return "end"


def test_a_removed_entry_that_was_settled_is_passed_over():
    play = Play(with_old).begin()
    play.complete("fetch")
    play.complete("old")
    play.complete("fetch#1")
    again = play.replayed_by(without_old).begin()
    assert again.value == "end"


@pytest.mark.parametrize("exposed", [False, True])
def test_a_removed_entry_that_was_under_way_is_passed_over(exposed):
    play = Play(with_old).begin()
    play.complete("fetch")
    if exposed:
        play.expose("old")
    play.close()
    play = play.replayed_by(without_old).begin()
    assert list(play.running) == ["fetch#1"]
    for _ in range(2):
        play = play.crash().begin()
        assert list(play.running) == ["fetch#1"]
    play.complete("fetch#1")
    assert play.value == "end"
    assert play.replayed_by(without_old).begin().value == "end"


def test_a_removed_entry_that_a_run_never_had_is_nothing():
    play = Play(without_old).begin()
    while play.alive:
        play = play.crash().begin()
        play.complete()
    assert play.value == "end"
    assert play.replayed_by(without_old).begin().value == "end"


def test_a_removed_sleep_is_passed_over():
    async def sleeping(ctx):
        await ctx.sleep(10)
        await fetch("a")

    async def awake(ctx):
        ctx.removed("sleep", kind="sleep")
        await fetch("a")

    for advanced in (False, True):
        play = Play(sleeping).begin()
        if advanced:
            play.advance(now=play.turn.wake_at)
        again = play.replayed_by(awake).begin()
        assert list(again.running) == ["fetch"]
        again.close()
        play.close()


def test_a_removed_entry_may_have_the_name_of_the_next_one():
    async def twice(ctx):
        await fetch("old")
        await fetch("kept")
        return "end"

    async def once(ctx):
        ctx.removed("fetch")
        await fetch("kept")
        return "end"

    old = Play(twice).begin()
    old.complete("fetch")
    old.close()
    again = old.replayed_by(once).begin()
    assert list(again.running) == ["fetch#1"]
    again.close()

    new = Play(once).begin()
    assert list(new.running) == ["fetch"]
    new.expose("fetch")
    new = new.crash().begin()
    assert list(new.running) == ["fetch"]
    new.complete("fetch")
    assert new.replayed_by(once).begin().value == "end"
    assert new.replayed_by(once).begin().running == {}


def test_a_gap_of_new_code_is_not_taken_for_a_removed_entry():
    async def side_by_side(ctx):
        ctx.removed("old")
        await asyncio.gather(fetch("a"), fetch("b"))
        return "end"

    play = Play(side_by_side).begin()
    play.complete("fetch#1")
    play = play.crash().begin()
    assert list(play.running) == ["fetch"]
    play.complete("fetch")
    assert play.value == "end"


def test_a_removed_entry_with_a_key_does_not_shift_the_numbers():
    async def keyed(ctx):
        await fetch.options(key="eu")("old")
        await fetch("a")
        return "end"

    async def without(ctx):
        ctx.removed("fetch")
        await fetch("a")
        return "end"

    play = Play(keyed).run()
    assert play.replayed_by(without).begin().value == "end"


def test_a_removed_entry_beside_others_keeps_its_completion_in_order():
    async def beside(ctx):
        await asyncio.gather(fetch.options(name="old")("x"), fetch("a"))
        await ctx.sleep(5)
        return ctx.now().timestamp()

    async def without(ctx):
        ctx.removed("old")
        await fetch("a")
        await ctx.sleep(5)
        return ctx.now().timestamp()

    play = Play(beside).begin()
    play.complete("fetch", now=play.now + 1)
    play.complete("old", now=play.now + 1)
    again = play.crash().replayed_by(without).begin()
    assert again.turn.wake_at == BEGUN_AT + 2 + 5  # as it is on record, although the new code came to it earlier
    again.advance(now=again.turn.wake_at)
    assert again.value == BEGUN_AT + 7
