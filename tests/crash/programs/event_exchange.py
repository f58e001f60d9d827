"""Runs that exchange events with each other and with a caller, in processes killed as in `crash_at_any_call`.

`event_exchange URL LOG SEED`. A speaker sends items to a collector and broadcasts to two listeners; the caller sends to
the collector too and requests a reply, each with its own id, again in every process until it has been accepted.
"""

import sys
from typing import Any

from perdure import Context, Engine, EngineConfig, event, workflow
from tests.crash.programs.crash_at_any_call import main

ITEMS = 5
CALLS = 60_000


@event(on_target_terminated="dead_letter")
class Item:
    n: int


@event(consume=False)
class Bulletin:
    n: int


@event
class Enough:
    pass


@workflow
async def talking_collector(ctx: Context) -> list[int]:
    found: list[int] = []
    while True:
        asked = await ctx.receive_request(Item, Enough)
        if isinstance(asked.value, Enough):
            return sorted(found)
        found.append(asked.value.n)
        await asked.reply(len(found))


@workflow
async def talking_listener(ctx: Context) -> list[int]:
    return [(await ctx.receive(Bulletin)).n for _ in range(ITEMS)]


@workflow
async def talking_speaker(ctx: Context) -> list[Any]:
    await ctx.start_child(talking_collector, id="collector")
    listeners = [await ctx.start_child(talking_listener, id=f"listener-{n}") for n in range(2)]
    for n in range(ITEMS):
        await ctx.send("collector", Item(n))
        await ctx.broadcast(Bulletin(n))
    return [await listener.result() for listener in listeners]


async def live(url: str, log: str) -> None:
    async with Engine(url, config=EngineConfig(max_recoveries=1_000)) as engine:
        speaker = await engine.start(talking_speaker, id="speaker")
        await engine.start(talking_collector, id="collector")
        for n in range(ITEMS, 2 * ITEMS - 1):
            await engine.send("collector", Item(n), event_id=f"item-{n}")
        last = 2 * ITEMS - 1
        assert 1 <= await engine.request("collector", Item(last), 30, event_id=f"item-{last}") <= 2 * ITEMS
        assert await speaker.result() == [list(range(ITEMS))] * 2
        await engine.send("collector", Enough(), event_id="enough")
        await engine.send("collector", Enough(), event_id="enough")
        assert await engine.result("collector") == list(range(2 * ITEMS))
        assert await engine.dead_letters() == []


if __name__ == "__main__":
    main(live, sys.argv[1], sys.argv[2], int(sys.argv[3]), CALLS)
