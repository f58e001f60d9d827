"""join, race and map: concurrent branches, each a task in its own scope.

They use asyncio tasks and compose with other asyncio code. They add names for branches, and define what happens to the
other branches when one fails, wins or is cancelled. This module knows the run only as a `BranchHost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from perdure.errors import InvalidArgument, JoinError, RaceError
from perdure.model.validation import check_count, check_name

Branch = str | int
Tasks = dict[Branch, asyncio.Task[Any]]


class BranchHost(Protocol):
    """The run, as branches use it."""

    def open_scope_for_branches(self, name: str) -> str:
        """Return the path of a new scope with this name in the current scope, for a group of branches."""

    def start_branch(self, path: str, branch: Branch, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Start an awaitable as a task in the scope of this branch. Return the task."""

    def record_note(self, kind: str, location: str, value: Any) -> None:
        """Record an informational entry about a group of branches. Replays do not read it."""


async def join(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> dict[Branch, Any]:
    """Wait for all branches and return their results. Raises `JoinError` if any branch failed."""
    tasks = _start(run, work, name)[1]
    if tasks:
        await _wait_all(tasks)
    errors = {branch: error for branch, task in tasks.items() if (error := _task_error(task)) is not None}
    if errors:
        raise JoinError(errors)
    return {branch: task.result() for branch, task in tasks.items()}


async def race(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> tuple[Branch, Any]:
    """Return the first branch that succeeds and its result.

    The other branches are cancelled at once and not awaited. Raises `RaceError` if all branches fail.
    """
    if not work:
        raise InvalidArgument("a race must have at least one branch")
    path, tasks = _start(run, work, name)
    waiting = dict(tasks)
    try:
        while waiting:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for branch, task in list(waiting.items()):
                if task.done():
                    del waiting[branch]
                    if _task_error(task) is None:
                        run.record_note("race", path, branch)
                        return branch, task.result()
    finally:
        for task in waiting.values():
            task.cancel()
    raise RaceError({branch: _task_error(task) for branch, task in tasks.items()})  # type: ignore[misc]


async def map_items(
    run: BranchHost, fn: Callable[[Any], Awaitable[Any]], items: Iterable[Any], concurrency: int, name: str
) -> list[Any]:
    """Return the results of a function over items, in order, with at most `concurrency` calls at a time.

    The first failure cancels the other calls and is raised.
    """
    check_count("concurrency", concurrency)
    path = run.open_scope_for_branches(check_name("the name of a map", name))
    waiting = list(enumerate(items))
    results: dict[int, Any] = {}
    running: dict[int, asyncio.Task[Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                index, item = waiting.pop(0)
                running[index] = run.start_branch(path, index, fn(item))
            await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
            for index, task in list(running.items()):
                if task.done():
                    del running[index]
                    results[index] = task.result()
    except BaseException:
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        raise
    return [results[index] for index in sorted(results)]


def collect_branches(args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[Branch, Awaitable[Any]]:
    """Return the branches of a call by index or name: given by position, by keyword, or as one dict."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not named:
        named, args = args[0], ()
    if args and named:
        raise InvalidArgument("branches must be given either by position or by name, not both")
    if args:
        return dict(enumerate(args))
    return {check_name("a branch's name", branch): work for branch, work in named.items()}


def _start(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> tuple[str, Tasks]:
    path = run.open_scope_for_branches(check_name("the name of a join or race", name))
    return path, {branch: run.start_branch(path, branch, awaitable) for branch, awaitable in work.items()}


async def _wait_all(tasks: Tasks) -> None:
    """Wait for all tasks. If the caller is cancelled, cancel the tasks and wait for their end."""
    try:
        await asyncio.wait(tasks.values())
    except asyncio.CancelledError:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())
        raise


def _task_error(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
