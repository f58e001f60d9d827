"""StepExecutor: runs the bodies of steps, with bounded concurrency, timeouts and cancellation.

It encodes the result or the error of an attempt as a `StepDone` and reports it once. It schedules no retries, writes
nothing, and knows a run by its id only. The late result of a cancelled or timed-out attempt is discarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context as VariableContext
from functools import partial
from typing import Any

from msgspec.structs import replace

from perdure.clock import Clock, Timer, to_datetime
from perdure.codec import Codec
from perdure.codec.annotation_advice import advise_annotation, contains_object
from perdure.codec.attempt_notes import decode_notes, encode_notes
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload
from perdure.execution.heartbeats import Heartbeats, HeartbeatState, ProgressCallback
from perdure.execution.stream_writer import StreamBuffer, StreamWriter
from perdure.execution.thread_pool import StepThreadPool
from perdure.model.locations import is_cleanup
from perdure.model.records import ErrorRecord
from perdure.model.turns import RunStep, StepDone
from perdure.retry import read_retry_after
from perdure.workflows.step_context import CurrentStep, _current_step
from perdure.workflows.steps import StepCall, StepOptions
from perdure.workflows.types import Complete

LOGGER = logging.getLogger("perdure.execution")

StepCallback = Callable[[str, StepDone], None]  # receives the run id and the result of the attempt


class Attempt(CurrentStep):
    """One execution of a body: what `current_step()` returns in it, and the state that the executor keeps for it."""

    __slots__ = (
        "_heartbeats",
        "_stream_writer",
        "beats",
        "ended",
        "page",
        "recorded",
        "retry_until",
        "since",
        "started_at",
        "step",
        "task",
        "timer",
    )

    def __init__(
        self, run_id: str, workflow: str, step: RunStep, state: Any, stream_writer: StreamWriter, heartbeats: Heartbeats
    ) -> None:
        # Hot path: one is created per step, so all attributes are set without a call of the base class.
        self.run_id = run_id
        self.workflow = workflow
        self.name = step.name
        self.location = step.location
        self.attempt = step.attempt
        self.idempotency_key = step.idempotency_key
        self.deadline = self.details = self._cancelled_event = None
        self.state = state
        self._cancel_requested = False
        self.step = step
        self.started_at = 0.0
        self.task: asyncio.Task[Any] | None = None
        self.timer: Timer | None = None
        self.ended = False
        self.recorded = False  # the history shows it as running
        self.page: StreamBuffer | None = None
        self.beats: HeartbeatState | None = None
        self.since: float | None = None  # the start of the first attempt, if `max_elapsed` limits the step
        self.retry_until: float | None = None
        self._stream_writer = stream_writer
        self._heartbeats = heartbeats

    def request_cancel(self) -> None:
        """Signal the body that its result is no longer needed."""
        self._cancel_requested = True
        if self._cancelled_event is not None:
            self._cancelled_event.set()

    @property
    def last_heartbeat(self) -> Any:
        return decode_notes(self._heartbeats.codec, self.step.notes).heartbeat

    def heartbeat(self, details: Any = None) -> None:
        super().heartbeat(details)
        if not self.ended:
            self._heartbeats.record(self, details)

    def encode_notes(self) -> bytes | None:
        """Return what the next attempt needs: the last heartbeat of all attempts, and the start of the first one."""
        if self.beats is not None and self.beats.notes is not None:
            return self.beats.notes
        if self.since is None:
            return self.step.notes
        codec = self._heartbeats.codec
        return encode_notes(codec, replace(decode_notes(codec, self.step.notes), since=self.since))

    @property
    def outcome(self) -> Complete[Any] | None:
        read = getattr(self.step.call, "read_outcome", None)
        return None if read is None else read()

    def write(self, stream: str, item: Any) -> None:
        self._stream_writer.write(self, stream, item)


class StepExecutor:
    """The attempts of one process. `on_completed` is called from the event loop, never from inside a task."""

    def __init__(
        self,
        clock: Clock,
        codec: Codec,
        limit: int,
        on_completed: StepCallback,
        on_progress: ProgressCallback,
        stream_writer: StreamWriter,
    ) -> None:
        self._clock = clock
        self._codec = codec
        self._limit = limit
        self._on_completed = on_completed
        self._stream_writer = stream_writer
        self.state: Any = None  # what the lifespan of the process yielded, for `current_step().state`
        self._heartbeats = Heartbeats(clock, codec, on_progress)
        self._threads = StepThreadPool()
        self._running: dict[str, dict[str, Attempt]] = {}  # by run and location
        self._queued: deque[Attempt] = deque()
        self._slots_taken = 0
        self._cancelled: set[asyncio.Task[Any]] = set()  # bodies that were cancelled and have not ended
        self._ended: list[tuple[Attempt, Any, BaseException | None]] = []  # in this iteration of the loop
        self._loop = asyncio.get_running_loop()

    def start(
        self, run_id: str, workflow: str, step: RunStep, now: float, may_have_run_elsewhere: bool = False
    ) -> None:
        """Execute an attempt, now or when a slot is free.

        `may_have_run_elsewhere`: another process may have executed it before and written to streams.
        """
        attempt = Attempt(run_id, workflow, step, self.state, self._stream_writer, self._heartbeats)
        if may_have_run_elsewhere or self._stream_writer.written:
            self._stream_writer.on_attempt_started(attempt, may_have_run_elsewhere=may_have_run_elsewhere)
        self._running.setdefault(run_id, {})[step.location] = attempt
        if self._slots_taken < self._limit:
            self._start(attempt, now)
        else:
            self._queued.append(attempt)

    def cancel(self, run_id: str, location: str) -> None:
        """Cancel a body and discard its result."""
        attempt = self._running.get(run_id, {}).get(location)
        if attempt is not None:
            self._cancel(attempt)

    def cancel_all(self, run_id: str) -> None:
        for attempt in list(self._running.get(run_id, {}).values()):
            self._cancel(attempt)
        self._stream_writer.discard_run(run_id)

    def running_locations(self, run_id: str) -> frozenset[str]:
        """Return the locations of the run's steps that are executing or queued."""
        return frozenset(self._running.get(run_id, ()))

    def close(self) -> None:
        """Cancel all attempts and end idle threads."""
        for run_id in list(self._running):
            self.cancel_all(run_id)
        self._threads.close()

    async def wait_cancelled(self) -> None:
        """Wait until the async bodies of cancelled attempts have ended."""
        while self._cancelled:
            await asyncio.wait(self._cancelled)

    @property
    def busy(self) -> int:
        """The number of attempts that are executing or queued."""
        return self._slots_taken + len(self._queued)

    def running_since(self, time: float) -> list[Attempt]:
        """Return the attempts that started before this time and that the history does not show yet."""
        attempts = (attempt for of_run in self._running.values() for attempt in of_run.values())
        return [found for found in attempts if not found.recorded and 0.0 < found.started_at <= time]

    # --- one attempt

    def _start(self, attempt: Attempt, now: float) -> None:
        self._slots_taken += 1
        attempt.started_at = now
        call = attempt.step.call
        if not call.step.is_plain and not self._set_limits(attempt, call.step.settings):
            return
        # An empty context: the body sees no context variables of the caller or the workflow, unless it inherits them.
        variables = call.variables.copy() if call.step.settings.context == "inherit" else VariableContext()
        if call.step.body.is_async:
            # Not loop.create_task: with an eager task factory it would run the body while effects are being started.
            body = self._run_in_task(attempt, call)
            attempt.task = asyncio.Task(body, loop=self._loop, name=attempt.location, context=variables)
        else:
            variables.run(_current_step.set, attempt)
            self._threads.run(lambda: self._run_in_thread(attempt, variables))

    def _set_limits(self, attempt: Attempt, settings: StepOptions) -> bool:
        """Set the timers of an attempt. False if its time is over, so that its body does not run."""
        if settings.timeout is not None or (settings.retry is not None and settings.retry.max_elapsed is not None):
            self._set_deadline(attempt, settings)
            if attempt.timer is None:
                return False
        if settings.heartbeat_timeout is not None:
            self._heartbeats.watch(attempt, settings.heartbeat_timeout, lambda: self._on_silence(attempt))
        return True

    def _set_deadline(self, attempt: Attempt, settings: StepOptions) -> None:
        """Set when the attempt is cancelled: after `timeout`, or when the time for all attempts is over.

        If that time is over already, the attempt ends without its body.
        """
        limits = [] if settings.timeout is None else [attempt.started_at + settings.timeout]
        if settings.retry is not None and settings.retry.max_elapsed is not None:
            recorded = decode_notes(self._codec, attempt.step.notes).since
            # A recorded time in the future comes from a wrong clock or an import.
            attempt.since = attempt.started_at if recorded is None else min(recorded, attempt.started_at)
            attempt.retry_until = settings.retry.retry_until(attempt.since)
            limits += [] if attempt.retry_until is None else [attempt.retry_until]
        deadline = min(limits)
        attempt.deadline = to_datetime(deadline)
        if attempt.retry_until is not None and attempt.retry_until <= attempt.started_at:
            self._loop.call_soon(partial(self._expire, attempt, started=False))
        else:
            attempt.timer = self._clock.call_at(deadline, lambda: self._on_timeout(attempt))

    def _run_in_thread(self, attempt: Attempt, variables: VariableContext) -> None:
        call = attempt.step.call
        value: Any = None
        error: BaseException | None = None
        try:
            value = variables.run(call.step.fn, *call.args, **call.kwargs)
        except BaseException as raised:  # not through a future, which cannot hold a StopIteration
            error = raised
        try:
            self._loop.call_soon_threadsafe(self._complete, attempt, value, error)
        except RuntimeError:
            LOGGER.debug(
                "Event loop closed before step %s finished", attempt.location, extra={"run_id": attempt.run_id}
            )

    async def _run_in_task(self, attempt: Attempt, call: StepCall) -> None:
        """Run a body in its task and report its end.

        A done callback per task would add 4 % to the cost of a step (ADR 5).
        """
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
            self._loop.call_soon(self._complete_all)
        self._ended.append((attempt, value, error))

    def _complete_all(self) -> None:
        ended, self._ended = self._ended, []
        for attempt, value, error in ended:
            try:
                self._complete(attempt, value, error)
            except Exception:
                extra = {"run_id": attempt.run_id, "workflow": attempt.workflow}
                LOGGER.exception(
                    "Run %s: could not process the result of step %s", attempt.run_id, attempt.location, extra=extra
                )

    def _complete(self, attempt: Attempt, value: Any, error: BaseException | None) -> None:
        if attempt.ended:
            return
        self._finish(attempt)
        try:
            done = self._build_result(attempt, value, error)
        except Exception as raised:  # the codec, or a method of the user's exception: the run must get a result
            done = self._build_defect(attempt, raised)
        self._on_completed(attempt.run_id, done)

    def _build_defect(self, attempt: Attempt, raised: Exception) -> StepDone:
        extra = {"run_id": attempt.run_id, "workflow": attempt.workflow}
        LOGGER.error(
            "Run %s: result of step %s cannot be recorded",
            attempt.run_id,
            attempt.location,
            exc_info=raised,
            extra=extra,
        )
        message = f"the result of step {attempt.location} cannot be recorded: {type(raised).__name__}"
        return StepDone(
            attempt.location, attempt.step.attempt, error=ErrorRecord(type(raised).__name__, message), retryable=False
        )

    def _build_result(self, attempt: Attempt, value: Any, error: BaseException | None) -> StepDone:
        step, name = attempt.step.call.step, attempt.step.location
        if error is None:
            returns = step.body.returns
            try:
                encoded = self._codec.encode(value, returns, what=f"result of step {name}")
                if returns is Any:
                    _check_annotated(attempt, value)
            except InvalidPayload as refused:
                return self._build_failure(attempt, refused, retryable=False)
            return StepDone(name, attempt.step.attempt, value=encoded)
        retry = step.settings.retry
        try:
            retryable = retry is not None and retry.should_retry(error)
        except Exception:
            extra = {"run_id": attempt.run_id, "workflow": attempt.workflow}
            LOGGER.exception("Retry.retry_on of step %s raised; step will not be retried", name, extra=extra)
            retryable = False
        done = self._build_failure(attempt, error, retryable=retryable)
        if done.retryable and done.error is not None:
            extra = {"run_id": attempt.run_id, "workflow": attempt.workflow}
            wanted = read_retry_after(error, f"Run {attempt.run_id}: step {name}", extra)
            return done if wanted is None else replace(done, error=replace(done.error, retry_after=wanted))
        return done

    def _build_failure(self, attempt: Attempt, error: BaseException, *, retryable: bool) -> StepDone:
        location, raises = attempt.step.location, attempt.step.call.step.settings.raises
        record = error_to_record(error, self._codec, raises=raises, location=location)
        notes, until = attempt.encode_notes(), attempt.retry_until
        return StepDone(location, attempt.step.attempt, None, record, retryable, notes, until)

    def _on_timeout(self, attempt: Attempt) -> None:
        if attempt.ended:
            return
        if attempt.retry_until is not None and self._clock.now() >= attempt.retry_until:
            self._expire(attempt, started=True)
            return
        settings = attempt.step.call.step.settings
        self._cancel(attempt)
        error = TimeoutError(f"step {attempt.step.location} took longer than {settings.timeout} seconds")
        self._on_completed(attempt.run_id, self._build_failure(attempt, error, retryable=settings.retry_on_timeout))

    def _expire(self, attempt: Attempt, *, started: bool) -> None:
        """Fail a step whose time for all attempts is over. An attempt without a body fails with the error before it."""
        if attempt.ended:
            return
        self._cancel(attempt)
        limit = f"{attempt.step.call.step.settings.retry.max_elapsed} seconds for all attempts (max_elapsed)"
        error = TimeoutError(f"step {attempt.step.location} took longer than {limit}")
        done, last = self._build_failure(attempt, error, retryable=False), attempt.step.last_error
        if last is not None and done.error is not None:
            done = replace(done, error=replace(done.error, cause=last) if started else last)
        self._on_completed(attempt.run_id, done)

    def _on_silence(self, attempt: Attempt) -> None:
        """Fail an attempt that sends no heartbeats. The retry policy decides on another one."""
        self._cancel(attempt)
        silence = attempt.step.call.step.settings.heartbeat_timeout
        error = TimeoutError(f"step {attempt.step.location} sent no heartbeat for {silence} seconds")
        self._on_completed(attempt.run_id, self._build_result(attempt, None, error))

    def _cancel(self, attempt: Attempt) -> None:
        """Cancel an attempt. Its slot is free at once, even if the body does not stop."""
        if attempt.started_at == 0.0:
            self._queued.remove(attempt)
            self._remove(attempt)
            return
        task = attempt.task
        self._finish(attempt)
        attempt.request_cancel()
        if task is not None:
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()

    def _remove(self, attempt: Attempt) -> None:
        attempt.ended = True
        attempt.task = None  # breaks a reference cycle: the context of the task holds the attempt
        of_run = self._running.get(attempt.run_id)
        if of_run is not None and of_run.get(attempt.location) is attempt:
            del of_run[attempt.location]
            if not of_run:
                del self._running[attempt.run_id]

    def _finish(self, attempt: Attempt) -> None:
        self._remove(attempt)
        if attempt.page is not None:
            self._stream_writer.flush(attempt)  # before its result is reported
        if attempt.beats is not None:
            self._heartbeats.stop(attempt.beats)
        if attempt.timer is not None:
            attempt.timer.cancel()
        self._slots_taken -= 1
        if self._queued and self._slots_taken < self._limit:
            self._start_queued(self._queued.popleft())

    def _start_queued(self, attempt: Attempt) -> None:
        """Start a queued attempt. An error, such as no further thread, belongs to its run and not to the one before."""
        try:
            self._start(attempt, self._clock.now())
        except Exception as error:
            self._slots_taken -= 1
            self._remove(attempt)
            failure = self._build_failure(attempt, error, retryable=True)
            self._loop.call_soon(self._on_completed, attempt.run_id, failure)


def _check_annotated(attempt: Attempt, value: Any) -> None:
    """Raise `InvalidPayload` if a result would lose its class because its step does not declare one.

    The results of compensations and exit functions are not used.
    """
    body = attempt.step.call.step.body
    if body.missing_type is None or not contains_object(value) or is_cleanup(attempt.location):
        return
    function = getattr(body.fn, "__name__", None) or type(body.fn).__name__
    declaration = f"{'async def' if body.is_async else 'def'} {function}(...) -> {advise_annotation(value)}"
    raise InvalidPayload(
        f"result of step {attempt.location}: {function} {body.missing_type}, so the workflow would get a dict; "
        f"write `{declaration.replace('<lambda>', attempt.name)}`, or `-> Any` for plain data"
    )
