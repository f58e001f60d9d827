"""Executor: runs the bodies of steps, with bounded concurrency, time-outs and cancellation.

It turns what a body did into a `StepDone`, encoded, and reports it once. It decides about no retry and records nothing;
it does not know what a run is beyond its id. A late result of an attempt that was cancelled or timed out goes nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context as VariableContext
from typing import Any

from perdure.clock import Clock, Timer, to_datetime
from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload
from perdure.execution.stream_writer import StreamBuffer, StreamWriter
from perdure.execution.thread_pool import StepThreadPool
from perdure.model.turns import RunStep, StepDone
from perdure.workflows.step_context import CurrentStep, _current_step
from perdure.workflows.steps import StepCall

LOGGER = logging.getLogger("perdure.execution")

Report = Callable[[str, StepDone], None]


class Attempt(CurrentStep):
    """One execution of a body; what `current_step()` gives to it, and what the executor keeps about it."""

    __slots__ = ("_writing", "ended", "exposed", "page", "started_at", "step", "task", "timer")

    def __init__(self, run_id: str, workflow: str, step: RunStep, writing: StreamWriter) -> None:
        super().__init__(run_id, workflow, step.name, step.location, step.attempt, step.idempotency_key)
        self.step = step
        self.started_at = 0.0
        self.task: asyncio.Task[Any] | None = None
        self.timer: Timer | None = None
        self.ended = False
        self.exposed = False
        self.page: StreamBuffer | None = None
        self._writing = writing

    def request_cancel(self) -> None:
        """Signal the body that its result is no longer needed."""
        self._cancel_requested = True
        if self._cancelled_event is not None:
            self._cancelled_event.set()

    def write(self, stream: str, item: Any) -> None:
        self._writing.write(self, stream, item)


class StepExecutor:
    """See the module's docstring. `report` is called from the event loop itself, never from inside a task."""

    def __init__(self, clock: Clock, codec: Codec, limit: int, report: Report, writing: StreamWriter) -> None:
        self._clock = clock
        self._codec = codec
        self._limit = limit
        self._report = report
        self._writing = writing
        self._threads = StepThreadPool()
        self._running: dict[str, dict[str, Attempt]] = {}  # by run and location
        self._queued: deque[Attempt] = deque()
        self._slots_taken = 0
        self._ended: list[tuple[Attempt, Any, BaseException | None]] = []  # in this round of the loop
        self._loop = asyncio.get_running_loop()

    def start(
        self, run_id: str, workflow: str, step: RunStep, now: float, may_have_run_elsewhere: bool = False
    ) -> None:
        """Execute an attempt, now or when a slot is free. `others`: another process may have executed it before."""
        attempt = Attempt(run_id, workflow, step, self._writing)
        if may_have_run_elsewhere or self._writing.written:
            self._writing.on_attempt_started(attempt, others=may_have_run_elsewhere)
        self._running.setdefault(run_id, {})[step.location] = attempt
        if self._slots_taken < self._limit:
            self._begin(attempt, now)
        else:
            self._queued.append(attempt)

    def cancel(self, run_id: str, location: str) -> None:
        """Cancel a body and forget it: whatever comes of it is not reported."""
        attempt = self._running.get(run_id, {}).get(location)
        if attempt is not None:
            self._end(attempt)

    def cancel_all(self, run_id: str) -> None:
        for attempt in list(self._running.get(run_id, {}).values()):
            self._end(attempt)
        self._writing.forget_all(run_id)

    def running_locations(self, run_id: str) -> frozenset[str]:
        """The locations of a run's steps that are executing or queued."""
        return frozenset(self._running.get(run_id, ()))

    def close(self) -> None:
        """Cancel everything and let the threads go."""
        for run_id in list(self._running):
            self.cancel_all(run_id)
        self._threads.close()

    @property
    def busy(self) -> int:
        """Attempts that are executing or queued."""
        return self._slots_taken + len(self._queued)

    def running_since(self, moment: float) -> list[Attempt]:
        """Attempts that began before the given moment and have not been exposed yet."""
        attempts = (attempt for of_run in self._running.values() for attempt in of_run.values())
        return [found for found in attempts if not found.exposed and 0.0 < found.started_at <= moment]

    # --- one attempt

    def _begin(self, attempt: Attempt, now: float) -> None:
        self._slots_taken += 1
        attempt.started_at = now
        call = attempt.step.call
        timeout = call.step.settings.timeout
        if timeout is not None:
            deadline = attempt.started_at + timeout
            attempt.deadline = to_datetime(deadline)
            attempt.timer = self._clock.call_at(deadline, lambda: self._time_out(attempt))
        # An empty context: nothing of the caller's or the workflow's variables reaches the body.
        variables = VariableContext()
        if call.step.body.is_async:
            # The class and not loop.create_task: an eager task would run the body within the hand-out of its turn.
            body = self._run_in_task(attempt, call)
            attempt.task = asyncio.Task(body, loop=self._loop, name=attempt.location, context=variables)
        else:
            variables.run(_current_step.set, attempt)
            self._threads.run(lambda: self._run_in_thread(attempt, variables))

    def _run_in_thread(self, attempt: Attempt, variables: VariableContext) -> None:
        call = attempt.step.call
        value: Any = None
        error: BaseException | None = None
        try:
            value = variables.run(call.step.fn, *call.args, **call.kwargs)
        except BaseException as raised:  # boxed: StopIteration through a future would hang it
            error = raised
        try:
            self._loop.call_soon_threadsafe(self._settle, attempt, value, error)
        except RuntimeError:
            LOGGER.debug("the loop ended before step %s did", attempt.step.location)

    async def _run_in_task(self, attempt: Attempt, call: StepCall) -> None:
        """The task of a body. It tells its end itself: a call-back for each would be 4 % of all that a step costs."""
        _current_step.set(attempt)
        value: Any = None
        error: BaseException | None = None
        try:
            value = await call.step.fn(*call.args, **call.kwargs)
        except KeyboardInterrupt:
            raise
        except asyncio.CancelledError:
            if attempt.ended:
                raise
            error = asyncio.CancelledError("the body of the step was cancelled from inside")
        except BaseException as raised:
            error = raised
        if not self._ended:
            self._loop.call_soon(self._settle_all)
        self._ended.append((attempt, value, error))

    def _settle_all(self) -> None:
        ended, self._ended = self._ended, []
        for attempt, value, error in ended:
            try:
                self._settle(attempt, value, error)
            except Exception:
                LOGGER.exception("run %s: the end of step %s was not taken", attempt.run_id, attempt.location)

    def _settle(self, attempt: Attempt, value: Any, error: BaseException | None) -> None:
        if attempt.ended:
            return
        self._finish(attempt)
        self._report(attempt.run_id, self._outcome(attempt, value, error))

    def _outcome(self, attempt: Attempt, value: Any, error: BaseException | None) -> StepDone:
        step, name = attempt.step.call.step, attempt.step.location
        if error is None:
            try:
                encoded = self._codec.encode(value, step.body.returns, what=f"result of step {name}")
            except InvalidPayload as refused:
                return self._failure(attempt, refused, retryable=False)
            return StepDone(name, attempt.step.attempt, value=encoded)
        retry = step.settings.retry
        try:
            retryable = retry is not None and retry.should_retry(error)
        except Exception:
            LOGGER.exception("Retry.retry_on of step %s raised; the step is not tried again", name)
            retryable = False
        return self._failure(attempt, error, retryable=retryable)

    def _failure(self, attempt: Attempt, error: BaseException, *, retryable: bool) -> StepDone:
        location, raises = attempt.step.location, attempt.step.call.step.settings.raises
        try:
            record = error_to_record(error, self._codec, raises=raises, location=location)
        except InvalidPayload as refused:  # an error of `raises` with fields that cannot be encoded
            record, retryable = error_to_record(refused, self._codec, location=location), False
        return StepDone(location, attempt.step.attempt, error=record, retryable=retryable)

    def _time_out(self, attempt: Attempt) -> None:
        if attempt.ended:
            return
        settings = attempt.step.call.step.settings
        self._end(attempt)
        error = TimeoutError(f"step {attempt.step.location} took longer than {settings.timeout} seconds")
        self._report(attempt.run_id, self._failure(attempt, error, retryable=settings.retry_on_timeout))

    def _end(self, attempt: Attempt) -> None:
        """Stop the body if it has begun; its slot is free at once, even if the body will not stop."""
        if attempt.started_at == 0.0:
            self._queued.remove(attempt)
            self._forget(attempt)
            return
        task = attempt.task
        self._finish(attempt)
        attempt.request_cancel()
        if task is not None:
            task.cancel()

    def _forget(self, attempt: Attempt) -> None:
        attempt.ended = True
        attempt.task = None  # its variables hold the attempt: together they would be left to the garbage collector
        of_run = self._running.get(attempt.run_id)
        if of_run is not None and of_run.get(attempt.location) is attempt:
            del of_run[attempt.location]
            if not of_run:
                del self._running[attempt.run_id]

    def _finish(self, attempt: Attempt) -> None:
        self._forget(attempt)
        if attempt.page is not None:
            self._writing.flush(attempt)  # before its result is reported
        if attempt.timer is not None:
            attempt.timer.cancel()
        self._slots_taken -= 1
        if self._queued and self._slots_taken < self._limit:
            self._begin(self._queued.popleft(), self._clock.now())
