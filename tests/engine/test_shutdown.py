"""Graceful shutdown: steps finish within the grace period, runs are released, and no crash is counted."""

import asyncio

import pytest

from perdure import Context, RunStatus, StepInterrupted, WorkflowMisuse, step, workflow
from tests.engine.store_matrix import on_every_store


def gated():
    gate = asyncio.Event()

    @step
    async def slow() -> str:
        await gate.wait()
        return "slow"

    @step
    async def after() -> str:
        return "after"

    @workflow(name="gated")
    async def two_steps(ctx: Context) -> str:
        return f"{await slow()} {await after()}"

    return two_steps, gate


@on_every_store
async def test_shutdown_records_running_steps_and_starts_no_new_ones(h):
    wf, gate = gated()
    engine = await h.engine(wf)
    await engine.start(wf, id="g")
    await h.settle()
    leaving = h.background(engine.shutdown(grace=30))
    await h.clock.advance(5)
    assert not leaving.done()
    gate.set()
    await h.drive(leaving)
    rows = await _history(h, "g")
    assert rows == [("slow", "succeeded")]
    assert h.executed() == [("slow", 1)]
    second = await h.engine(wf)
    await h.settle()  # released: no lease has to expire
    assert await second.status("g") is RunStatus.SUCCEEDED
    assert await second.result("g") == "slow after"
    assert (await second.describe("g")).recoveries == 0
    assert h.executed() == [("slow", 1), ("after", 1)]


@on_every_store
async def test_step_that_exceeds_the_grace_is_cancelled_and_its_run_released(h):
    wf, gate = gated()
    engine = await h.engine(wf)
    await engine.start(wf, id="g")
    await h.settle()
    started = h.clock.now()
    await h.drive(engine.shutdown(grace=3))
    assert h.clock.now() == pytest.approx(started + 3, abs=0.1)
    assert await _history(h, "g") == [("slow", "pending")]
    gate.set()
    second = await h.engine(wf)
    await h.settle()
    assert await second.result("g") == "slow after"
    assert (await second.describe("g")).recoveries == 0
    assert h.executed() == [("slow", 1), ("slow", 1), ("after", 1)]


@on_every_store
async def test_the_default_grace_is_the_configs(h):
    wf, _ = gated()
    engine = await h.engine(wf)
    await engine.start(wf, id="g")
    await h.settle()
    started = h.clock.now()
    await h.drive(engine.shutdown())
    assert h.clock.now() == pytest.approx(started + 10, abs=0.1)


@on_every_store
async def test_a_graceful_end_interrupts_no_at_most_once_step(h):
    gate = asyncio.Event()

    @step
    async def slow() -> None:
        await gate.wait()

    @step(at_most_once=True)
    async def pay() -> str:
        return "paid"

    @workflow
    async def paying(ctx: Context) -> str:
        await slow()
        try:
            return await pay()
        except StepInterrupted:
            return "interrupted"

    engine = await h.engine(paying)
    await engine.start(paying, id="p")
    await h.settle()
    leaving = h.background(engine.shutdown(grace=30))
    await h.clock.advance(1)
    gate.set()
    await h.drive(leaving)
    second = await h.engine(paying)
    assert await h.run_to_end(second.get("p")) == "paid"


@on_every_store
async def test_shutdown_leaves_no_worker_behind(h):
    wf, _ = gated()
    engine = await h.engine(wf)
    other = await h.engine(wf)
    await h.drive(engine.shutdown())
    assert [worker.id for worker in await h.store.workers()] == [other.worker]


@on_every_store
async def test_suspended_runs_need_no_release_at_shutdown(h):
    @workflow
    async def sleepy(ctx: Context) -> str:
        await ctx.sleep(100)
        return "awake"

    engine = await h.engine(sleepy)
    await engine.start(sleepy, id="s")
    await h.settle()
    commits = engine.faults.commits
    await h.drive(engine.shutdown())
    assert engine.faults.commits == commits
    second = await h.engine(sleepy)
    assert await h.run_to_end(second.get("s")) == "awake"


@on_every_store
async def test_calls_on_an_engine_that_is_not_open_raise(h):
    wf, _ = gated()
    engine = await h.engine(wf)
    await h.drive(engine.shutdown())
    for call in (engine.start(wf), engine.status("x"), engine.recover()):
        with pytest.raises(WorkflowMisuse, match="not open"):
            await call
    await engine.shutdown()  # twice does no harm
    other = await h.engine(wf)
    with pytest.raises(ValueError, match="grace"):
        await other.shutdown(grace=-1)


@on_every_store
async def test_async_with(h):
    wf, gate = gated()
    gate.set()
    engine = await h.engine(wf)
    await h.drive(engine.shutdown())

    async def session() -> str:
        async with engine as again:
            return await again.execute(wf)

    assert await h.drive(session()) == "slow after"


async def _history(h, run_id: str) -> list[tuple[str, str]]:
    client = await h.client()
    return [(entry.location, str(entry.status)) for entry in await client.history(run_id)]


@on_every_store
async def test_unavailable_store_does_not_block_shutdown(h):
    wf, gate = gated()
    engine = await h.engine(wf)
    await engine.start(wf, id="g")
    await h.settle()
    gate.set()
    engine.faults.fail_calls(
        10_000, calls=("commit", "renew", "workers", "claim", "fence_worker", "release_runs", "remove_worker")
    )
    began_at = h.clock.now()
    await h.drive(h.background(engine.shutdown(grace=1)))
    assert h.clock.now() - began_at < 30, "it waited for the store"
    second = await h.engine(wf)
    await h.clock.advance(20)  # nothing could be released: its lease must expire
    assert await h.drive(second.result("g")) == "slow after"
