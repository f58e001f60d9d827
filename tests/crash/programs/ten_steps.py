"""Starts 200 runs of ten steps, or goes on with them, and ends once all have finished."""

import asyncio
import sys

from perdure import Context, Engine, EngineConfig, step, workflow
from tests.crash.effect_log import effect

RUNS = 200
STEPS = 10


@step
async def square(log: str, number: int) -> int:
    if number % 3 == 0:
        await asyncio.sleep(0.002)
    effect(log)
    return number * number


@workflow
async def ten_steps(ctx: Context, log: str, first: int) -> int:
    total = 0
    for number in range(first, first + STEPS):
        total += await square(log, number)
    return total


def expected(first: int) -> int:
    return sum(number * number for number in range(first, first + STEPS))


async def main(url: str, log: str) -> None:
    # Killed far more often than a run should be: none of these runs is to blame for it.
    async with Engine(url, config=EngineConfig(max_recoveries=1_000)) as engine:
        starts = (engine.start(ten_steps, log, number, id=f"run-{number}") for number in range(RUNS))
        runs = await asyncio.gather(*starts)
        for number, run in enumerate(runs):
            assert await run.result() == expected(number)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
