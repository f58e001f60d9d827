"""Cancel, timeouts of the run, and the end of the function: handlers run, remaining tasks are cancelled."""

import asyncio
import contextlib
import gc
import logging

import pytest

from perdure.model.records import EntryStatus, Message
from perdure.model.turns import Failed, MessageReceived
from perdure.retry import Retry
from perdure.runner import eviction as closing
from perdure.runner.event_loop import WorkflowLoop
from perdure.workflows.steps import step
from tests.runner.turn_driver import BEGUN_AT, Play, note
from tests.runner.workflows import fetch, helper


async def waiting(ctx):
    try:
        await ctx.sleep(100)
    except asyncio.CancelledError:
        note("cancelled")
        await fetch("clean up")
        note("cleaned up")
        raise


def test_cancel_raises_and_handlers_can_make_durable_calls():
    play = Play(waiting).begin()
    turn = play.cancel()
    assert turn.consumed == (1,)
    assert {(entry.location, entry.kind, entry.status) for entry in turn.entries} == {
        ("~cancel", "cancel", EntryStatus.SUCCEEDED),
        ("sleep", "sleep", EntryStatus.CANCELLED),
    }
    assert play.attempts == {"fetch": 1}
    play.complete("fetch")
    assert play.notes == ["cancelled", "cleaned up"]
    assert play.was_cancelled


def test_cancel_is_replayed_at_the_same_point():
    play = Play(waiting).begin()
    play.cancel()
    again = play.crash().begin()
    assert (again.notes, again.attempts, again.turn.entries) == (["cancelled"], {"fetch": 1}, ())
    again.complete("fetch")
    assert again.was_cancelled
    assert again.replayed_by(waiting).begin().was_cancelled


def test_cancel_is_raised_once():
    async def slow_to_stop(ctx):
        try:
            await ctx.sleep(100)
        except asyncio.CancelledError:
            note("cancelled")
            await ctx.sleep(5)
            note("slept")

    play = Play(slow_to_stop).begin()
    play.cancel()
    turn = play.cancel()
    assert (turn.entries, turn.consumed) == ((), (2,))
    play.advance(now=play.turn.wake_at)
    assert play.notes == ["cancelled", "slept"]
    assert play.was_cancelled


@pytest.mark.parametrize("how", ["returns", "raises", "reraises"])
def test_cancelled_run_ends_cancelled_even_if_the_function_returns_or_raises(how):
    async def stopping(ctx):
        try:
            await ctx.sleep(100)
        except asyncio.CancelledError:
            if how == "returns":
                return "fine"
            if how == "raises":
                raise ValueError("while stopping") from None
            raise

    play = Play(stopping).begin()
    logging.disable(logging.CRITICAL)
    try:
        play.cancel()
    finally:
        logging.disable(logging.NOTSET)
    assert play.was_cancelled


def test_run_that_suppresses_a_cancel_ends_cancelled():
    async def deaf(ctx):
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.sleep(100)
        for number in range(3):
            await fetch(number)
        return "went on"

    play = Play(deaf).begin()
    play.cancel()
    for _ in range(3):
        play = play.crash().begin()
        play.complete()
    assert play.was_cancelled


def test_cancel_reaches_all_awaited_tasks_and_their_steps():
    async def member(number):
        try:
            await fetch(number)
        except asyncio.CancelledError:
            note(number)
            await fetch(["clean up", number])
            raise

    async def group(ctx):
        try:
            async with asyncio.TaskGroup() as members:
                for number in range(3):
                    members.create_task(member(number))
        finally:
            await fetch("outer")

    play = Play(group).begin()
    play.cancel()
    assert sorted(play.cancelled) == ["member#1/fetch", "member#2/fetch", "member/fetch"]
    assert sorted(play.attempts) == ["member#1/fetch#1", "member#2/fetch#1", "member/fetch#1"]
    notes = list(play.notes)
    play = play.crash().begin()
    assert play.notes == notes
    while play.alive:
        play.complete()
    assert play.was_cancelled


def test_cancel_and_result_in_one_turn_are_applied_in_input_order():
    async def one(ctx):
        try:
            note(await fetch("a"))
            await ctx.sleep(5)
        except asyncio.CancelledError:
            note("cancelled")
            raise

    cancel = MessageReceived(Message(id="m", kind="cancel", number=1))
    play = Play(one).begin()
    play.advance(play.outcome_of_body("fetch"), cancel)
    assert play.notes == ["a", "cancelled"]
    play = Play(one).begin()
    late = play.outcome_of_body("fetch")
    play.advance(cancel, late)
    assert play.notes == ["cancelled"]
    assert play.entries["fetch"].status is EntryStatus.CANCELLED


def test_run_that_cancels_itself_fails():
    async def giving_up(ctx):
        raise asyncio.CancelledError("mine")

    assert Play(giving_up).begin().failure.type == "CancelledError"


def test_task_that_cancels_itself_replays_identically():
    async def myself(ctx):
        await fetch(0)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await fetch(1)
        except asyncio.CancelledError:
            task.uncancel()
            await fetch(2)
            return "cancelled"

    play = Play(myself).run()
    assert play.value == "cancelled"
    assert play.replayed_by(myself).begin().value == "cancelled"


# --- limits of the run


async def limited(ctx):
    try:
        await ctx.sleep(1000)
    except asyncio.CancelledError:
        await fetch("clean up")
        return "ignored"


def test_run_timeout_cancels_the_function_and_fails_the_run():
    play = Play(limited, deadline_at=BEGUN_AT + 60).begin()
    assert play.turn.wake_at == BEGUN_AT + 60
    play.advance(now=BEGUN_AT + 59)
    assert play.attempts == {}
    play.advance(now=BEGUN_AT + 60)
    play = play.crash().begin()
    play.complete("fetch")
    assert play.failure.type == "TimeoutError"
    assert "timeout" in play.failure.message


def test_run_timeout_cancels_a_running_step():
    async def busy(ctx):
        await fetch("for ever")

    play = Play(busy, deadline_at=BEGUN_AT + 60).begin()
    assert play.turn.wake_at == BEGUN_AT + 60
    play.advance(now=BEGUN_AT + 61)
    assert play.cancelled == ["fetch"]
    assert play.failure.type == "TimeoutError"


def test_result_in_the_same_turn_as_the_timeout_counts():
    async def just(ctx):
        return await fetch("in time")

    play = Play(just, deadline_at=BEGUN_AT + 60).begin()
    play.complete("fetch", now=BEGUN_AT + 60)
    assert play.value == "in time"


def test_max_suspend_limits_a_single_suspension():
    async def several(ctx):
        for _ in range(3):
            await ctx.sleep(50)
        await ctx.sleep(70)

    play = Play(several, max_suspend=60.0).begin()
    for _ in range(3):
        assert play.turn.wake_at == play.now + 50
        play = play.crash().begin()
        play.advance(now=play.turn.wake_at)
    assert play.turn.wake_at == play.now + 60
    play = play.crash().begin()
    play.advance(now=play.turn.wake_at)
    assert play.failure.type == "TimeoutError"
    assert "max_suspend" in play.failure.message


def test_max_suspend_does_not_count_the_time_of_a_step():
    async def busy(ctx):
        await fetch("long")
        await ctx.sleep(50)
        return "end"

    play = Play(busy, max_suspend=60.0).begin()
    assert play.turn.wake_at is None
    play.complete("fetch", now=BEGUN_AT + 500)
    assert play.turn.wake_at == BEGUN_AT + 550
    play.advance(now=play.turn.wake_at)
    assert play.value == "end"


def test_max_suspend_counts_a_retry_delay_from_the_failed_attempt():
    @step(retry=Retry(initial=100, max_delay=100, jitter=0.2))
    async def failing():
        raise ValueError("no")

    async def one(ctx):
        await failing()

    play = Play(one, max_suspend=60.0).begin()
    play.complete("failing", now=BEGUN_AT + 500)
    assert play.alive
    assert play.turn.wake_at == pytest.approx(BEGUN_AT + 560)
    play = play.crash().begin()
    assert play.alive
    assert play.turn.wake_at == pytest.approx(BEGUN_AT + 560)
    play.advance(now=BEGUN_AT + 561)
    assert play.failure.type == "TimeoutError"


def test_timeout_after_a_cancel_has_no_effect():
    play = Play(limited, deadline_at=BEGUN_AT + 60).begin()
    play.cancel()
    play.advance(now=BEGUN_AT + 100)
    play.complete("fetch")
    assert play.was_cancelled


# --- the end of the function


def test_tasks_left_open_are_cancelled_with_their_steps_and_not_awaited():
    async def leaving(ctx):
        async def background():
            try:
                await fetch("background")
            finally:
                note("finally")
                await fetch("never")
                note("never")

        task = asyncio.create_task(background())
        await fetch("main")
        assert not task.done()
        return "end"

    play = Play(leaving).begin()
    play.complete("fetch")
    assert play.value == "end"
    assert play.cancelled == ["background/fetch"]
    assert play.notes == ["finally"]
    assert play.entries["background/fetch"].status is EntryStatus.CANCELLED
    assert "background/fetch#1" not in play.entries
    assert play.replayed_by(leaving).begin().turn.entries == ()


def test_handler_with_a_durable_call_does_not_spin_at_the_end_of_a_run(monkeypatch):
    """A handler that makes a durable call is left waiting and does not spin."""
    ran = []
    original = WorkflowLoop.drain

    def counting(self, **how):
        stopped = original(self, **how)
        ran.append(self.callbacks)
        return stopped

    monkeypatch.setattr(WorkflowLoop, "drain", counting)

    async def leaving(ctx):
        async def background():
            try:
                await ctx.sleep(100)
            finally:
                await fetch("never")

        task = asyncio.create_task(background())
        await fetch("main")
        return task.done()

    play = Play(leaving).begin()
    play.complete("fetch")
    assert play.value is False
    assert max(ran) < 20


def test_unretrieved_task_error_is_logged_with_its_location(caplog):
    async def losing(ctx):
        async def background():
            await fetch("boom")

        asyncio.create_task(background())  # noqa: RUF006
        await asyncio.sleep(50)
        return "end"

    play = Play(losing).begin()
    play.complete("background/fetch")
    play.advance(now=play.turn.wake_at)
    assert play.value == "end"
    gc.collect()
    assert "run run-1, scope background" in caplog.text
    assert "boom" in caplog.text


def test_system_exit_fails_the_run_and_nothing_else(caplog):
    async def exiting(ctx):
        asyncio.create_task(helper(1))  # noqa: RUF006
        await asyncio.sleep(0)
        raise SystemExit(3)

    play = Play(exiting).begin()
    assert play.failure.type == "SystemExit"
    assert play.entries["helper/fetch"].status is EntryStatus.CANCELLED
    del play
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_system_exit_in_a_task_fails_the_run(caplog):
    async def exiting(ctx):
        async def background():
            await fetch("a")
            raise SystemExit(3)

        await asyncio.gather(background(), ctx.sleep(5))

    play = Play(exiting).begin()
    play.complete("background/fetch")
    assert play.failure.type == "SystemExit"
    assert play.entries["sleep"].status is EntryStatus.CANCELLED


def test_keyboard_interrupt_abandons_the_turn():
    async def interrupted(ctx):
        try:
            await fetch("a")
            raise KeyboardInterrupt
        finally:
            note("finally")

    play = Play(interrupted).begin()
    live = set(closing.LIVE)
    with pytest.raises(KeyboardInterrupt):
        play.complete("fetch")
    assert play.rows == []
    assert len(closing.LIVE) == len(live) - 1


def test_retry_policy_that_raises_does_not_break_the_run(caplog):
    def broken(error):
        raise ZeroDivisionError

    async def failing(ctx):
        raise ValueError("no")

    play = Play(failing, retry=Retry(retry_on=broken)).begin()
    assert play.failure.type == "ValueError"
    assert isinstance(play.outcome, Failed)
    assert not play.outcome.retryable


def test_unsupported_result_fails_the_run():
    async def odd(ctx):
        return object()

    assert Play(odd).begin().failure.type == "InvalidPayload"
