"""join, race and map: branches that run side by side, each a task in a scope of its own.

Plain asyncio underneath, so that they compose with everything else; what they add is names for the branches, and what
happens to the others when one fails, wins or is cancelled.
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
    """What branches ask of the run."""

    def open_scope_for_branches(self, name: str) -> str:
        """Take the next place of this name in the current scope, for a block of branches; gives its path."""

    def start_branch(self, path: str, branch: Branch, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run something as a task, in the scope of this branch of the block."""

    def record_note(self, kind: str, location: str, value: Any) -> None:
        """Write down what became of a block, for people to read."""


async def join(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> dict[Branch, Any]:
    """Wait for all branches, whatever happens to them; `JoinError` with the errors of those that failed."""
    tasks = _start(run, work, name)[1]
    if tasks:
        await _wait_all(tasks)
    errors = {branch: error for branch, task in tasks.items() if (error := _error_of(task)) is not None}
    if errors:
        raise JoinError(errors)
    return {branch: task.result() for branch, task in tasks.items()}


async def race(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> tuple[Branch, Any]:
    """The first branch that succeeds; the others are cancelled at once, and nobody waits for them."""
    if not work:
        raise InvalidArgument("a race needs at least one branch")
    path, tasks = _start(run, work, name)
    waiting = dict(tasks)
    try:
        while waiting:
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for branch, task in list(waiting.items()):
                if task.done():
                    del waiting[branch]
                    if _error_of(task) is None:
                        run.record_note("race", path, branch)
                        return branch, task.result()
    finally:
        for task in waiting.values():
            task.cancel()
    raise RaceError({branch: _error_of(task) for branch, task in tasks.items()})  # type: ignore[misc]


async def map_items(
    run: BranchHost, fn: Callable[[Any], Awaitable[Any]], items: Iterable[Any], concurrency: int, name: str
) -> list[Any]:
    """The results of a function over items, in their order, so many at a time. The first failure cancels the rest."""
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


def branches_of(args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[Branch, Awaitable[Any]]:
    """The branches of a call: positional, by keyword, or one dict."""
    if len(args) == 1 and isinstance(args[0], Mapping) and not named:
        named, args = args[0], ()
    if args and named:
        raise InvalidArgument("give branches either by position or by name, not both")
    if args:
        return dict(enumerate(args))
    return {check_name("a branch's name", branch): work for branch, work in named.items()}


def _start(run: BranchHost, work: Mapping[Branch, Awaitable[Any]], name: str) -> tuple[str, Tasks]:
    path = run.open_scope_for_branches(check_name("the name of a block", name))
    return path, {branch: run.start_branch(path, branch, awaitable) for branch, awaitable in work.items()}


async def _wait_all(tasks: Tasks) -> None:
    """Wait for all; if we are cancelled meanwhile, cancel them and see them out."""
    try:
        await asyncio.wait(tasks.values())
    except asyncio.CancelledError:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())
        raise


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
