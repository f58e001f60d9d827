"""A PostgreSQL primary fails and its standby is promoted: all runs end correctly, without a change of configuration.

`tests/crash/test_postgres_failover.py` is about the store alone, and part of `make test`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from perdure import Client, EngineConfig
from tests.chaos.store_servers import Place
from tests.chaos.worker_fleet import Fleet
from tests.chaos.workflows import plan
from tests.servers.postgres import Server, Standby, primary_and_standby, url_of, with_schema

LEASE = 3.0
WORKERS = 4
RUNS = 300
AWAY = 2.0  # seconds without a primary


def test_workers_continue_after_a_postgres_failover(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def main(primary: Server, standby: Standby) -> float:
        url = with_schema(url_of(primary, standby), "chaos")
        async with Client(url, config=EngineConfig(sweep_interval=1.0)) as client:
            fleet = Fleet(tmp_path, Place(url, url), client, "worker", LEASE)
            try:
                await asyncio.gather(*(fleet.start() for _ in range(WORKERS)))
                return await lose_the_primary(fleet, primary, standby)
            finally:
                fleet.close()

    with primary_and_standby() as servers:
        seconds = asyncio.run(main(*servers))
    record_property("from the promotion to the next effect", round(seconds, 2))


async def lose_the_primary(fleet: Fleet, primary: Server, standby: Standby) -> float:
    took: list[float] = []

    async def trouble() -> None:
        await asyncio.to_thread(primary.stop, primary.at_once)
        await asyncio.sleep(AWAY)
        await fleet.kill(fleet.living()[0])
        seen = len(fleet.effects())
        began = time.monotonic()
        await standby.promote()
        await fleet.until(lambda: len(fleet.effects()) > seen, "the fleet goes on")
        took.append(time.monotonic() - began)

    await fleet.carry(plan(range(RUNS), str(fleet.log)), trouble)
    return took[0]
