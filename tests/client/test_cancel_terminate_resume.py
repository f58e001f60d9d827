"""Control of runs: cancel, terminate, resume."""

import asyncio

import pytest

from perdure import (
    Context,
    Retry,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunStatus,
    RunTerminated,
    StepFailed,
    current_step,
    step,
    workflow,
)
from tests.engine.store_matrix import everything_in, on_every_store

LOG: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()


@step
async def note(what: str) -> str:
    LOG.append(what)
    return what


@workflow
async def sleepy(ctx: Context) -> str:
    try:
        await ctx.sleep(1000)
    except asyncio.CancelledError:
        await note("cleaned up")
        raise
    return "awake"


@workflow
async def quick(ctx: Context) -> str:
    return await note("quick")


def hanging():
    """Return a workflow whose step waits for an event, and the event."""
    gate = asyncio.Event()

    @step
    async def hang() -> str:
        LOG.append("hang")
        try:
            await gate.wait()
        except asyncio.CancelledError:
            LOG.append("body cancelled")
            raise
        return "free"

    @workflow(name="hanging")
    async def waits(ctx: Context) -> str:
        return await hang()

    return waits, gate


# --- cancel


@on_every_store
async def test_cancel_a_sleeping_run(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, id="s")
    await h.settle()
    assert await run.cancel() is True
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert await run.status() is RunStatus.CANCELLED
    assert LOG == ["cleaned up"]
    cancel = next(entry for entry in await engine.history("s") if entry.kind == "cancel")
    assert cancel.status == "succeeded"


@on_every_store
async def test_cancel_a_sleeping_run_that_is_not_in_memory(h):
    first = await h.engine(sleepy)
    run = await first.start(sleepy, id="s")
    await h.settle()
    await h.drive(first.shutdown())
    client = await h.client()
    assert await client.cancel("s") is True
    assert await client.status("s") is RunStatus.SUSPENDED
    second = await h.engine(sleepy)
    with pytest.raises(RunCancelled):
        await h.run_to_end(second.get(run.id))
    assert LOG == ["cleaned up"]


@on_every_store
async def test_cancel_a_run_in_the_middle_of_a_step(h):
    waits, _ = hanging()
    engine = await h.engine(waits)
    run = await engine.start(waits, id="w")
    await h.settle()
    assert await engine.cancel("w") is True
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG == ["hang", "body cancelled"]
    assert engine.slots_taken == 0


@on_every_store
async def test_cancel_from_another_process_while_a_step_executes(h):
    waits, _ = hanging()
    await h.engine(waits)
    client = await h.client()
    run = await client.start(waits, id="w")
    await h.settle()
    assert LOG == ["hang"]
    assert await client.cancel("w") is True
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)


@on_every_store
async def test_cancel_ends_a_run_that_never_executed_at_once(h):
    engine = await h.engine(quick)
    run = await engine.start(quick, id="q", delay=1000)
    assert await run.cancel() is True
    assert await run.status() is RunStatus.CANCELLED
    await h.clock.advance(2000)
    assert LOG == []
    with pytest.raises(RunCancelled):
        await run.result()


@on_every_store
async def test_cancel_twice_is_raised_once(h):
    caught: list[str] = []

    @workflow
    async def stubborn(ctx: Context) -> str:
        try:
            await ctx.sleep(1000)
        except asyncio.CancelledError:
            caught.append("cancel")
        await ctx.sleep(10)
        return "my own way"

    engine = await h.engine(stubborn)
    run = await engine.start(stubborn, id="s")
    await h.settle()
    assert await engine.cancel("s") is True
    assert await engine.cancel("s") is True
    with pytest.raises(RunCancelled):  # its status is cancelled although its function returns
        await h.run_to_end(run)
    assert caught == ["cancel"]


@on_every_store
async def test_cancel_of_an_ended_or_unknown_run_returns_false(h):
    engine = await h.engine(quick)
    run = await engine.start(quick, id="q")
    assert await h.run_to_end(run) == "quick"
    before = await everything_in(h.store, "q")
    assert await engine.cancel("q") is False
    assert await engine.cancel("unknown") is False
    assert await everything_in(h.store, "q") == before
    assert await engine.status("unknown") is None


# --- terminate


@on_every_store
async def test_terminate_ends_a_run_at_once_and_does_not_record_its_running_step(h):
    waits, gate = hanging()
    engine = await h.engine(waits)
    run = await engine.start(waits, id="w")
    await h.settle()
    assert await engine.terminate("w") is True
    assert await run.status() is RunStatus.CANCELLED
    with pytest.raises(RunCancelled):
        await run.result()
    before = await everything_in(h.store, "w")
    gate.set()
    await h.clock.advance(100)
    assert await everything_in(h.store, "w") == before
    assert await engine.history("w") == []
    assert engine.loaded_runs == []


@on_every_store
async def test_terminate_from_another_process_rejects_the_turn_in_progress(h):
    waits, gate = hanging()
    engine = await h.engine(waits)
    await engine.start(waits, id="w")
    client = await h.client()
    await h.settle()
    assert await client.terminate("w") is True
    before = await everything_in(h.store, "w")
    gate.set()
    await h.clock.advance(100)
    assert await everything_in(h.store, "w") == before
    assert engine.loaded_runs == []


@on_every_store
async def test_terminate_runs_no_handlers_that_do_durable_work(h):
    engine = await h.engine(sleepy)
    await engine.start(sleepy, id="s")
    await h.settle()
    assert await engine.terminate("s") is True
    await h.clock.advance(2000)
    assert LOG == []


@on_every_store
async def test_terminal_status_is_final(h):
    """Guarantee 6."""

    @step(retry=None)
    async def fail() -> None:
        raise ValueError("no")

    @workflow
    async def failing(ctx: Context) -> None:
        await fail()

    engine = await h.engine(quick, sleepy, failing)
    await h.run_to_end(await engine.start(quick, id="done"))
    with pytest.raises(RunFailed):
        await h.run_to_end(await engine.start(failing, id="failed"))
    await engine.start(sleepy, id="stopped", delay=10)
    await engine.terminate("stopped")
    ids = ["done", "failed", "stopped"]
    before = await everything_in(h.store, *ids)
    for run_id in ids:
        assert await engine.cancel(run_id) is False
        assert await engine.terminate(run_id) is False
        with pytest.raises(RunTerminated, match="has ended"):
            await engine.resume(run_id)
    await engine.start(quick, id="done")
    await engine.recover()
    await h.clock.advance(1000)
    assert await everything_in(h.store, *ids) == before
    assert await engine.terminate("unknown") is False


# --- resume


@on_every_store
async def test_resume_shortens_the_wait_for_a_retry(h):
    @step(retry=Retry(initial=600, max_delay=600, jitter=0))
    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ValueError("no")
        return "yes"

    @workflow
    async def trying(ctx: Context) -> str:
        return await flaky()

    engine = await h.engine(trying)
    run = await engine.start(trying, id="t")
    await h.clock.advance(1)
    await engine.resume("t")
    await h.settle()
    assert await run.status() is RunStatus.SUCCEEDED
    assert h.executed() == [("flaky", 1), ("flaky", 2)]


@on_every_store
async def test_resume_does_not_fire_a_timer(h):
    engine = await h.engine(sleepy)
    run = await engine.start(sleepy, id="s")
    await h.clock.advance(1)
    await engine.resume("s")
    await h.clock.advance(1)
    assert await run.status() is RunStatus.SUSPENDED
    assert await h.run_to_end(run) == "awake"


@on_every_store
async def test_resume_of_an_unknown_run_raises_run_not_found(h):
    engine = await h.engine(sleepy)
    with pytest.raises(RunNotFound):
        await engine.resume("unknown")


@on_every_store
async def test_a_cancelled_workflow_can_still_see_its_steps_fail(h):
    @step(retry=None)
    async def fail() -> None:
        raise ValueError("no")

    @workflow
    async def untidy(ctx: Context) -> None:
        try:
            await ctx.sleep(1000)
        finally:
            try:
                await fail()
            except StepFailed as failed:
                LOG.append(failed.type)

    engine = await h.engine(untidy)
    run = await engine.start(untidy)
    await h.settle()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG == ["ValueError"]
