"""Steps on other workers: the internal workflow that executes one attempt, and its payload.

Each attempt of a step with a pool or queue is an internal run, an attached child of the calling run. The workflow of
the internal run is `~step/<name>`; workers publish it beside their own workflows, so that a run finds workers which
have imported the step. The retry policy stays with the calling run (ADR 30). The internal run succeeds with an
`AttemptResult`, which says how the attempt ended; the calling run records the same entry for it as for a local step.

A worker looks the step up by name among those that it has imported. Nothing in a payload is imported or called.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.codec.failures import INTERRUPTED, error_to_record, message_of
from perdure.errors import InvalidPayload, StepInterrupted, WorkflowMisuse
from perdure.model.ids import child_creation_id
from perdure.model.queue_records import Place
from perdure.model.records import ErrorRecord, RunResult, RunStatus
from perdure.model.turns import StartChild, StepDone
from perdure.retry import Retry
from perdure.workflows.children import CANCELLED, shorten_id
from perdure.workflows.context import Context, RunInfo
from perdure.workflows.definition import Workflow, WorkflowOptions
from perdure.workflows.queue_placement import Started, build_placement
from perdure.workflows.start_options import NO_OPTIONS
from perdure.workflows.step_context import CurrentStep, _current_step
from perdure.workflows.steps import REMOTE_STEPS, STEP_VERSION, Step, StepBody, StepCall

REMOTE_WORKFLOW = "~step/"
"""What the names of internal workflows of steps begin with."""
DEFAULT_POOL = "default"
MAX_SHORT_MESSAGE = 500  # characters
REQUEST_BYTES = 4096  # of a request, besides arguments, notes and the last error: names and ids
RETENTION_SECONDS = 3600.0  # of an internal run, after its end


class StepRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One attempt of a step, as the payload of its internal run.

    `arguments` and `notes` are encoded by the codec of the store. Options that are data travel with the call; `raises`
    and `Retry.retry_on` are those of the declaration. `retries` is False for a call with `retry=None`.
    """

    run_id: str
    workflow: str
    location: str
    attempt: int
    idempotency_key: str
    arguments: bytes
    notes: bytes | None = None
    last_error: ErrorRecord | None = None
    timeout: float | None = None
    retry_on_timeout: bool = False
    heartbeat_timeout: float | None = None
    at_most_once: bool = False
    retries: bool = True
    max_elapsed: float | None = None


class AttemptResult(Struct, frozen=True, omit_defaults=True):
    """How an attempt ended: with a value, or with an error that the retry policy accepts (`retryable`) or not.

    `notes` are for the next attempt. No attempt starts at `retry_until` or later.
    """

    value: bytes | None = None
    error: ErrorRecord | None = None
    retryable: bool = False
    notes: bytes | None = None
    retry_until: float | None = None


# --- in the calling run ----------------------------------------------------------------------------------------------


def prepare_call(call: StepCall, codec: Codec) -> None:
    """Set the encoded arguments of a call, and its place if the step has a queue. Raises what is wrong with them."""
    call.arguments = _encode_arguments(call, codec)
    call.place = _build_place(call)


def prepare_unchecked_call(call: StepCall, codec: Codec) -> None:
    """Prepare the call of a rollback, which must run. If its arguments do not fit, it fails where it executes."""
    call.place = None
    try:
        prepare_call(call, codec)
    except Exception as refused:  # also of the queue's partition_key
        call.arguments = codec.encode({"refused": message_of(refused)[:MAX_SHORT_MESSAGE]})


def _build_place(call: StepCall) -> Place | None:
    """Return the place in the queue of the step. Its partition is that of the step's arguments."""
    queue = call.step.settings.queue
    if queue is None:
        return None
    started = Started(REMOTE_WORKFLOW + call.step.declared_name, queue, call.args, call.kwargs)
    placement = build_placement(NO_OPTIONS, started, 0.0)
    return None if placement is None else placement.place


def _encode_arguments(call: StepCall, codec: Codec) -> bytes:
    """Return the arguments of a call as a payload.

    Raises `InvalidPayload` if they do not fit the annotations, or are too large for a request.
    """
    what = f"arguments of step {call.name!r}"
    arguments = call.step.body.parameters.encode(codec, call.args, call.kwargs, what)
    codec.encode(arguments + bytes(REQUEST_BYTES), what=what)
    return arguments


def build_start(call: StepCall, pending: RemoteAttempt, number: int, info: RunInfo, codec: Codec) -> StartChild:
    """Return the start of the internal run that executes an attempt.

    The id is that of the entry. From the second start for the entry on it has the `number` of the start as suffix.
    """
    settings, target = call.step.settings, pending.target
    suffix = f"#{number}" if number > 1 else ""
    request = StepRequest(
        run_id=info.id,
        workflow=info.workflow,
        location=pending.location,
        attempt=pending.attempt,
        idempotency_key=f"{info.id}/{target}",
        arguments=call.arguments,
        notes=pending.notes,
        last_error=pending.error,
        timeout=settings.timeout,
        retry_on_timeout=settings.retry_on_timeout,
        heartbeat_timeout=settings.heartbeat_timeout,
        at_most_once=settings.at_most_once,
        retries=settings.retry is not None,
        max_elapsed=None if settings.retry is None else settings.retry.retry_until(0.0),
    )
    return StartChild(
        run_id=_internal_id(info.id, target, suffix),
        fallback_id=None if info.origin == info.id else _internal_id(info.origin, target, suffix),
        workflow=REMOTE_WORKFLOW + call.step.declared_name,
        version=STEP_VERSION,
        input=_encode_request(request, codec),
        attached=True,
        created_by=child_creation_id(info.origin, info.incarnation, target + suffix),
        target=target,
        definition=_workflow_for(call.step.declared_name, settings.pool or info.pool),
        place=call.place,
    )


def _encode_request(request: StepRequest, codec: Codec) -> bytes:
    """Return the payload of an internal run. Without what earlier attempts have left if it is too large with that."""
    for fitting in (request, replace(request, last_error=None), replace(request, last_error=None, notes=None)):
        try:
            return codec.encode({"request": fitting})
        except InvalidPayload:
            continue
    raise AssertionError("the size of the arguments was checked when the step was called")


class RemoteAttempt(Protocol):
    """The pending entry of the step, as far as the start of an attempt depends on it."""

    @property
    def location(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def notes(self) -> bytes | None: ...
    @property
    def error(self) -> ErrorRecord | None: ...


def _internal_id(origin: str, target: str, suffix: str) -> str:
    return shorten_id(f"{origin}/{target}{suffix}")


def read_result(result: RunResult, location: str, attempt: int, codec: Codec) -> StepDone:
    """Return the result of an attempt from the end of its internal run.

    An internal run that failed or was cancelled itself is a failed attempt without another one.
    """
    if result.status is RunStatus.SUCCEEDED and result.result is not None:
        ended = codec.decode(result.result, AttemptResult, what=f"the result of step {location}")
        return StepDone(location, attempt, ended.value, ended.error, ended.retryable, ended.notes, ended.retry_until)
    error = result.error
    if result.status is RunStatus.CANCELLED or error is None:
        reason = f": {error.message}" if error is not None and error.message else ""
        error = ErrorRecord(CANCELLED, f"the execution of step {location} was cancelled{reason}", location=location)
    return StepDone(location, attempt, error=error)


# --- in the internal run ---------------------------------------------------------------------------------------------


def find_step_workflow(name: str) -> Workflow[Any, Any] | None:
    """Return the internal workflow of this name, if this process has imported its step.

    Raises `WorkflowMisuse` if several modules define the step.
    """
    step = REMOTE_STEPS.find(step_name(name), STEP_VERSION)
    return None if step is None else _workflow_for(step.declared_name, step.settings.pool or DEFAULT_POOL)


def is_step_workflow(name: str) -> bool:
    """Return whether this is the name of an internal workflow that executes a step."""
    return name.startswith(REMOTE_WORKFLOW)


def step_name(workflow: str) -> str:
    """Return the name of the step that an internal workflow executes."""
    return workflow.removeprefix(REMOTE_WORKFLOW)


def step_workflow_versions() -> tuple[tuple[str, int], ...]:
    """Return name and version of the internal workflows of all imported steps that are defined once."""
    return tuple((REMOTE_WORKFLOW + name, version) for name, version in REMOTE_STEPS.unambiguous())


@functools.lru_cache(maxsize=1024)
def _workflow_for(name: str, pool: str) -> Workflow[Any, Any]:
    """Return the internal workflow of a step. It finds the step when it executes: a reload may have replaced it."""

    async def execute(ctx: Context, request: StepRequest) -> AttemptResult:
        step = REMOTE_STEPS.find(name, STEP_VERSION)
        if step is None:
            raise WorkflowMisuse(f"step {name!r} is not imported in this process")
        return await _execute_attempt(step, request, ctx._run.codec)

    return Workflow(
        execute, REMOTE_WORKFLOW + name, STEP_VERSION, WorkflowOptions(pool=pool, retention=RETENTION_SECONDS)
    )


async def _execute_attempt(step: Step[Any, Any], request: StepRequest, codec: Codec) -> AttemptResult:
    try:
        args, kwargs = step.body.parameters.decode(codec, request.arguments, f"arguments of step {step.name!r}")
    except InvalidPayload as refused:
        return AttemptResult(error=error_to_record(refused, codec, location=request.location))
    settings = dataclasses.replace(
        step.settings,
        retry=_build_retry(step.settings.retry or Retry(), request) if request.retries else None,
        timeout=request.timeout,
        retry_on_timeout=request.retry_on_timeout,
        heartbeat_timeout=request.heartbeat_timeout,
        at_most_once=request.at_most_once,
        compensate=None,
        pool=None,
        queue=None,
    )
    attempt = Step[Any, Any](AttemptBody(step.body, request, codec), step.name, settings)
    try:
        result: AttemptResult = await attempt(*args, **kwargs)
    except StepInterrupted:
        return AttemptResult(error=ErrorRecord(INTERRUPTED, "", location=request.location))
    return result


def _build_retry(declared: Retry, request: StepRequest) -> Retry:
    """Return the declared policy with the time limit of the call. It decides which errors may be retried."""
    if declared.retry_until(0.0) == request.max_elapsed:
        return declared
    return dataclasses.replace(declared, max_elapsed=request.max_elapsed)


class AttemptBody(StepBody):
    """The body of a step as its internal run executes it: `current_step()` in it is the step of the calling run.

    The executor reports every end of the attempt, errors and timeouts included, as an `AttemptResult`.
    """

    reports_attempt = True
    recorded_as = AttemptResult

    def __init__(self, body: StepBody, request: StepRequest, codec: Codec) -> None:
        super().__init__(_as_called(body, request))
        self._body = body
        self.request = request
        self.initial_notes = request.notes
        self.initial_error = request.last_error

    @property
    def returns(self) -> Any:
        return self._body.returns

    @property
    def missing_type(self) -> str | None:
        return self._body.missing_type


def encode_attempt(done: StepDone, codec: Codec) -> StepDone:
    """Return the end of an attempt as the successful result of the internal run's step.

    What is too large to be recorded is left out: first of an error its traceback, then everything but its type and the
    beginning of its message. A value that is too large fails the attempt.
    """
    result = AttemptResult(done.value, done.error, done.retryable, done.notes, done.retry_until)
    what = f"result of step {done.location}"
    reasons: list[str] = []
    for fitting in _smaller_results(result):
        try:
            return StepDone(done.location, done.attempt, codec.encode(fitting, what=what))
        except InvalidPayload as refused:
            reasons.append(str(refused))
    too_large = ErrorRecord("InvalidPayload", reasons[0][:MAX_SHORT_MESSAGE], location=done.location)
    return StepDone(done.location, done.attempt, codec.encode(AttemptResult(error=too_large), what=what))


def _smaller_results(result: AttemptResult) -> Iterator[AttemptResult]:
    yield result
    if result.error is not None:
        yield replace(result, error=replace(result.error, traceback=""))
        short = ErrorRecord(result.error.type, result.error.message[:MAX_SHORT_MESSAGE], location=result.error.location)
        yield replace(result, error=short)
        yield replace(result, error=short, notes=None)


def _as_called(body: StepBody, request: StepRequest) -> Callable[..., Any]:
    """Return the function of a step, executed as the attempt of the calling run."""
    fn = body.fn
    if body.is_async:

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            _current_step.set(CalledStep(_current_step.get(), request))
            return await fn(*args, **kwargs)

        call_async.__name__ = getattr(fn, "__name__", type(fn).__name__)
        return call_async

    def call(*args: Any, **kwargs: Any) -> Any:
        _current_step.set(CalledStep(_current_step.get(), request))
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return call


class CalledStep(CurrentStep):
    """What `current_step()` returns in a step on another worker: run, location and key are those of the caller."""

    __slots__ = ("_attempt",)

    def __init__(self, attempt: CurrentStep, request: StepRequest) -> None:
        super().__init__(
            request.run_id, request.workflow, attempt.name, request.location, request.attempt, request.idempotency_key
        )
        self._attempt = attempt
        self.deadline = attempt.deadline
        self.state = attempt.state

    @property
    def cancelled(self) -> threading.Event:
        return self._attempt.cancelled

    @property
    def last_heartbeat(self) -> Any:
        return self._attempt.last_heartbeat

    def heartbeat(self, details: Any = None) -> None:
        self.details = details
        self._attempt.heartbeat(details)

    def write(self, stream: str, item: Any) -> None:
        raise WorkflowMisuse(
            f"step {self.name!r} executes on another worker and cannot write to stream {stream!r} of run "
            f"{self.run_id!r}; return the value, or write it to a store of yours and return a reference"
        )
