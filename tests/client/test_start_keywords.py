"""Keyword arguments of a start: options by reserved names, everything else is payload."""

import pytest

import perdure
from perdure import Context, InvalidPayload, RunConflict, RunFailed, workflow
from perdure.errors import InvalidArgument
from perdure.workflows.definition import REGISTRY
from perdure.workflows.start_options import UNSUPPORTED
from tests.engine.store_matrix import on_every_store


@workflow(name="keywords.order")
async def order(ctx: Context, item: str, note: str = "", *, gift: bool = False) -> str:
    return f"{item}/{note}/{gift}"


@workflow(name="keywords.labelled")
async def labelled(ctx: Context, id: str, timeout: int = 0, priority: int = 0) -> str:
    return f"{id}/{timeout}/{priority}"


@workflow(name="keywords.collects")
async def collects(ctx: Context, /, **values: int) -> dict[str, int]:
    return values


@workflow(name="keywords.eight")
async def eight(ctx: Context, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> int:
    return a + b + c + d + e + f + g + h


@on_every_store
async def test_keyword_payloads_and_options_in_one_call(h):
    engine = await h.engine()
    run = await engine.start(order, "book", note="x", gift=True, id="a", tags={"k": "v"})
    assert (run.id, await h.run_to_end(run)) == ("a", "book/x/True")
    assert (await run.describe()).tags == {"k": "v"}
    assert await h.drive(engine.execute(order, item="pen", gift=True)) == "pen//True"
    assert not (await engine.start(order.options(id="a"), "book", "x", gift=True)).created


@on_every_store
async def test_a_parameter_that_is_named_like_an_option(h):
    engine = await h.engine()
    assert await h.drive(engine.execute(labelled, "x", 5, 6, id="a")) == "x/5/6"
    assert await h.drive(engine.execute(labelled.options(id="b"), id="y", timeout=7, priority=1)) == "y/7/1"
    with pytest.raises(InvalidPayload, match="missing a required argument: 'id'"):
        await engine.start(labelled, id="c")


@pytest.mark.parametrize("name", UNSUPPORTED)
@on_every_store
async def test_an_option_of_a_later_version_is_refused_by_name(h, name):
    engine = await h.engine()
    before = engine.faults.commits
    for call in (
        lambda: engine.start(collects, id="a", **{name: 1}),
        lambda: engine.execute(collects, id="a", **{name: 1}),
        lambda: engine.start("keywords.collects", id="a", **{name: 1}),
        lambda: engine.start("unknown", id="a", **{name: 1}),
    ):
        with pytest.raises(InvalidArgument, match=f"{name}= .* not supported in this version"):
            await call()
    with pytest.raises(InvalidArgument, match=f"{name}= "):
        collects.options(**{name: 1})  # type: ignore[arg-type]
    assert engine.faults.commits == before
    assert await h.drive(engine.execute(collects.options(id="a"), **{name: 1})) == {name: 1}
    assert await h.drive(engine.execute(collects, id="b", **{name: None})) == {}


@on_every_store
async def test_unknown_keywords_are_refused_with_the_name(h):
    engine = await h.engine()
    with pytest.raises(InvalidArgument, match=r"no option colour, and workflow 'keywords\.order' has no parameter"):
        await engine.start(order, "x", colour="red")
    with pytest.raises(InvalidArgument, match="no option colour"):
        order.options(colour="red")  # type: ignore[call-arg]
    assert await h.drive(engine.execute(collects, colour=3)) == {"colour": 3}


@on_every_store
async def test_eight_positional_arguments(h):
    engine = await h.engine()
    assert await h.drive(engine.execute(eight, 1, 2, 3, 4, 5, 6, 7, 8, id="e")) == 36


@on_every_store
async def test_keywords_of_a_child_are_payload_and_options_that_children_do_not_take_are_refused(h):
    @workflow
    async def above(ctx: Context, name: str) -> object:
        if name == "payload":
            return await ctx.run_child(order, "x", note="n", gift=True, id="child")  # type: ignore[call-arg]
        if name == "bound":
            return await ctx.run_child(labelled.options(id="bound-child"), id="y", timeout=3)  # type: ignore[call-overload]
        if name == "handle":
            started = await ctx.start_child(order, "x", note="n", detached=True)  # type: ignore[call-arg]
            return await started.result()
        return await ctx.run_child(collects, **{name: 1})

    engine = await h.engine(above, order, labelled, collects)
    assert await h.drive(engine.execute(above, "payload")) == "x/n/True"
    assert await h.drive(engine.execute(above, "bound")) == "y/3/0"
    assert await h.drive(engine.execute(above, "handle")) == "x/n/False"
    for name in ("tags", "timeout", "if_exists", "dedupe", "connection"):
        with pytest.raises(RunFailed, match=name if name == "connection" else "takes id, queue, priority|must be"):
            await h.drive(engine.execute(above, name))
    assert await h.drive(engine.execute(above, "colour")) == {"colour": 1}


@on_every_store
async def test_options_and_keywords_of_a_start_by_a_published_name(h, monkeypatch):
    engine = await h.engine(order)
    client = await h.client()
    monkeypatch.setattr(REGISTRY, "_definitions", {})
    run = await client.start("keywords.order", item="x", note="n", id="c", timeout=60, send=[("paid", 1)])
    assert run.created
    assert await h.drive(engine.result("c")) == "x/n/False"
    await h.drive(client.start("keywords.order", {"item": "y"}, id="c", if_exists="restart_ended"))
    assert await h.drive(engine.result("c")) == "y//False"
    with pytest.raises(RunConflict):
        await client.start("keywords.order", {"item": "y"}, id="c", if_exists="reject")
    with pytest.raises(InvalidPayload, match="one dict by parameter name"):
        await client.start("keywords.order", {"item": "y"}, note="n")


def test_run_takes_keyword_payloads_and_options(tmp_path):
    store = f"sqlite:///{tmp_path}/runs.db"
    assert perdure.run(order, "x", gift=True, store=store, id="a") == "x//True"  # type: ignore[call-overload]
    assert perdure.run(order, "y", store=store, id="a", if_exists="restart") == "y//False"
    assert perdure.run(order.options(id="a", if_exists="restart"), "z", gift=True, store=store) == "z//True"
    with pytest.raises(InvalidArgument, match=r"declare WorkQueue\('q'\)"):
        perdure.run(order, "x", queue="q")
