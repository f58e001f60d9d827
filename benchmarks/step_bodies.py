"""What the workflows of the comparison do, the same for every engine. Each adapter puts these into steps of its engine.

Only the standard library: peers import this in environments of their own.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

STEPS = 10
"""Of a run of `ten_steps`, and of `halfway`, which stops at its gate after half of them."""
WORKFLOWS = {
    "one_step": "one step",
    "ten_steps": "ten steps, one after the other",
    "halfway": "five steps, the gate, five steps",
    "children": "as many children as its number says, all at once, each of one step",
    "parallel": "as many steps as its number says, all at once",
}
"""What an adapter has to offer. Each takes a number; all return it."""


async def noop(number: int) -> int:
    return number


class Gate:
    """Its step lets nobody pass until a file says so: how a run is stopped in the middle, in whichever process.

    Arrivals are bytes in a file, so that they can be counted from outside.
    """

    def __init__(self, folder: Path) -> None:
        self._opened = folder / "gate-open"
        self._arrived = folder / "gate-arrivals"

    async def stop(self, number: int) -> int:
        if not self._opened.exists():
            line = os.open(self._arrived, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(line, b".")
            os.close(line)
            await asyncio.Event().wait()
        return number

    def open(self) -> None:
        self._opened.touch()

    @property
    def arrivals(self) -> int:
        return self._arrived.stat().st_size if self._arrived.exists() else 0
