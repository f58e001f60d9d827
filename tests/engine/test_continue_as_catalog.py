"""continue_as and children by name find workflows through the engine's own catalog, whatever else is imported."""

import pytest

from perdure import Context, RunCancelled, workflow
from perdure.workflows.definition import REGISTRY, Workflow
from tests.engine.store_matrix import on_every_store


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_definitions", dict(REGISTRY._definitions))


def define(module: str, version: int = 1) -> Workflow:
    """Define the same workflow as another module would."""

    async def counts_down(ctx: Context, n: int) -> str:
        if n:
            await ctx.continue_as(n - 1)
        return f"{module} v{ctx._run.info.version}"

    counts_down.__module__ = module
    return workflow(name="catalog.counts_down", version=version)(counts_down)


@on_every_store
async def test_run_continues_as_the_definition_that_the_engine_was_given(h):
    define("one")
    mine = define("two")
    engine = await h.engine(mine)
    assert await h.run_to_end(await engine.start(mine, 2)) == "two v1"


@on_every_store
async def test_open_engine_continues_as_the_definition_that_was_started_through_it(h):
    define("one")
    mine = define("two")
    engine = await h.engine()
    assert await h.run_to_end(await engine.start(mine, 2)) == "two v1"


@on_every_store
async def test_newer_version_that_the_engine_does_not_execute_is_not_used(h):
    mine = define("one")
    define("one", version=2)
    engine = await h.engine(mine)
    assert await h.run_to_end(await engine.start(mine, 2)) == "one v1"


@on_every_store
async def test_newest_version_of_the_engine_is_used(h):
    old, new = define("one"), define("two", version=3)
    define("three", version=4)
    define("four", version=4)
    engine = await h.engine(old, new)
    assert await h.run_to_end(await engine.start(old, 1)) == "two v3"


@on_every_store
async def test_newer_version_that_two_modules_define_is_not_used_by_an_open_engine(h):
    mine = define("one")
    define("two", version=2)
    define("three", version=2)
    engine = await h.engine()
    assert await h.run_to_end(await engine.start(mine, 1)) == "one v1"


@on_every_store
async def test_child_by_name_is_the_definition_that_the_engine_was_given(h):
    define("one")
    mine = define("two")

    @workflow(name="catalog.parent")
    async def parent(ctx: Context) -> str:
        return await ctx.run_child("catalog.counts_down", 1)

    engine = await h.engine(parent, mine)
    assert await h.run_to_end(await engine.start(parent)) == "two v1"


@on_every_store
async def test_failed_child_lookup_does_not_strand_the_run(h):
    define("one")
    define("two")

    @workflow(name="catalog.ambiguous")
    async def ambiguous(ctx: Context) -> None:
        try:
            await ctx.run_child("catalog.counts_down", 1)
        except Exception:
            await ctx.sleep(1_000)

    engine = await h.engine(ambiguous)
    run = await engine.start(ambiguous)
    await h.settle()
    await run.cancel()
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
