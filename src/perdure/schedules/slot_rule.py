"""SlotRule: the time slots of a schedule, as a pure function of its spec. Also the names of slots and of their runs.

The slots after a time do not depend on where a search began, so workers that start to search at different times find
the same ones. Times are seconds since the epoch, in whole microseconds.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta

from perdure.model.schedule_records import ScheduleSpec
from perdure.schedules.cron import explain_cron, load_cron
from perdure.schedules.time_zones import load_zone

MICROSECONDS = 1_000_000
MAX_EXCLUDED = 100_000  # successive slots that `exclude` removes before a search ends
FIRST_WINDOW_SECONDS = 60.0


class SlotRule:
    """Finds the time slots of a spec."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self._spec = spec
        self._zone = load_zone(spec.tz)
        self._crons = [load_cron(text, spec.tz) for text in spec.cron]
        dates = [text for text in spec.exclude if is_date(text)]
        self._excluded_dates = frozenset(map(date.fromisoformat, dates))
        self._excluded_crons = [load_cron(text, spec.tz) for text in spec.exclude if text not in dates]

    def next_after(self, at: float) -> float | None:
        """Return the first slot later than this time; None if there is none."""
        start, end = self._spec.start_at, self._spec.end_at
        if start is not None and at < start:
            at = start - 1 / MICROSECONDS
        for _ in range(MAX_EXCLUDED):
            found = self._next_candidate(at)
            if found is None or (end is not None and found >= end):
                return None
            skip_to = self._end_of_exclusion(found)
            if skip_to is None:
                return found
            at = skip_to
        return None

    def between(self, after: float, until: float) -> Iterator[float]:
        """Yield the slots later than `after`, up to and including `until`."""
        at = self.next_after(after)
        while at is not None and at <= until:
            yield at
            at = self.next_after(at)

    def count(self, after: float, until: float, limit: int) -> int:
        """Return the number of slots in (after, until], at most `limit`."""
        return sum(1 for _, _ in zip(range(limit), self.between(after, until), strict=False))

    def latest(self, after: float, until: float, limit: int) -> list[float]:
        """Return the last slots of (after, until], at most `limit`, in order.

        Searches windows that double in length, so that a long time with many slots is not searched from its start.
        """
        window = FIRST_WINDOW_SECONDS
        while True:
            start = max(after, until - window)
            found = deque(self.between(start, until), maxlen=limit)
            if len(found) == limit or start <= after:
                return list(found)
            window *= 2

    def _next_candidate(self, at: float) -> float | None:
        """Return the first slot later than this time, without regard to bounds and exclusions."""
        spec = self._spec
        if spec.every is not None:
            return _next_multiple(at, spec.every, spec.start_at or 0.0)
        if spec.at:
            index = bisect_right(spec.at, at)
            return spec.at[index] if index < len(spec.at) else None
        return min((found for cron in self._crons if (found := cron.next_after(at)) is not None), default=None)

    def _end_of_exclusion(self, slot: float) -> float | None:
        """Return a time up to which all slots from this one on are excluded; None if this one is not."""
        if not self._excluded_dates and not self._excluded_crons:
            return None
        day = datetime.fromtimestamp(slot, UTC).astimezone(self._zone).date()
        if day in self._excluded_dates:
            next_day = datetime.combine(day + timedelta(days=1), time(), self._zone).timestamp()
            return max(slot, next_day - 1 / MICROSECONDS)
        return slot if any(cron.matches(slot) for cron in self._excluded_crons) else None


def _next_multiple(at: float, every: float, anchor: float) -> float:
    """Return the first anchor + n * every later than this time, for whole n >= 0."""
    origin, step = round(anchor * MICROSECONDS), round(every * MICROSECONDS)
    n = max(0, (round(at * MICROSECONDS) - origin) // step + 1)
    return (origin + n * step) / MICROSECONDS


def is_date(text: str) -> bool:
    """Return whether an item of `exclude` is a date, and not a cron expression."""
    return len(text) == 10 and text[4] == text[7] == "-"


def jitter_of(schedule: str, slot: float, jitter: float) -> float:
    """Return the seconds after the slot at which it fires: less than `jitter`, and the same on every worker."""
    if not jitter:
        return 0.0
    digest = hashlib.blake2b(f"{schedule}\0{slot_name(slot)}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56 * jitter


def slot_name(slot: float) -> str:
    """Return a time slot in ISO 8601, in UTC."""
    return datetime.fromtimestamp(slot, UTC).isoformat().replace("+00:00", "Z")


def slot_run_id(schedule: str, slot: float) -> str:
    """Return the id of the run of a slot."""
    return f"{schedule}/{slot_name(slot)}"


def floor_to_microseconds(at: float) -> float:
    """Return the time in whole microseconds, as all slots are."""
    return math.floor(at * MICROSECONDS) / MICROSECONDS


def describe_rule(spec: ScheduleSpec) -> str:
    """Return the rule of a spec as text: `cron "0 2 * * *" Europe/Berlin (At 02:00 every day)`."""
    if spec.every is not None:
        text = f"every {timedelta(seconds=spec.every)}" if spec.every >= 3600 else f"every {spec.every:g} s"
    elif spec.at:
        text = f"at {', '.join(map(slot_name, spec.at[:3]))}{' ...' if len(spec.at) > 3 else ''}"
    else:
        meanings = "; ".join(map(explain_cron, spec.cron))
        text = f"cron {', '.join(repr(each) for each in spec.cron)} {spec.tz} ({meanings})"
    parts = [text]
    if spec.jitter:
        parts.append(f"up to {spec.jitter:g} s later")
    if spec.start_at is not None:
        parts.append(f"from {slot_name(spec.start_at)}")
    if spec.end_at is not None:
        parts.append(f"before {slot_name(spec.end_at)}")
    if spec.exclude:
        parts.append(f"except {', '.join(repr(each) for each in spec.exclude)}")
    if spec.limit is not None:
        parts.append(f"{spec.limit} runs at most")
    return ", ".join(parts)
