"""A worker of restarted runs until SIGTERM: `restart_worker URL LOG LEASE`."""

import asyncio
import os
import sys
from pathlib import Path

from perdure import Context, EngineConfig, Worker, event, step, workflow
from tests.crash.effect_log import effect


@event(name="restart.go")
class Go:
    number: int


@step
async def pass_gate(log: str, number: int, gate: str) -> int:
    effect(log, f"begun-{number}")
    while gate and not await asyncio.to_thread(Path(gate).exists):
        await asyncio.sleep(0.01)
    return os.getpid()


@step
async def finish(log: str, number: int, message: int) -> None:
    effect(log, f"finished-{number}-{message}")


@workflow(name="restart.job")
async def job(ctx: Context, log: str, number: int, gate: str = "") -> list[int]:
    """Return its number, and that of the message that it was started with."""
    await pass_gate(log, number, gate)
    message = (await ctx.receive(Go)).number
    await finish(log, number, message)
    return [number, message]


async def main(url: str, lease: float) -> None:
    config = EngineConfig(sweep_interval=0.2, lease=lease, grace=0.2)
    await Worker(url, [job], config=config).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[3])))
