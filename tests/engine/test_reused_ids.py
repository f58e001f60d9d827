"""An id that is used again, after its run was deleted or pruned, meets nothing of its predecessor."""

import pytest

from perdure import Context, EngineConfig, InvalidToken, RunQuery, RunStatus, event, step, workflow
from perdure.admin.run_import import import_run
from perdure.testing import Harness
from tests.engine.store_matrix import on_every_store

TOKENS: list[str] = []
FOREVER = 100 * 365 * 86_400.0


@pytest.fixture(autouse=True)
def forget():
    TOKENS.clear()


@event
class Note:
    text: str


@event
class Go:
    pass


async def delete(h: Harness, engine, run_id: str) -> None:
    await h.settle()
    await engine.delete(run_id)


async def prune(h: Harness, engine, run_id: str) -> None:
    await h.settle()
    await h.store.prune(h.clock.now() + 10 * 365 * 86_400, keep_ids_for=20 * 365 * 86_400)
    assert await engine.status(run_id) is None


removals = pytest.mark.parametrize("remove", [delete, prune])


@workflow
async def collector(ctx: Context) -> list[str]:
    texts: list[str] = []
    while len(texts) < 2:
        texts.append((await ctx.receive(Note)).text)
    return texts


@workflow
async def sender(ctx: Context, to: str, text: str) -> None:
    await ctx.send(to, Note(text))


@workflow
async def broadcaster(ctx: Context, text: str) -> None:
    await ctx.broadcast(Note(text))


@workflow
async def child(ctx: Context, text: str) -> str:
    return f"{text} {(await ctx.receive(Note)).text}"


@workflow
async def leaves_child(ctx: Context) -> str:
    return (await ctx.start_child(child, "first")).id


@workflow
async def waits_for_child(ctx: Context) -> str:
    return await ctx.run_child(child, "first")


@workflow
async def starts_child(ctx: Context) -> str:
    started = await ctx.start_child(child, "first")
    await ctx.receive(Go)
    return await started.result()


@workflow
async def reviewed(ctx: Context) -> str:
    review = ctx.deferred("review", str)
    TOKENS.append(review.token)  # perdure: ignore
    return await review


@on_every_store
@removals
async def test_sends_of_a_later_run_are_delivered(h, remove):
    engine = await h.engine(collector, sender)
    receiving = await engine.start(collector, id="c", retention=FOREVER)
    for text in ("one", "two"):
        await h.run_to_end(await engine.start(sender, "c", text, id="s"))
        await remove(h, engine, "s")
    assert await h.run_to_end(receiving) == ["one", "two"]


@on_every_store
@removals
async def test_broadcasts_of_a_later_run_are_published(h, remove):
    engine = await h.engine(collector, broadcaster)
    receiving = await engine.start(collector, id="c", retention=FOREVER)
    for text in ("one", "two"):
        await h.settle()
        await h.run_to_end(await engine.start(broadcaster, text, id="b"))
        await remove(h, engine, "b")
    assert await h.run_to_end(receiving) == ["one", "two"]


@on_every_store
@removals
async def test_events_of_the_same_event_id_reach_the_later_run(h, remove):
    engine = await h.engine(child)
    for text in ("one", "two"):
        run = await engine.start(child, "got", id="r")
        await run.send(Note(text), event_id="the same")
        assert await h.run_to_end(run) == f"got {text}"
        await remove(h, engine, "r")


@on_every_store
@removals
async def test_later_run_starts_its_own_child(h, remove):
    engine = await h.engine(leaves_child, waits_for_child, child)
    assert await h.run_to_end(await engine.start(leaves_child, id="p")) == "p/child"
    await remove(h, engine, "p")
    run = await engine.start(waits_for_child, id="p")
    await h.settle()
    (own,) = await engine.runs(RunQuery(parent="p"))
    assert own.id != "p/child"
    await engine.send("p/child", Note("to the child of the predecessor"))
    await h.settle()
    assert await engine.status("p/child") is RunStatus.SUCCEEDED
    assert await engine.status("p") is RunStatus.SUSPENDED, "the end of the other child is none of its results"
    await engine.send(own.id, Note("to its own"))
    assert await h.run_to_end(run) == "first to its own"
    assert [each.name for each in await engine.history("p")] == ["child"]


@on_every_store
async def test_child_under_another_id_is_started_once_when_the_first_id_is_free_again(h):
    engine = await h.engine(leaves_child, starts_child, child)
    await h.run_to_end(await engine.start(leaves_child, id="p"))
    await delete(h, engine, "p")
    run = await engine.start(starts_child, id="p")
    await h.settle()
    (own,) = await engine.runs(RunQuery(parent="p"))
    assert await engine.terminate("p/child")
    await h.crash(engine)
    engine = await h.engine(leaves_child, starts_child, child)
    await h.settle()
    await engine.send("p", Go())
    await engine.send(own.id, Note("again"))
    assert await h.drive(engine.result(run.id)) == "first again"
    assert [each.id for each in await engine.runs(RunQuery(parent="p"))] == [own.id]


@on_every_store
@removals
@pytest.mark.parametrize("end", ["cancel", "terminate"])
async def test_end_of_a_later_run_does_not_stop_children_of_its_predecessor(h, remove, end):
    engine = await h.engine(leaves_child, starts_child, child)
    await h.run_to_end(await engine.start(leaves_child, id="p"))
    await remove(h, engine, "p")
    await engine.start(starts_child, id="p")
    await h.settle()
    (own,) = await engine.runs(RunQuery(parent="p"))
    assert await getattr(engine, end)("p")
    await h.settle()
    assert await engine.status("p") is RunStatus.CANCELLED
    assert await engine.status(own.id) is RunStatus.CANCELLED
    assert await engine.status("p/child") is RunStatus.SUSPENDED


@on_every_store
@removals
async def test_token_of_the_predecessor_is_invalid(h, remove):
    engine = await h.engine(reviewed)
    for review in ("one", "two"):
        run = await engine.start(reviewed, id="r")
        await h.settle()
        if review == "two":
            assert TOKENS[0] != TOKENS[1]
            with pytest.raises(InvalidToken, match="an earlier run"):
                await engine.complete(TOKENS[0], "late")
        assert TOKENS[-1] == await engine.deferred_token("r", "review")
        assert await engine.complete(TOKENS[-1], review)
        assert await h.run_to_end(run) == review
        if review == "one":
            await remove(h, engine, "r")


@on_every_store
async def test_dead_letters_of_a_later_run_are_kept_beside_those_of_its_predecessor(h):
    @step(retry=None)
    async def fails() -> None:
        raise ValueError("no")

    @workflow
    async def failing_exit(ctx: Context) -> None:
        ctx.on_exit(fails)

    engine = await h.engine(failing_exit)
    for _ in range(2):
        await h.run_to_end(await engine.start(failing_exit, id="r"))
        await engine.delete("r")
    assert len(await engine.dead_letters(kind="compensation")) == 2


@on_every_store
async def test_terminated_run_is_kept_for_its_own_retention(h):
    day = 86_400.0
    engine = await h.engine(leaves_child, starts_child, child, config=EngineConfig(run_retention=10 * day))
    for run_id, retention in (("short", day), ("long", 100 * day), ("default", None)):
        await engine.start(child, "x", id=run_id, retention=retention)
        await engine.start(child, "x", id=f"{run_id}-new", retention=retention, delay=3600)
    await h.settle()
    for run_id in ("short", "long", "default"):
        assert await engine.terminate(run_id)
        assert await engine.cancel(f"{run_id}-new"), "it has not started: it ends at once"
    await h.settle()
    ended_at, kept = h.clock.now(), []
    for days in (0.9, 1.1, 9, 11, 99, 101):
        await h.store.prune(ended_at + days * day)
        kept.append(sorted(each.id for each in await engine.runs()))
    assert kept[0] == ["default", "default-new", "long", "long-new", "short", "short-new"]
    assert kept[1] == kept[2] == ["default", "default-new", "long", "long-new"]
    assert kept[3] == kept[4] == ["long", "long-new"]
    assert kept[5] == []


@on_every_store
async def test_children_that_end_with_their_terminated_parent_are_kept_for_their_retention(h):
    @workflow(retention=86_400.0)
    async def short(ctx: Context) -> None:
        await ctx.receive(Go)

    @workflow
    async def parent(ctx: Context) -> None:
        await ctx.run_child(short, id="kid")

    engine = await h.engine(parent, short)
    await engine.start(parent, id="p")
    await h.settle()
    assert await engine.terminate("p")
    await h.settle()
    assert await engine.status("kid") is RunStatus.CANCELLED
    await h.store.prune(h.clock.now() + 2 * 86_400)
    assert (await engine.status("kid"), await engine.status("p")) == (None, RunStatus.CANCELLED)


@on_every_store
async def test_imported_run_keeps_the_token_of_the_exported_one(h):
    engine = await h.engine(reviewed)
    run = await engine.start(reviewed, id="r")
    await h.settle()
    data = await engine.export_history("r")
    await engine.terminate("r")
    await engine.delete("r")
    await import_run(engine, data)
    await engine.resume("r")
    await h.settle()
    assert await engine.complete(TOKENS[0], "good")
    assert await h.run_to_end(run) == "good"
    assert len(set(TOKENS)) == 1
