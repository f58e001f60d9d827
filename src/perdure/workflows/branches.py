"""join, race and map: concurrent branches, each a task in its own scope.

They use asyncio tasks and compose with other asyncio code. They add names for branches, and define what happens to the
other branches when one fails, wins or is cancelled. This module knows the run only as a `BranchHost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
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
    waiting, ended = dict(tasks), EndedBranches()
    for branch, task in tasks.items():
        ended.add(branch, task)
    try:
        while waiting:
            branches = await ended.wait()
            if any(_task_error(tasks[branch]) is None for branch in branches):
                # Of several branches that have succeeded by now, the first by position wins.
                branch = next(each for each, task in waiting.items() if task.done() and _task_error(task) is None)
                run.record_note("race", path, branch)
                return branch, waiting.pop(branch).result()
            for branch in branches:
                del waiting[branch]
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
    waiting = iter(enumerate(list(items)))
    results: dict[Branch, Any] = {}
    running: Tasks = {}
    ended = EndedBranches()
    try:
        while True:
            for index, item in islice(waiting, concurrency - len(running)):
                running[index] = run.start_branch(path, index, fn(item))
                ended.add(index, running[index])
            if not running:
                return [results[index] for index in range(len(results))]
            for branch in await ended.wait():
                results[branch] = running.pop(branch).result()
    except BaseException:
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.wait(running.values())
        raise


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


class EndedBranches:
    """Collects branches as they end. The end of a branch costs the same with one branch or a thousand.

    `asyncio.wait` with FIRST_COMPLETED adds and removes a callback per running task each time it is called.
    """

    __slots__ = ("_branches", "_count", "_ended", "_waiter")

    def __init__(self) -> None:
        self._branches: dict[asyncio.Task[Any], tuple[int, Branch]] = {}  # with their positions in order of start
        self._count = 0
        self._ended: list[tuple[int, Branch]] = []
        self._waiter: asyncio.Future[None] | None = None

    def add(self, branch: Branch, task: asyncio.Task[Any]) -> None:
        """Collect the branch that this task runs when it ends."""
        self._branches[task] = (self._count, branch)
        self._count += 1
        task.add_done_callback(self._on_end)

    async def wait(self) -> list[Branch]:
        """Wait until a branch has ended. Return all that have ended since the last call, in order of start."""
        if not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ended, self._ended = sorted(self._ended), []
        return [branch for _, branch in ended]

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._ended.append(self._branches.pop(task))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
