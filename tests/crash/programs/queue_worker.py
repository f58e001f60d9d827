"""A worker of a limited queue until it is killed: `queue_worker URL LOG LEASE CONCURRENCY`.

Each body takes one of `LOCKS` file locks while it executes. The system releases the locks of a killed process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure import Context, EngineConfig, Worker, WorkQueue, step, workflow
from tests.crash.effect_log import effect

LOCKS = 3
NAME = "locked"
BODY_SECONDS = 0.1


@contextmanager
def one_lock(folder: Path) -> Iterator[int | None]:
    """Take a free lock and yield its number; None if bodies hold all of them."""
    for number in range(LOCKS):
        file = os.open(folder / f"lock-{number}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        try:
            yield number
        finally:
            os.close(file)
        return
    yield None


@step(name="locked-body")
async def body(log: str) -> None:
    with one_lock(Path(log).parent) as lock:
        effect(log, "exceeded" if lock is None else f"lock-{lock}")
        await asyncio.sleep(BODY_SECONDS)
    effect(log, "done")


@workflow(name="locked-run")
async def locked_run(ctx: Context, log: str) -> int:
    await body(log)
    await ctx.sleep(0.01)  # suspended, it still holds its slot
    await body(log)
    return 2


async def main(url: str, lease: float, concurrency: int) -> None:
    queue = WorkQueue(NAME, concurrency=concurrency)
    await Worker(url, queues=[queue], config=EngineConfig(lease=lease, sweep_interval=1.0)).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[3]), int(sys.argv[4])))
