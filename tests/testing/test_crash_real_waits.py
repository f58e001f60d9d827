"""`crash_everywhere` gives real time to step bodies that wait for real I/O, as a `TestEngine` does."""

import asyncio
from typing import Any

import pytest

from perdure import Context, StepFailed, step, workflow
from perdure.testing import crash_everywhere
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES


@step(name="real.short", timeout=3600)
async def real_short() -> str:
    await asyncio.sleep(0.001)
    return "real"


@step(name="real.endless", timeout=3600, retry=None)
async def real_endless() -> None:
    await asyncio.sleep(1e9)


@workflow(name="real.waits")
async def real_waits(ctx: Context) -> list[str]:
    first = await real_short()
    await ctx.sleep(60)
    return [first, await real_short()]


@workflow(name="real.times_out")
async def real_times_out(ctx: Context) -> str:
    try:
        await real_endless()
    except StepFailed as failed:
        return failed.type
    return "not timed out"


@workflow(name="real.called")
async def real_called(ctx: Context) -> str:
    return str(await ctx.receive("real.word"))


def test_step_that_waits_in_real_time_is_not_timed_out():
    report = asyncio.run(crash_everywhere(real_waits))
    assert report.outcome == ("returned", ["real", "real"])
    assert len(report.crashes) == 2 * report.commits


@pytest.mark.parametrize("kind", STORES)
def test_step_that_waits_in_real_time_is_not_timed_out_on_any_store(kind, tmp_path):
    assert crash_on(kind, tmp_path, real_waits).outcome == ("returned", ["real", "real"])


def test_step_that_exceeds_the_limit_of_real_time_is_timed_out(monkeypatch):
    monkeypatch.setattr("perdure.testing.time_skipping.REAL_WAIT_SECONDS", 0.02)
    report = asyncio.run(crash_everywhere(real_times_out))
    assert report.outcome == ("returned", "TimeoutError")


def test_real_time_work_of_the_external_caller_is_awaited():
    async def send(engine: Any) -> None:
        await asyncio.sleep(0.001)
        await engine.send("called", "real.word", "now", event_id="word")

    async def main() -> object:
        return (await crash_everywhere(real_called, id="called", drive=send)).outcome

    assert asyncio.run(main()) == ("returned", "now")
