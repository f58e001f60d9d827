"""WorkflowLoop: asyncio inside a workflow, with the same interleaving live and on every replay.

The loop drives the tasks of one run and nothing else. It never waits: `drain` runs what is ready and returns. Its time
is the recorded time of the last completion. Everything that would reach the outside (I/O, threads, signals,
subprocesses) is refused. It is driven from a plain callback of the real loop, never from inside one of its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio import events, tasks
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context as VariableContext
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.errors import WorkflowMisuse
from perdure.runner.asyncio_internals import (
    AS_COMPLETED,
    RELEASE,
    WAIT,
    WAIT_FOR,
    WORKER_THREAD,
    WRAP_FUTURE,
    AsCompletedBatch,
    asyncio_caller,
    check_waited_for,
)
from perdure.runner.closing import close_suspended
from perdure.runner.iterations import RunningIterations
from perdure.runner.scopes import Scope
from perdure.runner.source_lines import waiting_line
from perdure.runner.tasks import (
    Closed,
    ReadyHandle,
    TaskStart,
    WorkflowFuture,
    WorkflowTask,
    WorkflowTimerHandle,
    label,
)
from perdure.workflows.durable_call import DurableCall

LOGGER = logging.getLogger("perdure.workflow")
MAX_CALLBACKS = 100_000  # between two completions; a workflow that needs more is in a livelock
CALLBACKS_PER_PAUSE_CHECK = 16  # a check reads the clock; most drains run fewer callbacks and make none
MAX_CLOSED_CALLS = 100  # calls of an evicted run that raise; later ones never complete

THREAD_WAIT = "workflow code waits for a thread: move it into a step"
NO_TASK = "asyncio.Task(...) and eager tasks cannot be used in a workflow: use create_task"

if TYPE_CHECKING:
    _RefusingLoop = Any  # its methods are generated below, which a type checker cannot see
else:

    class _RefusingLoop(asyncio.AbstractEventLoop):
        """Refuses every method of an event loop. `WorkflowLoop` defines those that a workflow may use."""


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
    """See the module's docstring.

    `perdure_run` is the `ContextApi` of the run, by which durable calls find it. `open` is set while the run is
    advanced: calls at any other time are refused. `halted` stops the drain, `closing` is the mode of eviction.
    `should_pause` is called now and then while a turn is computed. When it returns True, the drain stops and `paused`
    is set. The next drain continues with the same callback, so that user code runs in the same order with any pauses.
    """

    perdure_run: Any  # set by ContextApi, replaced by eviction

    def __init__(self, seed: int, now: float, root: Scope) -> None:
        self.ready: deque[Any] = deque()
        self.timers: dict[str, WorkflowTimerHandle] = {}
        self.live: dict[WorkflowTask, None] = {}  # strong references, in order of creation
        self.iterations = RunningIterations()
        self.now = now
        self.root = root
        self.main: WorkflowTask | None = None
        self.open = False
        self.halted = False
        self.closing = False
        self.should_pause: Callable[[], bool] | None = None
        self.paused = False
        self.callbacks = 0
        # Futures, tasks and calls hash by this number, the same on every replay. asyncio keeps them in sets, whose
        # order depends on the hashes; the multiplier spreads the seed over all bits.
        self.number = (seed * 0x9E3779B97F4A7C15) & ((1 << 60) - 1)
        self._inner_number = self.number  # of asyncio's internal objects, whose number differs per Python version
        # Of the thread that creates the run, and then advances it. Reading it for each turn would be a system call.
        self._outer = events._get_running_loop()
        self._run_next = False
        self._refused = 0
        self._batch: AsCompletedBatch | None = None

    # --- draining

    def drain(self, *, to_the_end: bool = False) -> bool:
        """Run ready callbacks until none is left, the workflow function has ended, or the run was halted.

        False if the run waits or the drain was paused; True if the run has ended, was halted, or has reached the limit
        of callbacks.
        """
        ready, main = self.ready, self.main
        if not ready:
            return self.stopped or self.spinning
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(None, self.finalize)  # positional: by keyword the call costs twice as much
        until_check = CALLBACKS_PER_PAUSE_CHECK
        try:
            while ready and not self.halted and self.callbacks < MAX_CALLBACKS:
                if main is not None and main.done() and not to_the_end:
                    break
                if not until_check:
                    until_check = CALLBACKS_PER_PAUSE_CHECK
                    if self.pause_if_due():
                        return False
                until_check -= 1
                self.callbacks += 1
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            events._set_running_loop(self._outer)
            sys.set_asyncgen_hooks(*hooks)
        return self.halted or self.callbacks >= MAX_CALLBACKS or (main is not None and main.done())

    def pause_if_due(self) -> bool:
        """Pause the turn if its time slice is used up. Return whether it is paused."""
        if self.should_pause is not None and self.should_pause():
            self.paused = True
        return self.paused

    @property
    def stopped(self) -> bool:
        """Whether no further completion is applied: the workflow function has ended, or the run was halted."""
        return self.halted or (self.main is not None and self.main.done())

    @property
    def spinning(self) -> bool:
        """Whether too many callbacks ran since the last completion."""
        return self.callbacks >= MAX_CALLBACKS

    def pass_time(self, until: float | None) -> None:
        """Set the time of the run, if it is later. Time never decreases."""
        if until is not None and until > self.now:
            self.now = until

    def running_task(self) -> asyncio.Task[Any] | None:
        return tasks.current_task(self)

    def scope(self) -> Scope:
        """Return the scope of the running task."""
        task = tasks.current_task(self)
        if task is None:
            return self.root
        if not isinstance(task, WorkflowTask) or task.scope is None:
            raise WorkflowMisuse(NO_TASK)
        return task.scope

    def waiting_line(self) -> str | None:
        """Return the line of user code at which the oldest task waits."""
        lines = (waiting_line(task.get_coro()) for task in self.live if not task.done())
        return next((line for line in lines if line is not None), None)

    def next_number(self) -> int:
        """Return the hash of the next object that user code creates."""
        self.number += 1
        return self.number

    def fire(self, location: str) -> bool:
        """Make the callback of a timer ready. False if there is no such timer."""
        handle = self.timers.pop(location, None)
        if handle is None:
            return False
        handle._scheduled = False
        self.ready.append(handle)
        return True

    def finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that user code dropped unfinished; durable calls in its `finally` are refused."""
        if not self.closing:  # a run that is evicted drops its generators, without a fault of user code
            name = getattr(generator, "__name__", "?")
            self.perdure_run.log_unretrieved_error("", f"async generator {name} was not closed; use aclosing()", None)
        outer, closing = events._get_running_loop(), self.closing
        events._set_running_loop(self)
        self.closing = True
        try:
            close = generator.aclose()
            close.send(None)
            close_suspended(close, _log_close_error)  # its `finally` awaits something
        except BaseException as error:
            if not isinstance(error, (StopIteration, StopAsyncIteration, Closed)):
                _log_close_error(error)
        finally:
            self.closing = closing
            events._set_running_loop(outer)

    # --- the part of the event loop interface that asyncio uses

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> ReadyHandle:
        if self.closing:  # a handler may release a lock; the tasks that wait for it do not run any more
            return ReadyHandle(callback, args, self, context)
        if not self.open or type(getattr(callback, "__self__", None)) is not WorkflowTask:
            self._check_open(callback)
        if RELEASE is not None and type(callback) is partial and callback.func is RELEASE:
            return self._release_soon(callback, args, context)
        handle = ReadyHandle(callback, args, self, context)
        if self._run_next:
            self.ready.appendleft(handle)
        else:
            self.ready.append(handle)
        return handle

    def _release_soon(self, callback: partial[Any], args: tuple[Any, ...], context: Any) -> ReadyHandle:
        """Resume `wait_for` of Python 3.11 at the same point as later versions, which use no task and no waiter."""

        def release() -> None:
            self._run_next = True
            try:
                callback(*args)
            finally:
                self._run_next = False

        handle = ReadyHandle(release, (), self, context)
        if getattr(args[0], "inline", False):
            self.ready.appendleft(handle)
        else:
            self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        self._check_open(callback)
        location = self.scope().locate("~timer")
        handle = WorkflowTimerHandle(location, when, callback, args, self, context)
        if self.closing:
            return handle
        self.timers[location] = handle
        self.perdure_run.timer_set(location, when)
        return handle

    def _timer_handle_cancelled(self, handle: WorkflowTimerHandle) -> None:
        if self.timers.pop(handle.location, None) is not None:
            self.perdure_run.timer_cancelled(handle.location)

    def create_future(self) -> WorkflowFuture:
        self._check_open(None)
        frame = sys._getframe(1)
        if frame.f_code is WAIT:
            check_waited_for(frame.f_locals["fs"])
        elif frame.f_code is WRAP_FUTURE:
            self._refuse_thread()
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
        caller, frame = asyncio_caller(sys._getframe(1))
        batch, index = self._as_completed_batch(frame, coro) if caller in AS_COMPLETED else (None, 0)
        inline = caller is WAIT_FOR
        own_scope = not (inline or parent.shared or isinstance(coro, DurableCall))
        if inline:
            self._inner_number += 1
            number = self._inner_number
        else:
            number = batch.first + index if batch is not None else self.next_number()
        task = WorkflowTask(
            coro,
            loop=self,
            name=name or label(coro),
            context=context,
            scope=None if own_scope else parent,
            parent=parent,
            number=number,
            inline=inline,
        )
        self._track(task)
        if inline:
            self.ready.appendleft(
                self.ready.pop()
            )  # later Python versions run it inside the caller, before anything else
        if own_scope:
            self.ready.append(TaskStart(self.ready.pop(), task, self.perdure_run))
        if batch is not None:
            batch.started[index] = (task, self.ready.pop())
            if len(batch.started) == batch.expected:
                self._start_in_order(batch)
        return task

    def start_branch(self, work: Any, label: str, scope: Scope) -> WorkflowTask:
        """Start a task for a branch of a block, in its own scope."""
        self._check_open(None)
        coro = work if asyncio.iscoroutine(work) else _awaiting(work)
        task = WorkflowTask(
            coro, loop=self, name=label, context=None, scope=scope, parent=scope, number=self.next_number()
        )
        self._track(task)
        return task

    def start_main(self, coro: Coroutine[Any, Any, Any], name: str, context: VariableContext) -> WorkflowTask:
        """Start the task of the workflow function, or of its cleanup, in the root scope."""
        task = WorkflowTask(
            coro, loop=self, name=name, context=context, scope=self.root, parent=self.root, number=self.next_number()
        )
        self._track(task)
        self.main = task
        return task

    def _track(self, task: WorkflowTask) -> None:
        self.live[task] = None
        self.iterations.add_task(task)
        task.add_done_callback(self._untrack, context=VariableContext())

    def _untrack(self, task: Any) -> None:
        self.live.pop(task, None)
        self.iterations.remove_task(task)

    def _as_completed_batch(self, frame: Any, coro: Any) -> tuple[AsCompletedBatch, int]:
        """Return the batch and index of a task that `as_completed` creates.

        `as_completed` creates tasks in set order. They are numbered and started by their index in its list instead.
        """
        awaitables = frame.f_locals.get(AS_COMPLETED[frame.f_code])
        if not isinstance(awaitables, (list, tuple)):
            coro.close()
            raise WorkflowMisuse("as_completed in a workflow takes a list or tuple, whose order is known")
        if self._batch is None or self._batch.of is not awaitables:
            self._batch = AsCompletedBatch(awaitables, self.number + 1)
            self.number += len(awaitables)
        return self._batch, self._batch.index_by_id[id(coro)]

    def _start_in_order(self, batch: AsCompletedBatch) -> None:
        self._batch = None
        for index in sorted(batch.started):
            task, handle = batch.started[index]
            self.live[task] = self.live.pop(task)
            self.iterations.add_task(task)
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
            raise WorkflowMisuse(NO_TASK)

    def refuse(self) -> None:
        """Raise `Closed` in a run that is evicted. A handler that ignores it too often waits forever instead."""
        self._refused += 1
        if self._refused <= MAX_CLOSED_CALLS:
            raise Closed

    def get_debug(self) -> bool:
        # Called whenever a future is created. The future of anyio's thread function is completed by a thread, which
        # would be started next, and which nothing could stop.
        if sys._getframe(1).f_code.co_name == WORKER_THREAD:
            self._refuse_thread()
        return False

    def _refuse_thread(self) -> None:
        """Hold the run before its code starts or awaits a thread: no event of the run could resume it."""
        if not self.closing:
            self.perdure_run.on_thread_wait()
            raise WorkflowMisuse(THREAD_WAIT)

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
        self.perdure_run.log_unretrieved_error(scope, str(context.get("message")), context.get("exception"))

    default_exception_handler = call_exception_handler


def _log_close_error(error: BaseException) -> None:
    LOGGER.warning("Async generator raised %r while being closed", error)


async def _awaiting(work: Any) -> Any:
    return await work
