"""What the deterministic loop schedules: futures and tasks that hash alike on every replay, and its handles."""

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
    """Raised by durable and asyncio calls while a run is being dropped from memory. Nothing of it is recorded."""


class LoopOwner(Protocol):
    """What the loop tells the run that it belongs to."""

    replaying: bool

    def open_scope(self, path: str) -> Scope: ...

    def timer_set(self, location: str, when: float) -> None: ...

    def timer_cancelled(self, location: str) -> None: ...

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None: ...

    def on_cancelled(self, location: str) -> None: ...

    def on_self_cancel(self) -> None: ...


class WorkflowFuture(asyncio.Future[Any]):
    """A future that hashes by its creation number, so that sets of them iterate alike on every replay."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class CancelListener(Protocol):
    """Who is told when a task gives up what it asked for."""

    def on_cancelled(self, location: str) -> None: ...


class EntryFuture(WorkflowFuture):
    """The future of an entry. Being cancelled is noticed here and not by a done-callback, which would come too late.

    That of a step is a plain one, if its task can tell: see `Ledger` and `WorkflowTask.cancel`.
    """

    location: str
    keeper: CancelListener

    def cancel(self, msg: Any = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.keeper.on_cancelled(self.location)
        return cancelled


class WorkflowTask(asyncio.Task[Any]):
    """A task with a scope, which is named when the task first runs (3.11 and 3.12 name tasks after creating them)."""

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
        self.inline = inline  # the inside of a `wait_for`, which is a task on 3.11 only
        self.variables = context if context is not None else copy_context()
        super().__init__(coro, loop=loop, name=name, context=self.variables)

    def cancel(self, msg: Any = None) -> bool:
        """Tells for the step that it waits for, whose future is asyncio's own and cannot."""
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
    """A timer with a location, under which it is recorded when it fires."""

    __slots__ = ("location",)

    def __init__(self, location: str, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self.location = location
        self._scheduled = True  # so that cancelling it tells the loop


class ReadyHandle:
    """A call-back in the ready queue: what asyncio's own handle is, without what only debugging needs."""

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
            self._loop.call_exception_handler({"message": "a call-back raised", "exception": error})


class TaskStart:
    """The first run of a task, in the ready queue: names the task's scope and then runs it."""

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
    """What a task is called that was given no name."""
    return getattr(coro, "__name__", None) or type(coro).__name__
