"""suspend_on_failure: an exhausted step holds its run, and `resume` gives it its attempts back."""

import pytest

from perdure import Context, Retry, RunCancelled, RunFailed, RunStatus, StepFailed, current_step, step, workflow
from perdure.clock import sleep_on
from tests.engine.crash_points import crash_script
from tests.engine.store_matrix import STORES, another_handle, on_every_store

LOG: list[str] = []
BROKEN: set[str] = set()


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()
    BROKEN.clear()


class Declined(Exception):
    pass


async def undo(what: str) -> None:
    LOG.append(f"undo {what}")


@step(retry=Retry(max_attempts=2, initial=1, jitter=0), compensate=undo)
async def use(what: str) -> str:
    LOG.append(f"{what} {current_step().attempt}")
    if what in BROKEN:
        raise ConnectionError(f"{what} is broken")
    return what


@step(retry=None, raises=Declined)
async def decline() -> None:
    raise Declined


@workflow(name="held.chain", suspend_on_failure=True)
async def held_chain(ctx: Context) -> list[str]:
    return [await use("pump"), await use("valve"), await use("tap")]


async def held_at_valve(h, wf=held_chain):
    BROKEN.add("valve")
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.clock.advance(10)
    await h.settle()
    return engine, run


@on_every_store
async def test_an_exhausted_step_holds_the_run_and_resume_runs_it_again(h):
    engine, run = await held_at_valve(h)
    assert await run.status() is RunStatus.SUSPENDED
    reasons = [reason for reason in (await run.describe()).waiting_for if reason.kind == "held"]
    assert "valve is broken" in reasons[0].text
    await h.clock.advance(1_000)
    await h.settle()
    assert LOG == ["pump 1", "valve 1", "valve 2"], "a held run does nothing by itself"
    BROKEN.clear()
    await engine.resume("r")
    assert await h.run_to_end(run) == ["pump", "valve", "tap"]
    assert LOG == ["pump 1", "valve 1", "valve 2", "valve 1", "tap 1"]


@on_every_store
async def test_resume_resets_attempts_and_holds_again(h):
    engine, run = await held_at_valve(h)
    await engine.resume("r")
    await h.clock.advance(10)
    await h.settle()
    assert LOG[1:] == ["valve 1", "valve 2"] * 2
    assert await run.status() is RunStatus.SUSPENDED
    assert any(reason.kind == "held" for reason in (await run.describe()).waiting_for)


@on_every_store
async def test_a_held_run_stays_held_across_a_restart(h):
    engine, _ = await held_at_valve(h)
    await h.crash(engine)
    BROKEN.clear()
    second = await h.engine(held_chain, store=another_handle(h.store, h.clock))
    await h.clock.advance(1000)
    await h.settle()
    assert LOG == ["pump 1", "valve 1", "valve 2"]
    await second.resume("r")
    assert await h.drive(second.get("r").result()) == ["pump", "valve", "tap"]


@on_every_store
async def test_a_held_run_can_be_cancelled_and_compensates(h):
    engine, run = await held_at_valve(h)
    assert await engine.cancel("r")
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert LOG[-1] == "undo pump"


@on_every_store
async def test_other_branches_finish_before_the_run_is_held(h):
    @workflow(name="held.branches", suspend_on_failure=True)
    async def branches(ctx: Context) -> dict:
        async def slow() -> str:
            await ctx.sleep(100)
            return await use("pump")

        return await ctx.join(broken=use("valve"), slow=slow())

    engine, run = await held_at_valve(h, branches)
    assert LOG == ["valve 1", "valve 2"]
    await h.clock.advance(200)
    await h.settle()
    BROKEN.clear()
    await engine.resume("r")
    assert await h.run_to_end(run) == {"broken": "valve", "slow": "pump"}


@on_every_store
async def test_error_type_of_the_workflow_module_is_preserved(h):
    @workflow(name="held.typed", suspend_on_failure=True)
    async def typed(ctx: Context) -> str:
        try:
            await decline()
        except Declined:
            return "declined"
        return "accepted"

    engine = await h.engine(typed)
    assert await h.run_to_end(await engine.start(typed)) == "declined"


@on_every_store
async def test_failed_step_raises_without_suspend_on_failure(h):
    BROKEN.add("valve")

    @workflow(name="held.not")
    async def not_held(ctx: Context) -> str:
        try:
            return await use("valve")
        except StepFailed as failed:
            return failed.message

    engine = await h.engine(not_held)
    assert await h.run_to_end(await engine.start(not_held)) == "valve is broken"


@on_every_store
async def test_an_error_of_the_workflow_itself_fails_the_run(h):
    @workflow(name="held.own-error", suspend_on_failure=True)
    async def own_error(ctx: Context) -> None:
        await use("pump")
        raise ValueError("mine")

    engine = await h.engine(own_error)
    with pytest.raises(RunFailed, match="mine"):
        await h.run_to_end(await engine.start(own_error))
    assert LOG == ["pump 1", "undo pump"]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_around_a_hold(kind, tmp_path):
    def begin():
        LOG.clear()
        BROKEN.add("valve")

    async def hold_and_fix(h, engine):
        run = await engine.start(held_chain, id="r")
        while not (await run.describe()).status.terminal:
            if any(reason.kind == "held" for reason in (await run.describe()).waiting_for):
                BROKEN.clear()
                await engine.resume("r")
            await sleep_on(h.clock, 10)
        assert await run.result() == ["pump", "valve", "tap"]
        assert LOG.count("pump 1") <= 2
        assert LOG.count("valve 2") in (1, 2)
        assert len(LOG) <= 6, LOG

    assert crash_script(kind, tmp_path, [held_chain], hold_and_fix, begin) > 6
