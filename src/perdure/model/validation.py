"""Validation of names, ids, durations and counts, with error messages for invalid ones.

Pure checks, called before anything is stored. This module knows only `perdure.errors`.
"""

from __future__ import annotations

import math
from datetime import timedelta

from perdure.errors import InvalidArgument

MAX_NAME = 512
MAX_SECONDS = 1000 * 365 * 86_400.0  # A thousand years. Every store can hold such a timestamp.


def check_name(what: str, name: object) -> str:
    """Return a valid name. Raises `InvalidArgument` if it is not a string, empty, too long or not printable."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what} must be a string, not {type(name).__name__}")
    if not name:
        raise InvalidArgument(f"{what} is empty; it must have at least one character")
    if len(name) > MAX_NAME:
        raise InvalidArgument(
            f"{what} has {len(name)} characters; {MAX_NAME} is the maximum (it starts with {name[:40]!r})"
        )
    if not name.isprintable() and any(not c.isprintable() for c in name):
        raise InvalidArgument(f"{what} {name[:80]!r} has control or unprintable characters; remove them")
    return name


def check_seconds(what: str, duration: object, *, zero: bool = True) -> float:
    """Return a duration in seconds. Raises `InvalidArgument` if it is negative, not a number or too long."""
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)
    else:
        raise InvalidArgument(f"{what} must be seconds or a timedelta, not {type(duration).__name__}")
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero):
        raise InvalidArgument(f"{what} must be {'zero or more' if zero else 'more than zero'} seconds, not {seconds}")
    if seconds > MAX_SECONDS:
        raise InvalidArgument(f"{what} of {seconds:g} seconds is longer than the maximum of a thousand years")
    return seconds


def check_count(what: str, count: object, *, minimum: int = 1) -> int:
    """Return a whole number of at least `minimum`. Raises `InvalidArgument` otherwise."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise InvalidArgument(f"{what} must be a whole number, not {count!r}")
    if count < minimum:
        raise InvalidArgument(f"{what} must be at least {minimum}, not {count}")
    return count
