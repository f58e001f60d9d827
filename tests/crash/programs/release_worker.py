"""A worker of one release: `release_worker URL LOG RELEASE`. Release 1 starts runs, 2 does not fit them, 3 does."""

import asyncio
import sys

from perdure import Context, EngineConfig, Worker, event, step, workflow
from tests.crash.effect_log import effect


@event(name="released")
class Released:
    """Lets a run continue."""


@step
async def before(log: str) -> str:
    effect(log, "before")
    return "before"


@step
async def after(log: str) -> str:
    effect(log, "after")
    return "after"


@workflow(name="released")
async def first_release(ctx: Context, log: str) -> str:
    await before(log)
    await ctx.receive(Released)
    return await after(log)


async def second_release(ctx: Context, log: str) -> str:
    await ctx.receive(Released)
    return await before(log)


async def third_release(ctx: Context, log: str) -> str:
    await before(log)
    await ctx.receive(Released)
    return f"{await after(log)}, fixed"


RELEASES = {1: first_release.fn, 2: second_release, 3: third_release}


async def main(url: str, release: int) -> None:
    served = workflow(name="released")(RELEASES[release])
    config = EngineConfig(lease=6.0, sweep_interval=1.0, grace=5.0)
    await Worker(url, [served], config=config).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[3])))
