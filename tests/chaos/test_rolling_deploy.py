"""Workers are replaced one by one, under load, with a changed workflow: no run fails, is stranded or repeats a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure import Client, EngineConfig, RunStatus
from tests.chaos.programs.deployed_worker import AFTER, BEFORE, first_release
from tests.chaos.store_servers import PLACES, Place
from tests.chaos.worker_fleet import Fleet
from tests.chaos.workflows import Planned

LEASE = 2.0
WORKERS = 3
EVERY = 0.03  # seconds between two starts


@pytest.mark.parametrize("where", PLACES)
def test_no_run_fails_or_strands(where: str, tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        async with Client(place.url, config=EngineConfig(sweep_interval=1.0)) as client:
            fleet = Fleet(tmp_path, place, client, "deployed_worker", LEASE)
            try:
                await deploy(fleet)
            finally:
                fleet.close()

    with PLACES[where](tmp_path) as place:
        asyncio.run(main(place))


async def deploy(fleet: Fleet) -> None:
    old = await asyncio.gather(*(fleet.start(1) for _ in range(WORKERS)))
    ids: list[str] = []
    load = asyncio.create_task(start_runs(fleet, ids))
    await fleet.until(lambda: len(ids) > 20, "there is load")
    for worker in old:
        await fleet.start(2)
        await fleet.ends(worker)
        await asyncio.sleep(0.5)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    runs = [await planned(fleet, run_id) for run_id in ids]
    await fleet.check(runs)
    for run_id in ids:
        assert (await fleet.client.describe(run_id)).recoveries == 0, "stopped workers release their runs"
    assert {run.places for run in runs} == {BEFORE, AFTER}, "there were runs of both kinds"
    await asyncio.gather(*(fleet.ends(worker) for worker in fleet.living()))


async def start_runs(fleet: Fleet, ids: list[str]) -> None:
    while True:
        run_id = f"run-{len(ids)}"
        ids.append(run_id)
        await asyncio.shield(asyncio.ensure_future(fleet.client.start(first_release, str(fleet.log), id=run_id)))
        await asyncio.sleep(EVERY)


async def planned(fleet: Fleet, run_id: str) -> Planned:
    """Both versions are valid, but a run must use only one of them."""
    await fleet.until(lambda: ended(fleet, run_id), f"run {run_id} ends")
    result = (await fleet.client.describe(run_id)).result
    places = AFTER if isinstance(result, str) and "0.5" in result.split() else BEFORE
    return Planned(run_id, first_release, (), "succeeded", " ".join(places), places)


async def ended(fleet: Fleet, run_id: str) -> bool:
    status = await fleet.client.status(run_id)
    assert status is not RunStatus.FAILED, await fleet.client.describe(run_id)
    return status is not None and status.terminal
