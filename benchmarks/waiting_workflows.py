"""Workflows that wait, for a year or for news: how to tell that runs have begun to, and that many are awake."""

from __future__ import annotations

import asyncio

from perdure import Context, Engine, event, workflow
from perdure.workflows.definition import Workflow

YEAR = 365 * 86_400
_awake: list[tuple[int, asyncio.Future[str]]] = []
_count = 0


@workflow
async def sleeper(ctx: Context) -> None:
    await ctx.sleep(YEAR)
    _note(ctx.run_id)


@event(delivery="after_wait", consume=False)
class News:
    """For everyone who waits."""


@workflow
async def waiter(ctx: Context) -> None:
    await ctx.receive(News)
    _note(ctx.run_id)


async def fall_asleep(engine: Engine, runs: int, wf: Workflow[[], None] = sleeper) -> None:
    """Start runs together; returns once all of them are suspended."""
    await asyncio.gather(*(_fall_asleep(engine, wf) for _ in range(runs)))


async def _fall_asleep(engine: Engine, wf: Workflow[[], None]) -> None:
    run = await engine.start(wf)
    async for _ in run.watch():  # what it waits in is its first entry, recorded in the commit that suspends the run
        return


def woken(runs: int) -> asyncio.Future[str]:
    """When so many have woken in this process: the id of the last one."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _awake.append((runs, future))
    return future


def _note(id: str) -> None:
    global _count
    _count += 1
    for runs, future in _awake:
        if _count == runs:
            future.set_result(id)
