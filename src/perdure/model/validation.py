"""Validation of names, ids, tags, durations and counts, with error messages for invalid ones.

Pure checks, called before anything is stored. Callers use the returned value: a subclass of str or an enum member is
returned as its plain text, so that every store gets the same type. This module knows only `perdure.errors` and
`perdure.model.tags`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum

from perdure.errors import InvalidArgument
from perdure.model.tags import TagChanges, Tags, TagValue, encode_tags, merge_tags

MAX_NAME = 512
MAX_TEXT = 65_536  # characters of a location or a dead letter's id, which contain several names
MAX_SECONDS = 1000 * 365 * 86_400.0  # A thousand years. Every store can hold such a timestamp.
INTERNAL_PREFIX = "~"
MAX_TAGS = 32
MAX_TAG_BYTES = 8192  # of the stored form of all tags of a run
RESERVED_TAG_PREFIX = "perdure."
MAX_COUNT = 2**63 - 1  # the largest integer of every store


def check_name(what: str, name: object) -> str:
    """Return a valid name. Raises `InvalidArgument` if it is not a string, empty, too long or not printable."""
    return _check_printable(what, name, MAX_NAME)


def check_public_name(what: str, name: object) -> str:
    """Return a valid name of a workflow, queue or pool that a user chooses. A leading tilde is reserved."""
    checked = check_name(what, name)
    if is_internal(checked):
        raise InvalidArgument(f"{what} must not begin with '~', which perdure reserves for itself, not {checked!r}")
    return checked


def check_text(what: str, text: object) -> str:
    """Return a valid id or location that perdure built from names. Raises `InvalidArgument` as `check_name` does."""
    return _check_printable(what, text, MAX_TEXT)


def is_internal(name: str) -> bool:
    """Return whether a workflow, pool or queue with this name is perdure's own."""
    return name.startswith(INTERNAL_PREFIX)


def _check_printable(what: str, given: object, max_length: int) -> str:
    text = given if type(given) is str else _plain_text(what, given)
    if not text:
        raise InvalidArgument(f"{what} is empty; it must have at least one character")
    if len(text) > max_length:
        raise InvalidArgument(
            f"{what} has {len(text)} characters; {max_length} is the maximum (it starts with {text[:40]!r})"
        )
    if not text.isprintable():
        raise InvalidArgument(f"{what} {text[:80]!r} has control or unprintable characters; remove them")
    return text


def _plain_text(what: str, given: object) -> str:
    """Return the text of a str, of a subclass of str, or of an enum member whose value is one."""
    if isinstance(given, Enum) and not isinstance(given, str):
        given = given.value
    if not isinstance(given, str):
        raise InvalidArgument(f"{what} must be a string, not {type(given).__name__}")
    return str.__str__(given)


def check_tags(tags: Tags | None) -> dict[str, TagValue]:
    """Return validated tags. A value that is text may be empty; a time is returned in UTC."""
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise InvalidArgument(f"tags must be a dict of tags, not {type(tags).__name__}")
    if len(tags) > MAX_TAGS:
        raise InvalidArgument(f"a run has at most {MAX_TAGS} tags, not {len(tags)}; use fewer")
    checked: dict[str, TagValue] = {}
    for given, value in tags.items():
        key = check_name("a tag's key", given)
        checked[key] = check_tag(key, value)
    size = len(encode_tags(checked))
    if size > MAX_TAG_BYTES:
        raise InvalidArgument(f"the tags of a run have at most {MAX_TAG_BYTES} bytes, not {size}; use shorter ones")
    return checked


def check_tag(key: str, value: object) -> TagValue:
    """Return the valid value of one tag. Raises `InvalidArgument` if it is of another type, too long or too large."""
    what = f"the value of tag {key!r}"
    if isinstance(value, Enum) and not isinstance(value, str):
        value = value.value
    if isinstance(value, str):
        text = value if type(value) is str else str.__str__(value)
        return check_name(what, text) if text else text
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return check_count(what, value, minimum=-MAX_COUNT)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidArgument(f"{what} must be a finite number, not {value}")
        return float(value)
    if isinstance(value, datetime):
        return _check_tag_time(what, value)
    raise InvalidArgument(
        f"{what} must be text, a number, a bool or an aware datetime, not {describe_value(value)}; convert it"
    )


def _check_tag_time(what: str, time: datetime) -> datetime:
    seconds = check_time(what, time)
    try:
        return datetime.fromtimestamp(seconds, UTC)  # as it comes back from a store
    except (OverflowError, ValueError, OSError):
        raise InvalidArgument(f"{what} must be a time of the years 1 to 9999 in UTC, not {time!r}") from None


def check_tag_changes(given: TagChanges | None, named: TagChanges, *, tags: Tags) -> dict[str, TagValue | None]:
    """Return validated changes of a run's tags, from a dict and from keyword arguments.

    `tags` are those that the run has. Raises `InvalidArgument` if a key is reserved, or the run would have too many.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgument(f"tags must be a dict of tags, not {type(given).__name__}")
    changes = {**(given or {}), **named}
    if not changes:
        raise InvalidArgument("tag was given no tags; name at least one, as in tag(stage='review')")
    checked = {check_name("a tag's key", key): value for key, value in changes.items()}
    refuse_reserved_tags(checked)
    checked = {key: None if value is None else check_tag(key, value) for key, value in checked.items()}
    check_tags(merge_tags(tags, checked))
    return checked


def refuse_reserved_tags(keys: Iterable[str]) -> None:
    """Raise `InvalidArgument` if one of these keys is reserved for perdure."""
    for key in keys:
        if key.startswith(RESERVED_TAG_PREFIX):
            raise InvalidArgument(f"tags that begin with {RESERVED_TAG_PREFIX!r} are reserved, so {key!r} is refused")


def check_seconds(what: str, duration: object, *, zero: bool = True) -> float:
    """Return a duration in seconds. Raises `InvalidArgument` if it is negative, not a number or too long."""
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    else:
        seconds = _to_float(f"{what} must be seconds or a timedelta", duration)
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero):
        raise InvalidArgument(f"{what} must be {'zero or more' if zero else 'more than zero'} seconds, not {seconds}")
    if seconds > MAX_SECONDS:
        raise InvalidArgument(f"{what} of {seconds:g} seconds is longer than the maximum of a thousand years")
    return seconds


def check_number(what: str, number: object, minimum: float, maximum: float = math.inf) -> float:
    """Return a finite number between `minimum` and `maximum`. Raises `InvalidArgument` otherwise."""
    value = _to_float(f"{what} must be a number", number)
    if not minimum <= value <= maximum or not math.isfinite(value):
        bounds = f"at least {minimum:g}" if maximum == math.inf else f"between {minimum:g} and {maximum:g}"
        raise InvalidArgument(f"{what} must be {bounds}, not {value}")
    return value


def check_time(what: str, time: object) -> float:
    """Return a time in seconds since the epoch, from an aware datetime or a number. Raises `InvalidArgument`."""
    if not isinstance(time, datetime):
        return check_number(what, time, -MAX_SECONDS, 10 * MAX_SECONDS)
    if time.utcoffset() is None:
        raise InvalidArgument(f"{what} must be an aware datetime (with a timezone), not {time!r}")
    return time.timestamp()


def check_count(what: str, count: object, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Return a whole number from `minimum` to `maximum`. Raises `InvalidArgument` otherwise."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise InvalidArgument(f"{what} must be a whole number, not {describe_value(count)}")
    if count < minimum:
        raise InvalidArgument(f"{what} must be at least {minimum}, not {describe_value(count)}")
    if count > maximum:
        raise InvalidArgument(f"{what} must be at most {maximum}, not {describe_value(count)}")
    return int(count)


def check_optional_count(what: str, count: object, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int | None:
    """Return a whole number as `check_count` does, or None."""
    return None if count is None else check_count(what, count, minimum=minimum, maximum=maximum)


def describe_value(value: object) -> str:
    """Return a value for an error message: its repr, cut to 200 characters, or its type if it has no repr."""
    try:
        text = repr(value)
    except Exception:  # Python refuses the repr of an integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _to_float(expected: str, number: object) -> float:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise InvalidArgument(f"{expected}, not {type(number).__name__}")
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
