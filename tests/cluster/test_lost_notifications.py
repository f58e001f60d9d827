"""Where no notification ever arrives, everything is found within a sweep interval of each who must know."""

from __future__ import annotations

import asyncio

from perdure import Context, EngineConfig, RunStatus, event, step, workflow
from tests.engine.store_matrix import another_handle, on_every_store

SWEEP = 5.0
CONFIG = EngineConfig(sweep_interval=SWEEP, lease=1000.0)


@event(name="unheard.word")
class Word:
    text: str


@step
async def repeat_word(text: str) -> str:
    return text


@workflow(name="unheard.listener")
async def listener(ctx: Context) -> str:
    return await repeat_word((await ctx.receive(Word)).text)


@workflow(name="unheard.parent")
async def parent(ctx: Context) -> str:
    return await (await ctx.start_child(listener, id="child")).result()


def deaf(h):
    """A way to the store by which nobody hears of what others do."""
    store = h.faulty(another_handle(h.store, h.clock))
    store.on_change = lambda hint: lambda: None
    return store


@on_every_store
async def test_a_new_run_mail_and_the_end_are_found_within_a_sweep_each(h):
    await h.engine(listener, config=CONFIG, store=deaf(h))
    client = await h.client(config=CONFIG, store=deaf(h))
    await h.clock.advance(1)
    run = await client.start(listener)
    ending = h.background(run.result())
    await h.settle()
    assert await run.status() is RunStatus.PENDING, "nobody has heard of it"
    await h.clock.advance(SWEEP)
    assert await run.status() is RunStatus.SUSPENDED
    await run.send(Word("mail"))
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED, "nobody has heard of it"
    await h.clock.advance(SWEEP)
    assert await run.status() is RunStatus.SUCCEEDED
    await h.clock.advance(SWEEP)
    assert ending.done()
    assert ending.result() == "mail"


@on_every_store
async def test_a_broadcast_and_the_end_of_a_child_are_found_within_a_sweep_each(h):
    await h.engine(parent, config=CONFIG, store=deaf(h))
    await h.engine(listener, config=CONFIG, store=deaf(h))
    client = await h.client(config=CONFIG, store=deaf(h))
    await client.start(parent, id="parent")
    await h.clock.advance(2 * SWEEP)  # the parent is taken, and then its child
    assert await client.broadcast(Word("all")) == 1
    await h.clock.advance(2 * SWEEP)  # the child ends, and its parent hears of it
    assert await client.status("child") is RunStatus.SUCCEEDED
    assert await client.status("parent") is RunStatus.SUCCEEDED


@on_every_store
async def test_what_a_worker_that_stops_gives_back_is_taken_within_two_sweeps(h):
    """Whoever counts with the leaver still takes what has stayed due for two."""

    @step
    async def stay_forever() -> int:
        if len(h.executions) == 1:
            await asyncio.get_running_loop().create_future()
        return 1

    @workflow(name="unheard.stayer")
    async def stayer(ctx: Context) -> int:
        return await stay_forever()

    leaver = await h.engine(stayer, config=CONFIG, store=deaf(h))
    await leaver.start(stayer, id="s")
    await h.settle()
    other = await h.engine(stayer, config=CONFIG, store=deaf(h))
    await h.drive(leaver.shutdown(grace=0), 1)
    await h.clock.advance(3 * SWEEP)
    seen = await other.describe("s")
    assert (seen.status, seen.recoveries) == (RunStatus.SUCCEEDED, 0)
