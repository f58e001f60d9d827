"""Eviction: close the coroutines of a run so that none of them runs later, under the wrong loop.

A coroutine left to the garbage collector would run its `finally` under the real loop, where a step is the plain
function, and would really execute it. So a registry keeps every live run until it is closed. Closing runs its own loop
in a mode where creating futures, tasks, timers and durable calls raises.
"""

from __future__ import annotations

import logging
import sys
from asyncio import events
from typing import Any

from perdure.runner.closing import close_suspended
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.pending import NeverCompletes
from perdure.runner.tasks import Closed
from perdure.workflows.context import RunInfo

LOGGER = logging.getLogger("perdure.workflow")

LIVE: set[WorkflowLoop] = set()
"""The loops of all runs in memory, kept until they are closed."""

UNCLOSABLE: list[Any] = []
"""Coroutines that cannot be closed. Kept, because the garbage collector would run them again, perhaps forever."""


def close(loop: WorkflowLoop, run: RunInfo) -> None:
    """Close all tasks of a run, newest first. What their handlers raise is logged and ignored."""
    loop.closing = True
    if loop.live:
        _close_tasks(loop, run)
    loop.ready.clear()
    loop.timers.clear()
    LIVE.discard(loop)
    # A run and its loop refer to each other. Separated, both are freed by reference counting; with the cycle, the
    # garbage collector took a fifth of the time of a busy engine.
    loop.perdure_run = EvictedRun(run)
    loop.main = None


def _close_tasks(loop: WorkflowLoop, run: RunInfo) -> None:
    outer, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
    events._set_running_loop(loop)
    sys.set_asyncgen_hooks(firstiter=None, finalizer=loop.finalize)
    try:
        for task in reversed(list(loop.live)):
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                # In the task's own context: a handler may reset a context variable that the task has set.
                task.variables.run(_close_coroutine, task.get_coro(), task.get_name(), run)
            elif not task.cancelled():
                task.exception()  # marks it as retrieved: the run was halted before its code could do so
    finally:
        events._set_running_loop(outer)
        sys.set_asyncgen_hooks(*hooks)
        loop.live.clear()


class EvictedRun:
    """Stands for a run that is no longer in memory: durable calls of its remaining coroutines are refused."""

    replaying = False

    def __init__(self, run: RunInfo) -> None:
        self._run = run

    @property
    def context(self) -> Any:
        raise Closed

    def next_number(self) -> int:
        return 0

    def request_step(self, call: Any) -> Any:
        events._get_running_loop().refuse()  # type: ignore[union-attr]
        return NeverCompletes()

    def has_recorded_step(self, name: str, args: Any, kwargs: Any) -> bool:
        return True  # The call is refused anyway.

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None:
        log_unhandled(self._run, scope, message, error)


def log_unhandled(run: RunInfo, scope: str, message: str, error: BaseException | None) -> None:
    """Log an error of a task or callback that no code handles."""
    LOGGER.error(
        "Unhandled error in run %s, scope %s: %s",
        run.id,
        scope or "(root)",
        message,
        exc_info=error,
        extra={"run_id": run.id, "workflow": run.workflow, "location": scope},
    )


def _close_coroutine(coro: Any, task: str, run: RunInfo) -> None:
    ids = {"run_id": run.id, "workflow": run.workflow}

    def on_error(error: BaseException) -> None:
        LOGGER.warning(
            "Run %s, task %s: exception handler raised %r during eviction; ignored", run.id, task, error, extra=ids
        )

    if not close_suspended(coro, on_error):
        UNCLOSABLE.append(coro)
        LOGGER.error(
            "Run %s, task %s keeps ignoring GeneratorExit and cannot be evicted; "
            "it stays in memory until the process exits",
            run.id,
            task,
            extra=ids,
        )
