"""current_step().outcome: functions registered with on_exit read how the run ends."""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from perdure import (
    Complete,
    Context,
    CriticalError,
    Engine,
    RunCancelled,
    RunFailed,
    RunStatus,
    current_step,
    step,
    workflow,
)
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import STORES, make_store, on_every_store

OUTCOMES: list[Complete[object] | None] = []


@dataclass
class Receipt:
    id: str


@pytest.fixture(autouse=True)
def forget():
    OUTCOMES.clear()


@step
async def report(of: str = "") -> None:
    OUTCOMES.append(current_step().outcome)


def report_in_thread() -> None:
    OUTCOMES.append(current_step().outcome)


@step(compensate=report)
async def book() -> str:
    OUTCOMES.append(current_step().outcome)
    return "booked"


@workflow
async def ends(ctx: Context, how: str) -> Receipt:
    ctx.on_exit(report)
    ctx.on_exit(report_in_thread)
    await book()
    if how == "fail":
        raise CriticalError("no money")
    if how == "wait":
        await ctx.sleep(10_000)
    return Receipt("r-1")


async def wait_for_end(h: Harness, engine: Engine, run_id: str) -> None:
    with contextlib.suppress(RunFailed, RunCancelled):
        await h.drive(engine.result(run_id))


async def end(h: Harness, how: str) -> None:
    engine = await h.engine(ends)
    await engine.start(ends, how, id="r")
    await h.settle()
    if how == "wait":
        await engine.cancel("r", reason="too late")
        await h.settle()
    await wait_for_end(h, engine, "r")


@on_every_store
async def test_exit_functions_read_the_value_of_a_run_that_succeeds(h):
    await end(h, "succeed")
    outcome = Complete(RunStatus.SUCCEEDED, Receipt("r-1"))
    assert [None, outcome, outcome] == OUTCOMES, "a step that is no exit function has no outcome"
    assert OUTCOMES[1] is not OUTCOMES[2]


@on_every_store
async def test_exit_functions_read_the_error_of_a_run_that_fails(h):
    await end(h, "fail")
    booking, compensation, *exits = OUTCOMES
    assert (booking, compensation) == (None, None)
    for outcome in exits:
        assert outcome is not None
        assert outcome.error is not None
        assert (outcome.status, outcome.value, outcome.reason) == (RunStatus.FAILED, None, None)
        assert (outcome.error.type, outcome.error.message) == ("CriticalError", "no money")


@on_every_store
async def test_exit_functions_read_the_reason_of_a_cancel(h):
    await end(h, "wait")
    assert [None, None, *[Complete(RunStatus.CANCELLED, reason="too late")] * 2] == OUTCOMES


@on_every_store
async def test_exit_functions_read_a_timeout(h):
    @workflow(timeout=5)
    async def slow(ctx: Context) -> None:
        ctx.on_exit(report)
        await ctx.sleep(10_000)

    engine = await h.engine(slow)
    await wait_for_end(h, engine, (await engine.start(slow)).id)
    (outcome,) = OUTCOMES
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.status, outcome.error.type) == (RunStatus.FAILED, "TimeoutError")


@pytest.mark.parametrize("store_kind", STORES)
@pytest.mark.parametrize("how", ["succeed", "fail"])
def test_outcome_is_the_same_for_the_attempt_after_a_crash(store_kind, how, tmp_path):
    """The first worker dies while the exit function runs; another process repeats the attempt."""

    @step
    async def hangs_once() -> None:
        OUTCOMES.append(current_step().outcome)
        if len(OUTCOMES) == 1:
            await asyncio.Event().wait()

    @workflow
    async def exits(ctx: Context) -> Receipt:
        ctx.on_exit(hangs_once)
        await ctx.sleep(1)
        if how == "fail":
            raise CriticalError("no money")
        return Receipt("r-1")

    async def main() -> None:
        clock = VirtualClock()
        async with Harness(make_store(store_kind, tmp_path, clock), clock=clock) as h:
            first = await h.engine(exits)
            await first.start(exits, id="r")
            await h.settle()
            await clock.advance(1)
            await h.settle()
            assert len(OUTCOMES) == 1
            await h.crash(first)
            second = await h.engine(exits)
            await wait_for_end(h, second, "r")

    asyncio.run(main())
    before, after = OUTCOMES
    assert before == after
    assert before is not None
    assert before.status is (RunStatus.FAILED if how == "fail" else RunStatus.SUCCEEDED)
