"""RunningIterations: the loop iterations that a run is in, and the tasks that were started in each.

What belongs to an iteration is found by its path, without a look at the other tasks and iterations of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.runner.tasks import WorkflowTask


class RunningIterations:
    """See the module's docstring. Tasks are kept in order of creation."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: dict[str, dict[WorkflowTask, None]] = {}

    def enter(self, path: str) -> None:
        """Start an iteration."""
        self._tasks[path] = {}

    def leave(self, path: str) -> None:
        """End an iteration."""
        self._tasks.pop(path, None)

    def contain(self, scope: str) -> bool:
        """Return whether a scope is a running iteration, or inside one."""
        return bool(self._tasks) and any(path in self._tasks for path in _iteration_paths(scope))

    def around(self, scope: str) -> list[str]:
        """Return the paths of the running iterations that contain a scope, the outermost first."""
        return [path for path in _iteration_paths(scope) if path in self._tasks] if self._tasks else []

    def add_task(self, task: WorkflowTask) -> None:
        """Note a task as the last one that was started in the iterations around it."""
        if self._tasks:
            for tasks in self._around(task):
                tasks.pop(task, None)
                tasks[task] = None

    def remove_task(self, task: WorkflowTask) -> None:
        """Remove a task that has ended."""
        if self._tasks:
            for tasks in self._around(task):
                tasks.pop(task, None)

    def running_tasks(self, path: str) -> list[WorkflowTask]:
        """Return the tasks started in an iteration, or in a scope inside it, that have not ended."""
        return [task for task in self._tasks.get(path, ()) if not task.done()]

    def _around(self, task: WorkflowTask) -> Iterator[dict[WorkflowTask, None]]:
        for path in _iteration_paths(task.parent.path):
            tasks = self._tasks.get(path)
            if tasks is not None:
                yield tasks


def _iteration_paths(scope: str) -> Iterator[str]:
    """Yield the paths around a scope, itself included, that may be those of iterations: `pages/~3`."""
    at = scope.find("/~")
    while at >= 0:
        end = scope.find("/", at + 1)
        yield scope if end < 0 else scope[:end]
        at = scope.find("/~", at + 1)
