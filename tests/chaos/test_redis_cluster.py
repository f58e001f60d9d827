"""Workers on a Redis Cluster of six nodes, two of them killed: all runs finish correctly."""

from __future__ import annotations

import asyncio
from pathlib import Path

from perdure import Client, EngineConfig
from tests.chaos.store_servers import Place
from tests.chaos.worker_group import WorkerGroup
from tests.chaos.workflows import plan
from tests.servers.redis import Cluster, with_options

LEASE = 2.0
WORKERS = 4
RUNS = 300


def test_all_kinds_of_runs_finish_on_a_redis_cluster(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with Client(url, config=EngineConfig(sweep_interval=1.0)) as client:
            group = WorkerGroup(tmp_path, Place(url, url), client, "worker", LEASE)

            async def kill_two() -> None:
                for _ in range(2):
                    await group.kill(group.living()[0])
                    await group.start()

            try:
                await asyncio.gather(*(group.start() for _ in range(WORKERS)))
                await group.carry(plan(range(RUNS), str(group.log)), kill_two)
            finally:
                group.close()

    cluster = Cluster(tmp_path / "cluster")
    try:
        cluster.start()
        asyncio.run(main(with_options(cluster.url, prefix="chaos", durability="relaxed")))
    finally:
        cluster.remove()
