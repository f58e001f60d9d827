"""Futures, tasks and handles of the workflow loop. Futures and tasks have the same hash on every replay."""

from __future__ import annotations

import asyncio
from asyncio import tasks
from collections.abc import Coroutine
from contextvars import Context as VariableContext
from contextvars import copy_context
from typing import Any, Protocol

from perdure.model.locations import escape_segment
from perdure.runner.scopes import Scope


class Closed(BaseException):
    """Raised by durable and asyncio calls while their run is evicted from memory. It is never recorded."""


class LoopOwner(Protocol):
    """What the loop and its tasks report to their run."""

    def open_scope(self, path: str) -> Scope: ...

    def timer_set(self, location: str, when: float) -> None: ...

    def timer_cancelled(self, location: str) -> None: ...

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None: ...

    def on_cancelled(self, location: str) -> None: ...

    def on_self_cancel(self) -> None: ...

    def on_thread_wait(self) -> None: ...


class WorkflowFuture(asyncio.Future[Any]):
    """A future that hashes by its creation number, so that sets of futures have the same order on every replay."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class CancelListener(Protocol):
    """Notified when the future of an entry is cancelled."""

    def on_cancelled(self, location: str) -> None: ...


class EntryFuture(WorkflowFuture):
    """The future of an entry. It reports a cancellation at once; a done-callback would run too late.

    Most steps use asyncio's own future, for which `WorkflowTask.cancel` reports (see `EntryTracker._future`).
    """

    location: str
    listener: CancelListener

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.listener.on_cancelled(self.location)
        return cancelled


class WorkflowTask(asyncio.Task[Any]):
    """A task with a scope. The scope is named when the task first runs: Python 3.11 and 3.12 set its name that late."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: Any,
        name: str,
        context: VariableContext | None,
        scope: Scope | None,
        parent: Scope,
        number: int,
        inline: bool = False,
    ) -> None:
        self.number = number
        self.scope = scope
        self.parent = parent
        self.inline = inline  # the task inside `wait_for`, which exists on Python 3.11 only
        self.variables = context if context is not None else copy_context()
        super().__init__(coro, loop=loop, name=name, context=self.variables)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the task, and report the cancellation of a step whose future is asyncio's own."""
        loop: Any = self.get_loop()
        if tasks.current_task(loop) is self:
            loop.perdure_run.on_self_cancel()
        waits_for = self._fut_waiter  # type: ignore[attr-defined]
        cancelled = super().cancel(msg)
        if type(waits_for) is asyncio.Future and waits_for.cancelled() and not loop.closing:
            loop.perdure_run.on_cancelled(getattr(waits_for, "location", ""))
        return cancelled

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class WorkflowTimerHandle(asyncio.TimerHandle):
    """A timer with a location, at which it is recorded when it fires."""

    __slots__ = ("location",)

    def __init__(self, location: str, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self.location = location
        self._scheduled = True  # then `cancel` calls the loop


class ReadyHandle:
    """A callback in the ready queue: asyncio's handle without its support for debugging."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop")

    def __init__(self, callback: Any, args: tuple[Any, ...], loop: Any, context: VariableContext | None) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def _run(self) -> None:
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler({"message": "a callback raised", "exception": error})


class TaskStart:
    """The first run of a task, in the ready queue: names the scope of the task, then runs it."""

    __slots__ = ("_handle", "_owner", "_task")

    def __init__(self, handle: ReadyHandle, task: WorkflowTask, owner: LoopOwner) -> None:
        self._handle = handle
        self._task = task
        self._owner = owner

    @property
    def _cancelled(self) -> bool:
        return self._handle._cancelled

    def _run(self) -> None:
        task = self._task
        task.scope = self._owner.open_scope(
            task.parent.locate(escape_segment(task.get_name() or label(task.get_coro())))
        )
        self._handle._run()


def label(coro: Any) -> str:
    """Return the name of a task that was created without one."""
    return getattr(coro, "__name__", None) or type(coro).__name__
