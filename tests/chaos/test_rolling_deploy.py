"""Workers are replaced one by one, under load, with a changed workflow: no run fails, is stranded or repeats a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure import Client, EngineConfig, RunStatus
from tests.chaos.programs.deployed_worker import AFTER, BEFORE, first_release
from tests.chaos.store_servers import PLACES, Place
from tests.chaos.worker_group import WorkerGroup
from tests.chaos.workflows import Planned

LEASE = 2.0
WORKERS = 3
EVERY = 0.03  # seconds between two starts


@pytest.mark.parametrize("where", PLACES)
def test_no_run_fails_or_strands(where: str, tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        async with Client(place.url, config=EngineConfig(sweep_interval=1.0)) as client:
            group = WorkerGroup(tmp_path, place, client, "deployed_worker", LEASE)
            try:
                await deploy(group)
            finally:
                group.close()

    with PLACES[where](tmp_path) as place:
        asyncio.run(main(place))


async def deploy(group: WorkerGroup) -> None:
    old = await asyncio.gather(*(group.start(1) for _ in range(WORKERS)))
    ids: list[str] = []
    load = asyncio.create_task(start_runs(group, ids))
    await group.until(lambda: len(ids) > 20, "there is load")
    for worker in old:
        await group.start(2)
        await group.ends(worker)
        await asyncio.sleep(0.5)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    runs = [await planned(group, run_id) for run_id in ids]
    await group.check(runs)
    for run_id in ids:
        assert (await group.client.describe(run_id)).recoveries == 0, "stopped workers release their runs"
    assert {run.places for run in runs} == {BEFORE, AFTER}, "there were runs of both kinds"
    await asyncio.gather(*(group.ends(worker) for worker in group.living()))


async def start_runs(group: WorkerGroup, ids: list[str]) -> None:
    while True:
        run_id = f"run-{len(ids)}"
        ids.append(run_id)
        await asyncio.shield(asyncio.ensure_future(group.client.start(first_release, str(group.log), id=run_id)))
        await asyncio.sleep(EVERY)


async def planned(group: WorkerGroup, run_id: str) -> Planned:
    """Both versions are valid, but a run must use only one of them."""
    await group.until(lambda: ended(group, run_id), f"run {run_id} ends")
    result = (await group.client.describe(run_id)).result
    places = AFTER if isinstance(result, str) and "0.5" in result.split() else BEFORE
    return Planned(run_id, first_release, (), "succeeded", " ".join(places), places)


async def ended(group: WorkerGroup, run_id: str) -> bool:
    status = await group.client.status(run_id)
    assert status is not RunStatus.FAILED, await group.client.describe(run_id)
    return status is not None and status.terminal
