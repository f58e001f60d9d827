"""Priority queue of due times: find the earliest id without scanning the others."""

from __future__ import annotations

import heapq


class DueQueue:
    """A heap with lazy deletion. An id has one due time; a replaced time stays in the heap until it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due_at)

    def put(self, id: str, at: float | None) -> None:
        """Set the due time of this id; None removes the id."""
        if at is None:
            self._due_at.pop(id, None)
        elif self._due_at.get(id) != at:
            self._due_at[id] = at
            heapq.heappush(self._heap, (at, id))
        if len(self._heap) > 2 * len(self._due_at) + 64:
            self._heap = [(at, id) for id, at in self._due_at.items()]
            heapq.heapify(self._heap)

    def head(self) -> tuple[float, str] | None:
        """Return the earliest due time and its id, or None. Equal times are in order of id."""
        self._drop_stale()
        return self._heap[0] if self._heap else None

    def _drop_stale(self) -> None:
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
