"""Internals of asyncio that the workflow loop depends on, per Python version.

`as_completed` creates its tasks in set order, `wait_for` creates a task on Python 3.11 only, `wait` keeps what it gets
in a set. For the same order on every replay and every version, the loop must know which of them calls it.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import futures, tasks
from collections.abc import Sequence
from typing import Any

from perdure.errors import WorkflowMisuse
from perdure.runner.tasks import WorkflowFuture, WorkflowTask

TASKS_FILE = tasks.create_task.__code__.co_filename
WAIT_FOR = tasks.wait_for.__code__
WAIT = tasks._wait.__code__  # type: ignore[attr-defined]
WRAP_FUTURE = futures.wrap_future.__code__
WORKER_THREAD = "run_sync_in_worker_thread"  # the function of anyio that creates a future and starts a thread
RELEASE = tasks._release_waiter if sys.version_info < (3, 12) else None  # type: ignore[attr-defined]  # resumes `wait_for`
AS_COMPLETED = {tasks.as_completed.__code__: "fs"}
if hasattr(tasks, "_AsCompletedIterator"):  # 3.13 and later
    AS_COMPLETED[tasks._AsCompletedIterator.__init__.__code__] = "aws"


class AsCompletedBatch:
    """The tasks of one `as_completed` call while it creates them."""

    __slots__ = ("expected", "first", "index_by_id", "of", "started")

    def __init__(self, of: Sequence[Any], first: int) -> None:
        self.of = of
        self.first = first
        self.index_by_id: dict[int, int] = {}  # a coroutine that is given twice has its first index
        for index, item in enumerate(of):
            if not asyncio.isfuture(item):
                self.index_by_id.setdefault(id(item), index)
        self.expected = len(self.index_by_id)
        self.started: dict[int, Any] = {}


def check_waited_for(awaited: set[Any]) -> None:
    """Raise `WorkflowMisuse` if `asyncio.wait` gets futures whose order in a set is not the same on every replay."""
    if len(awaited) > 1 and not all(isinstance(each, (WorkflowFuture, WorkflowTask)) for each in awaited):
        raise WorkflowMisuse(
            "asyncio.wait in a workflow takes tasks; the future that gather() returns has no stable order in a set: "
            "await it in a task"
        )


def asyncio_caller(frame: Any) -> tuple[Any, Any]:
    """Return the function of `asyncio.tasks` that creates a task, seen through its helpers, and its frame."""
    while frame is not None and frame.f_code.co_filename == TASKS_FILE:
        if frame.f_code is WAIT_FOR or frame.f_code in AS_COMPLETED:
            return frame.f_code, frame
        frame = frame.f_back
    return None, None
