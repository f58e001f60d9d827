"""A fork has a new inbox; a rewind of the fork must not mix its numbers with those in the copied history."""

import pytest

from perdure import Context, event, step, workflow
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


@pytest.mark.xfail(strict=True, reason="a returned message replaces an unread one that has the same number")
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
