"""TimerQueue: sleeps, asyncio timers and retries of one run, ordered by due time, then by creation."""

from __future__ import annotations

from heapq import heappop, heappush


class TimerQueue:
    """A heap with lazy removal: adding, removing and finding the earliest cost the same with one timer or a thousand.

    `due` are the active timers by location. Callers test it directly, once per turn, for whether there are any.
    """

    __slots__ = ("_count", "_heap", "due")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self.due: dict[str, tuple[float, int]] = {}
        self._count = 0

    def set(self, location: str, due_at: float) -> None:
        """Add a timer, or move the one at this location."""
        self._count += 1
        self.due[location] = (due_at, self._count)
        heappush(self._heap, (due_at, self._count, location))

    def remove(self, location: str) -> None:
        """Remove the timer at this location, if there is one."""
        self.due.pop(location, None)

    def earliest(self) -> float | None:
        """Return when the next timer is due."""
        while self._heap:
            due_at, count, location = self._heap[0]
            if self.due.get(location) == (due_at, count):
                return due_at
            heappop(self._heap)  # removed or moved
        return None

    def pop_due(self, now: float) -> str | None:
        """Remove the earliest timer that is due, and return its location."""
        due_at = self.earliest()
        if due_at is None or due_at > now:
            return None
        location = heappop(self._heap)[2]
        del self.due[location]
        return location

    def pending(self) -> list[tuple[float, str]]:
        """Return all timers, earliest first."""
        return sorted((due_at, location) for location, (due_at, _) in self.due.items())

    def __contains__(self, location: str) -> bool:
        return location in self.due
