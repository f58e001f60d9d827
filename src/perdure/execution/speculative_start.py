"""Newborns: runs that are being created here, whose first turns are worked out while the store is at work.

That needs no more than memory, and nothing of it is acted upon before the run is stored. It gains a twentieth of a run
of one step (docs/adr/0012).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from perdure.clock import Clock
from perdure.execution.run_cache import Resident
from perdure.model.records import Input, RunRecord, Turn
from perdure.workflows.definition import Workflow

Ahead = tuple[Resident, Turn, float]
"""The run as it will be, its first turn, and when that was worked out."""


class Newborns:
    """`begin` makes a run in memory, `advance` gives its next turn."""

    def __init__(
        self,
        clock: Clock,
        begin: Callable[[RunRecord, Workflow[Any, Any]], Resident],
        advance: Callable[[Resident, float, Sequence[Input]], Turn],
    ) -> None:
        self._clock = clock
        self._begin = begin
        self._advance = advance
        self._expected: dict[str, Ahead | None] = {}

    def expect(self, record: RunRecord, definition: Workflow[Any, Any]) -> None:
        """A new run was submitted, ours unless the store cannot take it: `take` or `forget` it once that is known."""
        self._expected[record.id] = None
        asyncio.get_running_loop().call_soon(self._work_out, record, definition)

    def _work_out(self, record: RunRecord, definition: Workflow[Any, Any]) -> None:
        if record.id in self._expected:
            resident = self._begin(record, definition)
            now = self._clock.now()
            self._expected[record.id] = (resident, self._advance(resident, now, ()), now)

    def take(self, run_id: str) -> Ahead | None:
        """What was worked out of this run, if anything."""
        return self._expected.pop(run_id, None)

    def forget(self, run_id: str) -> None:
        """The run is not ours, or not at all, or here already."""
        ahead = self.take(run_id)
        if ahead is not None:
            ahead[0].runner.close()

    def forget_all(self) -> None:
        for run_id in list(self._expected):
            self.forget(run_id)
