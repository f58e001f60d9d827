"""`ctx.deferred(..., timeout=)`: the run times the deferred out by a completion of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure import Break, Context, Continue
from perdure.model.records import EntryStatus
from perdure.model.turns import MessageReceived, SendEvent
from tests.runner.crash_after_every_turn import check_call_order, check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import BEGUN_AT, Play, note
from tests.runner.workflows import fetch

DEADLINE = "~deadline/review"
SEEDS = range(12)


async def reviewed(ctx: Context) -> Any:
    try:
        return await ctx.deferred("review", int, timeout=timedelta(seconds=10))
    except TimeoutError as error:
        return f"late: {error}"


def test_deferred_that_is_not_completed_raises_timeout_error():
    play = Play(reviewed).begin()
    assert [(wait.kind, wait.name, wait.until) for wait in play.turn.waits] == [("deferred", "review", BEGUN_AT + 10)]
    assert play.turn.wake_at == BEGUN_AT + 10
    check_replay(play)
    play = crashed(play)
    play.advance(now=BEGUN_AT + 9)
    assert play.effects == {}
    play.advance(now=BEGUN_AT + 10)
    check_replay(play)
    play = crashed(play)
    play.apply_effect(DEADLINE)
    assert play.value == "late: deferred 'review' was not completed in time"
    assert play.entries[DEADLINE].status is EntryStatus.SUCCEEDED


def test_message_of_the_timeout_may_arrive_before_its_effect_is_reported():
    play = Play(reviewed).begin()
    play.advance(now=BEGUN_AT + 10)
    work = play.effects[DEADLINE].work
    assert isinstance(work, SendEvent)
    assert (work.run_id, work.message.id) == ("run-1", "deferred/0/review"), "the id of every completion"
    play.advance(play.deliver_to_itself(work.message))
    assert play.value.startswith("late")
    assert play.entries[DEADLINE].status is EntryStatus.SUCCEEDED


def test_completion_before_the_deadline_ends_it():
    play = Play(reviewed).begin()
    play.settle_deferred("review", 4)
    assert play.value == 4
    assert play.entries[DEADLINE].status is EntryStatus.CANCELLED


def test_completion_in_the_turn_of_the_deadline_wins():
    play = Play(reviewed).begin()
    message = play.add_message("deferred", "review", body=b'{"result":"NA=="}', id="deferred/0/review")
    play.advance(MessageReceived(message), now=BEGUN_AT + 30)
    assert play.value == 4


def test_completion_that_is_not_awaited_yet_ends_the_deadline():
    async def later(ctx: Context) -> Any:
        review = ctx.deferred("review", int, timeout=10)
        await ctx.sleep(100)
        return await review

    play = Play(later).begin()
    play.settle_deferred("review", 4)
    assert (play.turn.wake_at, play.entries[DEADLINE].status) == (BEGUN_AT + 100, EntryStatus.CANCELLED)
    play = crashed(play)
    play.advance(now=BEGUN_AT + 100)
    assert play.value == 4


def test_deadline_counts_from_the_creation_and_expires_while_the_run_does_something_else():
    async def later(ctx: Context) -> Any:
        review = ctx.deferred("review", int, timeout=10)
        await ctx.sleep(100)
        try:
            return await review
        except TimeoutError:
            return ctx.now().timestamp() - BEGUN_AT

    play = Play(later).begin()
    assert play.turn.wake_at == BEGUN_AT + 10
    play.advance(now=BEGUN_AT + 10)
    play.apply_effect(DEADLINE)
    play = crashed(play)
    play.advance(now=BEGUN_AT + 100)
    assert play.value == 100


def test_deadline_is_fixed_when_it_is_first_reached():
    def waits(seconds: float) -> Any:
        async def run(ctx: Context) -> Any:
            return await ctx.deferred("review", int, timeout=seconds)

        return run

    play = Play(waits(10)).begin()
    play.close()
    later = play.replayed_by(waits(5000)).begin()
    assert later.turn.wake_at == BEGUN_AT + 10
    later.close()


def test_first_timeout_of_a_name_counts():
    async def twice(ctx: Context) -> Any:
        ctx.deferred("review", int, timeout=10)
        await ctx.sleep(5)
        ctx.deferred("review", int, timeout=1)
        return await ctx.deferred("review", int)

    play = Play(twice).begin()
    play.advance(now=BEGUN_AT + 5)
    assert play.turn.wake_at == BEGUN_AT + 10
    play.close()


def test_new_code_may_add_a_timeout_to_a_deferred_of_a_living_run():
    async def old(ctx: Context) -> Any:
        await fetch("a")
        await fetch("b")
        return await ctx.deferred("review", int)

    async def new(ctx: Context) -> Any:
        await fetch("a")
        review = ctx.deferred("review", int, timeout=50)
        await fetch("b")
        return await review

    play = Play(old).begin()
    play.complete(now=BEGUN_AT + 1)
    play.complete(now=BEGUN_AT + 2)
    play.close()
    play = play.replayed_by(new).begin()
    assert play.turn.wake_at == BEGUN_AT + 51
    play = crashed(play)
    play.settle_deferred("review", 1)
    assert play.value == 1


def test_function_that_ends_ends_its_deadlines():
    async def impatient(ctx: Context) -> Any:
        ctx.deferred("review", int, timeout=10)
        return await fetch("a")

    play = Play(impatient).run()
    assert play.entries[DEADLINE].status is EntryStatus.CANCELLED


def test_failed_delivery_is_repeated():
    play = Play(reviewed).begin()
    play.advance(now=BEGUN_AT + 10)
    play.apply_effect(DEADLINE, error=RuntimeError("no"))
    assert play.turn.wake_at == BEGUN_AT + 70
    play.advance(now=BEGUN_AT + 70)
    play.apply_effect(DEADLINE)
    assert play.value.startswith("late")


def test_deadline_of_an_earlier_iteration_survives_pruning_and_replay():
    async def run(ctx: Context) -> Any:
        async def body(ctx: Context, n: int) -> Any:
            if n == 0:
                ctx.deferred("review", int, timeout=10)
            await ctx.sleep(1)
            return Continue(n + 1) if n < 5 else Break(n)

        await ctx.loop("pages", body, 0, prune_every=1, keep=0)
        try:
            return await ctx.deferred("review", int)
        except TimeoutError:
            return "late"

    play = Play(run).begin()
    for second in range(1, 7):
        play.advance(now=BEGUN_AT + second)
        check_replay(play)
        play = crashed(play)
    assert play.turn.wake_at == BEGUN_AT + 10
    play.advance(now=BEGUN_AT + 10)
    play = crashed(play)
    play.apply_effect(DEADLINE)
    assert play.value == "late"


@pytest.mark.parametrize("seed", SEEDS)
def test_timeouts_replay_after_every_turn(seed):
    async def run(ctx: Context) -> Any:
        first = ctx.deferred("review", int, timeout=8)
        await fetch(1)
        await ctx.sleep(3)
        second = ctx.deferred("other", int, timeout=20)
        await fetch(2)
        note("waits")
        return [await wait(first), await ctx.race(other=wait(second), limit=ctx.sleep(60)), await wait(second)]

    async def wait(deferred: Any) -> Any:
        try:
            return await deferred
        except TimeoutError:
            return "late"

    def deliver(play: Play) -> Any:
        play.settle_deferred("review", 1)

    play = run_with_crashes(run, seed=seed, events=[deliver, lambda play: play.settle_deferred("other", 2)])
    assert play.value[0] in (1, "late")
    assert play.value[2] in (2, "late")
    check_call_order(play)


@pytest.mark.parametrize("timeout", [-1, "10", float("nan"), True])
def test_invalid_timeout_is_rejected(timeout):
    async def wrong(ctx: Context) -> None:
        ctx.deferred("review", int, timeout=timeout)

    assert Play(wrong).begin().failure.type == "InvalidArgument"
