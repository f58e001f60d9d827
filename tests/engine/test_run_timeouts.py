"""Limits of whole runs: timeout, max_suspend; and another generation for a run that failed."""

import asyncio

import pytest

from perdure import Context, CriticalError, Retry, RunFailed, RunStatus, step, workflow
from tests.engine.store_matrix import on_every_store

LOG: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()


@step
async def note(what: str) -> str:
    LOG.append(what)
    return what


@on_every_store
async def test_a_run_that_takes_longer_than_its_timeout_is_cancelled_inside_and_fails(h):
    @workflow(timeout=60)
    async def endless(ctx: Context) -> None:
        try:
            while True:
                await ctx.sleep(7)
        finally:
            await note("cleaned up")

    engine = await h.engine(endless)
    run = await engine.start(endless)
    started = h.clock.now()
    with pytest.raises(RunFailed) as raised:
        await h.run_to_end(run)
    assert raised.value.type == "TimeoutError"
    assert "timeout" in raised.value.message
    assert h.clock.now() == pytest.approx(started + 60, abs=1)
    assert LOG == ["cleaned up"]


@on_every_store
async def test_a_timeout_also_ends_a_run_in_the_middle_of_a_step(h):
    @step
    async def hang() -> None:
        await asyncio.Event().wait()

    @workflow(timeout=60)
    async def stuck(ctx: Context) -> None:
        await hang()

    engine = await h.engine(stuck)
    run = await engine.start(stuck)
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(run, within=70)
    assert engine.slots_taken == 0


@on_every_store
async def test_a_timeout_counts_from_the_start_across_crashes_and_with_a_delay(h):
    @workflow(timeout=60)
    async def sleeper(ctx: Context) -> None:
        await ctx.sleep(1000)

    engine = await h.engine(sleeper)
    started = h.clock.now()
    run = await engine.start(sleeper, id="s", delay=30)
    await h.clock.advance(50)
    await h.crash(engine)
    engine = await h.engine(sleeper)
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(engine.get(run.id))
    assert h.clock.now() == pytest.approx(started + 90, abs=1)


@on_every_store
async def test_a_suspension_longer_than_max_suspend_fails_the_run(h):
    @workflow(max_suspend=100)
    async def sleeper(ctx: Context) -> None:
        for _ in range(5):
            await ctx.sleep(90)
        LOG.append("short ones are fine")
        await ctx.sleep(110)

    engine = await h.engine(sleeper)
    started = h.clock.now()
    with pytest.raises(RunFailed) as raised:
        await h.run_to_end(await engine.start(sleeper))
    assert raised.value.type == "TimeoutError"
    assert "max_suspend" in raised.value.message
    assert h.clock.now() == pytest.approx(started + 550, abs=1)
    assert LOG


@on_every_store
async def test_long_step_does_not_count_as_suspension(h):
    gate = asyncio.Event()

    @step
    async def hang() -> str:
        await gate.wait()
        return "done"

    @workflow(max_suspend=10)
    async def patient(ctx: Context) -> str:
        return await hang()

    engine = await h.engine(patient)
    run = await engine.start(patient)
    await h.clock.advance(100)
    gate.set()
    assert await h.run_to_end(run) == "done"


@on_every_store
async def test_failed_run_with_retry_starts_a_new_generation(h):
    @workflow(retry=Retry(max_attempts=3, initial=10, jitter=0))
    async def again(ctx: Context) -> str:
        await note(f"generation {ctx.generation}")
        if ctx.generation < 2:
            raise ValueError("not yet")
        return f"in generation {ctx.generation}"

    engine = await h.engine(again)
    run = await engine.start(again, id="a")
    await h.clock.advance(1)
    assert await run.status() is RunStatus.SUSPENDED
    (reason,) = (await run.describe()).waiting_for
    assert reason.kind == "retry"
    assert "retry of the run" in str(reason)
    assert await h.run_to_end(run) == "in generation 2"
    assert LOG == ["generation 0", "generation 1", "generation 2"]
    assert (await run.describe()).generation == 2
    assert [entry.value for entry in await engine.history("a")] == ["generation 2"]
    assert not (await engine.start(again, id="a")).created


@on_every_store
async def test_attempts_of_a_run_end(h):
    @workflow(retry=Retry(max_attempts=3, initial=1, jitter=0))
    async def doomed(ctx: Context) -> None:
        await note("again")
        raise ValueError("never")

    engine = await h.engine(doomed)
    with pytest.raises(RunFailed, match="never"):
        await h.run_to_end(await engine.start(doomed))
    assert len(LOG) == 3


@on_every_store
async def test_critical_error_is_not_retried(h):
    @workflow(retry=Retry(initial=1))
    async def doomed(ctx: Context) -> None:
        await note("once")
        raise CriticalError("give up")

    engine = await h.engine(doomed)
    with pytest.raises(RunFailed, match="give up"):
        await h.run_to_end(await engine.start(doomed))
    assert LOG == ["once"]


@on_every_store
async def test_a_run_level_retry_survives_a_crash_in_its_wait(h):
    @workflow(retry=Retry(max_attempts=2, initial=100, max_delay=100, jitter=0))
    async def again(ctx: Context) -> str:
        await note(f"generation {ctx.generation}")
        if ctx.generation == 0:
            raise ValueError("not yet")
        return "done"

    engine = await h.engine(again)
    started = h.clock.now()
    await engine.start(again, id="a")
    await h.clock.advance(10)
    await h.crash(engine)
    engine = await h.engine(again)
    assert await h.run_to_end(engine.get("a")) == "done"
    assert h.clock.now() == pytest.approx(started + 100, abs=1)
    assert LOG == ["generation 0", "generation 1"]


@on_every_store
async def test_run_timeout_covers_all_attempts_and_is_not_retried(h):
    @workflow(timeout=30, retry=Retry(max_attempts=5, initial=1, jitter=0))
    async def endless(ctx: Context) -> None:
        await note(f"generation {ctx.generation}")
        await ctx.sleep(1000)

    engine = await h.engine(endless)
    run = await engine.start(endless)
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(run)
    assert LOG == ["generation 0"]
    assert (await run.describe()).generation == 0
