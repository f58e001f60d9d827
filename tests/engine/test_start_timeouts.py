"""`start(..., timeout=)`: the timeout of one run instead of that of its workflow."""

from datetime import timedelta

import pytest

from perdure import Context, RunFailed, workflow
from tests.engine.store_matrix import on_every_store


@workflow(name="start_timeouts.sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "done"


@workflow(name="start_timeouts.impatient", timeout=10)
async def impatient(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "done"


@workflow(name="start_timeouts.continues")
async def continues(ctx: Context, n: int) -> int:
    await ctx.sleep(7)
    if n < 10:
        await ctx.continue_as(n + 1)
    return n


async def fails_after(h, run) -> float:
    started = h.clock.now()
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(run)
    return h.clock.now() - started


@on_every_store
async def test_a_start_sets_the_timeout_of_its_run(h):
    engine = await h.engine()
    assert await fails_after(h, await engine.start(sleeper, 100, timeout=60)) == pytest.approx(60, abs=1)
    bound = sleeper.options(timeout=timedelta(minutes=1), delay=30)
    assert await fails_after(h, await engine.start(bound, 100)) == pytest.approx(90, abs=1)
    assert await h.drive(engine.execute(sleeper, 100)) == "done"


@on_every_store
async def test_it_replaces_the_timeout_of_the_workflow(h):
    engine = await h.engine()
    assert await h.drive(engine.execute(impatient, 100, timeout=200)) == "done"
    assert await fails_after(h, await engine.start(impatient, 100, timeout=5)) == pytest.approx(5, abs=1)
    assert await fails_after(h, await engine.start(impatient, 100)) == pytest.approx(10, abs=1)


@on_every_store
async def test_it_counts_across_continuations_and_crashes(h):
    engine = await h.engine()
    run = await engine.start(continues, 0, timeout=30)
    started = h.clock.now()
    await h.clock.advance(16)
    await h.crash(engine)
    engine = await h.engine()
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(engine.get(run.id))
    assert h.clock.now() - started == pytest.approx(30, abs=1)
    assert (await engine.describe(run.id)).generation >= 2


@on_every_store
async def test_a_restart_has_its_own_timeout(h):
    engine = await h.engine()
    await fails_after(h, await engine.start(sleeper, 100, id="s", timeout=10))
    run = await h.drive(engine.start(sleeper, 100, id="s", timeout=20, if_exists="restart"))
    assert await fails_after(h, run) == pytest.approx(20, abs=1)
    assert await h.drive(engine.execute(sleeper, 100, id="s", if_exists="restart")) == "done"


@on_every_store
async def test_a_rewind_gives_the_whole_timeout_again(h):
    engine = await h.engine()
    await h.clock.advance(1000)
    run = await engine.start(sleeper, 100, id="s")
    await h.run_to_end(run)
    run = await h.drive(engine.start(sleeper, 100, id="s", timeout=20, if_exists="restart"))
    await fails_after(h, run)
    await engine.rewind("s", "sleep")
    assert await fails_after(h, run) == pytest.approx(20, abs=1)


@on_every_store
async def test_a_timeout_by_name(h):
    engine = await h.engine()
    assert await fails_after(h, await engine.start("start_timeouts.sleeper", 100, timeout=5)) == pytest.approx(5, abs=1)
