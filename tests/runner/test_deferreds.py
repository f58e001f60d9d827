"""Deferreds: completed once from outside, before or after they are awaited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from perdure import Context
from perdure.model.records import EntryStatus, RunResult, SigningKey
from perdure.model.turns import MessageReceived
from perdure.workflows.tokens import read_token
from tests.runner.crash_after_every_turn import check_replay, crashed, run_with_crashes
from tests.runner.turn_driver import Play, note
from tests.runner.workflows import fetch

SEEDS = range(12)


@dataclass
class Review:
    stars: int


class Rejected(Exception):
    def __init__(self, why: str, code: int) -> None:
        super().__init__(why, code)
        self.why = why
        self.code = code


async def reviewed(ctx: Context) -> Any:
    review = ctx.deferred("review", Review)
    note(review.token)
    got = await review
    return [type(got).__name__, got]


def completion(play: Play, name: str, value: Any, **fields: Any) -> MessageReceived:
    body = msgspec.json.encode(RunResult(result=msgspec.json.encode(value)))
    return MessageReceived(
        play.add_message("deferred", name, body=body, **{"id": f"deferred/{play.epoch}/{name}", **fields})
    )


def test_deferred_returns_its_typed_value():
    play = Play(reviewed).begin()
    assert [(wait.kind, wait.location, wait.name) for wait in play.turn.waits] == [("deferred", "review", "review")]
    assert play.entries["review"].status is EntryStatus.PENDING
    check_replay(play)
    play = crashed(play)
    turn = play.settle_deferred("review", {"stars": 5})
    assert play.value == ["Review", {"stars": 5}]
    assert turn.consumed == (1,)
    assert play.replayed_by(reviewed).begin().value == play.value


def test_token_is_the_same_on_every_replay_and_names_run_epoch_and_deferred():
    play = Play(reviewed, epoch=3).begin()
    cold = crashed(play)
    assert cold.notes == play.notes
    [token] = play.notes
    assert read_token((SigningKey(1, 0.0, b"k" * 32),), token) == ("run-1", 3, "review")
    assert Play(reviewed, epoch=4).begin().notes != play.notes


def test_rewind_does_not_change_a_token():
    assert Play(reviewed, generation=0).begin().notes == Play(reviewed, generation=5).begin().notes


def test_completion_before_the_first_turn_is_available_to_the_first_await():
    play = Play(reviewed)
    completion(play, "review", {"stars": 1})
    play.begin()
    assert play.value == ["Review", {"stars": 1}]
    assert play.turn.consumed == (1,)


@pytest.mark.parametrize("seed", SEEDS)
def test_completion_may_arrive_at_any_time(seed):
    async def slowly(ctx):
        review = ctx.deferred("review", Review)
        await fetch(1)
        await ctx.sleep(5)
        return (await review).stars

    play = run_with_crashes(slowly, seed=seed, events=[lambda play: play.settle_deferred("review", {"stars": 2})])
    assert play.value == 2


def test_completion_of_a_deferred_that_is_not_awaited_stays_in_the_inbox():
    async def later(ctx):
        await ctx.sleep(5)
        return await ctx.deferred("review")

    play = Play(later).begin()
    turn = play.settle_deferred("review", 1)
    assert (turn.entries, turn.consumed) == ((), ())
    play = crashed(play)
    play.advance(now=1_005.0)
    assert play.value == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_deferreds_with_the_same_name_are_the_same(seed):
    async def thrice(ctx):
        first, second = ctx.deferred("same"), ctx.deferred("same", int)
        assert first.token == second.token
        pair = await asyncio.gather(first, second)
        await fetch("between")
        return [*pair, await ctx.deferred("same"), await first]

    play = run_with_crashes(thrice, seed=seed, events=[lambda play: play.settle_deferred("same", 4)])
    assert play.value == [4, 4, 4, 4]


def test_deferreds_with_different_names_are_independent():
    async def two(ctx):
        return await ctx.join(a=_wait(ctx, "a"), b=_wait(ctx, "b"))

    play = Play(two).begin()
    play.settle_deferred("b", "B")
    play = crashed(play)
    play.settle_deferred("a", "A")
    assert play.value == {"a": "A", "b": "B"}


async def _wait(ctx: Context, name: str) -> Any:
    return await ctx.deferred(name)


def test_second_completion_has_no_effect():
    async def twice(ctx):
        first = await ctx.deferred("review")
        await ctx.sleep(5)
        return [first, await ctx.deferred("review")]

    play = Play(twice).begin()
    play.settle_deferred("review", 1)
    play.settle_deferred("review", 2)
    play = crashed(play)
    play.advance(now=1_005.0)
    assert play.value == [1, 1]


# --- failures


async def failing(ctx: Context) -> Any:
    try:
        return await ctx.deferred("review", raises=Rejected)
    except Rejected as error:
        await fetch("caught")
        return [error.why, error.code]
    except Exception as error:
        return [type(error).__name__, str(error)]


def test_failure_of_a_declared_type_is_raised_as_that_type():
    play = Play(failing).begin()
    play.settle_deferred("review", error=Rejected("rude", 4))
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == ["rude", 4]


@pytest.mark.parametrize("error", [ValueError("bad"), TimeoutError("late"), KeyError("x")])
def test_failure_of_a_builtin_type_is_raised_as_that_type(error):
    play = Play(failing).begin()
    play.settle_deferred("review", error=error)
    assert play.value[0] == type(error).__name__
    assert play.entries["review"].status is EntryStatus.FAILED


class Unknown(Exception):
    pass


def test_failure_type_from_the_module_of_the_workflow_needs_no_raises():
    async def undeclared(ctx):
        try:
            await ctx.deferred("review")
        except Unknown as error:
            return f"itself: {error}"

    play = Play(undeclared).begin()
    play.settle_deferred("review", error=Unknown("what"))
    assert play.value == "itself: what"


def test_failure_is_the_same_for_all_deferreds_with_the_same_name():
    async def twice(ctx):
        got = []
        for _ in range(2):
            try:
                await ctx.deferred("review")
            except ValueError as error:
                got.append(str(error))
        return got

    play = Play(twice).begin()
    play.settle_deferred("review", error=ValueError("no"))
    assert play.value == ["no", "no"]


@pytest.mark.parametrize("raises", [5, "ValueError", (ValueError, int), BaseException])
def test_raises_rejects_values_that_are_not_exception_types(raises):
    async def wrong(ctx):
        ctx.deferred("review", raises=raises)

    assert Play(wrong).begin().failure.type == "InvalidArgument"


def test_value_of_the_wrong_type_is_rejected_and_the_next_one_counts():
    async def typed(ctx):
        review = await ctx.deferred("review", Review)
        await fetch("given")
        return review.stars

    play = Play(typed).begin()
    play.settle_deferred("review", {"stars": "many"})
    assert play.entries["review"].status is EntryStatus.PENDING
    check_replay(play)
    play = crashed(play)
    play.settle_deferred("review", {"stars": 3})
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == 3


def test_each_await_of_the_same_name_has_its_own_type():
    async def differently(ctx):
        async def wait(kind):
            try:
                return str(await ctx.deferred("review", kind))
            except Exception as error:
                return type(error).__name__

        both = await ctx.join(wait(Review), wait(int))
        await fetch("between")
        return [*both, await wait(str), await wait(int)]

    play = Play(differently).begin()
    play.settle_deferred("review", 3)
    check_replay(play)
    play = crashed(play)
    play.complete()
    assert play.value == ["InvalidPayload", "3", "InvalidPayload", "3"]


# --- epochs, keys and names


def test_completion_for_an_earlier_epoch_is_ignored():
    play = Play(reviewed, epoch=2).begin()
    turn = play.advance(completion(play, "review", {"stars": 1}, id="deferred/1/review"))
    assert (turn.entries, turn.consumed) == ((), (1,))
    play.settle_deferred("review", {"stars": 2})
    assert play.value == ["Review", {"stars": 2}]


def test_epoch_is_not_confused_with_one_that_has_it_as_a_prefix():
    play = Play(reviewed, epoch=1).begin()
    turn = play.advance(completion(play, "review", {"stars": 1}, id="deferred/12/review"))
    assert (play.alive, turn.consumed) == (True, (1,))


def test_token_is_not_available_without_signing_keys():
    play = Play(reviewed)
    play.runner.state.start = msgspec.structs.replace(play.runner.state.start, keys=())
    play.begin()
    assert play.failure.type == "WorkflowMisuse"


@pytest.mark.parametrize("name", ["", 5, None])
def test_invalid_name_is_rejected(name):
    async def wrong(ctx):
        ctx.deferred(name)

    assert Play(wrong).begin().failure.type == "InvalidArgument"


# --- cancelling


def test_deferred_that_lost_a_race_can_be_awaited_again():
    async def impatient(ctx):
        review = ctx.deferred("review")
        winner, _ = await ctx.race(review=_await(review), limit=ctx.sleep(5))
        return [winner, await review]

    play = Play(impatient).begin()
    play.advance(now=1_005.0)
    check_replay(play)
    play = crashed(play)
    play.settle_deferred("review", 1)
    assert play.value == ["limit", 1]


async def _await(deferred: Any) -> Any:
    return await deferred


def test_cancelled_await_consumes_no_completion():
    play = Play(reviewed).begin()
    cancel, done = play.add_message("cancel"), completion(play, "review", {"stars": 1})
    turn = play.advance(MessageReceived(cancel), done)
    assert play.was_cancelled
    assert turn.consumed == (1,)
    assert play.entries["review"].status is EntryStatus.CANCELLED
