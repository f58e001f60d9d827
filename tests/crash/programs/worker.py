"""A worker until SIGTERM: `worker URL LOG LEASE GRACE CONCURRENCY`. For tests with several workers."""

import asyncio
import os
import sys
import time
from pathlib import Path

from perdure import Context, EngineConfig, Worker, step, workflow
from tests.crash.effect_log import effect

STEPS = 8
GATED = 3  # the number of steps before the gate


@step
async def short(log: str, pause: float) -> int:
    effect(log, "begun")
    await asyncio.sleep(pause)
    effect(log, "done")
    return os.getpid()


@step
async def until_open(log: str, gate: str) -> int:
    effect(log, "begun")
    while not await asyncio.to_thread(Path(gate).exists):
        await asyncio.sleep(0.01)
    effect(log, "done")
    return os.getpid()


@step
def until_open_in_a_thread(log: str, gate: str) -> int:
    """Cannot be cancelled: the thread continues even if its worker is fenced meanwhile."""
    effect(log, "begun")
    while not Path(gate).exists():
        time.sleep(0.01)
    effect(log, "done")
    return os.getpid()


@workflow
async def chain(ctx: Context, log: str, pause: float, gate: str) -> int:
    """Sequential steps without waits, so that a run stays with its worker. One of them waits until the gate is open."""
    for n in range(STEPS):
        await (until_open(log, gate) if n == GATED else short(log, pause))
    return STEPS


@workflow
async def gated(ctx: Context, log: str, gate: str) -> int:
    return await until_open(log, gate)


@workflow
async def gated_in_a_thread(ctx: Context, log: str, gate: str) -> int:
    return await until_open_in_a_thread(log, gate)


async def main(url: str, lease: float, grace: float, concurrency: int) -> None:
    config = EngineConfig(lease=lease, grace=grace)
    await Worker(url, concurrency=concurrency, config=config).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
