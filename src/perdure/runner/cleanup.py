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

from perdure.runner.compensations import Compensation, Compensations

LOGGER = logging.getLogger("perdure.workflow")


class CleanupHost(Protocol):
    """What of the run is needed here."""

    @property
    def compensations(self) -> Compensations: ...

    def request_compensation(self, undo: Compensation) -> Any: ...

    def ask_stop_children(self) -> Any: ...

    def dead_letter_compensation(self, undo: Compensation, error: BaseException) -> None: ...

    def locate(self, segment: str) -> str: ...

    def inside(self, path: str) -> AbstractContextManager[None]: ...


async def run_cleanup(
    run: CleanupHost, rolling: Sequence[asyncio.Task[Any]], *, compensate: bool, run_exit_hooks: bool
) -> None:
    """`rolling` are rollbacks under way; `unhappy`: it failed or was cancelled; `last`: it is not to be tried again."""
    if rolling:
        await asyncio.wait(rolling)
    if compensate:
        stopping = run.ask_stop_children()
        if stopping is not None:
            await stopping
        with run.inside(run.locate("~rollback")):
            await roll_back(run, run.compensations.take("rollback"))
    if run_exit_hooks:
        with run.inside(run.locate("~exit")):
            await roll_back(run, run.compensations.take("exit"))


async def roll_back(run: CleanupHost, undos: Sequence[Compensation]) -> None:
    """Carry them out one after the other. One that is exhausted becomes a dead letter, and the rest still run."""
    for undo in undos:
        try:
            await run.request_compensation(undo)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            run.dead_letter_compensation(undo, error)


async def wait_shielded(task: asyncio.Task[Any]) -> None:
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
