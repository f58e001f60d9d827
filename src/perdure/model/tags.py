"""Tags of runs: typed values, their stored form, and the rows by which stores index them.

Tags are stored as a JSON object. Text, numbers and booleans are themselves; a datetime is an object with one key, so
that it differs from text. This module knows no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

TagValue = str | int | float | bool | datetime
if TYPE_CHECKING:
    Tags = Mapping[str, TagValue]
else:  # msgspec cannot tell text from times, and refuses the union in a record that it decodes
    Tags = Mapping[str, Any]
TagChanges = Mapping[str, TagValue | None]
"""Tags to set; None removes one."""

TIME_KEY = "$time"  # of the stored form of a datetime: seconds since the epoch


class IndexedTag(Struct, frozen=True):
    """A tag as stores index it. Equality compares `text` (and `kind`, if the type is given); ranges compare `number`.

    `text` is canonical: 500 and 500.0 are "500", True is "true", a time is ISO 8601 in UTC. `number` is None for text
    and booleans, and seconds since the epoch for a time.
    """

    key: str
    kind: str  # "text", "number", "boolean" or "time"
    text: str
    number: float | None = None


def index_tags(tags: Tags) -> list[IndexedTag]:
    """Return the index rows of a run's tags, in the order of the tags."""
    return [index_tag(key, value) for key, value in tags.items()]


def index_tag(key: str, value: TagValue) -> IndexedTag:
    """Return the index row of one tag."""
    if isinstance(value, bool):
        return IndexedTag(key, "boolean", "true" if value else "false")
    if isinstance(value, str):
        return IndexedTag(key, "text", value)
    if isinstance(value, datetime):
        seconds = value.timestamp()
        return IndexedTag(key, "time", canonical_time(seconds), seconds)
    return IndexedTag(key, "number", canonical_number(value), float(value))


def canonical_number(number: int | float) -> str:
    """Return the text of a number, equal for equal numbers of different types."""
    return str(int(number)) if isinstance(number, int) or number.is_integer() else repr(number)


def canonical_time(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def encode_tags(tags: Tags) -> bytes:
    """Return the stored form of tags."""
    return msgspec.json.encode({key: _stored(value) for key, value in tags.items()})


def decode_tags(stored: bytes | str) -> dict[str, TagValue]:
    """Return tags from their stored form."""
    decoded: dict[str, Any] = msgspec.json.decode(stored)
    return {key: _loaded(value) for key, value in decoded.items()}


def encode_tag_changes(changes: TagChanges) -> bytes:
    """Return changes of tags as bytes: the body of a message, or a part of an entry."""
    return msgspec.json.encode({key: None if value is None else _stored(value) for key, value in changes.items()})


def decode_tag_changes(stored: bytes | str) -> dict[str, TagValue | None]:
    """Return changes of tags from their encoded form."""
    decoded: dict[str, Any] = msgspec.json.decode(stored)
    return {key: None if value is None else _loaded(value) for key, value in decoded.items()}


def merge_tags(tags: Tags, changes: TagChanges) -> dict[str, TagValue]:
    """Return the tags after these changes: values are set, None removes a tag."""
    return {key: value for key, value in {**tags, **changes}.items() if value is not None}


def _stored(value: TagValue) -> Any:
    return {TIME_KEY: value.timestamp()} if isinstance(value, datetime) else value


def _loaded(value: Any) -> TagValue:
    if isinstance(value, dict):
        return datetime.fromtimestamp(value[TIME_KEY], UTC)
    checked: TagValue = value
    return checked
