"""Values of the public API: the outcome of a run and a recorded error. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from perdure.codec import Codec
from perdure.codec.failures import read_fields
from perdure.model.records import ErrorRecord, RunStatus

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ErrorView:
    """A recorded error of a run or an entry, as data.

    `fields` are the attributes of an exception whose type is declared in `raises`; `dropped` names those that could not
    be encoded.
    """

    type: str
    message: str
    traceback: str = ""
    location: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    cause: ErrorView | None = None
    retry_after: float | None = None


def error_view(
    record: ErrorRecord | None, codec: Codec, raises: tuple[type[BaseException], ...] = ()
) -> ErrorView | None:
    """Return the view of an error, if there is one. Fields of a type in `raises` are typed, others are plain data."""
    if record is None:
        return None
    return ErrorView(
        record.type,
        record.message,
        record.traceback,
        record.location,
        read_fields(record, codec, raises),
        record.dropped,
        error_view(record.cause, codec),
        record.retry_after,
    )


@dataclass(frozen=True, slots=True)
class Complete(Generic[R_co]):
    """The outcome of an ended run: status, and value or error; `reason` says why it was cancelled, if given."""

    status: RunStatus
    value: R_co | None = None
    error: ErrorView | None = None
    reason: str | None = None
