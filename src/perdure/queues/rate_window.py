"""RateWindow: how many admissions a rate allows now. A sliding window, counted in 100 sub-windows.

An admission counts until its whole sub-window has left the interval. So the rate is never exceeded, and an admission is
at most one sub-window, 1 % of the interval, later than an exact log of all admissions would allow.

The time of an admission is that of the store, which commits it a little before or after the time of its plan. `slack`
is how much the two may differ, because the store refuses an admission that differs by more. An admission is recorded
at the end of its slack and compared with the beginning of that of the next one, so the bound holds for any difference.

A plan says how many runs an admission may take; fewer may be taken. The state therefore has only the sub-window of
the last admission; the number that was really taken comes from the store with the state.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from perdure.model.queue_records import RateLimit

SUB_WINDOWS = 100
MIN_SUB_WINDOW_SECONDS = 1e-6  # about the resolution of a clock


class _State(Struct, frozen=True, array_like=True):
    """The stored form. `counts` are pairs: the distance from the sub-window before, and the number of admissions."""

    width: float  # of a sub-window, in seconds
    last: int  # the sub-window that the last admission is recorded in
    counts: tuple[tuple[int, int], ...]


_DECODER = msgspec.msgpack.Decoder(_State)


class RateWindow:
    """The admissions of the last interval, as known before the next admission.

    `state` is what `encode` returned for the last admission, and `taken` the number of runs that it took. `now` is the
    time of the plan.
    """

    def __init__(self, rate: RateLimit, state: bytes, taken: int, now: float, slack: float = 0.0) -> None:
        self._rate = rate
        self._width = max(rate.per / SUB_WINDOWS, MIN_SUB_WINDOW_SECONDS)
        self._slack = slack
        counts = _load(state, taken, self._width)
        self._current = self._sub_window(now + slack)
        latest = max(counts, default=self._current)
        if latest > self._current + 1:  # the store's clock was set back: everything counts as if it were admitted now
            counts = {self._current: sum(counts.values())}
        self._current = max(self._current, *counts) if counts else self._current
        begin = now - slack - rate.per
        self._counts = {at: count for at, count in sorted(counts.items()) if self._end(at) > begin}

    @property
    def count(self) -> int:
        """The number of admissions that count now."""
        return sum(self._counts.values())

    @property
    def free(self) -> int:
        """The number of further admissions that the rate allows now."""
        return max(0, self._rate.limit - self.count)

    def free_at(self, admitted: int = 0) -> float | None:
        """Return when the rate allows another admission after so many now; None if it allows one now."""
        counts = self._counts
        if admitted:
            counts = {**counts, self._current: counts.get(self._current, 0) + admitted}
        excess = sum(counts.values()) - self._rate.limit + 1
        for at, count in counts.items():
            if excess <= 0:
                break
            excess -= count
            free_at = self._end(at) + self._rate.per + self._slack
            if excess <= 0:
                return math.nextafter(free_at, math.inf)
        return None

    def empty_at(self, admitted: int) -> float:
        """Return when no admission counts any more, after so many now."""
        latest = self._current if admitted else max(self._counts, default=self._current)
        return self._end(latest) + self._rate.per + self._slack

    def encode(self) -> bytes:
        """Return the state to store with an admission now; the store adds how many runs it took."""
        distances: list[tuple[int, int]] = []
        before = 0
        for at, count in self._counts.items():
            distances.append((at - before, count))
            before = at
        return msgspec.msgpack.encode(_State(self._width, self._current, tuple(distances)))

    def _sub_window(self, time: float) -> int:
        return math.floor(time / self._width)

    def _end(self, sub_window: int) -> float:
        return (sub_window + 1) * self._width


def _load(state: bytes, taken: int, width: float) -> dict[int, int]:
    """Return the stored counts by sub-window of this width, with the numbers that the last admission took.

    If the interval of the rate has changed, admissions move to the sub-window in which their old one ends.
    """
    if not state:
        return {}
    stored = _DECODER.decode(state)
    counts: dict[int, int] = {}
    at = 0
    for distance, count in stored.counts:
        at += distance
        counts[at] = counts.get(at, 0) + count
    if taken > 0:
        counts[stored.last] = counts.get(stored.last, 0) + taken
    if stored.width == width:
        return counts
    converted: dict[int, int] = {}
    for sub_window, count in counts.items():
        moved = math.ceil((sub_window + 1) * stored.width / width) - 1
        converted[moved] = converted.get(moved, 0) + count
    return converted
