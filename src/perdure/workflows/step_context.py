"""`current_step()`: what a step body can read about its attempt, and the streams it can write to.

This module knows no executor and no store; the executor subclasses `CurrentStep`.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from perdure.errors import WorkflowMisuse
from perdure.workflows.types import Complete


class CurrentStep:
    """The current attempt of a step, as its body sees it.

    `idempotency_key` is the same for all attempts of a step call; a rewind of the run creates a new one. `state` is the
    value that the `lifespan` of the engine or worker yielded, None without one.
    """

    __slots__ = (
        "_cancel_requested",
        "_cancelled_event",
        "attempt",
        "deadline",
        "details",
        "idempotency_key",
        "location",
        "name",
        "run_id",
        "state",
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
        self.details: Any = None  # of the latest heartbeat of this attempt
        self.state: Any = None
        self._cancel_requested = False
        # Created on first use: few bodies read it, and creating an Event costs 2 us.
        self._cancelled_event: threading.Event | None = None

    @property
    def cancelled(self) -> threading.Event:
        """Event that is set when the result of the step is no longer needed. Synchronous code can poll it."""
        if self._cancelled_event is None:
            self._cancelled_event = threading.Event()
            if self._cancel_requested:
                self._cancelled_event.set()
        return self._cancelled_event

    @property
    def last_heartbeat(self) -> Any:
        """Details of the last recorded heartbeat of earlier attempts, also by another worker; None without one.

        Plain data: a dataclass is a dict here.
        """
        return None

    @property
    def outcome(self) -> Complete[Any] | None:
        """The outcome of the run, in a function registered with `ctx.on_exit`; None in any other step.

        `status` says how the run ends. It has the `value` of a run that succeeded, the `error` of one that failed, and
        the `reason` of a cancel. It is the same for all attempts, also after a crash.
        """
        return None

    def heartbeat(self, details: Any = None) -> None:
        """Record the progress of the body, for people and for the next attempt, and restart `heartbeat_timeout`.

        The call does not wait and can be made from threads. At most one heartbeat per second is stored, the last one;
        the last one before a failure is stored with the failure. Raises `InvalidPayload` if the details cannot be
        encoded, and `CancelledError` when the result of the step is no longer needed.
        """
        self.details = details
        if self._cancel_requested:
            raise asyncio.CancelledError(f"step {self.location} was cancelled or has timed out")

    def write(self, stream: str, item: Any) -> None:
        """Append an item to a stream of the run. Readers see it immediately; it belongs to this attempt.

        The call does not wait. Items are stored in order, before the result of the step. Synchronous bodies can use it.
        """
        raise WorkflowMisuse("CurrentStep.write must be called from the body of a step that a workflow runs")


_current_step: ContextVar[CurrentStep] = ContextVar("perdure_current_step")


def current_step() -> CurrentStep:
    """Return the step whose body is executing. Raises `WorkflowMisuse` outside of a step."""
    try:
        return _current_step.get()
    except LookupError:
        raise WorkflowMisuse("current_step() was called outside of a step that a workflow runs") from None
