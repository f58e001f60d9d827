"""Divergence: code that asks for something else than was recorded is held, and sees nothing of it."""

import asyncio
import inspect

import pytest

from perdure.workflows.steps import step
from tests.runner.turn_driver import Play, definition, note, step_row
from tests.runner.workflows import fetch, helper


@step
async def charge(what):
    return what


async def original(ctx):
    await fetch("a")
    await charge("b")
    await ctx.sleep(10)
    await fetch("c")


def recorded():
    """A run of `original` that waits for its last step."""
    play = Play(original).begin()
    play.complete("fetch")
    play.complete("charge")
    play.advance(now=play.turn.wake_at)
    play.close()
    return play


def held_by(fn):
    play = recorded().replayed_by(fn).begin()
    assert (play.turn.entries, play.turn.effects, play.turn.outcome) == ((), (), None)
    assert play.held.kind == "diverged"
    assert play.held.location is not None
    assert play.held.location in play.held.reason
    return play.held


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    number = next(index for index, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number} in {fn.__name__}"


def test_the_same_code_is_not_held():
    play = recorded().replayed_by(original).begin()
    assert play.alive
    assert list(play.running) == ["fetch#1"]
    play.close()


def test_another_name():
    async def other(ctx):
        await fetch("a")
        await fetch("b")

    held = held_by(other)
    assert (held.location, held.recorded, held.call_seq) == ("fetch#1", "step 'charge'", "step 'fetch#1'")
    assert held.line == line_of(other, 'fetch("b")')


def test_another_kind():
    async def other(ctx):
        await fetch("a")
        await charge("b")
        await charge.options(name="sleep")("c")

    held = held_by(other)
    assert (held.location, held.recorded, held.call_seq) == ("sleep", "sleep 'sleep'", "step 'sleep'")


def test_another_key():
    async def other(ctx):
        await fetch.options(key="eu")("a")

    assert held_by(other).call_seq == "step 'fetch[eu]'"


def test_another_order_within_a_scope():
    async def other(ctx):
        await charge("b")
        await fetch("a")

    held = held_by(other)
    assert (held.recorded, held.call_seq) == ("step 'fetch'", "step 'charge'")


def test_an_extra_ask():
    async def other(ctx):
        await fetch("a")
        await ctx.sleep(1)
        await charge("b")

    held = held_by(other)
    assert (held.recorded, held.call_seq) == ("step 'charge'", "sleep 'sleep'")


def test_a_missing_ask():
    async def other(ctx):
        await fetch("a")
        await ctx.sleep(10)

    held = held_by(other)
    assert (held.recorded, held.call_seq) == ("step 'charge'", "sleep 'sleep'")


def test_a_record_that_nobody_asks_for():
    async def other(ctx):
        await fetch("a")
        await charge("b")
        await asyncio.Event().wait()

    held = held_by(other)
    assert (held.location, held.recorded, held.call_seq) == ("sleep", "sleep 'sleep'", "nothing")
    assert held.line == line_of(other, "Event")


def test_an_end_before_the_last_record():
    async def other(ctx):
        await fetch("a")

    held = held_by(other)
    assert (held.location, held.call_seq) == ("charge", "nothing")


def test_a_scope_that_is_never_opened():
    async def with_task(ctx):
        await asyncio.gather(helper(1), fetch(2))

    async def without(ctx):
        await fetch(2)
        await fetch(3)

    live = Play(with_task).begin()
    live.complete("helper/fetch")
    held = live.replayed_by(without).begin().held
    assert (held.location, held.call_seq) == ("helper/fetch", "nothing")
    live.close()


def test_a_timer_that_does_not_stand_any_more():
    async def with_timer(ctx):
        await asyncio.sleep(5)
        await fetch("a")

    async def without(ctx):
        await fetch("a")

    live = Play(with_timer).begin()
    live.advance(now=live.turn.wake_at)
    held = live.replayed_by(without).begin().held
    assert (held.location, held.recorded) == ("~timer", "a timer that fired")
    live.close()


def test_something_cancelled_that_is_not_cancelled_any_more():
    async def giving_up(ctx):
        task = asyncio.create_task(fetch("a"))
        await charge("b")
        task.cancel()
        await charge("c")

    async def keeping(ctx):
        task = asyncio.create_task(fetch("a"))
        await charge("b")
        await charge("c")
        await task

    live = Play(giving_up).begin()
    live.complete("charge")
    held = live.replayed_by(keeping).begin().held
    assert held.recorded == "step 'fetch', cancelled"
    live.close()


def test_a_result_that_no_longer_fits_its_type():
    @step(name="fetch")
    async def typed(what) -> int:
        return 1

    async def other(ctx):
        await typed("a")

    assert held_by(other).location == "fetch"


def test_user_code_sees_nothing_of_it_but_being_closed():
    async def other(ctx):
        try:
            await fetch("a")
            await fetch("b")
        except BaseException as error:
            note(type(error))
            await charge("never")
        finally:
            note("finally")

    play = recorded().replayed_by(other)
    play.begin()
    assert play.held.kind == "diverged"
    assert set(play.notes) <= {GeneratorExit, "finally"}
    assert "charge" not in {row.location for row in play.turn.entries}


def test_a_step_under_way_beside_a_recorded_one_is_a_gap_and_no_divergence():
    async def both(ctx):
        await asyncio.gather(fetch("slow"), fetch("quick"))

    live = Play(both).begin()
    live.complete("fetch#1")
    again = live.crash().begin()
    assert again.attempts == {"fetch": 1}
    again.complete("fetch")
    assert again.turn.outcome is not None


def test_a_gap_takes_no_sleep():
    async def asleep(ctx):
        await asyncio.gather(ctx.sleep(5), fetch("quick"))

    rows = [step_row("fetch", "quick", ordinal=1, seq=1)]
    assert Play(asleep, rows=rows).begin().held.recorded == "a step that was under way"


def test_an_ask_past_the_last_record_is_new():
    rows = [step_row("fetch", "a", ordinal=0, seq=1)]
    play = Play(original, rows=rows).begin()
    assert list(play.running) == ["charge"]
    play.close()


def test_a_pending_record_must_be_asked_for_too():
    async def nothing(ctx):
        await asyncio.sleep(5)

    rows = [step_row("fetch", ordinal=0, seq=None)]
    assert Play(nothing, rows=rows).begin().held.location == "fetch"


async def with_other_arguments(ctx):
    await fetch("changed")
    await charge("b")
    await ctx.sleep(10)
    await fetch("c")


def test_other_arguments_are_reported_and_no_divergence(caplog):
    play = recorded().replayed_by(with_other_arguments).begin()
    assert play.turn.drift == ("fetch",)
    assert play.alive
    assert "differ from the recorded ones" in caplog.text
    assert "with_other_arguments" in caplog.text
    play.close()


@pytest.mark.parametrize("how", ["by the caller", "by the workflow"])
def test_other_arguments_are_divergence_when_strict(how):
    if how == "by the caller":
        play = recorded().replayed_by(with_other_arguments, strict=True).begin()
    else:
        play = recorded().replayed_by(definition(with_other_arguments, strict=True)).begin()
    assert play.held.location == "fetch"
    assert play.held.recorded == "other arguments"


def test_new_asks_are_numbered_after_all_that_is_on_record():
    async def timers(ctx):
        await asyncio.sleep(1)
        await fetch("a")
        ctx.version("gate", latest=1)
        await asyncio.sleep(1)
        await fetch("b")
        await fetch("c")

    live = Play(timers)
    live.run()
    cold = Play(timers).begin()
    while cold.alive:
        cold = cold.crash().begin()
        if cold.alive:
            cold.move(cold.choices()[0])
    assert [(row.location, row.call_seq) for row in cold.rows] == [(row.location, row.call_seq) for row in live.rows]
    asked = [entry.call_seq for entry in live.entries.values()]
    assert sorted(asked) == list(range(1, len(asked) + 1))
