"""The limit of a mailbox counts per event name: a flood of one type does not block another."""

from typing import Any

import pytest

from perdure import Context, EngineConfig, QueueFull, event, workflow
from tests.engine.store_matrix import another_handle, on_every_store

LIMITED = EngineConfig(max_pending_events=3, sweep_interval=1000.0, lease=5000.0)


@event
class Tick:
    n: int


@event
class Stop:
    by: str


@workflow
async def flooded(ctx: Context) -> Any:
    stop = await ctx.receive(Stop)
    ticks = await ctx.receive_batch(Tick, max=10)
    return [stop.by, [tick.n for tick in ticks]]


@workflow
async def flooding(ctx: Context, target: str) -> list[str]:
    refused = []
    for n in range(4):
        try:
            await ctx.send(target, Tick(n))
        except QueueFull as error:
            refused.append(str(error))
    await ctx.send(target, Stop("workflow"))
    return refused


@on_every_store
async def test_flood_of_one_event_does_not_block_another(h):
    engine = await h.engine(flooded, config=LIMITED)
    run = await engine.start(flooded)
    client = await h.client(config=LIMITED, store=another_handle(h.store, h.clock))
    for n in range(3):
        await client.send(run.id, Tick(n))
    text = f"the mailbox of run '{run.id}' holds 3 unread events of the name 'Tick' and takes no more of them"
    for caller in (engine, client):
        with pytest.raises(QueueFull) as caught:
            await caller.send(run.id, Tick(3))
        assert str(caught.value) == text
        with pytest.raises(QueueFull):
            await caller.request(run.id, Tick(3), 10)
    await client.send(run.id, "note", "another name")
    await client.send(run.id, Stop("ada"))
    assert await h.run_to_end(run) == ["ada", [0, 1, 2]]


@on_every_store
async def test_workflow_that_floods_a_mailbox_can_send_another_event(h):
    engine = await h.engine(flooded, flooding, config=LIMITED)
    target = await engine.start(flooded, id="target")
    sender = await engine.start(flooding, "target")
    refused = await h.run_to_end(sender)
    assert len(refused) == 1
    assert "3 unread events of the name 'Tick'" in refused[0]
    assert await h.run_to_end(target) == ["workflow", [0, 1, 2]]


@on_every_store
async def test_read_events_make_space_for_their_name(h):
    @workflow
    async def reading(ctx: Context) -> int:
        count = 0
        while (await ctx.receive(Tick)).n:
            count += 1
        return count

    engine = await h.engine(reading, config=LIMITED)
    run = await engine.start(reading)
    for n in range(20, -1, -1):
        await run.send(Tick(n))
        await h.settle()
    assert await h.run_to_end(run) == 20
