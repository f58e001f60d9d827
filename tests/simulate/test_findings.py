"""What the simulator has found, played again without chance: each of these went wrong once."""

from typing import Any

import pytest

from perdure import Context, Continue, StoreError, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import Harness, on_virtual_time


@workflow(name="found.pair")
async def pair(ctx: Context) -> None:
    await ctx.join(first=ctx.receive("found.first"), second=ctx.receive("found.second"))


def test_what_was_asked_for_and_given_up_in_one_turn_can_be_rewound_to_before_it_was_given_up():
    """A rewind, then a cancel, then the run goes on: the second receive is asked for anew and cancelled at once.

    To go back to the cancel then left a receive that was on record as cancelled, and that nobody cancels: divergence.
    """

    async def scene(harness: Harness) -> None:
        first = await harness.engine(pair)
        await first.start(pair, id="pair")
        await harness.settle()
        await harness.drive(first.shutdown())
        client: Any = await harness.client()
        await client.rewind("pair", "join/second/found.second")
        await client.cancel("pair")
        engine = await harness.engine(pair)
        await harness.settle()
        assert await client.status("pair") == "cancelled"
        await client.rewind("pair", "~cancel")
        await harness.settle()
        described = await engine.describe("pair")
        assert [reason.kind for reason in described.waiting_for] == ["event", "event"]
        await client.emit("found.first", 1)
        await client.emit("found.second", 2)
        await harness.run_to_end(engine.get("pair"))

    on_virtual_time(scene)


@workflow(name="found.sleeper")
async def sleeper(ctx: Context) -> str:
    await ctx.sleep(10)
    return "awake"


def test_a_claim_whose_answer_got_lost_is_taken_up_although_the_run_sleeps_in_memory():
    """The worker looks up what it owns, found the run in its memory, and left it there: asleep, owned, for ever."""

    async def scene(harness: Harness) -> None:
        engine = await harness.engine(sleeper)
        run = await engine.start(sleeper, id="sleeper")
        await harness.settle()
        claim, lost = engine.faults.claim, [True]

        async def claim_and_lose(asked: Any) -> Any:
            claimed = await claim(asked)
            if claimed and lost.pop():
                raise StoreError("the answer got lost", retryable=True)
            return claimed

        engine.faults.claim = claim_and_lose  # type: ignore[method-assign, assignment]
        assert await harness.run_to_end(run) == "awake"
        assert lost == []

    on_virtual_time(scene)


async def nothing(value: int) -> None:
    return


@step(compensate=nothing)
async def compensated() -> int:
    return 1


@workflow(name="found.noted")
async def noted(ctx: Context) -> None:
    async def body(ctx: Context, count: int) -> Continue[int]:
        await compensated()
        await ctx.sleep(100)
        return Continue(count + 1)

    await ctx.loop("rounds", body, 0)


def test_the_note_of_a_compensation_is_no_place_to_rewind_to():
    """It is kept beside the order of asking: the step of which it tells was then on record, and never asked for."""

    async def scene(harness: Harness) -> None:
        engine = await harness.engine(noted)
        await engine.start(noted, id="noted")
        await harness.settle()
        with pytest.raises(InvalidArgument, match="has no entry at"):
            await engine.rewind("noted", "~compensation/rounds/~0/compensated")
        await engine.rewind("noted", "rounds/~0/compensated")

    on_virtual_time(scene)
