"""What the bodies of simulated steps do to the world outside: kept where the checks can see it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from perdure import current_step
from perdure.testing.simulation.process import Process
from perdure.testing.simulation.simulation import Simulation


class Stage:
    """One for each simulation; the bodies find the present one."""

    _present: Stage | None = None

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.undos: Counter[tuple[str, str]] = Counter()
        self.exits: Counter[str] = Counter()
        self.received: set[tuple[str, str]] = set()
        self.mended: set[str] = set()  # runs whose steps do not fail any more
        Stage._present = self

    @classmethod
    def current(cls) -> Stage:
        assert cls._present is not None
        if cls._present.process.dead.is_set():  # a body that goes on after its process has died does nothing
            raise asyncio.CancelledError
        return cls._present

    @classmethod
    def saw(cls, run_id: str, number: str) -> str:
        """A workflow has been given this event; it is told so again on every replay."""
        assert cls._present is not None
        cls._present.received.add((run_id, number))
        return number

    @property
    def process(self) -> Process:
        """The one whose body asks."""
        me: Any = current_step()
        return self.world.writings[id(me._stream_writer)]

    def begins(self, me: Any, after: str | None) -> None:
        """A body begins: the result that it was called with must be on record."""
        run = self.world.witness.models[me.run_id]
        if after is None or run.touched or run.owner != me._stream_writer._worker():
            return
        if after not in run.pruned and run.settled_at(after) is None:
            self.world.witness.breaks(f"{me.location} of run {me.run_id} began before {after} was on record")

    def undone(self, done: list[Any]) -> None:
        self.undos[current_step().run_id, str(done[1])] += 1

    def left(self, run_id: str) -> None:
        self.exits[run_id] += 1
