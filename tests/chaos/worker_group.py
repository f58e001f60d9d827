"""Worker processes, a client that starts runs, and the effect log that all processes write to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure import Client, RunConflict, RunStatus
from perdure.admin.health_check import check_health
from perdure.model.records import WorkerRecord
from perdure.testing import replay
from tests.chaos.store_servers import Place
from tests.chaos.workflows import Item, Planned, chaos_listener, leaves
from tests.crash.effect_log import Effect, effects

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds until a test fails; a passing test never waits that long
POLL = 0.02

Process = subprocess.Popen[bytes]


class WorkerGroup:
    """`client` connects the test to the store past the proxy."""

    def __init__(self, folder: Path, place: Place, client: Client, program: str, *args: object) -> None:
        self.log = folder / "effects.log"
        self.report = folder / "report.jsonl"
        self.client = client
        self.workers: list[Process] = []
        self._errors = folder / "stderr.log"
        self._place = place
        self._program = program
        self._args = args

    # --- processes

    async def start(self, *more: object) -> Process:
        """A worker that has joined."""
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        args = [self._place.worker_url, *self._args, self.report, *more]
        with self._errors.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tests.chaos.programs.{self._program}", *map(str, args)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stderr=errors,
            )
        self.workers.append(process)
        await self.until(lambda: self.row_of(process), "the worker joins")
        return process

    async def kill(self, process: Process) -> None:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, PATIENCE)

    async def ends(self, process: Process) -> None:
        """Stop a worker with SIGTERM, and wait until it has exited with code 0."""
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0, self.explanation()

    def living(self) -> list[Process]:
        return [process for process in self.workers if process.poll() is None]

    def close(self) -> None:
        for process in self.living():
            process.send_signal(signal.SIGKILL)  # ends a stopped one too
            process.wait(PATIENCE)

    # --- reading

    async def row_of(self, process: Process) -> WorkerRecord | None:
        """Return the current worker record of a process."""
        assert process.poll() is None, self.explanation()
        rows = await self.client._session.read(self.client._session.store.workers)
        return next((row for row in rows if row.pid == process.pid and not row.fenced), None)

    async def owned_by(self, worker: str) -> list[str]:
        return await self.client._session.read(lambda: self.client._session.store.owned(worker))

    def effects(self) -> list[Effect]:
        return effects(self.log)

    def reported(self) -> dict[int, dict[str, Any]]:
        """Return the counters of workers that exited normally, by process."""
        lines = self.report.read_text().splitlines() if self.report.exists() else []
        return {each["pid"]: each for each in map(json.loads, lines)}

    def explanation(self) -> str:
        return self._errors.read_text()[-8000:] if self._errors.exists() else ""

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain: {what}\n{await self._unfinished()}\n{self.explanation()}")
            await asyncio.sleep(POLL)

    async def _unfinished(self) -> list[str]:
        lines = []
        page = await self.client.runs()
        for run in page.runs:
            if run.ended_at is None:
                description = await self.client.describe(run.id)
                lines.append(
                    f"{run.id} {run.status} owner={run.owner} {[each.text for each in description.waiting_for]}"
                )
        rows = await self.client._session.store.workers()
        return [*lines[:30], *(f"{row.id} pid={row.pid} gone={row.fenced} until={row.lease_until}" for row in rows)]

    # --- runs

    async def begin(self, runs: Iterable[Planned]) -> None:
        """Start runs and send the events that listeners wait for, with ids, so that calls can be repeated."""
        for run in runs:
            await self.client.start(run.workflow, *run.args, id=run.id)
            if run.workflow is chaos_listener:
                for n in range(2):
                    await self.client.send(run.id, Item(n), event_id=f"{run.id}-{n}")

    async def carry(self, runs: list[Planned], trouble: Callable[[], Awaitable[object]]) -> None:
        """Start runs, inject faults meanwhile, and wait until all runs have ended."""
        coming = asyncio.create_task(self.begin(runs))
        await self.until(lambda: len(self.effects()) > len(runs) // 4, "they get on")
        await trouble()
        await coming
        everyone = runs + leaves(runs)
        await self.all_ended(everyone)
        await self.see_off(everyone)

    async def all_ended(self, runs: Iterable[Planned]) -> None:
        for run in runs:
            await self.until(partial(self._has_ended, run.id), f"run {run.id} ends")

    async def _has_ended(self, run_id: str) -> bool:
        status = await self.client.status(run_id)
        return status is not None and status.terminal

    async def see_off(self, runs: list[Planned], *, zombies: Iterable[int] = ()) -> None:
        """Stop the workers after all runs have ended, and check what is stored against the guarantees."""
        await self.until(self._nothing_is_pending, "all ended runs are finalized")
        before = await self._exported(runs)
        for run in runs[:10]:
            with pytest.raises(RunConflict):
                await self.client.start(run.workflow, "another log", *run.args[1:], id=run.id)
        await asyncio.gather(*(self.ends(worker) for worker in self.living()))
        assert await self._exported(runs) == before, "what has ended is final, and a refused call leaves nothing"
        assert not await self.client.dead_letters()
        for run in runs:
            replay(before[run.id], run.workflow)  # the history matches the code
        await self.check(runs, zombies=zombies)

    async def _nothing_is_pending(self) -> bool:
        return not (await check_health(self.client)).findings

    async def _exported(self, runs: Iterable[Planned]) -> dict[str, dict[str, Any]]:
        return {run.id: await self.client.export_history(run.id) for run in runs}

    async def check(self, runs: Iterable[Planned], *, zombies: Iterable[int] = ()) -> None:
        """Check that every run has its expected outcome, and that no recorded step was executed again.

        `zombies` are processes that were paused: a step that one was about to start is started when it continues,
        which no store can prevent.
        """
        paused = frozenset(zombies)
        seen: dict[str, list[Effect]] = {}
        for line in self.effects():
            seen.setdefault(line.run, []).append(line)
        for run in runs:
            described = await self.client.describe(run.id)
            assert (described.status, described.result) == (RunStatus(run.status), run.result), run.id
            latest = -1
            lines = seen.pop(run.id, [])
            assert {line.what for line in lines} == set(run.places), f"{run.id}: {lines}"
            for line in lines:
                place = run.places.index(line.what)
                assert place >= latest or line.pid in paused, f"{line} was recorded, and was done again: {lines}"
                latest = max(latest, place)
        assert not seen, f"unexpected effects: {sorted(seen)}"
