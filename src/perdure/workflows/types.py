"""Values of the public API: the outcome of a run, and a work queue. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.model.records import ErrorRecord, RunStatus
from perdure.model.validation import check_count, check_name

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Complete(Generic[R_co]):
    """The outcome of an ended run: status, and value or error; `reason` says why it was cancelled, if given."""

    status: RunStatus
    value: R_co | None = None
    error: ErrorRecord | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """A queue whose limits apply to all runs started on it, across all workers."""

    name: str
    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: float | None = None
    partition_key: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_name("a queue's name", self.name))
        for limit in ("concurrency", "worker_concurrency"):
            if getattr(self, limit) is not None:
                check_count(f"WorkQueue.{limit}", getattr(self, limit))
