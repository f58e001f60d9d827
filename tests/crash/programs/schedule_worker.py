"""A worker whose workflow logs each time slot that it is executed for: `schedule_worker URL LOG LEASE`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from perdure import Context, EngineConfig, Worker, step, workflow


@workflow
async def logged(ctx: Context, log: str) -> None:
    await append_line(log, ctx.run_id)


@step
async def append_line(log: str, run_id: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    with Path(log).open("ab", buffering=0) as file:
        file.write(f"{run_id} {os.getpid()}\n".encode())


if __name__ == "__main__":
    url, _, lease = sys.argv[1:4]
    config = EngineConfig(lease=float(lease), sweep_interval=0.5)
    asyncio.run(Worker(url, workflows=[logged], config=config).run())
