"""Events that a step or workflow sends to its own run are available when the workflow continues."""

from __future__ import annotations

from typing import Any

from perdure import Context, event, step, workflow
from tests.engine.store_matrix import on_every_store

AROUND: dict[str, Any] = {}


@event
class Parcel:
    n: int


@step
async def ordered_sends(run_id: str, many: int) -> None:
    for n in range(many):
        await AROUND["engine"].send(run_id, Parcel(n))


@workflow
async def ordered_receiver(ctx: Context, many: int, by: str) -> list[int]:
    if by == "step":
        await ordered_sends(ctx.run_id, many)
    else:
        for n in range(many):
            await ctx.send(ctx.run_id, Parcel(n))
    batch = [each.n for each in await ctx.receive_batch(Parcel, max=many - 1)]
    return [*batch, (await ctx.receive(Parcel, timeout=0)).n]


@on_every_store
async def test_event_sent_by_a_step_is_available_when_it_returns(h):
    AROUND["engine"] = engine = await h.engine(ordered_receiver)
    run = await engine.start(ordered_receiver, 5, "step")
    assert await h.run_to_end(run) == [0, 1, 2, 3, 4]


@on_every_store
async def test_event_sent_to_itself_is_available_to_the_workflow(h):
    engine = await h.engine(ordered_receiver)
    run = await engine.start(ordered_receiver, 5, "workflow")
    assert await h.run_to_end(run) == [0, 1, 2, 3, 4]
