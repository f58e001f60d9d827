"""A deterministic event loop: asyncio inside a workflow, with the same interleaving live and on every replay.

It drives the tasks of one run and nothing else. It never waits: `drain` runs what is ready and returns. Its time is
the recorded time of the last completion. Whatever would reach the world (I/O, threads, signals, subprocesses) is
refused. It is driven from a plain call-back of the real loop, never from inside one of its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio import events, tasks
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context as VariableContext
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from perdure.durable import DurableCall
from perdure.errors import WorkflowMisuse
from perdure.runner.locations import Scope, escape

LOGGER = logging.getLogger("perdure.workflow")
MAX_CALLBACKS = 100_000  # between two completions; a workflow that needs more spins
MAX_REFUSED = 100  # calls that a closing run may make before it gets no answer at all

_TASKS_FILE = tasks.create_task.__code__.co_filename
_WAIT_FOR = tasks.wait_for.__code__
_WAIT = tasks._wait.__code__  # type: ignore[attr-defined]
_RELEASE = tasks._release_waiter if sys.version_info < (3, 12) else None  # type: ignore[attr-defined]  # wakes a `wait_for`
_AS_COMPLETED = {tasks.as_completed.__code__: "fs"}
if hasattr(tasks, "_AsCompletedIterator"):  # 3.13 and later
    _AS_COMPLETED[tasks._AsCompletedIterator.__init__.__code__] = "aws"


class Closed(BaseException):
    """Raised by durable and asyncio calls while a run is being dropped from memory. Nothing of it is recorded."""


class LoopOwner(Protocol):
    """What the loop tells the run that it belongs to."""

    replaying: bool

    def open_scope(self, path: str) -> Scope: ...

    def timer_set(self, location: str, when: float) -> None: ...

    def timer_cancelled(self, location: str) -> None: ...

    def report_lost(self, scope: str, message: str, error: BaseException | None) -> None: ...


class WorkflowFuture(asyncio.Future[Any]):
    """A future that hashes by its creation number, so that sets of them iterate alike on every replay."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class WorkflowTask(asyncio.Task[Any]):
    """A task with a scope, which is named when the task first runs (3.11 and 3.12 name tasks after creating them)."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: WorkflowLoop,
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

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Timer(asyncio.TimerHandle):
    """A timer with a location, under which it is recorded when it fires."""

    __slots__ = ("location",)

    def __init__(self, location: str, when: float, callback: Any, args: Any, loop: WorkflowLoop, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self.location = location
        self._scheduled = True  # so that cancelling it tells the loop


class _Ready:
    """A call-back in the ready queue: what asyncio's own handle is, without what only debugging needs."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop")

    def __init__(
        self, callback: Any, args: tuple[Any, ...], loop: WorkflowLoop, context: VariableContext | None
    ) -> None:
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


class _TaskStart:
    """The first run of a task, in the ready queue: names the task's scope and then runs it."""

    __slots__ = ("_handle", "_owner", "_task")

    def __init__(self, handle: _Ready, task: WorkflowTask, owner: LoopOwner) -> None:
        self._handle = handle
        self._task = task
        self._owner = owner

    @property
    def _cancelled(self) -> bool:
        return self._handle._cancelled

    def _run(self) -> None:
        task = self._task
        task.scope = self._owner.open_scope(task.parent.place(escape(task.get_name() or _label(task.get_coro()))))
        self._handle._run()


if TYPE_CHECKING:
    _RefusingLoop = Any  # its methods are made below, one by one; to a type checker they would be missing
else:

    class _RefusingLoop(asyncio.AbstractEventLoop):
        """Every method of an event loop, refused: what a workflow may use is defined below."""


def _refuser(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if asyncio.iscoroutine(arg):
                arg.close()
        raise WorkflowMisuse(f"{name}() cannot be called in a workflow: move it into a step")

    refuse.__name__ = name
    return refuse


for _name in dir(asyncio.AbstractEventLoop):
    if not _name.startswith("__"):
        setattr(_RefusingLoop, _name, _refuser(_name))


class WorkflowLoop(_RefusingLoop):  # type: ignore[misc]
    """See the module's docstring. `open` while the run is being advanced: calls from anywhere else are refused."""

    def __init__(self, owner: LoopOwner, seed: int, now: float, root: Scope) -> None:
        self.perdure_run: Any = owner
        self.ready: deque[Any] = deque()
        self.timers: dict[str, _Timer] = {}
        self.live: dict[WorkflowTask, None] = {}  # strong references, in order of creation
        self.now = now
        self.root = root
        self.main: WorkflowTask | None = None
        self.open = False
        self.halted = False
        self.closing = False
        self.callbacks = 0
        self._number = (seed * 0x9E3779B97F4A7C15) & (
            (1 << 60) - 1
        )  # spread over all bits: asyncio keeps tasks in sets
        self._inner_number = self._number  # for what asyncio makes for itself, which differs between Python versions
        self._hurrying = False
        self._refused = 0
        self._batch: _AsCompletedBatch | None = None

    # --- driving

    def drain(self, *, to_the_end: bool = False) -> None:
        """Run what is ready, until nothing is, the workflow function has ended, or the run was halted."""
        outer = events._get_running_loop()
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self.finalize)
        ready, main = self.ready, self.main
        try:
            while ready and not self.halted and self.callbacks < MAX_CALLBACKS:
                if main is not None and main.done() and not to_the_end:
                    break
                self.callbacks += 1
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            events._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)

    @property
    def stopped(self) -> bool:
        """Nothing more is to be applied: the workflow function has ended, or the run was halted."""
        return self.halted or (self.main is not None and self.main.done())

    @property
    def spinning(self) -> bool:
        return self.callbacks >= MAX_CALLBACKS

    def pass_time(self, until: float | None) -> None:
        """Time never goes back."""
        if until is not None and until > self.now:
            self.now = until

    def running_task(self) -> asyncio.Task[Any] | None:
        return tasks.current_task(self)

    def scope(self) -> Scope:
        """The scope of the task that is running."""
        task = tasks.current_task(self)
        if task is None:
            return self.root
        if not isinstance(task, WorkflowTask) or task.scope is None:
            raise WorkflowMisuse(_NO_TASK)
        return task.scope

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def fire(self, location: str) -> bool:
        """Make a timer's call-back ready. False if no such timer stands."""
        handle = self.timers.pop(location, None)
        if handle is None:
            return False
        handle._scheduled = False
        self.ready.append(handle)
        return True

    def finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that was dropped unexhausted; durable calls in its `finally` are refused."""
        self.perdure_run.report_lost("", f"async generator {generator.__name__} was not closed; use aclosing()", None)  # type: ignore[attr-defined]
        outer, closing = events._get_running_loop(), self.closing
        events._set_running_loop(self)
        self.closing = True
        try:
            generator.aclose().send(None)
        except BaseException as error:
            if not isinstance(error, (StopIteration, StopAsyncIteration, Closed)):
                LOGGER.warning("closing async generator raised %r", error)
        finally:
            self.closing = closing
            events._set_running_loop(outer)

    # --- what asyncio needs of a loop

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> _Ready:
        if self.closing:  # a handler that releases a lock does no harm: nobody is woken any more
            return _Ready(callback, args, self, context)
        self._check_open(callback)
        if _RELEASE is not None and type(callback) is partial and callback.func is _RELEASE:
            return self._release_soon(callback, args, context)
        handle = _Ready(callback, args, self, context)
        if self._hurrying:
            self.ready.appendleft(handle)
        else:
            self.ready.append(handle)
        return handle

    def _release_soon(self, callback: partial[Any], args: tuple[Any, ...], context: Any) -> _Ready:
        """Let `wait_for` of 3.11 go on exactly when that of later versions does, which has no task and no waiter."""

        def release() -> None:
            self._hurrying = True
            try:
                callback(*args)
            finally:
                self._hurrying = False

        handle = _Ready(release, (), self, context)
        if getattr(args[0], "inline", False):
            self.ready.appendleft(handle)
        else:
            self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        self._check_open(callback)
        location = self.scope().place("~timer")
        handle = _Timer(location, when, callback, args, self, context)
        if self.closing:
            return handle
        self.timers[location] = handle
        self.perdure_run.timer_set(location, when)
        return handle

    def _timer_handle_cancelled(self, handle: _Timer) -> None:
        if self.timers.pop(handle.location, None) is not None:
            self.perdure_run.timer_cancelled(handle.location)

    def create_future(self) -> WorkflowFuture:
        self._check_open(None)
        frame = sys._getframe(1)
        if frame.f_code is _WAIT:
            _check_waited_for(frame.f_locals["fs"])
        future = WorkflowFuture(loop=self)
        self._inner_number += 1
        future.number = self._inner_number
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **refused: Any) -> Any:
        if self.closing or not self.open:
            coro.close()
        self._check_open(None)
        if self.closing:
            return self.create_future()
        if any(refused.values()):
            coro.close()
            raise WorkflowMisuse("eager tasks cannot be used in a workflow: they would run before they are scheduled")
        parent = self.scope()
        caller, frame = _asyncio_caller(sys._getframe(1))
        batch, index = self._as_completed_batch(frame, coro) if caller in _AS_COMPLETED else (None, 0)
        inline = caller is _WAIT_FOR
        own_scope = not isinstance(coro, DurableCall) and not inline
        if inline:
            self._inner_number += 1
            number = self._inner_number
        else:
            number = batch.first + index if batch is not None else self.next_number()
        task = WorkflowTask(
            coro,
            loop=self,
            name=name or _label(coro),
            context=context,
            scope=None if own_scope else parent,
            parent=parent,
            number=number,
            inline=inline,
        )
        self._track(task)
        if inline:
            self.ready.appendleft(self.ready.pop())  # later versions run it within the caller, before anything else
        if own_scope:
            self.ready.append(_TaskStart(self.ready.pop(), task, self.perdure_run))
        if batch is not None:
            batch.started[index] = (task, self.ready.pop())
            if len(batch.started) == batch.expected:
                self._start_in_order(batch)
        return task

    def start_branch(self, work: Any, label: str, scope: Scope) -> WorkflowTask:
        """A task for a branch of a block, in a scope that is named already."""
        self._check_open(None)
        coro = work if asyncio.iscoroutine(work) else _awaiting(work)
        task = WorkflowTask(
            coro, loop=self, name=label, context=None, scope=scope, parent=scope, number=self.next_number()
        )
        self._track(task)
        return task

    def start_main(self, coro: Coroutine[Any, Any, Any], name: str, context: VariableContext) -> WorkflowTask:
        """The task of the workflow function itself, in the run's own scope."""
        task = WorkflowTask(
            coro, loop=self, name=name, context=context, scope=self.root, parent=self.root, number=self.next_number()
        )
        self._track(task)
        self.main = task
        return task

    def _track(self, task: WorkflowTask) -> None:
        self.live[task] = None
        task.add_done_callback(self._untrack, context=VariableContext())

    def _untrack(self, task: Any) -> None:
        self.live.pop(task, None)

    def _as_completed_batch(self, frame: Any, coro: Any) -> tuple[_AsCompletedBatch, int]:
        """`as_completed` makes its tasks in set order; they are numbered and started by their place in its list."""
        awaitables = frame.f_locals.get(_AS_COMPLETED[frame.f_code])
        if not isinstance(awaitables, (list, tuple)):
            coro.close()
            raise WorkflowMisuse("as_completed in a workflow takes a list or tuple, whose order is known")
        if self._batch is None or self._batch.of is not awaitables:
            waiting = {id(item) for item in awaitables if not asyncio.isfuture(item)}
            self._batch = _AsCompletedBatch(awaitables, self._number + 1, len(waiting))
            self._number += len(awaitables)
        return self._batch, next(i for i, item in enumerate(awaitables) if item is coro)

    def _start_in_order(self, batch: _AsCompletedBatch) -> None:
        self._batch = None
        for index in sorted(batch.started):
            task, handle = batch.started[index]
            self.live[task] = self.live.pop(task)
            self.ready.append(handle)

    def _check_open(self, callback: Any) -> None:
        if self.closing:
            self.refuse()
        elif not self.open:
            raise WorkflowMisuse(
                "an asyncio object of one run was used from outside of it; send an event, or complete a deferred"
            )
        task = getattr(callback, "__self__", None)
        if isinstance(task, asyncio.Task) and not isinstance(task, WorkflowTask):
            task.get_coro().close()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            raise WorkflowMisuse(_NO_TASK)

    def refuse(self) -> None:
        """Raise in a run that is being closed; but a handler that will not hear of it is left waiting in the end."""
        self._refused += 1
        if self._refused <= MAX_REFUSED:
            raise Closed

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        scope = task.scope.path if isinstance(task, WorkflowTask) and task.scope is not None else ""
        self.perdure_run.report_lost(scope, str(context.get("message")), context.get("exception"))

    default_exception_handler = call_exception_handler


async def _awaiting(work: Any) -> Any:
    return await work


class _AsCompletedBatch:
    """The tasks of one `as_completed` call while they are being made."""

    __slots__ = ("expected", "first", "of", "started")

    def __init__(self, of: Any, first: int, expected: int) -> None:
        self.of = of
        self.first = first
        self.expected = expected
        self.started: dict[int, Any] = {}


_NO_TASK = "asyncio.Task(...) and eager tasks cannot be used in a workflow: use create_task"


def _label(coro: Any) -> str:
    """What a task is called that was given no name."""
    return getattr(coro, "__name__", None) or type(coro).__name__


def _check_waited_for(awaited: set[Any]) -> None:
    if len(awaited) > 1 and not all(isinstance(each, (WorkflowFuture, WorkflowTask)) for each in awaited):
        raise WorkflowMisuse(
            "asyncio.wait in a workflow takes tasks; what gather() gives has no known place in a set: put it in a task"
        )


def _asyncio_caller(frame: Any) -> tuple[Any, Any]:
    """The function of asyncio.tasks that asked for a task, seen through its helpers; and its frame."""
    while frame is not None and frame.f_code.co_filename == _TASKS_FILE:
        if frame.f_code is _WAIT_FOR or frame.f_code in _AS_COMPLETED:
            return frame.f_code, frame
        frame = frame.f_back
    return None, None
