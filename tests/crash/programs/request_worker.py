"""A worker that replies to requests until SIGTERM: `request_worker URL LOG SWEEP LEASE`."""

import asyncio
import os
import sys
from pathlib import Path

from perdure import Context, EngineConfig, Worker, event, step, workflow
from tests.crash.effect_log import effect


@event(name="across.word")
class WordRequest:
    word: str


@step
async def who_works(log: str) -> int:
    effect(log)
    return os.getpid()


@workflow(name="across.replying")
async def replying(ctx: Context, log: str, rounds: int) -> int:
    """Between two requests the run is suspended and does not change."""
    for _ in range(rounds):
        request = await ctx.receive_request(WordRequest)
        await ctx.stream("words").write(request.value.word)
        await request.reply(f"{request.value.word}!")
    return await who_works(log)


@step
async def stay_until_open(log: str, gate: str) -> int:
    effect(log, "begun")
    while not await asyncio.to_thread(Path(gate).exists):
        await asyncio.sleep(0.01)
    return os.getpid()


@workflow(name="across.staying")
async def staying(ctx: Context, log: str, gate: str) -> int:
    return await stay_until_open(log, gate)


async def main(url: str, sweep: float, lease: float) -> None:
    config = EngineConfig(sweep_interval=sweep, lease=lease, grace=0.2)
    await Worker(url, [replying, staying], config=config).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[3]), float(sys.argv[4])))
