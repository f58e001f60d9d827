"""What the body of a step can know of itself: `current_step()`."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from perdure.errors import WorkflowMisuse


class CurrentStep:
    """One attempt of a step, seen from inside. `idempotency_key` is the same on every attempt, new after a rewind."""

    __slots__ = (
        "_event",
        "_stopped",
        "attempt",
        "deadline",
        "details",
        "idempotency_key",
        "location",
        "name",
        "run_id",
        "workflow",
    )

    def __init__(self, run_id: str, workflow: str, name: str, location: str, attempt: int, key: str) -> None:
        self.run_id = run_id
        self.workflow = workflow
        self.name = name
        self.location = location
        self.attempt = attempt
        self.idempotency_key = key
        self.deadline: datetime | None = None
        self.details: Any = None
        self._event: threading.Event | None = None  # made when asked for: few bodies look, and it costs 2 us
        self._stopped = False

    @property
    def cancelled(self) -> threading.Event:
        """Set once the result is no longer wanted; sync code can poll it."""
        if self._event is None:
            self._event = threading.Event()
            if self._stopped:
                self._event.set()
        return self._event

    def request_cancel(self) -> None:
        """Tell the body that its result is no longer wanted."""
        self._stopped = True
        if self._event is not None:
            self._event.set()

    def heartbeat(self, details: Any = None) -> None:
        """Say how far the body is. Raises CancelledError once its result is no longer wanted."""
        self.details = details
        if self._stopped:
            raise asyncio.CancelledError(f"step {self.location} was cancelled or has timed out")

    def write(self, stream: str, item: Any) -> None:
        """Append an item to a stream of the run; readers see it at once. It belongs to this attempt of the step.

        Nothing is awaited: items are stored in order, before the step's result. Works in sync bodies too.
        """
        raise WorkflowMisuse("write to a stream from the body of a step that a workflow runs")


_current_step: ContextVar[CurrentStep] = ContextVar("perdure_current_step")


def current_step() -> CurrentStep:
    """The step whose body is executing."""
    try:
        return _current_step.get()
    except LookupError:
        raise WorkflowMisuse("current_step() was called outside of a step that a workflow runs") from None
