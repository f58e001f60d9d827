"""Replies to requests and their rejections, as the values that a run publishes for the caller of `request`.

Both are published under keys of the request's id: `~reply/<id>` with the encoded value, `~rejected/<id>` with a
`Rejection`. The keys differ so that a caller of an earlier version never takes a rejection for a reply. This module
knows no run and no store.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.codec.failures import error_from_record, error_to_record
from perdure.errors import InvalidArgument, RecordedError, RequestRejected
from perdure.model.records import ErrorRecord, Message, PublishedValue
from perdure.model.validation import describe_value

REPLY, REJECTED = "~reply/", "~rejected/"
RETENTION_SECONDS = 7 * 86_400.0
"""How long the caller of a request can fetch the reply."""
PLAIN_TEXT = RequestRejected.__name__
"""Type of the error of a request that was rejected with a text instead of an exception."""


class Rejection(Struct, frozen=True, omit_defaults=True):
    """A rejected request: the name of its event, when it was rejected, and why."""

    event: str
    at: float
    error: ErrorRecord


def request_id(message: Message) -> str:
    """Return the id of a request, under which its reply is published."""
    return message.event_id or message.id


def build_reply(message: Message, value: bytes, now: float) -> PublishedValue:
    """Return the published value of a reply."""
    return PublishedValue(f"{REPLY}{request_id(message)}", value, now + RETENTION_SECONDS)


def build_rejection(message: Message, error: ErrorRecord, now: float) -> PublishedValue:
    """Return the published value of a rejection."""
    rejection = msgspec.json.encode(Rejection(message.name, now, error))
    return PublishedValue(f"{REJECTED}{request_id(message)}", rejection, now + RETENTION_SECONDS)


def rejection_error(error: BaseException | str, codec: Codec) -> ErrorRecord:
    """Return the error of a rejection as data: its type and message. The traceback stays in the worker."""
    if isinstance(error, str):
        return ErrorRecord(PLAIN_TEXT, error)
    if not isinstance(error, BaseException):
        raise InvalidArgument(f"a request is rejected with an exception or a text, not with {describe_value(error)}")
    return replace(error_to_record(error, codec), traceback="")


def describe_rejection(error: ErrorRecord) -> str:
    """Return why a request was rejected, for people to read."""
    return error.message if error.type == PLAIN_TEXT else f"{error.type}: {error.message}"


def read_rejections(values: Iterable[PublishedValue]) -> dict[str, Rejection]:
    """Return the rejections among the values that a run has published, by the id of the request."""
    found = (each for each in values if each.key.startswith(REJECTED))
    return {each.key.removeprefix(REJECTED): msgspec.json.decode(each.value, type=Rejection) for each in found}


def find_reply(run_id: str, id: str, values: Iterable[PublishedValue], codec: Codec) -> bytes | None:
    """Return the encoded reply to a request; None if the run has not replied. Raises `RequestRejected`.

    A run that was rewound may have published both; the later one counts.
    """
    keys = (f"{REPLY}{id}", f"{REJECTED}{id}")
    found = max((each for each in values if each.key in keys), key=lambda each: each.expires_at or 0.0, default=None)
    if found is None:
        return None
    if found.key.startswith(REJECTED):
        raise _to_exception(run_id, msgspec.json.decode(found.value, type=Rejection), codec)
    return found.value


def _to_exception(run_id: str, rejection: Rejection, codec: Codec) -> RequestRejected:
    error = rejection.error
    raised = RequestRejected(run_id, error.type, error.message)
    cause = error_from_record(error, codec)
    if not isinstance(cause, RecordedError):
        raised.__cause__ = cause
    return raised
