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


def test_new_run_pins_the_latest_version():
    play = Play(gated(2)).begin()
    play.complete("fetch")
    assert play.notes == [2]
    assert (play.entries["~version/gate"].kind, play.entries["~version/gate"].name) == ("version", "2")
    again = play.replayed_by(gated(3)).begin()
    again.complete("fetch#1")
    assert again.notes == [2, 2]
    play.close()


def test_gate_reached_during_replay_returns_one_and_is_pinned():
    old = Play(before).begin()
    old.complete("fetch")
    old.close()
    play = old.replayed_by(gated(2)).begin()
    assert play.notes == [1]
    assert play.turn.entries == ()
    play.complete("fetch#1")
    assert play.notes == [1, 1]
    assert play.entries["~version/gate"].name == "1"


def test_gate_after_the_committed_history_returns_the_latest_version():
    old = Play(before).begin()
    old.close()
    play = old.replayed_by(gated(2)).begin()
    play.complete("fetch")
    assert play.notes == [2]
    play.close()


def test_gate_in_the_first_turn_is_pinned_with_the_first_write():
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


def test_patched_is_the_boolean_form_of_version():
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


def test_gates_are_pinned_independently():
    async def two(ctx):
        return [ctx.version("one", latest=4), ctx.version("a/b", latest=5), ctx.version("one", latest=9)]

    assert Play(two).begin().value == [4, 5, 4]


@pytest.mark.parametrize("latest", [0, -1, "2", None])
def test_invalid_latest_is_rejected(latest):
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


def test_removed_entry_that_was_completed_is_skipped():
    play = Play(with_old).begin()
    play.complete("fetch")
    play.complete("old")
    play.complete("fetch#1")
    again = play.replayed_by(without_old).begin()
    assert again.value == "end"


@pytest.mark.parametrize("exposed", [False, True])
def test_removed_entry_that_was_running_is_skipped(exposed):
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


def test_removed_entry_that_was_never_recorded_is_ignored():
    play = Play(without_old).begin()
    while play.alive:
        play = play.crash().begin()
        play.complete()
    assert play.value == "end"
    assert play.replayed_by(without_old).begin().value == "end"


def test_removed_sleep_is_skipped():
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


def test_removed_entry_can_have_the_name_of_the_next_entry():
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


def test_unrecorded_step_is_not_mistaken_for_a_removed_entry():
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


def test_removed_entry_with_a_key_does_not_shift_numbering():
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


def test_removed_concurrent_entry_keeps_its_position_in_the_completion_order():
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
