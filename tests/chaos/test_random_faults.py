"""Four workers with random faults: kills, pauses, server restarts, cut connections. All runs end correctly.

Recorded effects happen once, despite the faults of their workers.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from perdure import Client, EngineConfig
from perdure.model.records import EntryStatus, WorkerRecord
from tests.chaos.store_servers import PLACES, Place
from tests.chaos.worker_group import Process, WorkerGroup
from tests.chaos.workflows import Planned, leaves, plan

LEASE = 1.5
WORKERS = 4
WAVE = 100
WAVES = 5


@pytest.mark.parametrize("where", PLACES)
def test_all_runs_finish_and_recorded_effects_happen_once(
    where: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def main(place: Place) -> dict[str, float]:
        config = EngineConfig(sweep_interval=1.0)
        async with Client(place.url, config=config) as client:
            group = WorkerGroup(tmp_path, place, client, "worker", LEASE)
            try:
                return await Storm(group, place, seed=7).rage()
            finally:
                group.close()

    with PLACES[where](tmp_path) as place:
        for name, seconds in asyncio.run(main(place)).items():
            record_property(name, round(seconds, 2))


class Storm:
    """The sequence of faults, while batches of runs are started."""

    def __init__(self, group: WorkerGroup, place: Place, seed: int) -> None:
        self._group = group
        self._place = place
        self._chance = random.Random(seed)
        self._runs: list[Planned] = []
        self._zombies: list[int] = []
        self._resumed_at = 0  # the number of effects at that time
        self._times: dict[str, float] = {}

    async def rage(self) -> dict[str, float]:
        group = self._group
        await asyncio.gather(*(group.start() for _ in range(WORKERS)))
        for trouble in (self._kill_some, self._pause_one, self._restart_server, self._cut_lines, self._hold_up_lines):
            wave = plan(range(len(self._runs), len(self._runs) + WAVE), str(group.log))
            self._runs += wave
            coming = asyncio.create_task(group.begin(wave))
            await asyncio.sleep(0.3)
            await trouble()
            await coming
        assert len(self._runs) == WAVE * WAVES
        everyone = self._runs + leaves(self._runs)
        await group.all_ended(everyone)
        await group.see_off(everyone, zombies=self._zombies)
        reported = group.reported()
        for pid in self._zombies:  # the order of the two is random
            late = reported[pid]
            assert late["refused"] + late["left"] > 0, "its late commit is refused, or it learns that it is fenced"
            assert any(line.pid == pid for line in group.effects()[self._resumed_at :]), "it works again"
        return self._times

    async def _kill_some(self) -> None:
        for _ in range(3):
            victim = self._chance.choice([each for each in self._group.living() if each.pid not in self._zombies])
            row = await self._group.row_of(victim)
            assert row is not None
            began = time.monotonic()
            await self._group.kill(victim)
            await self._group.until(partial(self._let_go, row.id), "the runs of a killed worker are released")
            self._longest("takeover from a killed local process", began)
            await self._group.start()

    async def _pause_one(self) -> None:
        paused, row = await self._group.until(self._stopped, "a worker can be paused in the middle of a step")
        began = time.monotonic()
        self._zombies.append(paused.pid)
        await self._group.until(lambda: self._let_go(row.id), "the runs of a paused worker are released")
        self._longest("takeover when a lease has run out", began)
        await asyncio.sleep(3 * LEASE - (time.monotonic() - began))
        self._resumed_at = len(self._group.effects())
        paused.send_signal(signal.SIGCONT)
        joined = await self._group.until(lambda: self._group.row_of(paused), "it joins again")
        assert joined.id != row.id, "the id of a fenced worker is never used again"

    async def _stopped(self) -> tuple[Process, WorkerRecord] | None:
        """Pause the busiest worker; resume it if the pause hit a transaction or an idle worker."""
        worker = await self._busiest()
        row = await self._group.row_of(worker)
        if row is None:
            return None
        worker.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        # One that is stopped in the middle of a transaction keeps SQLite's lock, and one whose steps were all recorded
        # just now brings back nothing that could be refused. What it had sent before it was stopped may still arrive.
        if self._place.can_write() and await self._has_work_in_hand(worker, row.id):
            await asyncio.sleep(0.1)
            if await self._has_work_in_hand(worker, row.id):
                return worker, row
        worker.send_signal(signal.SIGCONT)
        return None

    async def _has_work_in_hand(self, worker: Process, id: str) -> bool:
        """Return whether the worker has started a step that is not recorded."""
        last = {line.run: line for line in self._group.effects() if line.pid == worker.pid}
        for run in await self._group.owned_by(id):
            entries = await self._group.client.history(run)
            recorded = {entry.location for entry in entries if entry.status is not EntryStatus.PENDING}
            if run in last and last[run].location not in recorded:
                return True
        return False

    async def _restart_server(self) -> None:
        if self._place.restart is not None:
            await asyncio.to_thread(self._place.restart)
        await self._kill_some()

    async def _cut_lines(self) -> None:
        if self._place.proxy is not None:
            for seconds in (0.2, 0.5, 2 * LEASE):
                self._place.proxy.cut()
                await asyncio.sleep(seconds)
                self._place.proxy.heal()
                await asyncio.sleep(0.5)

    async def _hold_up_lines(self) -> None:
        if self._place.proxy is not None:
            self._place.proxy.hold_up()
            await asyncio.sleep(2 * LEASE)
            self._place.proxy.heal()

    async def _busiest(self) -> Process:
        """Return the worker that owns most runs."""
        counts = []
        for worker in self._group.living():
            row = await self._group.row_of(worker)
            counts.append((len(await self._group.owned_by(row.id)) if row is not None else 0, worker.pid, worker))
        return max(counts)[2]

    async def _let_go(self, worker: str) -> bool:
        """Whether a worker was found to be gone, and owns nothing any more."""
        rows = await self._group.client._session.store.workers()
        return all(row.id != worker for row in rows) and not await self._group.owned_by(worker)

    def _longest(self, what: str, began: float) -> None:
        self._times[what] = max(self._times.get(what, 0.0), time.monotonic() - began)
