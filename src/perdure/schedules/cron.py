"""Cron expressions: parse, refuse with the field's name, find the next match. Wraps the library cronsim.

Five fields (minute, hour, day of month, month, day of week), or six with seconds last. Days and months may have names;
`L` is the last day of a month, `LW` its last weekday, `5L` the last Friday and `5#2` the second one. `@hourly`,
`@daily`, `@weekly`, `@monthly` and `@yearly` are short for an expression.

Rules for daylight saving time are those of Debian's cron. A rule with a fixed minute and hour fires once per day: at
the first of two equal local times, and right after the gap if the local time does not exist. Hourly and finer rules,
and all rules with seconds, follow real time. This module returns seconds since the epoch and knows no schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

from cronsim import CronSim, CronSimError

from perdure.errors import InvalidArgument
from perdure.model.validation import describe_value
from perdure.schedules.time_zones import load_zone

SHORT_NAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week", "second")
MAX_LENGTH = 512
CHANGE_STEP_SECONDS = 6 * 3600  # no zone has changed its offset twice in so short a time


class CronExpression:
    """One parsed cron expression in a time zone."""

    def __init__(self, text: str, zone_name: str) -> None:
        self._zone = load_zone(zone_name)
        self._search = CronSim(_seconds_first(text), datetime.fromtimestamp(0, UTC).astimezone(self._zone))
        self._has_seconds = text.count(" ") == 5

    def next_after(self, time: float) -> float | None:
        """Return the first match later than this time; None if there is none in the next 50 years."""
        try:
            is_fixed = self._search.fixup_tz is not None
            return self._next_local_time(time) if is_fixed else self._next_in_real_time(math.floor(time))
        except (OverflowError, ValueError):  # beyond the last year of a datetime
            return None

    def _next_local_time(self, time: float) -> float | None:
        """Search by local time, which may be skipped or repeated; cronsim applies the rules of Debian's cron."""
        for found in self._start_search(self._local(time).replace(tzinfo=None)):
            at = found.timestamp()
            if at > time:  # not the first of two equal local times when the second one has begun
                return at
        return None

    def _next_in_real_time(self, time: int) -> float | None:
        """Search with the present offset from UTC, and again from each change of the offset on.

        cronsim itself steps by whole hours here, and misses matches where clocks are moved by half an hour.
        """
        while True:
            local = self._local(time)
            found = next(self._start_search(local.replace(tzinfo=None)), None)
            if found is None:
                return None
            at = time + round((found - local.replace(tzinfo=None)).total_seconds())
            change = None if self._zone is UTC else self._first_change(time, at)
            if change is None:
                return float(at)
            if self._is_match(self._local(change)):
                return float(change)
            time = change

    def _first_change(self, start: int, end: int) -> int | None:
        """Return the first second in (start, end] at which the offset from UTC has changed, or None."""
        offset, before = self._local(start).utcoffset(), start
        while before < end:
            after = min(before + CHANGE_STEP_SECONDS, end)
            if self._local(after).utcoffset() != offset:
                while after - before > 1:
                    middle = (before + after) // 2
                    before, after = (middle, after) if self._local(middle).utcoffset() == offset else (before, middle)
                return after
            before = after
        return None

    def _start_search(self, local: datetime) -> CronSim:
        """Return an iterator over the matches after a local time."""
        search = copy.copy(self._search)  # it has parsed the expression
        search.dt = local.replace(microsecond=0)
        return search

    def _local(self, time: float) -> datetime:
        return datetime.fromtimestamp(time, UTC).astimezone(self._zone)

    def matches(self, time: float) -> bool:
        """Return whether the local time matches all fields. Without a field for seconds, any second matches."""
        local = self._local(time)
        return self._is_match(local if self._has_seconds else local.replace(second=0))

    def _is_match(self, local: datetime) -> bool:
        search = self._search
        return (
            local.second in search.seconds
            and local.minute in search.minutes
            and local.hour in search.hours
            and local.month in search.months
            and search.match_day(local.date())
        )

    def explain(self) -> str:
        """Return the expression as an English sentence."""
        return self._search.explain()


@lru_cache(maxsize=4096)
def load_cron(text: str, zone_name: str) -> CronExpression:
    """Return a checked expression, parsed."""
    return CronExpression(text, zone_name)


def check_cron(expression: object, what: str = "cron") -> str:
    """Return a valid expression, with single spaces and without a short name. Raises `InvalidArgument`."""
    if not isinstance(expression, str):
        raise InvalidArgument(f"{what} must be a cron expression, not {describe_value(expression)}")
    text = " ".join(expression.split())
    if text.startswith("@"):
        if text.lower() not in SHORT_NAMES:
            names = ", ".join(SHORT_NAMES)
            raise InvalidArgument(f"{what} {describe_value(expression)} is not a short name; use one of {names}")
        return SHORT_NAMES[text.lower()]
    fields = text.split(" ")
    if len(fields) not in (5, 6) or len(text) > MAX_LENGTH:
        raise InvalidArgument(
            f"{what} {describe_value(expression)} has {len(fields) if text else 0} fields; use 5 (minute, hour, "
            "day-of-month, month, day-of-week) or 6, with seconds last"
        )
    try:
        search = CronSim(_seconds_first(text), datetime.fromtimestamp(0, UTC))
    except (CronSimError, AssertionError, ValueError, TypeError) as error:
        raise InvalidArgument(_describe_invalid(what, expression, fields, error)) from None
    if next(search, None) is None:
        raise InvalidArgument(f"{what} {describe_value(expression)} never fires: no date matches all of its fields")
    return text


def check_crons(expressions: object, what: str = "cron") -> tuple[str, ...]:
    """Return the valid expressions of one expression or a list, whose matches are united."""
    if isinstance(expressions, str) or not isinstance(expressions, Sequence):
        return (check_cron(expressions, what),)
    if not expressions:
        raise InvalidArgument(f"{what} is an empty list; it must have at least one cron expression")
    return tuple(dict.fromkeys(check_cron(each, what) for each in expressions))


def explain_cron(text: str) -> str:
    """Return a valid expression as an English sentence."""
    return load_cron(text, "UTC").explain()


def _seconds_first(text: str) -> str:
    """Return the expression as cronsim reads it: with the field for seconds, if there is one, first."""
    fields = text.split(" ")
    return " ".join([fields[5], *fields[:5]]) if len(fields) == 6 else text


def _describe_invalid(what: str, expression: object, fields: list[str], error: Exception) -> str:
    """Return an error message that names the field which cannot be parsed."""
    text = describe_value(expression)
    name = str(error).removeprefix("Bad ")
    if name not in FIELDS:
        return f"{what} {text} is not a cron expression: {error}"
    given = fields[FIELDS.index(name)]
    if name == "day-of-month" and _is_valid(" ".join([*fields[:3], "*", "*"])):
        return f"{what} {text} never fires: no month in field month {fields[3]!r} has day-of-month {given}"
    return f"{what} {text} has an invalid field {name}: {given!r}"


def _is_valid(text: str) -> bool:
    try:
        CronSim(text, datetime.fromtimestamp(0, UTC))
    except CronSimError:
        return False
    return True
