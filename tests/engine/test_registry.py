"""Which workflows an engine executes: by list, by import, by being started; names defined twice."""

import types

import pytest

from perdure import Context, RunStatus, WorkflowMisuse, workflow
from perdure.errors import InvalidArgument
from perdure.workflows.definition import REGISTRY
from tests.engine.store_matrix import on_every_store


def defined_in(module: str, answer: str, name: str = "twice", version: int = 1):
    """The workflow of this name as another module defines it."""

    async def twice(ctx: Context) -> str:
        await ctx.sleep(1)
        return answer

    made = types.FunctionType(twice.__code__, {**globals()}, "twice", None, twice.__closure__)
    made.__module__, made.__qualname__, made.__annotations__ = module, "twice", twice.__annotations__
    return workflow(name=name, version=version)(made)


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_definitions", dict(REGISTRY._definitions))


@on_every_store
async def test_redefinition_from_the_same_source_replaces_a_workflow(h):
    defined_in("shop.orders", "old")
    new = defined_in("shop.orders", "new")
    assert REGISTRY.find("twice", 1) is new
    engine = await h.engine()
    assert await h.run_to_end(await engine.start("twice")) == "new"


@on_every_store
async def test_two_definitions_of_a_name_are_an_error_only_when_one_must_be_chosen(h):
    one = defined_in("shop.orders", "one")
    two = defined_in("shop.returns", "two")
    engine = await h.engine()  # no error yet
    with pytest.raises(WorkflowMisuse, match=r"shop.orders.twice and shop.returns.twice.*Engine\(workflows="):
        await engine.start("twice")
    listed = await h.engine(two)
    with pytest.raises(InvalidArgument, match="in the list twice"):
        await h.engine(one, two)
    assert await h.run_to_end(await listed.start(two, id="t")) == "two"
    await h.drive(listed.shutdown())  # it would also execute the other definition's runs
    assert await h.run_to_end(await engine.start(one, id="o")) == "one"  # named by the object: nothing to choose


@on_every_store
async def test_a_run_of_an_ambiguous_name_waits_and_is_not_failed(h):
    one = defined_in("shop.orders", "one")
    client = await h.client()
    run = await client.start(one, id="t")
    defined_in("shop.returns", "two")
    with pytest.raises(WorkflowMisuse, match=r"shop.orders.twice and shop.returns.twice.*run 't' needs it"):
        await h.engine()
    await h.clock.advance(60)
    assert await run.status() is RunStatus.PENDING
    await h.engine(one)
    assert await h.run_to_end(run) == "one"


@on_every_store
async def test_workflow_list_limits_what_the_engine_serves(h):
    one = defined_in("shop.orders", "one", name="listed")
    other = defined_in("shop.orders", "other", name="unlisted")
    engine = await h.engine(one)
    assert await h.run_to_end(await engine.start(one)) == "one"
    run = await engine.start(other)
    await h.clock.advance(60)
    assert await run.status() is RunStatus.PENDING


@on_every_store
async def test_engine_without_a_list_serves_all_imported_workflows(h):
    before = defined_in("shop.orders", "before", name="imported_before")
    engine = await h.engine()
    client = await h.client()
    after = defined_in("shop.orders", "after", name="imported_after")
    runs = [await client.start(wf) for wf in (before, after)]
    assert [await h.run_to_end(run) for run in runs] == ["before", "after"]
    assert await h.run_to_end(await engine.start(after)) == "after"


@on_every_store
async def test_versions_of_a_name_side_by_side(h):
    one = defined_in("shop.orders", "v1", name="versions", version=1)
    two = defined_in("shop.orders", "v2", name="versions", version=2)
    engine = await h.engine(one, two)
    assert await h.run_to_end(await engine.start(one, id="1")) == "v1"
    assert await h.run_to_end(await engine.start(two, id="2")) == "v2"
    newest = await engine.start("versions", id="newest")
    assert await h.run_to_end(newest) == "v2"
    assert (await newest.describe()).version == 2
    assert not (await engine.start(two, id="1")).created  # the version does not count for identity


@on_every_store
async def test_workflows_of_this_engine_are_not_reported_as_missing(h):
    """A workflow that was defined after the engine was opened, before its next sign of life."""
    engine = await h.engine()
    late = defined_in("shop.late", "late", name="late")
    run = await engine.start(late, delay=60)
    assert [reason.kind for reason in (await run.describe()).waiting_for] == ["start"]
