"""The cleanup of a run whose function has ended: stop children, run compensations, run exit hooks, in this order.

It is ordinary asynchronous code over durable calls and is replayed like the workflow itself: after a crash, what is
recorded is not executed again. It cannot be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from perdure.runner.compensations import Compensation, Compensations


class CleanupHost(Protocol):
    """The part of `ContextApi` that the cleanup uses."""

    @property
    def compensations(self) -> Compensations: ...

    def request_compensation(self, compensation: Compensation) -> Any: ...

    def request_stop_children(self) -> Any: ...

    def dead_letter_compensation(self, compensation: Compensation, error: BaseException) -> None: ...

    def locate(self, segment: str) -> str: ...

    def inside(self, path: str) -> AbstractContextManager[None]: ...


async def run_cleanup(
    run: CleanupHost, rollbacks: Sequence[asyncio.Task[Any]], *, compensate: bool, run_exit_hooks: bool
) -> None:
    """Wait for running rollbacks; then compensate if the run failed or was cancelled; then run exit hooks.

    Exit hooks run at the very end only, not before another attempt of the run.
    """
    if rollbacks:
        await asyncio.wait(rollbacks)
    if compensate:
        stopping = run.request_stop_children()
        if stopping is not None:
            await stopping
        with run.inside(run.locate("~rollback")):
            await roll_back(run, run.compensations.take("rollback"))
    if run_exit_hooks:
        with run.inside(run.locate("~exit")):
            await roll_back(run, run.compensations.take("exit"))


async def roll_back(run: CleanupHost, compensations: Sequence[Compensation]) -> None:
    """Execute compensations one after the other. One without attempts left becomes a dead letter; the others run."""
    for compensation in compensations:
        try:
            await run.request_compensation(compensation)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            run.dead_letter_compensation(compensation, error)


async def wait_shielded(task: asyncio.Task[Any]) -> None:
    """Wait for a task to its end. A cancellation of the caller meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
