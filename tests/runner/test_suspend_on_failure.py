"""suspend_on_failure: a step whose attempts all failed holds its run until a person resumes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Context, CriticalError, Retry, step
from perdure.model.records import EntryStatus
from tests.runner.crash_after_every_turn import apply_event, crashed
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

BROKEN: set[Any] = set()


class Refused(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@pytest.fixture(autouse=True)
def fixed() -> None:
    BROKEN.clear()


@step(retry=Retry(max_attempts=2, initial=10, jitter=0), raises=(Refused,))
async def fragile(what: Any) -> Any:
    if what == "refuse":
        raise Refused("on principle")
    if what in BROKEN:
        raise OSError(f"{what} is broken")
    return what


async def brittle(ctx: Context) -> Any:
    first = await fragile("a")
    note(first)
    return [first, await fragile("b")]


def until_held(play: Play) -> Play:
    while play.alive and (choices := play.choices()):
        play.move(choices[0])
    return play


def resumed(play: Play) -> Play:
    """Return the run after a resume, which loads it again."""
    cold = play.crash()
    cold.extras = list(play.extras)
    cold.resume()
    return cold


def held_at_b() -> Play:
    BROKEN.add("b")
    return until_held(Play(brittle, suspend_on_failure=True).begin())


def test_exhausted_step_holds_the_run_with_a_reason():
    play = held_at_b()
    assert play.held.kind == "step_failed"
    assert play.held.location == "fragile#1"
    assert "OSError: b is broken" in play.held.reason
    entry = play.entries["fragile#1"]
    assert entry.error is not None
    assert (entry.status, entry.attempts, entry.error.message) == (EntryStatus.PENDING, 2, "b is broken")
    assert play.notes == ["a"]


def test_held_run_stays_held_after_loading():
    play = held_at_b()
    again = play.replayed_by(play.definition).begin()
    assert again.turn.held == play.turn.held
    assert again.turn.entries == ()
    assert again.running == {}


def test_resume_reruns_the_failed_step_with_all_attempts():
    play = held_at_b()
    play = resumed(play)
    assert play.turn.consumed == (1,)
    assert play.attempts == {"fragile#1": 1}
    until_held(play)
    assert play.held.location == "fragile#1", "the cause remains, and both attempts ran again"
    assert play.entries["fragile#1"].attempts == 2
    BROKEN.clear()
    play = resumed(play)
    play = crashed(play)
    play.complete()
    assert play.value == ["a", "b"]
    assert play.replayed_by(play.definition).begin().value == ["a", "b"]


def test_resumed_step_drops_its_recorded_error():
    play = resumed(held_at_b())
    entry = play.entries["fragile#1"]
    assert (entry.error, entry.attempts, entry.detail) == (None, 0, None)


def test_run_without_suspend_on_failure_fails():
    BROKEN.add("a")
    assert until_held(Play(brittle).begin()).failure.type == "StepFailed"


def test_errors_in_raises_reach_the_workflow():
    async def typed(ctx):
        try:
            await fragile("refuse")
        except Refused as error:
            return error.why

    assert until_held(Play(typed, suspend_on_failure=True).begin()).value == "on principle"


def test_step_with_an_error_that_is_not_retried_holds_the_run():
    @step
    async def never():
        raise CriticalError("no")

    async def critical(ctx):
        await never()

    assert until_held(Play(critical, suspend_on_failure=True).begin()).held.location == "never"


def test_error_of_the_workflow_function_fails_the_run():
    async def own(ctx):
        await fragile("a")
        raise ValueError("mine")

    assert until_held(Play(own, suspend_on_failure=True).begin()).failure.message == "mine"


def test_running_steps_finish_before_the_run_is_held():
    async def two(ctx):
        return await asyncio.gather(fragile("b"), fetch(1), fetch(2))

    BROKEN.add("b")
    play = Play(two, suspend_on_failure=True).begin()
    play.complete("fragile")
    play.advance(now=play.turn.wake_at)
    turn = play.complete("fragile")
    assert turn.held is None
    assert play.alive
    play.complete("fetch")
    assert play.alive
    turn = play.complete("fetch#1")
    assert turn.held is not None
    assert [row.location for row in turn.entries] == ["fetch#1"]
    BROKEN.clear()
    play = resumed(play)
    assert play.attempts == {"fragile": 1}
    play.complete()
    assert play.value == ["b", 1, 2]


def test_two_failed_steps_are_resumed_together():
    async def two(ctx):
        return await asyncio.gather(fragile("b"), fragile("c"))

    BROKEN.update("bc")
    play = until_held(Play(two, suspend_on_failure=True).begin())
    assert play.held.kind == "step_failed"
    play = resumed(play)
    assert play.attempts == {"fragile": 1, "fragile#1": 1}
    BROKEN.clear()
    assert until_held(play).value == ["b", "c"]


def test_held_run_can_be_cancelled():
    async def tidy(ctx):
        try:
            await fragile("b")
        finally:
            await fetch("tidy")

    BROKEN.add("b")
    play = until_held(Play(tidy, suspend_on_failure=True).begin())
    cold = play.crash()
    cold.cancel()
    assert cold.attempts == {"fetch": 1}
    assert cold.entries["fragile"].status is EntryStatus.CANCELLED
    cold = crashed(cold)
    cold.complete()
    assert cold.was_cancelled


def test_cancelled_exhausted_step_no_longer_holds_the_run():
    async def raced(ctx):
        winner, _ = await ctx.race(work=fragile("b"), other=fetch("slow"))
        return winner

    BROKEN.add("b")
    play = Play(raced, suspend_on_failure=True).begin()
    play.complete("race/work/fragile")
    play.advance(now=play.turn.wake_at)
    play.complete("race/work/fragile")
    assert play.alive
    play.complete("race/other/fetch")
    assert play.value == "other"


def test_messages_for_a_held_run_wait_until_it_is_resumed():
    async def has_messages(ctx):
        return await ctx.join(fragile("b"), ctx.receive("a"))

    BROKEN.add("b")
    play = until_held(Play(has_messages, suspend_on_failure=True).begin())
    play.add_message("event", "a", 1)
    BROKEN.clear()
    cold = play.crash()
    apply_event(cold, lambda cold: cold.resume())
    cold = crashed(cold)
    assert cold.turn.consumed == (1,)
    assert until_held(cold).value == ["b", 1]


def test_resume_skips_the_retry_delay():
    BROKEN.add("a")
    play = Play(brittle, suspend_on_failure=True).begin()
    play.complete()
    assert play.turn.wake_at == 1_010.0
    play.resume()
    assert play.attempts == {"fragile": 2}
