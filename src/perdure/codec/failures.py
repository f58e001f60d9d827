"""Convert exceptions to `ErrorRecord` and back.

A workflow sees every error as reconstructed from its record, also the first time, so that it takes the same branch on
every replay. This module knows no run and no store.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from perdure.codec import Codec
from perdure.codec.exceptions import (
    decode_exception,
    decode_fields,
    decode_with_message,
    encode_exception,
    fields_of,
)
from perdure.errors import (
    InvalidPayload,
    PerdureError,
    RecordedError,
    RollbackError,
    StepFailed,
    StepInterrupted,
    WorkflowMisuse,
)
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
    """Return the record of an error. Fields are recorded for types in `raises` and for `RollbackError`.

    The record names the fields that cannot be encoded. It never raises, whatever the methods of the error do.
    """
    kind, fields = type(error), None
    dropped: tuple[str, ...] = ()
    is_rollback = isinstance(error, RollbackError)
    if is_rollback or (raises and isinstance(error, raises)):
        with contextlib.suppress(Exception):  # what a property or a method of the error raises
            fields, dropped = encode_exception(codec, error)
    return ErrorRecord(
        type=kind.__name__,
        message=message_of(error),
        traceback=_traceback_of(error),
        location=location,
        qualified=f"{kind.__module__}:{kind.__qualname__}",
        fields=fields,
        dropped=dropped,
        rollback=is_rollback,
    )


def error_to_record_lossy(error: BaseException, codec: Codec, location: str | None = None) -> ErrorRecord:
    """Return the record of an error with its fields, whatever its type."""
    return error_to_record(error, codec, raises=(type(error),), location=location)


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
    """Return the exception that a workflow sees for a failed step.

    It is the original one for types in `raises`, a `RollbackError` for one, and `StepFailed` for all others. Records of
    earlier versions do not mark a `RollbackError`; their workflows have seen `StepFailed`.
    """
    if record.type == INTERRUPTED and not record.qualified:
        return StepInterrupted(location, attempts)
    original = reconstruct_error(record, codec, (*raises, RollbackError) if record.rollback else raises)
    if original is not None and not isinstance(original, StopIteration):  # Cannot be raised into a coroutine.
        return original
    if record.rollback:  # of a class that this code does not have
        return RollbackError(record.message)
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
    original = reconstruct_error(record, codec, kinds)
    if original is not None and not isinstance(original, StopIteration):
        return original
    builtin = _reconstruct_builtin(record)
    return RecordedError(record.type, record.message) if isinstance(builtin, StopIteration) else builtin


def read_fields(record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...] = ()) -> dict[str, Any]:
    """Return the recorded fields of an error: typed if its type is in `raises`, else plain data; {} if it has none."""
    original = reconstruct_error(record, codec, raises)
    if original is not None:
        return fields_of(original)
    try:
        return {} if record.fields is None else decode_fields(codec, record.fields)
    except InvalidPayload:
        return {}


def reconstruct_error(
    record: ErrorRecord, codec: Codec, raises: tuple[type[BaseException], ...]
) -> BaseException | None:
    """Return the error with its original type, or None if its type is not in `raises` or its fields do not match."""
    kind = None if record.fields is None else _find_type(record.qualified, raises)
    if record.fields is None or kind is None:
        return None
    try:
        return _decode_error(record, record.fields, codec, kind)
    except Exception:  # a __new__ of the type, or a built-in one that needs other arguments, may raise anything
        return None


def _find_type(qualified: str, kinds: tuple[type[BaseException], ...]) -> type[BaseException] | None:
    """Return the type with this module and name among these types and their subclasses, or None.

    The module of a program that is started as a script is `__main__`; other processes import it under its own name.
    """
    module, _, name = qualified.partition(":")
    of_script = None
    for kind in _with_subclasses(kinds):
        if kind.__qualname__ == name:
            if kind.__module__ == module:
                return kind
            if of_script is None and "__main__" in (kind.__module__, module):
                of_script = kind
    return of_script


def _decode_error(record: ErrorRecord, fields: bytes, codec: Codec, kind: type[BaseException]) -> BaseException:
    """Return the recorded error as an instance of `kind`, with the recorded message."""
    error = decode_exception(codec, fields, kind)
    if _text_of(error) != record.message:
        with contextlib.suppress(Exception):  # what a metaclass or __init_subclass__ raises
            error = decode_with_message(codec, fields, kind, record.message)
    return error


def _with_subclasses(kinds: tuple[type[BaseException], ...]) -> Iterator[type[BaseException]]:
    """Yield these classes and all their subclasses, each before its own subclasses."""
    seen: set[Any] = set()
    queue = list(kinds)
    while queue:
        kind = queue.pop()
        if kind not in seen:
            seen.add(kind)
            yield kind
            queue.extend(kind.__subclasses__())


def _reconstruct_builtin(record: ErrorRecord) -> BaseException:
    kind = getattr(builtins, record.type, None)
    if record.qualified == f"builtins:{record.type}" and isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(record.message)
        except TypeError:
            pass  # UnicodeDecodeError and others require more arguments than a message.
    return RecordedError(record.type, record.message)
