"""Small values of the public API: what a loop's body returns, how a run came out, what limits a queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.model.records import ErrorRecord, RunStatus
from perdure.model.validation import check_count, check_name

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Complete(Generic[R_co]):
    """A run has ended: how, and with what."""

    status: RunStatus
    value: R_co | None = None
    error: ErrorRecord | None = None


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
