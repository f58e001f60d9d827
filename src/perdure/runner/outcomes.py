"""Outcomes: how a workflow function ended, as data."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload, StepFailed, WorkflowMisuse
from perdure.model.records import RunStatus
from perdure.model.turns import Cancelled, Failed, Outcome, Succeeded
from perdure.retry import read_retry_after
from perdure.workflows.definition import Workflow
from perdure.workflows.types import Complete, error_view

LOGGER = logging.getLogger("perdure.workflow")

_UNORDERED = "expect an iterable of futures, not generator"  # as_completed of 3.11 takes a generator for a coroutine
_FOREIGN = ("is bound to a different event loop", "attached to a different loop")


def task_outcome(
    task: asyncio.Task[Any], definition: Workflow[Any, Any], codec: Codec, stop_reason: str | None
) -> Outcome:
    """Return the outcome of a finished main task. A limit decides, whatever the function returned or raised."""
    if stop_reason is not None:
        limit = "timeout" if stop_reason == "timeout" else "max_suspend"
        # Not retryable: the limit is one of the whole run, across its generations.
        return replace(
            failure_outcome(TimeoutError(f"the run exceeded its {limit}"), definition, codec), retryable=False
        )
    if task.cancelled():
        return failure_outcome(asyncio.CancelledError("the workflow cancelled itself"), definition, codec)
    error = task.exception()
    if error is not None:
        return failure_outcome(_as_misuse(error), definition, codec)
    try:
        return Succeeded(
            codec.encode(task.result(), definition.returns, what=f"result of workflow {definition.name!r}")
        )
    except InvalidPayload as refused:
        return failure_outcome(refused, definition, codec)


def as_complete(outcome: Outcome, definition: Workflow[Any, Any], codec: Codec) -> Complete[Any]:
    """Return the outcome of a run as its exit functions read it. The value is a new object each time."""
    match outcome:
        case Succeeded(value):
            what = f"result of workflow {definition.name!r}"
            return Complete(RunStatus.SUCCEEDED, codec.decode(value, definition.returns, what=what))
        case Failed(error):
            return Complete(RunStatus.FAILED, error=error_view(error, codec, definition.settings.raises))
        case Cancelled(reason):
            return Complete(RunStatus.CANCELLED, reason=reason)
        case _:
            raise AssertionError(f"{type(outcome).__name__} is not the end of a run")


def failure_outcome(error: BaseException, definition: Workflow[Any, Any], codec: Codec) -> Failed:
    """Return the outcome of a function that raised."""
    location = error.location if isinstance(error, StepFailed) else None
    retry = definition.settings.retry
    record = error_to_record(error, codec, raises=definition.settings.raises, location=location)
    try:
        retryable = retry is not None and isinstance(error, Exception) and retry.should_retry(error)
    except Exception:
        LOGGER.exception(
            "Retry.retry_on of workflow %s raised; run will not be retried",
            definition.name,
            extra={"workflow": definition.name},
        )
        retryable = False
    if retryable:
        wanted = read_retry_after(error, f"Workflow {definition.name}", {"workflow": definition.name})
        record = record if wanted is None else replace(record, retry_after=wanted)
    return Failed(record, retryable=retryable)


def _as_misuse(error: BaseException) -> BaseException:
    """Return a `WorkflowMisuse` for asyncio's errors about objects of another loop; other errors unchanged."""
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FOREIGN):
        misuse = WorkflowMisuse(f"an asyncio object is shared between runs or made outside of this one: {error}")
        misuse.__cause__ = error
        return misuse
    if isinstance(error, TypeError) and _UNORDERED in str(error):
        return WorkflowMisuse("as_completed in a workflow takes a list or tuple, whose order is known")
    return error
