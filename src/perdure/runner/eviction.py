"""Dropping a run from memory: closing its coroutines so that nothing of them runs later, under the wrong loop.

A coroutine left to the garbage collector would run its `finally` under the real loop, where a step is the plain
function, and really execute it. So every live run is held here until it is closed, with its own loop set and in a
closing mode in which creating futures, tasks, timers and durable calls raises.
"""

from __future__ import annotations

import logging
import sys
from asyncio import events
from typing import Any

from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.pending import NeverCompletes
from perdure.runner.tasks import Closed

LOGGER = logging.getLogger("perdure.workflow")
MAX_CLOSE_ATTEMPTS = 20

LIVE: set[WorkflowLoop] = set()
"""Keeps the loops of runs in memory alive until they are closed."""

UNCLOSABLE: list[Any] = []
"""Coroutines that would not end. Kept, because letting them go would run them once more, and perhaps for ever."""


def close(loop: WorkflowLoop, run_id: str) -> None:
    """Close all tasks of a run, newest first. What their handlers raise is logged and ignored."""
    loop.closing = True
    if loop.live:
        _close_tasks(loop, run_id)
    loop.ready.clear()
    loop.timers.clear()
    LIVE.discard(loop)
    # A run and its loop refer to each other; apart, they go when the last one lets go of them, and the garbage
    # collector has nothing to do (it took a fifth of the time of a busy engine).
    loop.perdure_run = EvictedRun(run_id)
    loop.main = None


def _close_tasks(loop: WorkflowLoop, run_id: str) -> None:
    outer, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
    events._set_running_loop(loop)
    sys.set_asyncgen_hooks(firstiter=None, finalizer=loop.finalize)
    try:
        for task in reversed(list(loop.live)):
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                what = f"run {run_id}, task {task.get_name()}"
                task.variables.run(_close_coroutine, task.get_coro(), what)  # a handler may reset what it set there
    finally:
        events._set_running_loop(outer)
        sys.set_asyncgen_hooks(*hooks)
        loop.live.clear()


class EvictedRun:
    """Stands for a run that is no longer in memory: what is left of its coroutines may ask, and is refused."""

    replaying = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def context(self) -> Any:
        raise Closed

    def next_number(self) -> int:
        return 0

    def request_step(self, call: Any) -> Any:
        events._get_running_loop().refuse()  # type: ignore[union-attr]
        return NeverCompletes()

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None:
        LOGGER.error("run %s at %s: %s", self._run_id, scope or "its own scope", message, exc_info=error)


def _close_coroutine(coro: Any, what: str) -> None:
    for _ in range(MAX_CLOSE_ATTEMPTS):
        try:
            coro.close()
        except RuntimeError as error:
            if "ignored GeneratorExit" not in str(error):
                LOGGER.warning("%s: a handler raised %r while the run was dropped from memory", what, error)
                return
        except Closed:
            return
        except BaseException as error:
            LOGGER.warning("%s: a handler raised %r while the run was dropped from memory", what, error)
            return
        else:
            return
    UNCLOSABLE.append(coro)
    LOGGER.error("%s swallows GeneratorExit again and again; it stays in memory until the process ends", what)
