"""A workflow requests the cancellation of its children and of other runs, once."""

import asyncio

import pytest

from perdure import ChildFailed, Context, RunCancelled, RunStatus, step, workflow
from perdure.testing import Harness, VirtualClock
from tests.engine.store_matrix import STORES, make_store, on_every_store

CANCELLED: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    CANCELLED.clear()


@step
async def note(what: str) -> None:
    CANCELLED.append(what)


@workflow
async def sleeper(ctx: Context) -> str:
    try:
        await ctx.sleep(10_000)
        return "slept"
    except asyncio.CancelledError as error:
        await note(f"{ctx.run_id}: {error}")
        raise


@workflow
async def cancels_child(ctx: Context, reason: str | None = None) -> list[object]:
    child = await ctx.start_child(sleeper, id="child")
    await ctx.sleep(5)
    requested = await child.cancel(reason=reason)
    outcome = await child.outcome()
    again = await child.cancel()
    try:
        await child.result()
    except ChildFailed as failed:
        return [requested, again, outcome.status, outcome.reason, failed.message]
    raise AssertionError("the child was cancelled")


@workflow
async def cancels_other(ctx: Context, run_id: str, reason: str | None = None) -> bool:
    return await ctx.cancel(run_id, reason=reason)


@on_every_store
async def test_child_is_cancelled_by_its_handle(h):
    engine = await h.engine(cancels_child, sleeper)
    run = await engine.start(cancels_child, "too late", id="parent")
    requested, again, status, reason, message = await h.run_to_end(run)
    assert (requested, again, status, reason) == (True, False, RunStatus.CANCELLED, "too late")
    assert message == "run 'child' was cancelled: too late"
    assert (await engine.describe("child")).cancel_reason == "too late"
    assert CANCELLED == ["child: too late"]
    entry = next(each for each in await engine.history("parent") if each.kind == "cancel_run")
    assert (entry.location, entry.value) == ("sleeper:cancel", True)


@on_every_store
async def test_child_is_cancelled_without_a_reason(h):
    engine = await h.engine(cancels_child, sleeper)
    result = await h.run_to_end(await engine.start(cancels_child, id="parent"))
    assert result == [True, False, RunStatus.CANCELLED, None, "run 'child' was cancelled"]


@on_every_store
async def test_any_run_is_cancelled_by_its_id(h):
    engine = await h.engine(cancels_other, sleeper)
    await engine.start(sleeper, id="s")
    await h.settle()
    assert await h.run_to_end(await engine.start(cancels_other, "s", "no reason", id="c")) is True
    with pytest.raises(RunCancelled, match="no reason"):
        await h.drive(engine.result("s"))
    assert await h.run_to_end(await engine.start(cancels_other, "s", id="c2")) is False, "it has ended"
    assert await h.run_to_end(await engine.start(cancels_other, "unknown", id="c3")) is False


@on_every_store
@pytest.mark.parametrize("reason", [None, "not needed"])
async def test_run_that_never_executed_is_cancelled_at_once(h, reason):
    engine = await h.engine(cancels_other, sleeper)
    await engine.start(sleeper, id="later", delay=3600)
    assert await h.run_to_end(await engine.start(cancels_other, "later", reason, id="c")) is True
    described = await engine.describe("later")
    assert (described.status, described.cancel_reason) == (RunStatus.CANCELLED, reason)
    assert CANCELLED == []


@on_every_store
async def test_run_can_cancel_itself(h):
    @workflow
    async def gives_up(ctx: Context) -> None:
        await ctx.cancel(ctx.run_id, reason="gave up")
        await ctx.sleep(10)

    engine = await h.engine(gives_up)
    with pytest.raises(RunCancelled, match="gave up"):
        await h.run_to_end(await engine.start(gives_up, id="r"))


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("store_kind", STORES)
def test_request_happens_once_when_the_worker_crashes_around_any_commit(store_kind, side, tmp_path):
    """The result is the same, and the child sees one cancel, also if it has ended when the request is repeated."""

    async def attempt(n: int) -> bool:
        """Crash at the n-th commit; return whether the run had as many commits."""
        clock = VirtualClock()
        CANCELLED.clear()
        async with Harness(make_store(store_kind, tmp_path, clock, name=f"{side}{n}"), clock=clock) as h:
            first = await h.engine(cancels_child, sleeper)
            first.faults.crash(n, side)
            start = first.start(cancels_child, "too late", id="parent")
            run = await h.drive_until_crash(first, start)
            if run is not None:
                result = await h.drive_until_crash(first, run.result())
                if result is not None:
                    return False
            second = await h.engine(cancels_child, sleeper)
            run = await second.start(cancels_child, "too late", id="parent")
            result = await h.run_to_end(run)
            assert result[:4] == [True, False, RunStatus.CANCELLED, "too late"], n
            assert len(set(CANCELLED)) == 1
            cancels = [each for each in await second.history("child") if each.kind == "cancel"]
            assert len(cancels) == 1
            return True

    async def main() -> None:
        n = 1
        while await attempt(n):
            n += 1
        assert n > 5

    asyncio.run(main())


@on_every_store
async def test_caller_gives_a_reason_to_a_run_that_never_executed(h):
    engine = await h.engine(sleeper)
    await engine.start(sleeper, id="later", delay=3600)
    assert await engine.cancel("later", reason="not needed")
    await h.settle()
    described = await engine.describe("later")
    assert (described.status, described.cancel_reason) == (RunStatus.CANCELLED, "not needed")
    assert h.executed("later") == []
