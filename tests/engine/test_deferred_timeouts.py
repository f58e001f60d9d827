"""`ctx.deferred(..., timeout=)` on every store: the store decides between a completion and the timeout."""

import asyncio

import pytest

from perdure import Context, RunFailed, RunStatus, step, workflow
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store


@step
async def prepare() -> None:
    pass


@workflow(name="timeouts.review")
async def review(ctx: Context) -> str:
    stars = ctx.deferred("stars", int, timeout=60)
    await prepare()
    try:
        return f"{await stars} stars"
    except TimeoutError as error:
        return f"late: {error}"


async def waiting(h):
    engine = await h.engine(review)
    run = await engine.start(review, id="r")
    await h.settle()
    return engine, run, await engine.deferred_token("r", "stars")


@on_every_store
async def test_await_raises_timeout_error_and_later_completions_return_false(h):
    engine, run, token = await waiting(h)
    [reason] = (await run.describe()).waiting_for
    assert (reason.kind, reason.name) == ("deferred", "stars")
    assert reason.until is not None
    assert "until" in reason.text
    await h.clock.advance(59)
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    await h.clock.advance(2)
    assert await h.run_to_end(run) == "late: deferred 'stars' was not completed in time"
    assert await engine.complete(token, 5) is False
    assert await engine.fail(token, "no") is False


@on_every_store
async def test_uncaught_timeout_fails_the_run(h):
    @workflow(name="timeouts.strict")
    async def strict(ctx: Context) -> int:
        return await ctx.deferred("stars", int, timeout=5)

    engine = await h.engine(strict)
    with pytest.raises(RunFailed, match=r"TimeoutError.*'stars'"):
        await h.run_to_end(await engine.start(strict))


@on_every_store
async def test_completion_in_time_wins(h):
    engine, run, token = await waiting(h)
    await h.clock.advance(59)
    assert await engine.complete(token, 5) is True
    assert await h.run_to_end(run) == "5 stars"
    [deadline] = [each for each in await engine.history("r") if each.kind == "deadline"]
    assert deadline.status == "cancelled"


@on_every_store
async def test_completions_return_false_before_the_run_awaits_a_deferred_that_timed_out(h):
    @workflow(name="timeouts.busy")
    async def busy(ctx: Context) -> str:
        stars = ctx.deferred("stars", int, timeout=10)
        await ctx.sleep(100)
        try:
            return f"{await stars} stars"
        except TimeoutError:
            return "late"

    engine = await h.engine(busy)
    run = await engine.start(busy, id="r")
    await h.settle()
    await h.clock.advance(50)
    await h.settle()
    assert await engine.complete(await engine.deferred_token("r", "stars"), 5) is False
    assert await h.run_to_end(run) == "late"


@on_every_store
async def test_completion_that_is_stored_while_no_worker_runs_wins(h):
    engine, _, token = await waiting(h)
    await h.crash(engine)
    await h.clock.advance(300)
    client = await h.client(store=another_handle(h.store, h.clock))
    assert await client.complete(token, 5) is True
    second = await h.engine(review, store=another_handle(h.store, h.clock))
    assert await h.drive(second.get("r").result()) == "5 stars"


@on_every_store
async def test_deadline_that_passes_while_no_worker_runs_is_kept(h):
    engine, _, token = await waiting(h)
    await h.crash(engine)
    await h.clock.advance(300)
    second = await h.engine(review, store=another_handle(h.store, h.clock))
    assert (await h.drive(second.get("r").result())).startswith("late")
    assert await second.complete(token, 5) is False


@on_every_store
async def test_completion_and_timeout_at_the_same_time_agree_with_the_caller(h):
    for n in range(5):
        engine = await h.engine(review)
        run = await engine.start(review, id=f"r{n}")
        await h.settle()
        token = await engine.deferred_token(run.id, "stars")
        await h.clock.advance(59.99)
        completed, _ = await asyncio.gather(engine.complete(token, 5), h.clock.advance(1))
        assert await h.run_to_end(run) == (
            "5 stars" if completed else "late: deferred 'stars' was not completed in time"
        )


@on_every_store
async def test_rewind_keeps_a_timeout_and_a_rewind_before_it_gives_a_new_one(h):
    engine, run, _ = await waiting(h)
    assert (await h.run_to_end(run)).startswith("late")
    await engine.rewind("r", "stars")
    assert (await h.run_to_end(run)).startswith("late")


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_with_timeouts(kind, tmp_path):
    @workflow(name="timeouts.several")
    async def several(ctx: Context) -> list:
        async def wait(name: str, timeout: float) -> object:
            try:
                return await ctx.deferred(name, int, timeout=timeout)
            except TimeoutError:
                return "late"

        await prepare()
        found = await ctx.join(a=wait("a", 10), b=wait("b", 20), c=wait("c", 1_000))
        await prepare()
        return [*found.values(), await wait("a", 5)]

    async def complete(engine):
        await engine.complete(await engine.deferred_token("crash-everywhere", "c"), 3)

    report = crash_on(kind, tmp_path, several, drive=complete)
    assert report.outcome == ("returned", ["late", "late", 3, "late"])
