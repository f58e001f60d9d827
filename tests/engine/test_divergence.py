"""Code that does not match a history holds the run; user code sees nothing, and matching code continues it."""

import pytest

from perdure import Context, RunCancelled, RunStatus, step, workflow
from tests.engine.store_matrix import everything_in, on_every_store

SEEN: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    SEEN.clear()


@step
async def first(n: int) -> int:
    return n


@step
async def second(n: int) -> int:
    return n


def version(body):
    """The same workflow with another body, as after a deploy."""

    @workflow(name="deployed")
    async def deployed(ctx: Context) -> str:
        try:
            return await body(ctx)
        except BaseException as error:
            SEEN.append(type(error).__name__)
            raise

    return deployed


async def good(ctx: Context) -> str:
    await first(1)
    await ctx.sleep(100)
    await second(2)
    return "good"


async def bad(ctx: Context) -> str:
    await second(1)
    return "bad"


async def halted(h) -> None:
    """Create a suspended run of the original code, without its worker."""
    engine = await h.engine(version(good))
    await engine.start(version(good), id="d")
    await h.settle()
    await h.drive(engine.shutdown())
    SEEN.clear()


@on_every_store
async def test_diverged_run_is_held_without_raising_in_user_code(h):
    await halted(h)
    engine = await h.engine(version(bad))
    history = await engine.history("d")
    await h.clock.advance(200)
    run = engine.get("d")
    assert await run.status() is RunStatus.SUSPENDED
    held = next(reason for reason in (await run.describe()).waiting_for if reason.kind == "held")
    for word in ("first", "second", "test_divergence.py"):
        assert word in str(held)
    assert await engine.history("d") == history
    assert set(SEEN) <= {"GeneratorExit"}
    assert h.executed() == [("first", 1)]
    commits = engine.faults.commits
    await h.clock.advance(1000)
    assert engine.faults.commits == commits  # it is not tried again and again


@on_every_store
async def test_engine_with_compatible_code_resumes_a_held_run(h):
    await halted(h)
    engine = await h.engine(version(bad))
    await h.clock.advance(200)
    assert await engine.status("d") is RunStatus.SUSPENDED
    await h.drive(engine.shutdown())
    fixed = await h.engine(version(good))
    assert await h.run_to_end(fixed.get("d")) == "good"
    assert h.executed() == [("first", 1), ("second", 1)]


@on_every_store
async def test_resume_retries_the_held_run(h):
    await halted(h)
    code = [bad]

    async def deployed_in_place(ctx: Context) -> str:
        return await code[0](ctx)

    engine = await h.engine(version(deployed_in_place))
    await h.clock.advance(200)
    assert await engine.status("d") is RunStatus.SUSPENDED
    await engine.resume("d")
    await h.settle()
    assert await engine.status("d") is RunStatus.SUSPENDED
    code[0] = good
    await engine.resume("d")
    assert await h.run_to_end(engine.get("d")) == "good"


@on_every_store
async def test_a_held_run_can_be_terminated(h):
    await halted(h)
    engine = await h.engine(version(bad))
    await h.clock.advance(200)
    assert await engine.terminate("d") is True
    with pytest.raises(RunCancelled):
        await engine.result("d")


@on_every_store
async def test_cancel_of_a_held_run_waits_for_compatible_code(h):
    await halted(h)
    engine = await h.engine(version(bad))
    await h.clock.advance(200)
    assert await engine.cancel("d") is True
    await h.clock.advance(10)
    assert await engine.status("d") is RunStatus.SUSPENDED
    await h.drive(engine.shutdown())
    SEEN.clear()
    fixed = await h.engine(version(good))
    with pytest.raises(RunCancelled):
        await h.run_to_end(fixed.get("d"))
    assert SEEN == ["CancelledError"]


@on_every_store
async def test_run_whose_payload_type_changed_is_held(h):
    @workflow(name="typed")
    async def typed(ctx: Context, n: int) -> int:
        await ctx.sleep(10)
        return n

    @workflow(name="typed")
    async def typed_otherwise(ctx: Context, n: dict[str, int]) -> int:
        await ctx.sleep(10)
        return n["x"]

    engine = await h.engine(typed)
    await engine.start(typed, 5, id="t")
    await h.settle()
    await h.drive(engine.shutdown())
    engine = await h.engine(typed_otherwise)
    await h.clock.advance(20)
    assert await engine.status("t") is RunStatus.SUSPENDED
    assert any(reason.kind == "held" for reason in (await engine.describe("t")).waiting_for)
    await h.drive(engine.shutdown())
    engine = await h.engine(typed)
    assert await h.run_to_end(engine.get("t")) == 5


@on_every_store
async def test_changed_arguments_are_reported_without_effect(h):
    async def other_arguments(ctx: Context) -> str:
        await first(99)
        await ctx.sleep(100)
        return "went on"

    await halted(h)
    engine = await h.engine(version(other_arguments))
    assert await h.run_to_end(engine.get("d")) == "went on"
    assert (await engine.describe("d")).drift == ("first",)


@on_every_store
async def test_versions_side_by_side(h):
    @workflow(name="versioned", version=1)
    async def one(ctx: Context) -> str:
        await first(1)
        await ctx.sleep(10)
        return "one"

    @workflow(name="versioned", version=2)
    async def two(ctx: Context) -> str:
        await second(1)
        await ctx.sleep(10)
        return "two"

    engine = await h.engine(one, two)
    old = await engine.start(one, id="old")
    new = await engine.start(two, id="new")
    await h.settle()
    await h.crash(engine)
    only_new = await h.engine(two)
    assert await h.run_to_end(only_new.get("new")) == "two"
    await h.clock.advance(100)
    assert await only_new.status("old") is RunStatus.SUSPENDED  # a run keeps its version, and waits for it
    reasons = (await only_new.describe("old")).waiting_for
    assert any(reason.kind == "no_worker" and "versioned v1" in str(reason) for reason in reasons)
    both = await h.engine(one, two)
    assert await h.run_to_end(both.get(old.id)) == "one"
    assert new.id == "new"


@on_every_store
async def test_held_run_does_not_time_out(h):
    await halted(h)
    await h.engine(version(bad))
    await h.clock.advance(200)
    before = await everything_in(h.store, "d")
    await h.clock.advance(1_000)
    assert await everything_in(h.store, "d") == before
