"""The step bodies of the compared workflows, the same for every engine. Each adapter makes them steps of its engine.

Imports only the standard library: peers import this module in their own environments.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import perf_counter

STEPS = 10
"""The number of steps of `ten_steps`, and of `halfway`, which waits at its gate after half of them."""
WORKFLOWS = {
    "one_step": "one step",
    "ten_steps": "ten steps, one after the other",
    "halfway": "five steps, the gate, five steps",
    "children": "as many concurrent children as its number, each of one step",
    "parallel": "as many concurrent steps as its number",
}
"""The workflows that an adapter must provide. Each takes a number and returns it."""


QUEUES = {"wide": 50, "narrow": 1}
"""Queues by name, with their limit of concurrency."""


async def noop(number: int) -> int:
    return number


class QueuedRuns:
    """A step that notes when queued runs execute. The runs execute in the process of their caller."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    async def note(self, number: int) -> int:
        self.began.append(perf_counter())
        await asyncio.sleep(0)
        self.ended.append(perf_counter())
        return number


class Gate:
    """A step that blocks until a file exists. It stops runs in the middle, in any process.

    Arrivals are bytes in a file, so that other processes can count them.
    """

    def __init__(self, folder: Path) -> None:
        self._opened = folder / "gate-open"
        self._arrived = folder / "gate-arrivals"

    async def stop(self, number: int) -> int:
        if not self._opened.exists():
            arrivals = os.open(self._arrived, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(arrivals, b".")
            os.close(arrivals)
            await asyncio.Event().wait()
        return number

    def open(self) -> None:
        self._opened.touch()

    @property
    def arrivals(self) -> int:
        return self._arrived.stat().st_size if self._arrived.exists() else 0
