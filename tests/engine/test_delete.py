"""delete: an ended run and all that it owns are removed; nothing that is still needed is."""

import pytest

from perdure import Client, Context, RunConflict, RunNotFound, RunQuery, RunStatus, event, step, workflow
from perdure.errors import RunInUse, StoreError
from perdure.stores.results import Committed, RunMissing
from tests.engine.store_matrix import on_every_store

pytestmark = pytest.mark.usefixtures("forget")
EFFECTS: list[str] = []


@pytest.fixture
def forget():
    EFFECTS.clear()


@event
class Approved:
    by: str


@event(on_target_terminated="dead_letter")
class Important:
    text: str


@step
async def effect(what: str) -> str:
    EFFECTS.append(what)
    return what


@workflow
async def writes(ctx: Context, what: str) -> str:
    await ctx.publish("progress", what)
    await ctx.stream("lines").write(what)
    return await effect(what)


@workflow
async def waits_for_approval(ctx: Context) -> str:
    return (await ctx.receive(Approved)).by


@workflow
async def starts_child(ctx: Context) -> str:
    child = await ctx.start_child(writes, "child", id="child")
    await ctx.receive(Approved)
    return await child.result()


@on_every_store
async def test_deleted_run_is_unknown_and_its_id_starts_a_new_run(h):
    engine = await h.engine(writes)
    assert await h.run_to_end(await engine.start(writes, "one", id="r")) == "one"
    await engine.delete("r")
    assert await engine.status("r") is None
    assert list(await engine.runs(RunQuery())) == []
    for call in (engine.describe, engine.history, engine.published, engine.delete, engine.result):
        with pytest.raises(RunNotFound):
            await call("r")
    with pytest.raises(RunNotFound):
        [item async for item in engine.read_stream("r", "lines")]
    run = await engine.start(writes, "two", id="r")
    assert run.created
    assert await h.run_to_end(run) == "two"
    assert EFFECTS == ["one", "two"]
    assert [item async for item in engine.read_stream("r", "lines")] == ["two"]


@on_every_store
async def test_open_run_is_not_deleted(h):
    engine = await h.engine(waits_for_approval)
    run = await engine.start(waits_for_approval, id="r")
    await h.settle()
    with pytest.raises(RunInUse, match="terminate it first") as raised:
        await engine.delete("r")
    assert isinstance(raised.value, RunConflict)
    assert raised.value.run_id == "r"
    await engine.send("r", Approved("ada"))
    assert await h.run_to_end(run) == "ada"


@on_every_store
async def test_terminated_run_is_deleted_at_once_and_its_unread_events_are_kept_as_dead_letters(h):
    engine = await h.engine(waits_for_approval)
    await engine.start(waits_for_approval, id="r")
    await h.settle()
    await engine.send("r", Important("read me"))
    assert await engine.terminate("r")
    await engine.delete("r")
    assert await engine.status("r") is None
    assert [each.original_target for each in await engine.dead_letters()] == ["r"]


@on_every_store
async def test_child_of_an_open_parent_is_not_deleted(h):
    engine = await h.engine(starts_child, writes)
    run = await engine.start(starts_child, id="parent")
    await h.settle()
    assert await engine.status("child") is RunStatus.SUCCEEDED
    with pytest.raises(RunInUse, match="parent"):
        await engine.delete("child")
    await engine.send("parent", Approved("ada"))
    assert await h.run_to_end(run) == "child"
    await engine.delete("child")
    await engine.delete("parent")
    assert list(await engine.runs()) == []


@on_every_store
async def test_client_without_workers_deletes_a_terminated_run_and_ends_its_children(h):
    engine = await h.engine(starts_child, writes, waits_for_approval)
    await engine.start(starts_child, id="parent")
    await h.settle()
    await h.crash(engine)
    client: Client = await h.client()
    assert await client.terminate("parent")
    await client.delete("parent")
    assert await client.status("parent") is None


@on_every_store
async def test_deletion_is_done_when_the_response_is_lost(h, monkeypatch):
    engine = await h.engine(writes)
    await h.run_to_end(await engine.start(writes, "one", id="r"))
    delete_run, calls = h.store.delete_run, []

    async def lose_first_response(run_id: str) -> object:
        calls.append(await delete_run(run_id))
        if len(calls) == 1:
            raise StoreError("the response was lost", retryable=True)
        return calls[-1]

    monkeypatch.setattr(h.store, "delete_run", lose_first_response)
    await h.drive(engine.delete("r"))
    assert calls == [Committed(), RunMissing()]
    assert await engine.status("r") is None
