"""Small values of the public API that say how work is structured: what a loop's body returns, what limits a queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.names import check_count, check_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Break(Generic[T]):
    """Returned by a loop's body: the loop ends with this value."""

    value: T = None  # type: ignore[assignment]  # the default for a loop without state


@dataclass(frozen=True, slots=True)
class Continue(Generic[T]):
    """Returned by a loop's body: go on with this state."""

    state: T = None  # type: ignore[assignment]  # the default for a loop without state


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """Limits that hold for all runs started on a queue, across the fleet."""

    name: str
    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: float | None = None
    partition_key: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        check_name("a queue's name", self.name)
        for limit in ("concurrency", "worker_concurrency"):
            if getattr(self, limit) is not None:
                check_count(f"WorkQueue.{limit}", getattr(self, limit))
