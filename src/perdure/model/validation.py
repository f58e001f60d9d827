"""What names, ids and durations may look like, and the words that refuse the others.

Pure checks at the edge: a call that fails here has stored nothing.
"""

from __future__ import annotations

import math
from datetime import timedelta

from perdure.errors import InvalidArgument

MAX_NAME = 512
MAX_SECONDS = 1000 * 365 * 86_400.0  # a thousand years: further than any timestamp that stores can hold


def check_name(what: str, name: object) -> str:
    """Refuse what is no usable name: not a string, empty, too long, or with control characters in it."""
    if not isinstance(name, str):
        raise InvalidArgument(f"{what} must be a string, not {type(name).__name__}")
    if not name:
        raise InvalidArgument(f"{what} is empty; give it at least one character")
    if len(name) > MAX_NAME:
        raise InvalidArgument(f"{what} has {len(name)} characters; {MAX_NAME} is the most (it begins {name[:40]!r})")
    if not name.isprintable() and any(not c.isprintable() for c in name):
        raise InvalidArgument(f"{what} {name[:80]!r} has control or unprintable characters; leave them out")
    return name


def check_seconds(what: str, duration: object, *, zero: bool = True) -> float:
    """A duration in seconds; refuses what is negative, not a number, or longer than a thousand years."""
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)
    else:
        raise InvalidArgument(f"{what} must be seconds or a timedelta, not {type(duration).__name__}")
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero):
        raise InvalidArgument(f"{what} must be {'zero or more' if zero else 'more than zero'} seconds, not {seconds}")
    if seconds > MAX_SECONDS:
        raise InvalidArgument(f"{what} of {seconds:g} seconds is longer than a thousand years")
    return seconds


def check_count(what: str, count: object, *, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise InvalidArgument(f"{what} must be a whole number, not {count!r}")
    if count < least:
        raise InvalidArgument(f"{what} must be at least {least}, not {count}")
    return count
