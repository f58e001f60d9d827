"""A worker whose step sends heartbeats with its process id until a gate file exists: `beating_worker URL LOG LEASE`."""

import asyncio
import os
import sys
import time
from pathlib import Path

from perdure import Context, EngineConfig, Worker, current_step, step, workflow
from tests.crash.effect_log import effect


@step
def copy(log: str, gate: str) -> dict[str, int] | None:
    me = current_step()
    effect(log, "begun")
    before = me.last_heartbeat
    page = 0 if before is None else before["page"]
    try:
        while not Path(gate).exists():
            page += 1
            me.heartbeat({"page": page, "pid": os.getpid()})
            time.sleep(0.02)
    except asyncio.CancelledError:
        effect(log, "stopped")
        raise
    return before


@workflow(name="crash.copying")
async def copying(ctx: Context, log: str, gate: str) -> dict[str, int] | None:
    return await copy(log, gate)


if __name__ == "__main__":
    url, _, lease = sys.argv[1:]
    config = EngineConfig(lease=float(lease), sweep_interval=1.0)
    asyncio.run(Worker(url, [copying], config=config).run())
