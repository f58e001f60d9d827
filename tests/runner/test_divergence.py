"""Divergence: a run whose code requests other operations than recorded is held; its code does not see an error."""

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
    """Return a run of `original` that waits for its last step."""
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


def test_unchanged_code_does_not_diverge():
    play = recorded().replayed_by(original).begin()
    assert play.alive
    assert list(play.running) == ["fetch#1"]
    play.close()


def test_changed_name_diverges():
    async def other(ctx):
        await fetch("a")
        await fetch("b")

    held = held_by(other)
    assert (held.location, held.recorded, held.asked) == ("fetch#1", "step 'charge'", "step 'fetch#1'")
    assert held.line == line_of(other, 'fetch("b")')


def test_changed_kind_diverges():
    async def other(ctx):
        await fetch("a")
        await charge("b")
        await charge.options(name="sleep")("c")

    held = held_by(other)
    assert (held.location, held.recorded, held.asked) == ("sleep", "sleep 'sleep'", "step 'sleep'")


def test_changed_key_diverges():
    async def other(ctx):
        await fetch.options(key="eu")("a")

    assert held_by(other).asked == "step 'fetch[eu]'"


def test_changed_order_within_a_scope_diverges():
    async def other(ctx):
        await charge("b")
        await fetch("a")

    held = held_by(other)
    assert (held.recorded, held.asked) == ("step 'fetch'", "step 'charge'")


def test_additional_request_diverges():
    async def other(ctx):
        await fetch("a")
        await ctx.sleep(1)
        await charge("b")

    held = held_by(other)
    assert (held.recorded, held.asked) == ("step 'charge'", "sleep 'sleep'")


def test_missing_request_diverges():
    async def other(ctx):
        await fetch("a")
        await ctx.sleep(10)

    held = held_by(other)
    assert (held.recorded, held.asked) == ("step 'charge'", "sleep 'sleep'")


def test_recorded_entry_that_is_not_requested_diverges():
    async def other(ctx):
        await fetch("a")
        await charge("b")
        await asyncio.Event().wait()

    held = held_by(other)
    assert (held.location, held.recorded, held.asked) == ("sleep", "sleep 'sleep'", "nothing")
    assert held.line == line_of(other, "Event")


def test_end_before_the_last_recorded_entry_diverges():
    async def other(ctx):
        await fetch("a")

    held = held_by(other)
    assert (held.location, held.asked) == ("charge", "nothing")


def test_recorded_scope_that_is_never_opened_diverges():
    async def with_task(ctx):
        await asyncio.gather(helper(1), fetch(2))

    async def without(ctx):
        await fetch(2)
        await fetch(3)

    live = Play(with_task).begin()
    live.complete("helper/fetch")
    held = live.replayed_by(without).begin().held
    assert (held.location, held.asked) == ("helper/fetch", "nothing")
    live.close()


def test_recorded_timer_that_is_not_set_diverges():
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


def test_recorded_cancellation_that_does_not_happen_diverges():
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


def test_result_that_does_not_match_the_changed_type_diverges():
    @step(name="fetch")
    async def typed(what) -> int:
        return 1

    async def other(ctx):
        await typed("a")

    assert held_by(other).location == "fetch"


def test_user_code_does_not_see_a_divergence_except_being_closed():
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


def test_unrecorded_running_step_beside_a_recorded_one_does_not_diverge():
    async def both(ctx):
        await asyncio.gather(fetch("slow"), fetch("quick"))

    live = Play(both).begin()
    live.complete("fetch#1")
    again = live.crash().begin()
    assert again.attempts == {"fetch": 1}
    again.complete("fetch")
    assert again.turn.outcome is not None


def test_unrecorded_sleep_beside_a_recorded_step_diverges():
    async def asleep(ctx):
        await asyncio.gather(ctx.sleep(5), fetch("quick"))

    rows = [step_row("fetch", "quick", ordinal=1, seq=1)]
    assert Play(asleep, rows=rows).begin().held.recorded == "a step that was under way"


def test_request_after_the_last_recorded_entry_is_new():
    rows = [step_row("fetch", "a", ordinal=0, seq=1)]
    play = Play(original, rows=rows).begin()
    assert list(play.running) == ["charge"]
    play.close()


def test_pending_entry_that_is_not_requested_diverges():
    async def nothing(ctx):
        await asyncio.sleep(5)

    rows = [step_row("fetch", ordinal=0, seq=None)]
    assert Play(nothing, rows=rows).begin().held.location == "fetch"


async def with_other_arguments(ctx):
    await fetch("changed")
    await charge("b")
    await ctx.sleep(10)
    await fetch("c")


def test_changed_arguments_are_reported_as_drift(caplog):
    play = recorded().replayed_by(with_other_arguments).begin()
    assert play.turn.drift == ("fetch",)
    assert play.alive
    assert "differ from the recorded ones" in caplog.text
    assert "with_other_arguments" in caplog.text
    play.close()


@pytest.mark.parametrize("how", ["by the caller", "by the workflow"])
def test_changed_arguments_diverge_in_strict_mode(how):
    if how == "by the caller":
        play = recorded().replayed_by(with_other_arguments, strict=True).begin()
    else:
        play = recorded().replayed_by(definition(with_other_arguments, strict=True)).begin()
    assert play.held.location == "fetch"
    assert play.held.recorded == "other arguments"


def test_new_requests_are_numbered_after_all_recorded_ones():
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
    call_numbers = [entry.call_seq for entry in live.entries.values()]
    assert sorted(call_numbers) == list(range(1, len(call_numbers) + 1))
