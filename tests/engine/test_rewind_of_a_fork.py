"""The inbox of a fork or import is numbered after the messages that its history received, which a rewind returns."""

from perdure import Context, event, step, workflow
from perdure.admin.run_import import import_run
from tests.engine.store_matrix import on_every_store


@event(name="forked.First")
class First:
    n: int


@event(name="forked.Second")
class Second:
    n: int


@step(name="forked.mark")
async def mark() -> None:
    return


@workflow(name="forked.receives")
async def receives(ctx: Context) -> list[int]:
    first = await ctx.receive(First)
    await mark()
    await ctx.sleep(1_000)
    second = await ctx.receive(Second)
    return [first.n, second.n]


@on_every_store
async def test_rewind_of_a_fork_loses_no_unread_message(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives, id="r"))
    await h.drive(engine.send("r", First(1)))
    await h.drive(engine.send("r", Second(2)))
    await h.settle()
    fork = await h.drive(engine.fork("r", "forked.mark"))
    await h.settle()
    await h.drive(engine.rewind(fork.id, "forked.First"))
    assert await h.drive(engine.result(fork.id)) == [1, 2]


@on_every_store
async def test_rewind_of_a_fork_without_an_inbox_loses_no_unread_message(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives, id="r"))
    await h.drive(engine.send("r", First(1)))
    await h.settle()
    fork = await h.drive(engine.fork("r", "forked.mark"))
    await h.drive(engine.send(fork.id, Second(2)))
    await h.settle()
    await h.drive(engine.rewind(fork.id, "forked.First"))
    assert await h.drive(engine.result(fork.id)) == [1, 2]


@on_every_store
async def test_rewind_of_an_import_loses_no_unread_message(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives, id="r"))
    await h.drive(engine.send("r", First(1)))
    await h.drive(engine.send("r", Second(2)))
    await h.settle()
    export = await h.drive(engine.export_history("r"))
    await h.drive(import_run(engine, export, run_id="imported"))
    await h.drive(engine.rewind("imported", "forked.First"))
    await h.drive(engine.resume("imported"))
    assert await h.drive(engine.result("imported")) == [1, 2]


@on_every_store
async def test_event_id_that_the_original_received_is_returned_once(h):
    engine = await h.engine(receives)
    await h.drive(engine.start(receives, id="r"))
    await h.drive(engine.send("r", First(1), event_id="one"))
    await h.settle()
    fork = await h.drive(engine.fork("r", "forked.mark"))
    await h.drive(engine.send(fork.id, First(3), event_id="one"))
    await h.drive(engine.send(fork.id, Second(2)))
    await h.settle()
    await h.drive(engine.rewind(fork.id, "forked.First"))
    assert await h.drive(engine.result(fork.id)) == [3, 2]
