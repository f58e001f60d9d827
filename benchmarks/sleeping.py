"""A workflow that sleeps for a year, and how to tell that a run of it has begun to."""

from __future__ import annotations

import asyncio

from perdure import Context, Engine, workflow

YEAR = 365 * 86_400


@workflow
async def sleeper(ctx: Context) -> None:
    await ctx.sleep(YEAR)


async def fall_asleep(engine: Engine, runs: int) -> None:
    """Start runs together; returns once all of them are suspended."""
    await asyncio.gather(*(_fall_asleep(engine) for _ in range(runs)))


async def _fall_asleep(engine: Engine) -> None:
    run = await engine.start(sleeper)
    async for _ in run.watch():  # the sleep is its first entry, and is recorded in the commit that suspends the run
        return
