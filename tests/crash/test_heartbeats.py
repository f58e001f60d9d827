"""Heartbeats of a step whose worker is killed, or paused and fenced: the next worker's attempt gets the last one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from perdure import Client
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.beating_worker import copying
from tests.crash.test_multiple_workers import joined, pause


def heartbeat(here: Scenario) -> dict[str, Any]:
    """Return the stored heartbeat of the running step, as the store has it; empty without one."""
    row = here.history().get(("r", "copy"))
    return json.loads(row.value)["heartbeat"] if row is not None and row.status == "pending" and row.value else {}


def start_worker(here: Scenario, lease: float) -> Any:
    worker = here.start("beating_worker", lease)
    here.until(lambda: joined(here, worker), "the worker joins")
    return worker


def start_run(here: Scenario, gate: Path) -> None:
    async def main() -> None:
        async with Client(here.url) as client:
            await client.start(copying, str(here.log), str(gate), id="r")

    asyncio.run(main())


def beats_of(here: Scenario, pid: int, after: int = 0) -> dict[str, Any]:
    """Wait for a heartbeat of this process with a later page, and return it."""

    def found() -> dict[str, Any]:
        last = heartbeat(here)
        return last if last.get("pid") == pid and last["page"] > after else {}

    return dict(here.until(found, "the heartbeat is stored"))


@pytest.mark.parametrize("kind", STORES)
def test_the_next_worker_gets_the_heartbeat_of_a_killed_one(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        first = start_worker(here, lease=30.0)
        start_run(here, gate)
        page = beats_of(here, first.pid)["page"]
        beats_of(here, first.pid, after=page)
        here.kill(first)
        last = heartbeat(here)
        second = start_worker(here, lease=30.0)
        beats_of(here, second.pid, after=last["page"])
        gate.touch()
        here.until(here.all_succeeded, "the run ends")
        assert json.loads(here.results()["r"]) == last
        assert [line.attempt for line in here.effects("begun")] == [1, 1]
        rows = [row for row in here.book.history() if row.location == "copy"]
        assert len(rows) <= 2, "each worker keeps one row, whatever the number of heartbeats"


@pytest.mark.parametrize("kind", STORES)
def test_a_paused_worker_that_returns_changes_no_heartbeat(kind: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with scenario(tmp_path, kind) as here:
        first = start_worker(here, lease=2.0)
        start_run(here, gate)
        beats_of(here, first.pid)
        pause(here, first)
        last = heartbeat(here)
        second = start_worker(here, lease=2.0)
        page = beats_of(here, second.pid)["page"]
        os.kill(first.pid, signal.SIGCONT)
        here.until(lambda: [line for line in here.effects("stopped") if line.pid == first.pid], "the old body stops")
        assert heartbeat(here)["pid"] == second.pid
        assert beats_of(here, second.pid, after=page)["pid"] == second.pid
        gate.touch()
        here.until(here.all_succeeded, "the run ends")
        assert json.loads(here.results()["r"]) == last
