"""A run that uses every kind of entry, for tests of its export."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from perdure import Break, Context, Continue, Retry, StepFailed, event, step, workflow
from perdure.testing import Harness

CALLED: list[str] = []


@dataclass
class Order:
    id: str
    cents: int = 0


@event(on_target_terminated="dead_letter")
class Paid:
    by: str


@event
class Offer:
    price: int


class Declined(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


async def unreserve(order: Order) -> None:
    CALLED.append(f"unreserve {order.id}")


def undo(what: Any) -> None:
    CALLED.append(f"undo {what}")


@step(compensate=unreserve)
async def reserve(order: Order) -> Order:
    CALLED.append(f"reserve {order.id}")
    return order


@step(retry=None, raises=Declined)
async def decline() -> None:
    raise Declined(7)


@step(retry=None)
async def fail() -> None:
    raise OSError("disk")


@step(retry=Retry(max_attempts=50, initial=1_000, jitter=0))
async def flaky() -> None:
    raise ConnectionError("later")


@workflow(name="rich.child")
async def rich_child(ctx: Context, n: int) -> int:
    if n < 0:
        await ctx.sleep(100_000)
    return n


@workflow(name="rich.run", raises=Declined, tags={"team": "day"})
async def rich_run(ctx: Context, order: Order, ends: bool = False) -> str:
    ctx.on_exit(undo, "exit")
    await reserve(order)
    for failing in (decline, fail):
        with contextlib.suppress(Declined, StepFailed):
            await failing()
    await ctx.sleep(1)
    assert ctx.version("gate", latest=2) == 2
    await ctx.join(a=reserve(Order("a")), b=ctx.sleep(2))
    await ctx.race(fast=reserve(Order("r")), slow=ctx.sleep(500))
    await ctx.publish("progress", 1)
    await ctx.run_child(rich_child, 5)
    open_child = await ctx.start_child(rich_child, -1, id=f"{ctx.run_id}-child")
    await ctx.broadcast(Offer(5))
    await ctx.receive(Offer, timeout=10)
    await ctx.receive(Paid)

    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        await reserve(Order(f"loop {n}"))
        ctx.on_rollback(undo, n)
        return Break(n) if n == 6 else Continue(n + 1)

    await ctx.loop("pages", body, 0, prune_every=3, keep=1)
    if ends:
        return order.id
    async with asyncio.timeout(90_000):
        await ctx.join(
            retried=flaky(), event=ctx.receive("never"), verdict=ctx.deferred("verdict", str), kid=open_child.result()
        )
    return "never"


async def export_of_rich_run(h: Harness, *, ends: bool = False) -> dict[str, Any]:
    """Execute a rich run until it waits, or to its end, and return its export."""
    engine = await h.engine(rich_run, rich_child)
    run = await engine.start(rich_run, Order("1", 5), ends, id="rich")
    await engine.send("rich", Paid("ada"))
    await h.clock.advance(20)
    await h.settle()
    if not ends:
        await engine.send("rich", "unread", {"n": 1})
        await engine.send("rich", Paid("bob"))
        await h.settle()
    assert await run.status() == ("succeeded" if ends else "suspended")
    exported = await engine.export_history("rich")
    await h.crash(engine)
    return exported
