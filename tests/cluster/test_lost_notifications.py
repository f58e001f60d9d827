"""Without any change hints, each worker and client finds changes within its sweep interval."""

from __future__ import annotations

import asyncio

from perdure import Context, EngineConfig, RunStatus, event, step, workflow
from tests.engine.store_matrix import another_handle, on_every_store

SWEEP = 5.0
CONFIG = EngineConfig(sweep_interval=SWEEP, lease=1000.0)


@event(name="unhinted.word")
class Word:
    text: str


@step
async def repeat_word(text: str) -> str:
    return text


@workflow(name="unhinted.listener")
async def listener(ctx: Context) -> str:
    return await repeat_word((await ctx.receive(Word)).text)


@workflow(name="unhinted.parent")
async def parent(ctx: Context) -> str:
    return await (await ctx.start_child(listener, id="child")).result()


def without_hints(h):
    """Return a store handle that delivers no change hints."""
    store = h.faulty(another_handle(h.store, h.clock))
    store.on_change = lambda hint: lambda: None
    return store


@on_every_store
async def test_new_run_message_and_end_are_found_within_a_sweep_each(h):
    await h.engine(listener, config=CONFIG, store=without_hints(h))
    client = await h.client(config=CONFIG, store=without_hints(h))
    await h.clock.advance(1)
    run = await client.start(listener)
    ending = h.background(run.result())
    await h.settle()
    assert await run.status() is RunStatus.PENDING, "no worker has found it"
    await h.clock.advance(SWEEP)
    assert await run.status() is RunStatus.SUSPENDED
    await run.send(Word("hello"))
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED, "no worker has found it"
    await h.clock.advance(SWEEP)
    assert await run.status() is RunStatus.SUCCEEDED
    await h.clock.advance(SWEEP)
    assert ending.done()
    assert ending.result() == "hello"


@on_every_store
async def test_broadcast_and_end_of_a_child_are_found_within_a_sweep_each(h):
    await h.engine(parent, config=CONFIG, store=without_hints(h))
    await h.engine(listener, config=CONFIG, store=without_hints(h))
    client = await h.client(config=CONFIG, store=without_hints(h))
    await client.start(parent, id="parent")
    await h.clock.advance(2 * SWEEP)  # the parent is claimed, and then its child
    assert await client.broadcast(Word("all")) == 1
    await h.clock.advance(2 * SWEEP)  # the child ends, and its parent gets the result
    assert await client.status("child") is RunStatus.SUCCEEDED
    assert await client.status("parent") is RunStatus.SUCCEEDED


@on_every_store
async def test_runs_released_by_a_stopping_worker_are_claimed_within_two_sweeps(h):
    """A worker that still assigns them to the stopped one claims what stays due for two sweeps."""

    @step
    async def stay_forever() -> int:
        if len(h.executions) == 1:
            await asyncio.get_running_loop().create_future()
        return 1

    @workflow(name="unhinted.stayer")
    async def stayer(ctx: Context) -> int:
        return await stay_forever()

    leaver = await h.engine(stayer, config=CONFIG, store=without_hints(h))
    await leaver.start(stayer, id="s")
    await h.settle()
    other = await h.engine(stayer, config=CONFIG, store=without_hints(h))
    await h.drive(leaver.shutdown(grace=0), 1)
    await h.clock.advance(3 * SWEEP)
    seen = await other.describe("s")
    assert (seen.status, seen.recoveries) == (RunStatus.SUCCEEDED, 0)
