"""Guarantee 4 with the process dying before and after every commit: events of workflows are sent and received once."""

import asyncio
from typing import Any

import pytest

from perdure import Context, event, step, workflow
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES


@event
class Item:
    n: int


@event(consume=False)
class Bulletin:
    n: int


@event
class Finished:
    sent: int


@step
async def crash_note(n: int) -> int:
    return n


@workflow
async def crash_of_senders(ctx: Context, role: str) -> Any:
    """One of three roles: the parent sends to the collector and broadcasts to the listeners."""
    if role == "collector":
        return await _collected(ctx)
    if role == "listener":
        heard = [(await ctx.receive(Bulletin)).n for _ in range(2)]
        try:
            heard.append((await ctx.receive(Bulletin, timeout=60)).n)
        except TimeoutError:
            heard.append(-1)
        return heard
    names = ["collector", "listener", "listener"]
    children = [await ctx.start_child(crash_of_senders, name, id=f"{name}-{n}") for n, name in enumerate(names)]
    for n in range(2):
        await ctx.send("collector-0", Item(n))
        await crash_note(n)
    await ctx.broadcast(Bulletin(1))
    await ctx.sleep(5)
    await asyncio.gather(ctx.send("collector-0", Item(2)), ctx.broadcast(Bulletin(2)), ctx.broadcast(Item(3)))
    await ctx.sleep(5)
    await ctx.send("collector-0", Finished(4))
    return [await child.result() for child in children]


async def _collected(ctx: Context) -> list[int]:
    """Return all items until the final event, and those that are available after it."""
    found: list[int] = []
    while not isinstance(got := await ctx.receive(Item, Finished), Finished):
        found.append(got.n)
    found += [each.n for each in await ctx.receive_batch(Item, max=10, timeout=30)]
    return sorted(found)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_events_sent_by_a_workflow_arrive_once_at_any_crash(kind, tmp_path):
    report = crash_on(kind, tmp_path, crash_of_senders, "parent")
    assert report.outcome == ("returned", [[0, 1, 2, 3], [1, 2, -1], [1, 2, -1]])


@workflow
async def crash_of_a_receiver(ctx: Context, role: str) -> Any:
    """Sends to itself, so that a crash hits every commit around each kind of receive."""
    for n in range(6):
        await ctx.send(ctx.run_id, Item(n))
    first = (await ctx.receive(Item)).n
    batch = [each.n for each in await ctx.receive_batch(Item, max=2)]
    winner, value = await ctx.race(item=ctx.receive(Item), never=ctx.receive("never"))
    asked = await ctx.receive_request(Item)
    await asked.reply("thanks")
    await crash_note(asked.value.n)
    last = (await ctx.receive(Item, timeout=5)).n
    rest = await ctx.receive_batch(Item, timeout=5)
    return [first, batch, winner, value.n, asked.value.n, last, rest]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_every_receive_kind_takes_each_event_once_at_any_crash(kind, tmp_path):
    report = crash_on(kind, tmp_path, crash_of_a_receiver, "alone", calls=("commit", "claim"))
    assert report.outcome == ("returned", [0, [1, 2], "item", 3, 4, 5, []])
