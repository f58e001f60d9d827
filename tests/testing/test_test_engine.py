"""TestEngine: an engine on a virtual clock that advances while a caller waits."""

import asyncio
import threading
from datetime import timedelta

import pytest

from perdure import (
    Client,
    Context,
    Engine,
    EngineConfig,
    Retry,
    RunFailed,
    RunStatus,
    StepFailed,
    WorkflowMisuse,
    event,
    step,
    workflow,
)
from perdure.testing import TestEngine
from perdure.testing.engine import Recorded
from tests.testing.async_runner import with_engine

DAY = timedelta(days=1)


@event
class KitApproved:
    by: str


@step
async def kit_greet(name: str) -> str:
    return f"hello {name}"


@step(retry=Retry(max_attempts=3, delay=lambda attempt: 3600.0))
async def kit_flaky() -> str:
    raise ConnectionError("away")


@workflow(name="kit.month")
async def month(ctx: Context, name: str) -> str:
    for _ in range(30):
        await ctx.sleep(DAY)
    return await kit_greet(name)


@workflow(name="kit.approval")
async def approval(ctx: Context, timeout: float | None = None) -> str:
    return (await ctx.receive(KitApproved, timeout=timeout)).by


def test_test_engine_is_not_collected_and_has_all_engine_calls():
    assert not TestEngine.__test__
    assert {name for name in dir(Engine) if not name.startswith("_")} <= set(dir(TestEngine))


@with_engine
async def test_a_month_takes_a_few_wake_ups(engine):
    before = engine.now()
    run = await engine.start(month, "ada")
    assert await run.result() == "hello ada"
    assert timedelta(days=30) <= engine.now() - before < timedelta(days=30, minutes=1)
    assert engine.faults.calls["renew"] < 50, "maintenance does not use up virtual time"


@with_engine
async def test_virtual_time_stands_still_unless_a_caller_waits(engine):
    before = engine.now()
    run = await engine.start(month, "ada")
    await engine.settle()
    assert await run.status() is RunStatus.SUSPENDED
    for _ in range(1000):
        await asyncio.sleep(0)
    assert engine.now() == before
    await engine.advance(DAY * 10.5)
    assert engine.now() == before + DAY * 10.5
    assert [line.status for line in await engine.history_of(run)] == ["succeeded"] * 10 + ["pending"]


@with_engine
async def test_several_callers_wait_at_once(engine):
    approved = await engine.start(approval)

    async def approve_later() -> None:
        await engine.execute(month, "bob")
        await approved.send(KitApproved("bob"))

    by, _, greeting = await asyncio.gather(approved.result(), approve_later(), engine.execute(month, "cy"))
    assert (by, greeting) == ("bob", "hello cy")


@with_engine
async def test_two_engines_in_one_loop_do_not_wait_for_each_other(engine):
    async with TestEngine() as other:
        one, two = await asyncio.gather(engine.execute(month, "a"), other.execute(month, "b"))
    assert (one, two) == ("hello a", "hello b")


@with_engine
async def test_wait_that_cannot_end_fails_at_once_with_the_reason(engine):
    run = await engine.start(approval, id="kit-approval")
    with pytest.raises(AssertionError, match="run 'kit-approval' will not end by itself: it waits for event KitAppr"):
        await run.result()
    await run.send(KitApproved("ada"))
    assert await run.result() == "ada"


@with_engine
async def test_request_without_a_reply_fails_with_the_reason(engine):
    run = await engine.start(month, "ada")
    await engine.start(approval, id="kit-silent")
    with pytest.raises(AssertionError, match="run 'kit-silent' does not reply: it waits for event KitApproved"):
        await engine.request("kit-silent", "question", payload=1)
    assert await run.status() is RunStatus.SUCCEEDED, "time passed while it was waited for"


@with_engine
async def test_timeouts_of_callers_and_runs_use_the_same_clock(engine):
    run = await engine.start(approval, id="kit-timed")
    before = engine.now()
    with pytest.raises(TimeoutError):
        await run.result(timeout=90)
    assert engine.now() == before + timedelta(seconds=90)
    with pytest.raises(RunFailed, match="TimeoutError"):
        await engine.execute(approval, 3600.0)
    assert engine.now() >= before + timedelta(seconds=3690)


@with_engine
async def test_watch_advances_virtual_time(engine):
    run = await engine.start(month, "ada")
    seen = [entry.location async for entry in run.watch()]
    assert seen[-1] == "kit_greet"


@with_engine
async def test_retries_take_virtual_time(engine):
    @workflow(name="kit.flaky")
    async def flaky(ctx: Context) -> int:
        try:
            await kit_flaky()
        except StepFailed as failed:
            return failed.attempts
        return 0

    before = engine.now()
    run = await engine.start(flaky)
    assert await run.result() == 3
    assert engine.now() >= before + timedelta(hours=2)
    engine.assert_ran(run, kit_flaky, times=3)


@with_engine
async def test_endless_timer_does_not_hide_a_stuck_run(engine, monkeypatch):
    monkeypatch.setattr("perdure.testing.time_skipping.MANY", 200)

    @workflow(name="kit.ticker")
    async def ticker(ctx: Context) -> None:
        while True:
            await ctx.sleep(10)

    await engine.start(ticker)
    with pytest.raises(AssertionError, match="has not ended by 2025-06-"):
        await engine.execute(approval)


@with_engine
async def test_finished_runs_are_retained_by_default(engine):
    first = await engine.start(month, "ada")
    await first.result()
    for name in "bcd":
        await engine.execute(month, name)
    assert await first.result() == "hello ada"
    async with TestEngine(config=EngineConfig()) as faithful:
        first = await faithful.start(month, "ada")
        await first.result()
        for name in "bcd":
            await faithful.execute(month, name)
        assert await faithful.status(first.id) is None


# --- the real world ---------------------------------------------------------------------------------------------------


@with_engine
async def test_step_body_that_waits_for_the_real_world_gets_real_time(engine):
    @step(timeout=1)
    async def real() -> str:
        await asyncio.sleep(0.05)
        return "real"

    @workflow(name="kit.real")
    async def waits(ctx: Context) -> str:
        return await real()

    before = engine.now()
    assert await engine.execute(waits) == "real", "it was not timed out, although virtual time costs nothing"
    assert engine.now() - before < timedelta(seconds=1)


@with_engine
async def test_step_body_that_waits_for_nothing_real_times_out_at_once(engine):
    @step(timeout=3600, retry=None)
    async def hangs() -> None:
        await asyncio.Event().wait()

    @workflow(name="kit.hangs")
    async def hanging(ctx: Context) -> str:
        try:
            await hangs()
        except StepFailed as failed:
            return failed.type
        return ""

    assert await engine.execute(hanging) == "TimeoutError"


@with_engine
async def test_real_time_is_granted_once(engine, monkeypatch):
    """The timeout around the test is a real timer, which looks like a wait for the real world."""
    monkeypatch.setattr("perdure.testing.time_skipping.REAL_WAIT_SECONDS", 0.02)

    @step(timeout=3600, retry=None)
    async def hangs_beside_a_timer() -> None:
        await asyncio.Event().wait()

    @workflow(name="kit.hangs_beside_a_timer")
    async def hanging(ctx: Context) -> None:
        await asyncio.gather(hangs_beside_a_timer(), month(ctx, "ada"))

    async with asyncio.timeout(60):
        with pytest.raises(RunFailed, match="TimeoutError"):
            await engine.execute(hanging)


@with_engine
async def test_endless_step_body_is_reported_as_the_reason(engine):
    @step
    async def never_ends() -> None:
        await asyncio.Event().wait()

    @workflow(name="kit.never_ends")
    async def waits(ctx: Context) -> None:
        await never_ends()

    with pytest.raises(AssertionError, match="it waits for a step that does not end: never_ends"):
        await engine.execute(waits)


@with_engine
async def test_step_bodies_in_threads_are_awaited(engine):
    @step
    def in_thread() -> str:
        return threading.current_thread().name

    @workflow(name="kit.threads")
    async def threads(ctx: Context) -> str:
        return await in_thread()

    assert (await engine.execute(threads)).startswith("perdure-step-")


@with_engine
async def test_real_time_work_of_the_test_is_awaited(engine):
    run = await engine.start(approval)

    async def approve() -> None:
        await asyncio.sleep(0.02)
        await run.send(KitApproved("late"))

    by, _ = await asyncio.gather(run.result(), approve())
    assert by == "late"


# --- what happened ----------------------------------------------------------------------------------------------------


@with_engine
async def test_histories_compare_with_plain_tuples(engine):
    @workflow(name="kit.two")
    async def two(ctx: Context) -> None:
        await kit_greet("ada")
        await kit_flaky.options(retry=None)()

    run = await engine.start(two)
    with pytest.raises(RunFailed):
        await run.result()
    assert await engine.history_of(run) == [
        ("kit_greet", "succeeded", "hello ada"),
        ("kit_flaky", "failed", "ConnectionError: away"),
    ]
    assert await engine.history_of(run.id) == await engine.history_of(run)
    assert isinstance((await engine.history_of(run))[0], Recorded)


@with_engine
async def test_assert_ran_counts_executions_by_name_and_location(engine):
    @workflow(name="kit.thrice")
    async def thrice(ctx: Context) -> None:
        await asyncio.gather(kit_greet("a"), kit_greet("b"))
        await kit_greet.options(name="other")("c")

    run = await engine.start(thrice)
    await run.result()
    other = await engine.start(thrice)
    await other.result()
    engine.assert_ran(run, kit_greet, times=2)
    engine.assert_ran(run, "kit_greet#1", times=1)
    engine.assert_ran(run.id, "other")
    engine.assert_ran(run, "never", times=0)
    with pytest.raises(
        AssertionError, match=r"execute kit_greet once, but did twice; it executed .*kit_greet#1 \(attempt 1\)"
    ):
        engine.assert_ran(run, kit_greet, times=1)
    with pytest.raises(AssertionError, match="to execute never at least once, but did never"):
        engine.assert_ran(run, "never")


# --- life -------------------------------------------------------------------------------------------------------------


def test_first_call_opens_the_test_engine_in_any_loop():
    engine = TestEngine()

    async def main() -> str:
        return await engine.execute(month, "ada")

    with asyncio.Runner() as runner:
        assert runner.run(main()) == "hello ada"
        engine.drop()
    with pytest.raises(WorkflowMisuse, match="closed"):
        asyncio.run(main())


def test_engine_can_be_collected_after_its_loop_closed():
    engine = TestEngine()

    async def main() -> None:
        await engine.start(approval)
        await engine.settle()

    asyncio.run(main())
    engine.drop()
    TestEngine().drop()  # one that was never used


@with_engine
async def test_closing_a_client_does_not_wait_for_pending_calls(engine):
    @step
    async def for_ever() -> None:
        await asyncio.Event().wait()

    @workflow(name="kit.for_ever")
    async def hangs(ctx: Context) -> None:
        await for_ever()

    await engine.start(hangs)
    await engine.settle()
    assert engine.slots_taken == 1


def test_only_the_workflows_that_were_named_are_served():
    async def main() -> None:
        async with TestEngine([month]) as engine:
            assert await engine.execute(month, "ada") == "hello ada"
            run = await engine.start(approval)
            with pytest.raises(AssertionError, match="no live worker has workflow kit"):
                await run.result()

    asyncio.run(main())


def test_client_subclass_works_as_a_client():
    assert issubclass(TestEngine, Client)


@with_engine
async def test_test_engine_store_can_inject_faults(engine):
    run = await engine.start(month, "ada")
    await engine.settle()
    engine.faults.fail_calls(3, calls=["commit"])
    engine.faults.lose_responses(2)
    assert await run.result() == "hello ada"
    engine.assert_ran(run, kit_greet, times=1)
