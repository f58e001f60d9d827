"""Errors as data, and back: what is recorded of an exception, and what a workflow sees of the record.

A workflow sees an error only through its record, the first time too, so that it takes the same branch on every replay.
"""

from __future__ import annotations

import builtins
import sys
import traceback

from perdure.codec import Codec
from perdure.codec.exceptions import decode_exception, encode_exception
from perdure.errors import InvalidPayload, PerdureError, RecordedError, StepFailed, StepInterrupted
from perdure.model.records import ErrorRecord

MAX_TRACEBACK = 16_000
INTERRUPTED = "StepInterrupted"


def error_to_record(
    error: BaseException,
    codec: Codec,
    *,
    raises: tuple[type[BaseException], ...] = (),
    location: str | None = None,
) -> ErrorRecord:
    """The record of an error. Those named in `raises` keep their fields, to come back as themselves."""
    kind = type(error)
    fields = encode_exception(codec, error) if raises and isinstance(error, raises) else None
    trace = "".join(traceback.format_exception(error))
    if len(trace) > MAX_TRACEBACK:
        trace = trace[: MAX_TRACEBACK // 2] + "\n  ...\n" + trace[-MAX_TRACEBACK // 2 :]
    return ErrorRecord(
        type=kind.__name__,
        message=message_of(error),
        traceback=trace.encode("utf-8", "replace").decode("utf-8"),
        location=location,
        qualified=f"{kind.__module__}:{kind.__qualname__}",
        fields=fields,
    )


def message_of(error: BaseException) -> str:
    """str(error), also for an error whose __str__ raises or that cannot be encoded."""
    try:
        return str(error).encode("utf-8", "replace").decode("utf-8")
    except Exception:
        return f"<{type(error).__name__} that cannot be printed>"


def step_error_from_record(
    record: ErrorRecord,
    codec: Codec,
    *,
    location: str,
    attempts: int,
    raises: tuple[type[BaseException], ...],
) -> BaseException:
    """What a workflow sees of a step's recorded error: the error itself if it is in `raises`, else `StepFailed`."""
    if record.type == INTERRUPTED and not record.qualified:
        return StepInterrupted(location, attempts)
    itself = _rebuild(record, codec, raises)
    if itself is not None and not isinstance(itself, StopIteration):  # which cannot be raised into a coroutine
        return itself
    cause = _rebuild_builtin(record)
    failed = StepFailed(location, attempts, record.type, record.message, cause)
    failed.__cause__ = cause
    return failed


def error_from_record(
    record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...] = (), module: str = ""
) -> BaseException:
    """An error that somebody else ran into or reported, as itself where every replay can rebuild it.

    That is: perdure's own errors, those in `raises`, built-in ones, and those that the workflow's own `module` defines.
    """
    near = getattr(sys.modules.get(module), record.type, None)
    kinds = (*raises, PerdureError)
    if isinstance(near, type) and issubclass(near, Exception):
        kinds = (near, *kinds)
    itself = _rebuild(record, codec, kinds)
    if itself is not None and not isinstance(itself, StopIteration):
        return itself
    return _rebuild_builtin(record)


def _rebuild(record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...]) -> BaseException | None:
    """The error as itself, if the code still names its type (or a base of it) and its fields still fit."""
    if record.fields is None:
        return None
    for kind in _with_subclasses(raises):
        if f"{kind.__module__}:{kind.__qualname__}" == record.qualified:
            try:
                return decode_exception(codec, record.fields, kind)
            except InvalidPayload:
                return None
    return None


def _with_subclasses(kinds: tuple[type[BaseException], ...]) -> list[type[BaseException]]:
    found: list[type[BaseException]] = []
    queue = list(kinds)
    while queue:
        kind = queue.pop()
        if kind not in found:
            found.append(kind)
            queue.extend(kind.__subclasses__())
    return found


def _rebuild_builtin(record: ErrorRecord) -> BaseException:
    kind = getattr(builtins, record.type, None)
    if record.qualified == f"builtins:{record.type}" and isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(record.message)
        except TypeError:
            pass  # UnicodeDecodeError and the like want more than a message
    return RecordedError(record.type, record.message)
