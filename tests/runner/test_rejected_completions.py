"""Completions of deferreds that do not fit: a dead letter each, the deferred stays open, and the next one wins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure import Context
from perdure.model.records import DeadLetter, EntryStatus, RunResult
from perdure.model.turns import MessageReceived
from tests.runner.crash_after_every_turn import check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import Play
from tests.runner.workflows import fetch


class Review(msgspec.Struct):
    stars: int


BAD, GOOD = {"stars": "many"}, {"stars": 3}


async def reviewed(ctx: Context) -> Any:
    review = await ctx.deferred("review", Review)
    await fetch("given")
    return review.stars


def completion(play: Play, value: Any, id: str = "deferred/0/review") -> MessageReceived:
    body = msgspec.json.encode(RunResult(result=msgspec.json.encode(value)))
    return MessageReceived(play.add_message("deferred", "review", body=body, id=id))


def dead_letters(play: Play) -> list[DeadLetter]:
    return [each for extras in play.extras for each in extras.dead_letters]


def test_rejected_completion_is_a_dead_letter_and_is_released_with_its_id():
    play = Play(reviewed).begin()
    turn = play.advance(completion(play, BAD))
    assert turn.extras is not None
    assert (turn.entries, turn.consumed, turn.extras.released_assignments) == ((), (), (1,))
    [letter] = dead_letters(play)
    assert (letter.kind, letter.event_name, letter.original_target) == ("misfit", "review", "run-1")
    assert "stars" in letter.reason
    assert letter.value == b'{"stars":"many"}'
    assert play.entries["review"].status is EntryStatus.PENDING
    check_replay(play)
    play = crashed(play)
    play.advance(completion(play, GOOD))
    play.complete()
    assert play.value == 3


def test_first_of_several_that_fits_wins_and_all_are_consumed():
    play = Play(reviewed)
    for number, value in enumerate([BAD, 5, GOOD]):
        completion(play, value, f"fallback/0/{number}/review" if number else "deferred/0/review")
    play.begin()
    assert sorted(play.turn.consumed) == [1, 2, 3]
    assert play.turn.extras is not None
    assert play.turn.extras.released_assignments == (), "the id stays taken"
    assert [msgspec.json.decode(each.value or b"") for each in dead_letters(play)] == [BAD, 5]
    play.complete()
    assert play.value == 3


def test_several_of_which_none_fits_are_all_rejected():
    play = Play(reviewed)
    completion(play, BAD)
    completion(play, 5, "fallback/0/1/review")
    play.begin()
    assert play.turn.extras is not None
    assert play.turn.extras.released_assignments == (1, 2)
    assert len(dead_letters(play)) == 2
    play.advance(completion(play, GOOD))
    play.complete()
    assert play.value == 3


def test_completion_is_checked_when_the_deferred_is_created():
    async def later(ctx: Context) -> Any:
        await ctx.sleep(5)
        review = ctx.deferred("review", Review)
        await ctx.sleep(5)
        return (await review).stars

    play = Play(later)
    completion(play, BAD)
    play.begin()
    assert (play.turn.extras, play.turn.consumed) == (None, ()), "the run does not know the type yet"
    play = crashed(play)
    play.advance(now=1_005.0)
    assert len(dead_letters(play)) == 1
    play.advance(completion(play, BAD))
    assert len(dead_letters(play)) == 2, "it need not be awaited"
    play.advance(completion(play, GOOD))
    play = crashed(play)
    play.advance(now=1_010.0)
    assert play.value == 3


def test_type_that_is_declared_later_counts():
    """The first call, for the token, declares no type."""

    async def token_first(ctx: Context) -> Any:
        assert ctx.deferred("review").token
        await ctx.sleep(5)
        return (await ctx.deferred("review", Review)).stars

    play = Play(token_first).begin()
    play.advance(completion(play, BAD))
    assert dead_letters(play) == []
    play.advance(now=1_005.0)
    assert len(dead_letters(play)) == 1
    play.advance(completion(play, GOOD))
    assert play.value == 3


def test_failure_always_fits():
    async def failing(ctx: Context) -> Any:
        try:
            return await ctx.deferred("review", Review)
        except ValueError as error:
            return str(error)

    play = Play(failing).begin()
    play.settle_deferred("review", error=ValueError("no"))
    assert play.value == "no"


def test_fallback_after_the_completion_is_discarded():
    play = Play(reviewed).begin()
    play.advance(completion(play, GOOD))
    turn = play.advance(completion(play, {"stars": 9}, "fallback/0/1/review"))
    assert turn.consumed == (2,)
    play = crashed(play)
    play.complete()
    assert play.value == 3


@pytest.mark.parametrize("seed", range(12))
def test_rejected_completions_replay_after_every_turn(seed):
    async def run(ctx: Context) -> Any:
        await fetch(1)
        review = ctx.deferred("review", Review)
        await ctx.sleep(3)
        found = await ctx.join(a=wait(review), b=wait(ctx.deferred("review", Review)), c=fetch(2))
        return [found["a"], found["b"]]

    async def wait(deferred: Any) -> Any:
        return (await deferred).stars

    sent = [lambda play, value=value: play.advance(completion(play, value)) for value in (BAD, 5, GOOD)]
    play = run_with_crashes(run, seed=seed, events=sent)
    assert play.value == [3, 3]
