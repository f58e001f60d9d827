"""A worker until SIGTERM: `worker URL LEASE REPORT`. At exit it appends its counters to the report."""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from perdure import EngineConfig, Worker
from perdure.execution.coordinator import Coordinator
from tests.chaos import workflows as flows

WORKFLOWS: list[Any] = [
    flows.chaos_listener,
    flows.chaos_chain,
    flows.chaos_naps,
    flows.chaos_leaf,
    flows.chaos_family,
    flows.chaos_undo,
]


async def main(url: str, lease: float, report: Path) -> None:
    config = EngineConfig(lease=lease, sweep_interval=1.0, grace=5.0, max_recoveries=1_000)
    worker = Worker(url, WORKFLOWS, config=config)
    working = asyncio.create_task(worker.run())
    while (core := worker._engine._runtime) is None:
        if working.done():
            return await working  # it could not start: report the reason
        await asyncio.sleep(0.01)
    left = _count_what_is_left_undone(core.coordinator)
    await working
    with report.open("a") as file:
        file.write(
            json.dumps({"pid": os.getpid(), "refused": core.coordinator.rejected_turns, "left": sum(left)}) + "\n"
        )


def _count_what_is_left_undone(coordinator: Coordinator) -> list[int]:
    """Count the runs that this worker was executing each time it learned that it is fenced, before it could commit."""
    left: list[int] = []
    drop = coordinator.discard_all

    def count_and_drop() -> None:
        left.append(len(coordinator.cache.all_active()))
        drop()

    coordinator.discard_all = count_and_drop  # type: ignore[method-assign]
    return left


if __name__ == "__main__":
    logging.basicConfig(format=f"%(asctime)s {os.getpid()} %(message)s", level=logging.INFO)
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
