"""ExternalState: the external effects of simulated step bodies, which the final checks read."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from perdure import current_step
from perdure.testing.simulation.process import Process
from perdure.testing.simulation.simulation import Simulation


class ExternalState:
    """The external effects of one simulation. Step bodies use the current instance."""

    _current: ExternalState | None = None

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.compensations: Counter[tuple[str, str]] = Counter()
        self.exits: Counter[str] = Counter()
        self.received: set[tuple[str, str]] = set()
        self.repaired: set[str] = set()  # runs whose steps no longer fail
        ExternalState._current = self

    @classmethod
    def current(cls) -> ExternalState:
        assert cls._current is not None
        if cls._current.process.dead.is_set():  # a body that still runs after the death of its process has no effect
            raise asyncio.CancelledError
        return cls._current

    @classmethod
    def record_received(cls, run_id: str, number: str) -> str:
        """Record that a workflow received this event. Every replay calls it again."""
        assert cls._current is not None
        cls._current.received.add((run_id, number))
        return number

    @property
    def process(self) -> Process:
        """The process that executes the calling step body."""
        attempt: Any = current_step()
        return self.simulation.writings[id(attempt._stream_writer)]

    def on_start(self, attempt: Any, after: str | None) -> None:
        """Check that the result that a step body was called with is recorded."""
        run = self.simulation.checker.models[attempt.run_id]
        if after is None or run.touched or run.owner != attempt._stream_writer._worker():
            return
        if after not in run.pruned and run.completed_entry(after) is None:
            self.simulation.checker.report(
                f"{attempt.location} of run {attempt.run_id} started before {after} was recorded"
            )

    def undone(self, done: list[Any]) -> None:
        self.compensations[current_step().run_id, str(done[1])] += 1

    def left(self, run_id: str) -> None:
        self.exits[run_id] += 1
