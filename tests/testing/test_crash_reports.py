"""The report of crash_everywhere names the commit, the difference, and the steps that were executed twice."""

import asyncio
from datetime import timedelta

import pytest

from perdure import Context, current_step, event, step, workflow
from perdure.testing import crash_everywhere

WORLD: list[str] = []


@event
class CrashApproved:
    by: str


@step
async def report_add(what: str) -> str:
    WORLD.append(what)
    return what


@step
async def report_add_once(what: str) -> str:
    key = current_step().idempotency_key
    if key not in WORLD:
        WORLD.append(key)
    return what


def test_differing_effects_are_reported_with_commit_and_step():
    @workflow(name="reports.careless")
    async def careless(ctx: Context) -> None:
        await report_add_once("safe")
        await ctx.sleep(10)
        await report_add("lamp")
        await ctx.sleep(10)

    with pytest.raises(AssertionError) as failed:
        asyncio.run(crash_everywhere(careless, begin=WORLD.clear, effects=lambda: len(WORLD)))
    first, effects, blame = str(failed.value).splitlines()
    assert first.startswith("after a crash before commit ")
    assert "(report_add succeeded, sleep#1 requested" in first
    assert effects == "- the effects are 3, and without a crash 2"
    assert "step report_add is not idempotent: attempt 1 was under way" in blame
    assert "report_add_once" not in str(failed.value), "that one was not under way then"


def test_another_outcome_names_the_step_that_was_executed_twice():
    @step
    async def counts() -> int:
        WORLD.append("x")
        return len(WORLD)

    @workflow(name="reports.fickle")
    async def fickle(ctx: Context) -> int:
        return await counts()

    with pytest.raises(AssertionError, match=r"the outcome is \('returned', 2\)(.|\n)*step counts is not idempotent"):
        asyncio.run(crash_everywhere(fickle, begin=WORLD.clear))


def test_the_report_names_what_was_executed_again_and_by_which_crash():
    @workflow(name="reports.careful")
    async def careful(ctx: Context) -> None:
        await report_add_once("lamp")
        await ctx.sleep(timedelta(days=20))
        await report_add_once("table")

    report = asyncio.run(crash_everywhere(careful, begin=WORLD.clear, effects=lambda: len(WORLD)))
    assert set(report.repeated) == {"report_add_once", "report_add_once#1"}
    crash = report.repeated["report_add_once#1"]
    assert crash.side == "before"
    assert "report_add_once#1 succeeded, run crash-everywhere succeeded" in str(crash)
    assert str(report.crashes[0]) == "a crash before commit 1 (run crash-everywhere created)"


def test_simulated_external_state_changes():
    @workflow(name="reports.approved")
    async def approved(ctx: Context) -> str:
        return await report_add_once((await ctx.receive(CrashApproved)).by)

    async def drive(engine) -> None:
        await engine.send("crash-everywhere", CrashApproved("ada"), event_id="once")

    report = asyncio.run(crash_everywhere(approved, drive=drive, begin=WORLD.clear, effects=lambda: len(WORLD)))
    assert report.outcome == ("returned", "ada")
    assert any("event for run crash-everywhere" in crash.what for crash in report.crashes)
