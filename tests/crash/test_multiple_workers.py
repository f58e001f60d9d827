"""Several worker processes on one store: which worker executes the runs when one dies, shuts down or is paused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perdure import Client
from tests.crash.effect_log import Effect
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.worker import STEPS, chain, gated, gated_in_a_thread

LEASE, GRACE = 6.0, 30.0


def start_worker(
    here: Scenario, *, lease: float = LEASE, grace: float = GRACE, concurrency: int = 100
) -> subprocess.Popen[bytes]:
    """A worker that has joined."""
    worker = here.start("worker", lease, grace, concurrency)
    here.until(lambda: joined(here, worker), "the worker joins")
    return worker


def joined(here: Scenario, worker: subprocess.Popen[bytes]) -> bool:
    assert worker.poll() is None, here.explanation()
    return any(row.pid == worker.pid and not row.fenced for row in here.book.workers())


def worker_id(here: Scenario, worker: subprocess.Popen[bytes]) -> str:
    [found] = [row.id for row in here.book.workers() if row.pid == worker.pid]
    return found


def at_gate(here: Scenario) -> list[Effect]:
    """The steps that have begun to wait for the gate."""
    return [line for line in here.effects("begun") if line.location == "until_open"]


def start_runs(here: Scenario, workflow: Any, *args: Any, ids: list[str]) -> None:
    async def main() -> None:
        async with Client(here.url) as client:
            for run_id in ids:
                await client.start(workflow, *args, id=run_id)

    asyncio.run(main())


def pause(here: Scenario, worker: subprocess.Popen[bytes]) -> None:
    """Pause a worker between two transactions: inside a transaction it would keep the lock of SQLite."""

    def stopped_without_lock() -> bool:
        worker.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        if here.book.can_write():
            return True
        worker.send_signal(signal.SIGCONT)
        return False

    here.until(stopped_without_lock, "the worker can be paused")


@pytest.mark.parametrize("kind", STORES)
def test_runs_of_a_killed_worker_continue_on_the_other_and_execute_once(kind: str, tmp_path: Path) -> None:
    ids, gate = [f"run-{number}" for number in range(30)], tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        first, second = (start_worker(here, concurrency=10) for _ in range(2))
        start_runs(here, chain, str(here.log), 0.05, str(gate), ids=ids)
        pids = {first.pid, second.pid}
        here.until(lambda: {line.pid for line in at_gate(here)} == pids, "both work")
        here.until(lambda: len(here.effects("done")) >= 40, "they get on")
        here.kill(first)
        recorded = here.recorded()  # before counting: the other worker continues meanwhile
        killed_at = len(here.effects())
        gate.touch()
        here.until(lambda: len(here.results()) == len(ids), "the other one does the rest")
        here.kill(second)

        by_run = defaultdict(list)
        for number, line in enumerate(here.effects()):
            by_run[line.run].append(line.pid)
            assert number < killed_at or line.step not in recorded, f"{line.step} was recorded, and was executed again"
        taken_over = 0
        for run, executed_by in by_run.items():
            changes = sum(1 for a, b in pairwise(executed_by) if a != b)
            assert changes == 0 or (changes == 1 and executed_by[0] == first.pid), f"{run} went back and forth"
            taken_over += changes
        assert taken_over >= 1
        _check_repetitions(here, first.pid, second.pid, recorded)


def _check_repetitions(here: Scenario, killed: int, survivor: int, recorded: frozenset[tuple[str, str]]) -> None:
    """Only steps that the killed worker had started, but not recorded, were started again, once."""
    begun = defaultdict(list)
    for line in here.effects("begun"):
        assert line.attempt == 1
        begun[line.step].append(line.pid)
    for step, pids in begun.items():
        if len(pids) > 1:
            assert pids == [killed, survivor]
            assert step not in recorded
    assert len(begun) == 30 * STEPS


@pytest.mark.parametrize("kind", STORES)
def test_sigterm_finishes_steps_within_the_grace_and_releases_runs(kind: str, tmp_path: Path) -> None:
    ids, gate = [f"run-{number}" for number in range(20)], tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        worker = start_worker(here)
        start_runs(here, chain, str(here.log), 0.1, str(gate), ids=ids)
        here.until(lambda: len(at_gate(here)) == len(ids), "all runs are in the middle of a step")
        worker.send_signal(signal.SIGTERM)
        gate.touch()
        here.until_ended(worker)

        assert not here.all_succeeded(), "the signal came in the middle"
        assert {line.step for line in here.effects("begun")} == here.recorded()
        for run in here.book.runs():
            assert run.owner is None
            assert run.ended_at is not None or run.wake_at is not None
            assert run.recoveries == 0, "no worker died"
        assert here.book.workers() == []

        other = start_worker(here)
        here.until(here.all_succeeded, "another worker does the rest")
        here.kill(other)
        assert Counter(line.step for line in here.effects("done")).most_common(1)[0][1] == 1
        assert len(here.effects("begun")) == len(ids) * STEPS


@pytest.mark.parametrize("kind", STORES)
def test_sigterm_does_not_wait_longer_than_the_grace(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        worker = start_worker(here, grace=0.2)
        start_runs(here, gated, str(here.log), str(gate), ids=["run"])
        here.until(lambda: here.effects("begun"), "the step begins")
        worker.send_signal(signal.SIGTERM)
        here.until_ended(worker)
        assert here.effects("done") == []
        assert here.recorded() == frozenset()
        assert [(run.owner, run.recoveries) for run in here.book.runs()] == [(None, 0)]

        gate.touch()
        other = start_worker(here)
        here.until(here.all_succeeded, "another worker runs the step again")
        assert [(line.attempt, line.pid) for line in here.effects("done")] == [(1, other.pid)]


@pytest.mark.parametrize("kind", STORES)
def test_a_paused_worker_that_was_taken_over_changes_nothing_and_joins_again(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        paused = start_worker(here, lease=1.5)
        start_runs(here, gated_in_a_thread, str(here.log), str(gate), ids=["run"])
        here.until(lambda: here.effects("begun"), "the step begins")
        before_the_pause = worker_id(here, paused)
        pause(here, paused)
        other = start_worker(here, lease=1.5)
        here.until(lambda: len(here.effects("begun")) == 2, "the other takes over when the lease has run out")
        gate.touch()
        here.until(here.all_succeeded, "the other finishes the run")
        assert here.results() == {"run": str(other.pid)}
        before = here.book.everything_about("run")
        assert not joined(here, paused)

        paused.send_signal(signal.SIGCONT)
        here.until(lambda: len(here.effects("done")) == 2, "the late step ends in the worker that was paused")
        here.until(lambda: joined(here, paused), "it joins again")
        assert worker_id(here, paused) != before_the_pause, "the id of a fenced worker is never used again"
        assert here.book.everything_about("run") == before

        here.kill(other)
        start_runs(here, gated_in_a_thread, str(here.log), str(gate), ids=["next"])
        here.until(here.all_succeeded, "it works again")
        assert here.results() == {"run": str(other.pid), "next": str(paused.pid)}
        assert here.book.everything_about("run") == before
