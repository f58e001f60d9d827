"""Moments in order, each of one id: which come first, without looking at all the others."""

from __future__ import annotations

import heapq


class DueQueue:
    """A heap with lazy deletion. An id has one moment; what it had before stays in the heap until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._moments: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._moments)

    def put(self, id: str, at: float | None) -> None:
        """Set the id's moment; None takes it out."""
        if at is None:
            self._moments.pop(id, None)
        elif self._moments.get(id) != at:
            self._moments[id] = at
            heapq.heappush(self._heap, (at, id))
        if len(self._heap) > 2 * len(self._moments) + 64:
            self._heap = [(at, id) for id, at in self._moments.items()]
            heapq.heapify(self._heap)

    def head(self) -> tuple[float, str] | None:
        """The earliest moment and its id; equal moments in order of id."""
        self._drop_stale()
        return self._heap[0] if self._heap else None

    def _drop_stale(self) -> None:
        while self._heap and self._moments.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
