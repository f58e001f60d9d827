"""The end of a run that is not over when its function is: children, compensations and exits, in this order.

Plain asynchronous code over durable calls, replayed like the workflow itself: a crash in the middle repeats nothing
that was recorded. Nobody can cancel it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from perdure.runner.compensations import Compensations, Undo

LOGGER = logging.getLogger("perdure.workflow")


class Closes(Protocol):
    """What of the run is needed here."""

    @property
    def compensations(self) -> Compensations: ...

    def ask_undo(self, undo: Undo) -> Any: ...

    def ask_stop_children(self) -> Any: ...

    def bury(self, undo: Undo, error: BaseException) -> None: ...

    def place(self, segment: str) -> str: ...

    def inside(self, path: str) -> AbstractContextManager[None]: ...


async def finale(run: Closes, rolling: Sequence[asyncio.Task[Any]], *, unhappy: bool, last: bool) -> None:
    """`rolling` are rollbacks under way; `unhappy`: it failed or was cancelled; `last`: it is not to be tried again."""
    if rolling:
        await asyncio.wait(rolling)
    if unhappy:
        stopping = run.ask_stop_children()
        if stopping is not None:
            await stopping
        with run.inside(run.place("~rollback")):
            await roll_back(run, run.compensations.take("rollback"))
    if last:
        with run.inside(run.place("~exit")):
            await roll_back(run, run.compensations.take("exit"))


async def roll_back(run: Closes, undos: Sequence[Undo]) -> None:
    """Carry them out one after the other. One that is exhausted becomes a dead letter, and the rest still run."""
    for undo in undos:
        try:
            await run.ask_undo(undo)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            run.bury(undo, error)


async def uncancelled(task: asyncio.Task[Any]) -> None:
    """Wait for a task to its end, also if we are cancelled meanwhile: who cancels us is heard afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
