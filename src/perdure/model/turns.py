"""Turn: the inputs, effects and outcomes of one advance of a run.

Pure data. This module knows neither the runner that builds turns nor the stores that commit them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from perdure.model.queue_records import Place
from perdure.model.records import (
    DeadLetter,
    Entry,
    ErrorRecord,
    Hold,
    Message,
    PublishedValue,
    StreamItem,
    Subscription,
    TopicEvent,
    Wait,
)
from perdure.model.tags import TagValue


class StepDone(Struct, frozen=True, gc=False):
    """An attempt of a step ended, with a value or with an error; `retryable`: the retry policy accepts the error.

    `notes` are for the next attempt. No attempt starts at `retry_until` or later.
    """

    location: str
    attempt: int
    value: bytes | None = None
    error: ErrorRecord | None = None
    retryable: bool = False
    notes: bytes | None = None
    retry_until: float | None = None


class MessageReceived(Struct, frozen=True):
    """A message arrived in the inbox of the run."""

    message: Message


class RecordRunningSteps(Struct, frozen=True):
    """Write the pending entries of these running steps, so that they are visible in the stored history."""

    locations: tuple[str, ...]


class RecordProgress(Struct, frozen=True):
    """Write the pending entry of a running attempt with its latest notes."""

    location: str
    attempt: int
    notes: bytes


class AwaitingResult(Struct, frozen=True):
    """An external effect was executed and has no result yet: a message will bring one for each of these runs.

    `created` is False for a child that existed before; the run must not stop such a child.
    """

    location: str
    runs: tuple[str, ...]
    created: bool = True


class ChildIdTaken(Struct, frozen=True):
    """A child was not started: its derived id belongs to a child of an earlier run with the id of this one."""

    location: str


Input = StepDone | MessageReceived | RecordRunningSteps | RecordProgress | AwaitingResult | ChildIdTaken


class RunStep(Struct, frozen=True):
    """Execute an attempt of a step. `call` is the `StepCall` of the workflow; it is never serialized.

    `notes` and `last_error` are those of earlier attempts.
    """

    location: str
    attempt: int
    name: str
    call: Any
    idempotency_key: str
    notes: bytes | None = None
    last_error: ErrorRecord | None = None


class CancelStep(Struct, frozen=True):
    """Cancel the body of a step that the workflow no longer waits for."""

    location: str


class SendEvent(Struct, frozen=True):
    """Send an event to a run."""

    run_id: str
    message: Message


class BroadcastEvent(Struct, frozen=True):
    """Publish an event to its topic."""

    event: TopicEvent


class StartChild(Struct, frozen=True, kw_only=True):
    """Start a child run, idempotently. If `target` is set, report the end of the child to this run at `target`."""

    run_id: str
    workflow: str
    version: int
    input: bytes
    attached: bool
    created_by: str  # Identifies this start, to distinguish its child from a run that existed before.
    target: str | None = None
    fallback_id: str | None = None  # Used if `run_id` belongs to a child of an earlier run with the id of this one.
    definition: Any = None  # Never serialized.
    place: Place | None = None  # The child waits in a queue.


class ObserveRun(Struct, frozen=True):
    """Report the end of another run to this run, at `target`."""

    run_id: str
    target: str


class StopRun(Struct, frozen=True):
    """Request the cancellation of another run; the result says whether it was requested. `reason` is encoded."""

    run_id: str
    reason: bytes | None = None


class StopChildren(Struct, frozen=True):
    """Request the cancellation of every open attached child, and report the end of each at `target`."""

    target: str


ExternalAction = SendEvent | BroadcastEvent | StartChild | ObserveRun | StopRun | StopChildren


class ExternalEffect(Struct, frozen=True):
    """Execute an action on another run or a topic for a pending entry. Idempotent: all ids are deterministic.

    It completes with a `StepDone`, or with an `AwaitingResult` if a message will bring the result.
    """

    location: str
    attempt: int
    work: ExternalAction


Effect = RunStep | CancelStep | ExternalEffect


class Succeeded(Struct, frozen=True):
    """The workflow returned this value."""

    value: bytes


class Failed(Struct, frozen=True):
    """The workflow raised; `retryable`: the retry policy of the workflow accepts this error."""

    error: ErrorRecord
    retryable: bool = False


class Cancelled(Struct, frozen=True):
    """The workflow ended after it was cancelled. Its own result or error is discarded."""

    reason: str | None = None


class Continued(Struct, frozen=True):
    """The run continues as new: same id, empty history except for `carried` (compensation records carried over)."""

    workflow: str
    version: int
    input: bytes
    at: float | None = None
    run_attempt: int = 1
    pool: str | None = None
    carried: tuple[Entry, ...] = ()


Outcome = Succeeded | Failed | Cancelled | Continued


class TurnExtras(Struct, frozen=True, gc=False, kw_only=True):
    """Changes of a turn other than history entries, applied in the same commit.

    `dropped` are locations whose entries, and all entries below them, are deleted. `replaced` are positions of earlier
    versions of this turn's entries, which are deleted too. `released_assignments` are message numbers of assignments
    that no receive matches; the store returns their events to the topic. They may also be numbers of completions of
    deferreds that do not fit. The store removes such a message with its id, as if it had never been delivered, so that
    the next completion is accepted. `tags` are changes of the run's tags; None removes one.
    """

    dropped: tuple[str, ...] = ()
    subscribe: tuple[Subscription, ...] = ()
    unsubscribe: tuple[str, ...] = ()  # Targets.
    released_assignments: tuple[int, ...] = ()
    published: tuple[PublishedValue, ...] = ()
    streamed: tuple[StreamItem, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    replaced: tuple[int, ...] = ()
    tags: Mapping[str, TagValue | None] = {}


class Turn(Struct, frozen=True, gc=False):
    """The result of advancing a run. The worker commits it in one write before it executes any effect.

    `busy`: steps or effects are running or about to run, so the run needs an owner. A run that is neither busy nor
    ended is suspended: `waits` names the conditions, `wake_at` the next due time. `version_pins` are entries that are
    written only together with other changes, because a replay without new input must write nothing. `more`: the run
    can continue immediately and does so in another turn, so that the size of a turn is bounded. `extras` is rare.
    """

    entries: tuple[Entry, ...] = ()
    version_pins: tuple[Entry, ...] = ()
    consumed: tuple[int, ...] = ()
    effects: tuple[Effect, ...] = ()
    busy: bool = False
    waits: tuple[Wait, ...] = ()
    wake_at: float | None = None
    outcome: Outcome | None = None
    held: Hold | None = None
    drift: tuple[str, ...] = ()
    more: bool = False
    extras: TurnExtras | None = None
