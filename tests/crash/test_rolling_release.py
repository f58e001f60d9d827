"""A release that is rolled out as documented, with real processes: it frees the runs that the old release holds."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from perdure import Client, RunQuery
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.release_worker import Released, first_release

IDS = [f"run-{number}" for number in range(8)]


def start_release(here: Scenario, number: int) -> subprocess.Popen[bytes]:
    """Return a worker of this release that has joined."""
    worker = here.start("release_worker", number)
    here.until(lambda: any(row.pid == worker.pid and not row.fenced for row in here.book.workers()), "it joins")
    return worker


def stop(here: Scenario, worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    here.until_ended(worker)


async def start_runs(url: str, log: Path) -> None:
    async with Client(url) as client:
        for run_id in IDS:
            await client.start(first_release, str(log), id=run_id)


async def send_to_all(url: str) -> None:
    async with Client(url) as client:
        for run_id in IDS:
            await client.send(run_id, Released())


def held(here: Scenario) -> list[str]:
    async def main() -> list[str]:
        async with Client(here.url) as client:
            return sorted(run.id for run in await client.runs(RunQuery(held="diverged")))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", STORES)
def test_new_worker_frees_what_the_old_code_holds(kind: str, tmp_path: Path) -> None:
    with scenario(tmp_path, kind) as here:
        first = start_release(here, 1)
        asyncio.run(start_runs(here.url, here.log))
        here.until(lambda: list(here.statuses().values()).count("suspended") == len(IDS), "all wait for the event")
        stop(here, first)

        broken = start_release(here, 2)
        asyncio.run(send_to_all(here.url))
        here.until(lambda: held(here) == IDS, "the broken release holds all runs")
        fixed = start_release(here, 3)  # the new worker first,
        stop(here, broken)  # then the old one stops
        here.until(here.all_succeeded, "the fixed release continues all runs")
        assert set(here.results().values()) == {'"after, fixed"'}
        assert len(here.effects("before")) == len(here.effects("after")) == len(IDS)
        stop(here, fixed)
