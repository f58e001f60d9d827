"""Three worker processes fire each of 1,000 time slots once, while they are killed one after the other."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from perdure import Client, RunQuery
from perdure.schedules.slot_rule import slot_run_id
from tests.crash.process_harness import STORES, scenario
from tests.crash.programs.schedule_worker import logged

LEASE = 3.0
SLOTS_PER_SECOND, SECONDS = 100, 10


@pytest.mark.parametrize("kind", STORES)
def test_workers_that_are_killed_fire_a_thousand_slots_once(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "slots.log"
    with scenario(tmp_path, kind) as here:
        workers = [here.start("schedule_worker", LEASE) for _ in range(3)]
        first = int(time.time()) + 4
        slots = [first + second for second in range(SECONDS)]
        ids = [slot_run_id(f"s{n}", slot) for n in range(SLOTS_PER_SECOND) for slot in slots]
        asyncio.run(create_schedules(here.url, str(log), slots))
        for number in (250, 500):
            here.until(partial(has_lines, log, number), f"{number} slots were fired")
            here.kill(workers.pop(0))
            workers.append(here.start("schedule_worker", LEASE))
        here.until(lambda: len(set(lines(log))) >= len(ids), "all slots were fired")
        started = asyncio.run(started_runs(here.url))
        assert sorted(started) == sorted(ids)
        executed = set(lines(log))
        assert executed == set(ids)


async def create_schedules(url: str, log: str, slots: list[int]) -> None:
    at = [datetime.fromtimestamp(slot, UTC) for slot in slots]
    async with Client(url) as client:
        for n in range(SLOTS_PER_SECOND):
            await client.schedule(f"s{n}", logged, log, at=at, overlap="allow", catch_up="all")


async def started_runs(url: str) -> list[str]:
    async with Client(url) as client:
        page = await client.runs(RunQuery(workflow="logged", limit=10_000))
        return [run.id for run in page.runs]


def has_lines(log: Path, number: int) -> bool:
    return len(lines(log)) >= number


def lines(log: Path) -> list[str]:
    """Return the ids of the runs that were executed. A killed worker's run may be executed again."""
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
