"""Followers of streams: a client reads a stream while its run writes, from an offset to the end of the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from perdure import Client, RunNotFound, StoreError
from perdure.client.views import stream_item_view
from perdure.codec import JSON
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation

RESUME_SECONDS = 0.5
STREAMS = ("log", "steps")  # written by workflows and by steps


@dataclass
class Follower:
    """One reader of a stream, and what it has read."""

    run_id: str
    stream: str
    start: int
    items: list[tuple[int, Any]] = field(default_factory=list)  # offset and value
    outcome: str = "reads"  # then "ended" or "run not found"
    task: asyncio.Task[None] | None = None

    def begin(self, client: Client) -> None:
        """Read the stream in the background until the run has ended."""
        self.task = asyncio.get_running_loop().create_task(self._read(client))

    async def _read(self, client: Client) -> None:
        while self.outcome == "reads":
            start = self.items[-1][0] + 1 if self.items else self.start
            try:
                async for item in client.read_stream(self.run_id, self.stream, start, details=True):
                    self.items.append((item.offset, item.value))
                self.outcome = "ended"
            except RunNotFound:
                self.outcome = "run not found"
            except StoreError:  # after the attempts of the client: a reader resumes where it was
                await asyncio.sleep(RESUME_SECONDS)

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


async def check_follower(simulation: Simulation, follower: Follower, run: RunModel) -> None:
    """After the end of the run, its follower has read every item from its offset on, once and in order."""
    report, where = simulation.checker.report, f"stream {follower.stream} of run {run.id} from {follower.start} on"
    if follower.outcome != "ended":
        error = None if follower.task is None or not follower.task.done() else follower.task.exception()
        report(f"a follower of {where} has not ended: {follower.outcome}, {error!r}")
        return
    stored = await simulation.store.stream(run.id, follower.stream, follower.start, 1_000)
    expected = [(item.offset, stream_item_view(item, JSON).value) for item in stored]
    if follower.items != expected:
        report(f"a follower of {where} has read {follower.items}, stored are {expected}")
