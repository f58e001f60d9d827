"""What a workflow function came to, as data."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from perdure.codec import Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload, StepFailed, WorkflowMisuse
from perdure.model.turns import Cancelled, Failed, Outcome, Succeeded
from perdure.workflows.definition import Workflow

LOGGER = logging.getLogger("perdure.workflow")

_UNORDERED = "expect an iterable of futures, not generator"  # as_completed of 3.11 takes a generator for a coroutine
_FOREIGN = ("is bound to a different event loop", "attached to a different loop")


def outcome_of(
    task: asyncio.Task[Any], definition: Workflow[Any, Any], codec: Codec, asked_to_stop: str | None
) -> Outcome:
    """The outcome of a finished main task. Once asked to stop, the run ends so, whatever its function did."""
    if asked_to_stop == "cancel":
        return Cancelled()
    if asked_to_stop is not None:
        limit = "timeout" if asked_to_stop == "timeout" else "max_suspend"
        # For the whole run, across its generations: not something that another one could mend.
        return replace(failed(TimeoutError(f"the run exceeded its {limit}"), definition, codec), retryable=False)
    if task.cancelled():
        return failed(asyncio.CancelledError("the workflow cancelled itself"), definition, codec)
    error = task.exception()
    if error is not None:
        return failed(_as_misuse(error), definition, codec)
    try:
        return Succeeded(
            codec.encode(task.result(), definition.returns, what=f"result of workflow {definition.name!r}")
        )
    except InvalidPayload as refused:
        return failed(refused, definition, codec)


def failed(error: BaseException, definition: Workflow[Any, Any], codec: Codec) -> Failed:
    location = error.location if isinstance(error, StepFailed) else None
    retry = definition.settings.retry
    try:
        record = error_to_record(error, codec, raises=definition.settings.raises, location=location)
    except InvalidPayload as refused:  # a typed error whose fields cannot be encoded
        record = error_to_record(refused, codec)
    try:
        retryable = retry is not None and isinstance(error, Exception) and retry.should_retry(error)
    except Exception:
        LOGGER.exception("Retry.retry_on of workflow %s raised; the run is not tried again", definition.name)
        retryable = False
    return Failed(record, retryable=retryable)


def _as_misuse(error: BaseException) -> BaseException:
    """asyncio's complaint about objects of another loop, in words that help."""
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FOREIGN):
        misuse = WorkflowMisuse(f"an asyncio object is shared between runs or made outside of this one: {error}")
        misuse.__cause__ = error
        return misuse
    if isinstance(error, TypeError) and _UNORDERED in str(error):
        return WorkflowMisuse("as_completed in a workflow takes a list or tuple, whose order is known")
    return error
