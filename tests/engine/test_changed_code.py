"""Code that changes under living runs: `ctx.scope`, `ctx.removed` for blocks, and gates in loops, on every store."""

import asyncio

import pytest

from perdure import Break, Context, Continue, RunStatus, step, workflow
from perdure.testing import replay
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


@step
async def call(what: str) -> str:
    CALLS.append(what)
    return what


async def _request(what: str) -> str:
    await call(f"{what} 1")
    return await call(f"{what} 2")


async def _renamed_request(what: str) -> str:
    await call(f"{what} 1")
    return await call(f"{what} 2")


def library_call(release: int):
    """Return the public function of a third-party library; the second release has renamed a private one."""
    private = _request if release == 1 else _renamed_request

    async def fetch_all(*names: str) -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(private(name)) for name in names]
        return [task.result() for task in tasks]

    return fetch_all


async def redeploy(h, engine, new):
    """Replace the worker by one with new code."""
    await h.crash(engine)
    return await h.engine(new, store=another_handle(h.store, h.clock))


# --- scopes


def scoped(release: int):
    @workflow(name="changed.scoped")
    async def run(ctx: Context) -> list[str]:
        fetch_all = library_call(release)
        with ctx.scope("library"):
            first = await fetch_all("a", "b")
            await ctx.sleep(100)
            return first + await fetch_all("c")

    return run


@on_every_store
async def test_renamed_private_function_of_a_library_does_not_hold_a_living_run(h):
    old, new = scoped(1), scoped(2)
    engine = await h.engine(old)
    await engine.start(old, id="r")
    await h.settle()
    later = await redeploy(h, engine, new)
    assert await h.drive(later.get("r").result()) == ["a 2", "b 2", "c 2"]
    assert len(CALLS) == len(set(CALLS)) == 6, "no recorded step was executed again"
    steps = [each.location for each in await later.history("r") if each.kind == "step"]
    assert steps == ["library/call", *(f"library/call#{n}" for n in range(1, 6))]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_in_scopes(kind, tmp_path):
    @workflow(name="changed.crashing")
    async def run(ctx: Context) -> list:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            with ctx.scope("library"):
                await library_call(1)(f"loop {n}")
            return Continue(n + 1) if n < 2 else Break(n)

        async def branch(name: str) -> list[str]:
            with ctx.scope("library"):
                return await library_call(1)(name, f"{name}'")

        with ctx.scope("all"):
            found = await ctx.join(a=branch("a"), b=branch("b"))
            return [*found.values(), await ctx.loop("pages", body, 0)]

    report = crash_on(kind, tmp_path, run)
    assert report.outcome == ("returned", [["a 2", "a' 2"], ["b 2", "b' 2"], 2])


# --- removed blocks


@workflow(name="changed.removed")
async def with_block(ctx: Context) -> str:
    async def branch(name: str) -> str:
        await call(name)
        await ctx.sleep(1_000)
        return await call(f"{name}, late")

    await ctx.join(a=branch("a"), b=branch("b"), c=call("c"), name="audit")
    return await call("end")


@on_every_store
async def test_run_in_a_removed_join_continues_after_it(h):
    @workflow(name="changed.removed")
    async def without_block(ctx: Context) -> str:
        ctx.removed("audit", "join")
        return await call("end")

    engine = await h.engine(with_block)
    await engine.start(with_block, id="r")
    await h.settle()
    assert sorted(CALLS) == ["a", "b", "c"]
    later = await redeploy(h, engine, without_block)
    assert await h.drive(later.get("r").result()) == "end"
    assert sorted(CALLS) == ["a", "b", "c", "end"]
    fresh = await later.start(without_block)
    assert await h.run_to_end(fresh) == "end"


@on_every_store
async def test_ended_run_with_a_removed_block_replays(h):
    @workflow(name="changed.removed")
    async def without_block(ctx: Context) -> str:
        ctx.removed("audit", "join")
        return await call("end")

    engine = await h.engine(with_block)
    run = await engine.start(with_block, id="r")
    assert await h.run_to_end(run) == "end"
    replay(await engine.export_history("r"), without_block)


# --- gates in loops


@on_every_store
async def test_loop_takes_the_new_branch_from_the_next_iteration_on(h):
    @workflow(name="changed.loop")
    async def old(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await call(f"old {n}")
            await ctx.sleep(100)
            return Continue(n + 1) if n < 8 else Break(n)

        return await ctx.loop("pages", body, 0, prune_every=1, keep=0)

    @workflow(name="changed.loop")
    async def new(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await call(f"{'new' if ctx.patched('checks') else 'old'} {n}")
            await ctx.sleep(100)
            assert ctx.patched("checks") is (n > 5)
            return Continue(n + 1) if n < 8 else Break(n)

        return await ctx.loop("pages", body, 0, prune_every=1, keep=0)

    engine = await h.engine(old)
    await engine.start(old, id="r")
    while CALLS[-1:] != ["old 5"]:
        await h.clock.advance(50)
        await h.settle()
    later = await redeploy(h, engine, new)
    assert await later.status("r") is not RunStatus.FAILED
    assert await h.drive(later.get("r").result()) == 8
    assert [f"old {n}" for n in range(6)] + [f"new {n}" for n in range(6, 9)] == CALLS


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_crash_at_every_commit_with_gates_in_loops(kind, tmp_path):
    @workflow(name="changed.gates")
    async def run(ctx: Context) -> list[int]:
        async def body(ctx: Context, found: list[int]) -> Continue[list[int]] | Break[list[int]]:
            await call(f"a {len(found)}")
            version = ctx.version("gate", latest=3)
            await call(f"b {version}")
            found = [*found, version]
            return Continue(found) if len(found) < 4 else Break(found)

        start: list[int] = []
        return await ctx.loop("pages", body, start, prune_every=1, keep=1)

    report = crash_on(kind, tmp_path, run)
    assert report.outcome == ("returned", [3, 3, 3, 3])
