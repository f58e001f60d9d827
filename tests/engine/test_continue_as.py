"""continue_as: the same id, a fresh history, in one commit."""

import asyncio
from itertools import count

import pytest

from perdure import Context, EngineConfig, RunConflict, RunStatus, current_step, step, workflow
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import STORES, another_handle, make_store, on_every_store

EFFECTS: list[int] = []


@pytest.fixture(autouse=True)
def forget():
    EFFECTS.clear()


@step
async def effect(n: int) -> int:
    EFFECTS.append(n)
    return n


@step
async def hangs() -> None:
    await asyncio.Event().wait()


@workflow
async def countdown(ctx: Context, n: int, total: int = 0) -> int:
    total += await effect(n)
    if n == 0:
        return total
    await ctx.sleep(1)
    await ctx.continue_as(n - 1, total)


@workflow
async def closing_words(ctx: Context, words: str) -> str:
    return f"{words}, generation {ctx.generation}"


@workflow
async def handing_over(ctx: Context) -> str:
    hanging = asyncio.create_task(hangs())
    await effect(1)
    assert not hanging.done()
    await ctx.continue_as("handed over", workflow=closing_words)


@on_every_store
async def test_waiters_keep_waiting_across_continue_as(h):
    engine = await h.engine(countdown)
    run = await engine.start(countdown, 3, id="c")
    assert await h.run_to_end(run) == 6
    seen = await engine.describe("c")
    assert (seen.generation, seen.input) == (3, {"n": 0, "total": 6})
    assert [entry.location for entry in await engine.history("c")] == ["effect"]
    assert EFFECTS == [3, 2, 1, 0]


@on_every_store
async def test_continue_as_another_workflow_cancels_running_steps(h):
    engine = await h.engine(handing_over, closing_words)
    assert await h.run_to_end(await engine.start(handing_over, id="h")) == "handed over, generation 1"
    assert (await engine.describe("h")).workflow == "closing_words"
    assert engine.slots_taken == 0


@on_every_store
async def test_run_id_keeps_its_first_workflow_and_payload(h):
    engine = await h.engine(handing_over, closing_words, countdown)
    await h.run_to_end(await engine.start(handing_over, id="h"))
    assert not (await engine.start(handing_over, id="h")).created
    with pytest.raises(RunConflict):
        await engine.start(closing_words, "handed over", id="h")
    await h.run_to_end(await engine.start(countdown, 2, id="c"))
    assert not (await engine.start(countdown, 2, id="c")).created
    with pytest.raises(RunConflict):
        await engine.start(countdown, 0, id="c")


@on_every_store
async def test_payload_of_the_wrong_type_is_refused_at_the_call(h):
    @workflow(name="misfit")
    async def misfit(ctx: Context, n: int) -> str:
        try:
            await ctx.continue_as("no number")
        except Exception as error:
            return type(error).__name__

    engine = await h.engine(misfit)
    assert await h.run_to_end(await engine.start(misfit, 1)) == "InvalidPayload"


@on_every_store
async def test_cancelled_run_is_not_retried(h):
    @workflow(name="stubborn")
    async def stubborn(ctx: Context) -> None:
        try:
            await ctx.sleep(100)
        finally:
            await ctx.continue_as()

    engine = await h.engine(stubborn)
    run = await engine.start(stubborn, id="s")
    await h.settle()
    assert await run.cancel()
    await h.settle()
    assert await engine.status("s") is RunStatus.CANCELLED
    assert (await engine.describe("s")).generation == 0


@on_every_store
async def test_the_timeout_of_a_run_holds_across_continuations(h):
    @workflow(name="continue_as.endless", timeout=50)
    async def endless(ctx: Context) -> None:
        await ctx.sleep(20)
        await ctx.continue_as()

    engine = await h.engine(endless)
    await engine.start(endless, id="e")
    await h.clock.advance(60)
    await h.settle()
    seen = await engine.describe("e")
    assert (seen.status, seen.generation, seen.error.type) == (RunStatus.FAILED, 2, "TimeoutError")


@on_every_store
async def test_idempotency_keys_differ_between_generations(h):
    keys = []

    @step
    async def keyed() -> None:
        keys.append(current_step().idempotency_key)

    @workflow(name="continue_as.twice")
    async def twice(ctx: Context) -> str:
        await keyed()
        if ctx.generation == 1:
            return "done"
        await ctx.continue_as()

    engine = await h.engine(twice)
    assert await h.run_to_end(await engine.start(twice)) == "done"
    assert len(set(keys)) == 2


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_any_commit_leaves_the_old_or_the_new_state(kind, side, tmp_path):
    names = count()

    async def crashed_at(n: int) -> bool:
        EFFECTS.clear()
        clock = VirtualClock()
        store = make_store(kind, tmp_path, clock, f"store-{next(names)}")
        async with Harness(store, clock=clock, config=EngineConfig()) as h:
            first = await h.engine(countdown)
            first.faults.crash(n, side)
            ended = await h.drive_until_crash(first, first.execute(countdown, 3, id="c"), 3600)
            if ended is not None:
                return False
            await h.crash(first)
            second = await h.engine(countdown, store=another_handle(store, clock))
            assert await h.drive(second.execute(countdown, 3, id="c")) == 6
            assert sorted(set(EFFECTS)) == [0, 1, 2, 3]
            assert len(EFFECTS) <= 5, f"more than the step under way was repeated: {EFFECTS}"
            return True

    async def everywhere() -> int:
        n = 1
        while await crashed_at(n):
            n += 1
        return n

    assert asyncio.run(everywhere()) > 8
