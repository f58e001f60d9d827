"""A parent with fifty children, a loop and compensations, started or resumed until it has failed as expected."""

import asyncio
import sys

from perdure import Break, Context, Continue, Engine, EngineConfig, RunFailed, step, workflow
from tests.crash.effect_log import effect

CHILDREN = 50
ROUNDS = 40


@step
async def undo(given: tuple[str, int]) -> None:
    effect(given[0], f"undone-{given[1]}")


@step(compensate=undo)
async def do(log: str, number: int) -> tuple[str, int]:
    effect(log, f"done-{number}")
    return log, number


@step
async def square(log: str, number: int) -> int:
    if number % 3 == 0:
        await asyncio.sleep(0.002)
    effect(log, "squared")
    return number * number


@workflow(name="crash.child")
async def child(ctx: Context, log: str, number: int) -> int:
    first = await square(log, number)
    await ctx.sleep(0.01)
    return first + await square(log, number + 1)


@workflow(name="crash.family")
async def family(ctx: Context, log: str) -> None:
    async def body(ctx: Context, number: int) -> Continue[int] | Break[int]:
        await do(log, number)
        return Break(number) if number == ROUNDS - 1 else Continue(number + 1)

    handles = [await ctx.start_child(child, log, number) for number in range(CHILDREN)]
    await ctx.loop("rounds", body, 0, prune_every=5, keep=2)
    results = await asyncio.gather(*(handle.result() for handle in handles))
    raise ValueError(f"{sum(results)} in all")


def expected() -> int:
    return sum(number**2 + (number + 1) ** 2 for number in range(CHILDREN))


async def main(url: str, log: str) -> None:
    # The test kills workers often; the runs must not count as poison.
    async with Engine(url, config=EngineConfig(max_recoveries=1_000)) as engine:
        run = await engine.start(family, log, id="family")
        try:
            await run.result()
        except RunFailed as failed:
            if failed.message != f"{expected()} in all":
                raise


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
