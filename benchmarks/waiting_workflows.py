"""Workflows that wait, for a year or for an event, and functions that wait until runs are suspended or activated."""

from __future__ import annotations

import asyncio

from perdure import Context, Engine, event, workflow
from perdure.workflows.definition import Workflow

YEAR_SECONDS = 365 * 86_400
_waiters: list[tuple[int, asyncio.Future[str]]] = []
_activated = 0


@workflow
async def sleeper(ctx: Context) -> None:
    await ctx.sleep(YEAR_SECONDS)
    _count_activation(ctx.run_id)


@event(delivery="after_wait", consume=False)
class Announcement:
    """An event for all waiting runs."""


@workflow
async def waiter(ctx: Context) -> None:
    await ctx.receive(Announcement)
    _count_activation(ctx.run_id)


async def start_suspended(engine: Engine, runs: int, wf: Workflow[[], None] = sleeper) -> None:
    """Start runs concurrently and return when all of them are suspended."""
    await asyncio.gather(*(_start_suspended(engine, wf) for _ in range(runs)))


async def _start_suspended(engine: Engine, wf: Workflow[[], None]) -> None:
    run = await engine.start(wf)
    async for _ in run.watch():  # the first entry is the wait, recorded in the commit that suspends the run
        return


def wait_for_activations(runs: int) -> asyncio.Future[str]:
    """Return a future that completes with the id of the last run when that many runs are activated in this process."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _waiters.append((runs, future))
    return future


def _count_activation(run_id: str) -> None:
    global _activated
    _activated += 1
    for runs, future in _waiters:
        if _activated == runs:
            future.set_result(run_id)
