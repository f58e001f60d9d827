"""Workers lose their PostgreSQL primary and its standby is promoted: all runs finish without manual action.

`tests/crash/test_postgres_failover.py` tests the store alone, and is part of `make test`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from perdure import Client, EngineConfig
from tests.chaos.store_servers import Place
from tests.chaos.worker_group import WorkerGroup
from tests.chaos.workflows import plan
from tests.servers.postgres import Server, Standby, primary_and_standby, url_of, with_schema

LEASE = 3.0
WORKERS = 4
RUNS = 300
OUTAGE_SECONDS = 2.0


def test_workers_continue_after_the_standby_is_promoted(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def main(primary: Server, standby: Standby) -> float:
        url = with_schema(url_of(primary, standby), "chaos")
        async with Client(url, config=EngineConfig(sweep_interval=1.0)) as client:
            group = WorkerGroup(tmp_path, Place(url, url), client, "worker", LEASE)
            try:
                await asyncio.gather(*(group.start() for _ in range(WORKERS)))
                return await lose_the_primary(group, primary, standby)
            finally:
                group.close()

    with primary_and_standby() as servers:
        seconds = asyncio.run(main(*servers))
    record_property("from the promotion to the next effect", round(seconds, 2))


async def lose_the_primary(group: WorkerGroup, primary: Server, standby: Standby) -> float:
    took: list[float] = []

    async def trouble() -> None:
        await asyncio.to_thread(primary.stop, primary.at_once)
        await asyncio.sleep(OUTAGE_SECONDS)
        await group.kill(group.living()[0])
        seen = len(group.effects())
        began = time.monotonic()
        await standby.promote()
        await group.until(lambda: len(group.effects()) > seen, "the workers continue")
        took.append(time.monotonic() - began)

    await group.carry(plan(range(RUNS), str(group.log)), trouble)
    return took[0]
