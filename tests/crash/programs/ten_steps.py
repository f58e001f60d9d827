"""Starts or resumes 200 runs of ten steps, and exits when all have ended."""

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
    # The test kills workers often; the runs must not count as poison.
    async with Engine(url, config=EngineConfig(max_recoveries=1_000)) as engine:
        starts = (engine.start(ten_steps, log, number, id=f"run-{number}") for number in range(RUNS))
        runs = await asyncio.gather(*starts)
        for number, run in enumerate(runs):
            assert await run.result() == expected(number)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
