"""Convert exceptions to `ErrorRecord` and back.

A workflow sees every error as reconstructed from its record, also the first time, so that it takes the same branch on
every replay. This module knows no run and no store.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Iterator

from perdure.codec import Codec
from perdure.codec.exceptions import decode_exception, encode_exception
from perdure.errors import PerdureError, RecordedError, StepFailed, StepInterrupted, WorkflowMisuse
from perdure.model.records import ErrorRecord

MAX_TRACEBACK = 16_000
MAX_MESSAGE = 64_000
INTERRUPTED = "StepInterrupted"


def error_to_record(
    error: BaseException,
    codec: Codec,
    *,
    raises: tuple[type[BaseException], ...] = (),
    location: str | None = None,
) -> ErrorRecord:
    """Return the record of an error. Fields are recorded only for types in `raises`, to reconstruct them."""
    kind = type(error)
    fields = encode_exception(codec, error) if raises and isinstance(error, raises) else None
    return ErrorRecord(
        type=kind.__name__,
        message=message_of(error),
        traceback=_traceback_of(error),
        location=location,
        qualified=f"{kind.__module__}:{kind.__qualname__}",
        fields=fields,
    )


def error_to_record_lossy(error: BaseException, codec: Codec, location: str | None = None) -> ErrorRecord:
    """Return the record of an error that restores its type, or only its message if its fields cannot be encoded."""
    try:
        return error_to_record(error, codec, raises=(type(error),), location=location)
    except Exception:  # also what a property of the error raises
        return error_to_record(error, codec, location=location)


def message_of(error: BaseException) -> str:
    """Return str(error), or a replacement if __str__ raises.

    Characters that cannot be encoded are replaced, and a message of more than `MAX_MESSAGE` characters is cut. The
    message of an exception group with a `WorkflowMisuse` inside starts with the message of the misuse: "unhandled
    errors in a TaskGroup" does not say what to change.
    """
    misuse = next(_misuses_in(error), None) if isinstance(error, BaseExceptionGroup) else None
    return _text_of(error) if misuse is None else f"{_text_of(misuse)} ({_text_of(error)})"


def _misuses_in(group: BaseExceptionGroup[BaseException]) -> Iterator[WorkflowMisuse]:
    for error in group.exceptions:
        if isinstance(error, WorkflowMisuse):
            yield error
        elif isinstance(error, BaseExceptionGroup):
            yield from _misuses_in(error)


def _text_of(error: BaseException) -> str:
    try:
        return _cut(str(error), MAX_MESSAGE).encode("utf-8", "replace").decode("utf-8")
    except Exception:
        return f"<{type(error).__name__} that cannot be printed>"


def _traceback_of(error: BaseException) -> str:
    try:
        return _cut("".join(traceback.format_exception(error)), MAX_TRACEBACK).encode("utf-8", "replace").decode()
    except Exception:  # nested too deep, or a part of it cannot be printed
        return ""


def _cut(text: str, max_length: int) -> str:
    """Return text without its middle if it is too long."""
    return text if len(text) <= max_length else f"{text[: max_length // 2]}\n  ...\n{text[-max_length // 2 :]}"


def step_error_from_record(
    record: ErrorRecord,
    codec: Codec,
    *,
    location: str,
    attempts: int,
    raises: tuple[type[BaseException], ...],
) -> BaseException:
    """Return the exception that a workflow sees for a failed step: its own type if in `raises`, else `StepFailed`."""
    if record.type == INTERRUPTED and not record.qualified:
        return StepInterrupted(location, attempts)
    original = _reconstruct(record, codec, raises)
    if original is not None and not isinstance(original, StopIteration):  # Cannot be raised into a coroutine.
        return original
    cause = _reconstruct_builtin(record)
    failed = StepFailed(location, attempts, record.type, record.message, cause)
    failed.__cause__ = cause
    return failed


def error_from_record(
    record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...] = (), module: str = ""
) -> BaseException:
    """Return the exception for an error of another run or of a caller, with its original type if possible.

    Reconstructed types: errors of perdure, types in `raises`, built-in types, and types that `module`, the module of
    the workflow, defines. Every replay can reconstruct these. Other types become `RecordedError`.
    """
    # Not getattr: the record may come from an import, and a module may execute code for an unknown attribute.
    local_type = getattr(sys.modules.get(module), "__dict__", {}).get(record.type)
    kinds = (*raises, PerdureError)
    if isinstance(local_type, type) and issubclass(local_type, Exception):
        kinds = (local_type, *kinds)
    original = _reconstruct(record, codec, kinds)
    if original is not None and not isinstance(original, StopIteration):
        return original
    builtin = _reconstruct_builtin(record)
    return RecordedError(record.type, record.message) if isinstance(builtin, StopIteration) else builtin


def _reconstruct(record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...]) -> BaseException | None:
    """Return the error with its original type, or None if its type is not in `raises` or its fields do not match."""
    if record.fields is None:
        return None
    for kind in _with_subclasses(raises):
        if f"{kind.__module__}:{kind.__qualname__}" == record.qualified:
            try:
                return decode_exception(codec, record.fields, kind)
            except Exception:  # a __new__ of the type, or a built-in one that needs other arguments, may raise anything
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


def _reconstruct_builtin(record: ErrorRecord) -> BaseException:
    kind = getattr(builtins, record.type, None)
    if record.qualified == f"builtins:{record.type}" and isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(record.message)
        except TypeError:
            pass  # UnicodeDecodeError and others require more arguments than a message.
    return RecordedError(record.type, record.message)
