"""Lifespan: what the steps of a process share, opened before the first one and closed after the last one.

A lifespan is an async context manager, or a function that returns one. The function may take the engine or worker. The
value that it yields is `current_step().state`. One task enters and exits it, as task groups and cancel scopes in it
require. This module knows no engine and no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from perdure.errors import InvalidArgument

LOGGER = logging.getLogger("perdure.execution")
LifespanFactory = Callable[[Any], AbstractAsyncContextManager[Any]]
LifespanOption = LifespanFactory | Callable[[], AbstractAsyncContextManager[Any]] | AbstractAsyncContextManager[Any]
ADVICE = "decorate an async generator with contextlib.asynccontextmanager: async def lifespan(engine): ... yield state"


def check_lifespan(lifespan: Any) -> Any:
    """Return the lifespan. Raises `InvalidArgument` if it is neither a function nor an async context manager."""
    undecorated = inspect.isasyncgenfunction(lifespan) or inspect.iscoroutinefunction(lifespan)
    if lifespan is None or (not undecorated and (_is_manager(lifespan) or callable(lifespan))):
        return lifespan
    raise InvalidArgument(f"lifespan must be an async context manager, not {lifespan!r}: {ADVICE}")


class Lifespan:
    """One entered lifespan."""

    def __init__(self, task: asyncio.Task[None], left: asyncio.Event) -> None:
        self._task = task
        self._leave = left
        task.add_done_callback(self._on_end)

    @classmethod
    async def enter(cls, lifespan: Any, owner: Any) -> tuple[Lifespan, Any]:
        """Enter a lifespan, and return it with the value that it yields. Raises what the lifespan raises."""
        manager = open_manager(lifespan, owner)
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()
        task = asyncio.create_task(_hold(manager, entered, leave), name="perdure-lifespan")
        try:
            await asyncio.wait((task, entered), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        if not entered.done():
            task.result()  # raises: only an error ends it before it is entered
            raise InvalidArgument(f"lifespan {lifespan!r} suppressed an error before it yielded")
        return cls(task, leave), entered.result()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not self._leave.is_set() and not task.cancelled():
            LOGGER.error(
                "Lifespan ended while steps may run, what it yielded may be closed: %r",
                task.exception(),
                exc_info=task.exception(),
            )

    async def exit(self) -> None:
        """Exit the lifespan. Raises what it raises."""
        self._leave.set()
        await self._task


async def _hold(manager: AbstractAsyncContextManager[Any], entered: asyncio.Future[Any], leave: asyncio.Event) -> None:
    async with manager as state:
        entered.set_result(state)
        await leave.wait()


def open_manager(lifespan: Any, owner: Any) -> AbstractAsyncContextManager[Any]:
    """Return the context manager of a lifespan. Raises `InvalidArgument` if it is not an async one."""
    manager = lifespan
    if not _is_manager(lifespan):
        manager = lifespan(owner) if _takes_owner(lifespan) else lifespan()
    if _is_manager(manager):
        return manager  # type: ignore[no-any-return]
    kind = "a synchronous context manager" if hasattr(manager, "__enter__") else repr(manager)
    raise InvalidArgument(f"lifespan must be an async context manager, not {kind}: {ADVICE}")


def _takes_owner(lifespan: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # without a signature, or with one that takes no argument
        signature = inspect.signature(lifespan)
        try:
            signature.bind(None)
        except TypeError:
            signature.bind()
            return False
    return True


def _is_manager(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "__aenter__") and hasattr(value, "__aexit__")
