"""A queue with a concurrency of 3 while its workers are killed: file locks show that never more than 3 bodies run."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from perdure import Client
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.queue_worker import LOCKS, NAME, locked_run

LEASE = 2.0
KILLS = 3
RUNS_PER_KILL = 20


def start_worker(here: Scenario, concurrency: int) -> subprocess.Popen[bytes]:
    """Start a worker and wait until it has joined."""
    worker = here.start("queue_worker", LEASE, concurrency)

    def joined() -> bool:
        assert worker.poll() is None, here.explanation()
        return any(row.pid == worker.pid and not row.fenced for row in here.book.workers())

    here.until(joined, "the worker joins")
    return worker


def start_runs(here: Scenario, numbers: range) -> None:
    async def main() -> None:
        async with Client(here.url) as client:
            for number in numbers:
                await client.start(locked_run, str(here.log), id=f"run-{number}", queue=NAME)

    asyncio.run(main())


def holders(here: Scenario) -> int:
    """Return how many slots the store says are held."""

    async def main() -> int:
        async with Client(here.url) as client:
            return (await client.queue(NAME).describe()).held

    return asyncio.run(main())


def is_in_a_body(here: Scenario, pid: int) -> bool:
    """Return whether a body of this process has begun and is not done."""
    own = [each.what == "done" for each in here.effects() if each.pid == pid]
    return own.count(False) > own.count(True)


def worker_in_a_body(here: Scenario, workers: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Wait until one of the workers executes a body, and return it."""
    found: subprocess.Popen[bytes] = here.until(
        lambda: next((each for each in workers if is_in_a_body(here, each.pid)), None), "a worker executes a body"
    )
    return found


@pytest.mark.parametrize("kind", STORES)
def test_never_more_bodies_run_than_the_queue_allows_while_workers_are_killed(kind: str, tmp_path: Path) -> None:
    with scenario(tmp_path, kind) as here:
        workers, killed_in_a_body = [start_worker(here, LOCKS) for _ in range(3)], 0
        for kill in range(KILLS):
            first = kill * RUNS_PER_KILL
            start_runs(here, range(first, first + RUNS_PER_KILL))
            victim = worker_in_a_body(here, workers)
            here.kill(victim)
            killed_in_a_body += is_in_a_body(here, victim.pid)
            workers[workers.index(victim)] = start_worker(here, LOCKS)
        here.until(lambda: len(here.results()) == KILLS * RUNS_PER_KILL, "all runs end")

        assert killed_in_a_body > 0
        assert not here.effects("exceeded")
        used = {each.what for each in here.effects() if each.what.startswith("lock-")}
        assert used == {f"lock-{number}" for number in range(LOCKS)}, "all slots were used"
        assert holders(here) == 0


def test_the_file_locks_find_a_fourth_body(tmp_path: Path) -> None:
    with scenario(tmp_path, "sqlite") as here:
        start_worker(here, LOCKS + 1)
        start_runs(here, range(12))
        here.until(lambda: here.effects("exceeded"), "four bodies run at once")
