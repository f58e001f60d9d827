"""A worker of one release: `deployed_worker URL LEASE REPORT RELEASE`. Release 2 changes the workflow by a gate."""

import asyncio
import logging
import os
import sys

from perdure import Context, EngineConfig, Worker, workflow
from tests.chaos.workflows import touch

NAPS = 6


@workflow(name="deployed")
async def first_release(ctx: Context, log: str) -> str:
    places = [await touch(log, "0")]
    for n in range(NAPS):
        await ctx.sleep(0.3)
        places.append(await touch(log, f"1.{n}"))
    return " ".join([*places, await touch(log, "9")])


async def second_release(ctx: Context, log: str) -> str:
    """Has an additional check; runs that are past its location skip it."""
    places = [await touch(log, "0")]
    if ctx.version("check", latest=2) == 2:
        places.append(await touch.options(name="check")(log, "0.5"))
    for n in range(NAPS):
        await ctx.sleep(0.3)
        places.append(await touch(log, f"1.{n}"))
    return " ".join([*places, await touch(log, "9")])


BEFORE = ("0", *(f"1.{n}" for n in range(NAPS)), "9")
AFTER = ("0", "0.5", *(f"1.{n}" for n in range(NAPS)), "9")


async def main(url: str, lease: float, release: int) -> None:
    served = first_release if release == 1 else workflow(name="deployed")(second_release)
    config = EngineConfig(lease=lease, sweep_interval=1.0, grace=5.0)
    await Worker(url, [served], config=config).run()


if __name__ == "__main__":
    logging.basicConfig(format=f"%(asctime)s {os.getpid()} %(message)s", level=logging.INFO)
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[4])))
