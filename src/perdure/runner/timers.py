"""What is due when: sleeps, asyncio timers and retries of one run, ordered by (due, creation)."""

from __future__ import annotations

from heapq import heappop, heappush


class TimerQueue:
    """A heap with lazy removal: adding, removing and asking for the earliest cost the same with one or a thousand.

    `due` are those that stand, by location; who wants to know whether there are any asks it directly, each turn.
    """

    __slots__ = ("_heap", "_made", "due")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self.due: dict[str, tuple[float, int]] = {}
        self._made = 0

    def set(self, location: str, due_at: float) -> None:
        self._made += 1
        self.due[location] = (due_at, self._made)
        heappush(self._heap, (due_at, self._made, location))

    def remove(self, location: str) -> None:
        self.due.pop(location, None)

    def earliest(self) -> float | None:
        """When the next one is due."""
        while self._heap:
            due_at, made, location = self._heap[0]
            if self.due.get(location) == (due_at, made):
                return due_at
            heappop(self._heap)
        return None

    def pop_due(self, now: float) -> str | None:
        """Take the earliest one that is due."""
        due_at = self.earliest()
        if due_at is None or due_at > now:
            return None
        location = heappop(self._heap)[2]
        del self.due[location]
        return location

    def pending(self) -> list[tuple[float, str]]:
        """All of them, earliest first."""
        return sorted((due_at, location) for location, (due_at, _) in self.due.items())

    def __contains__(self, location: str) -> bool:
        return location in self.due
