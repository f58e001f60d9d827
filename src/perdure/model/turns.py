"""Turn: what one advance of a run takes in and gives out."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

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


class StepDone(Struct, frozen=True, gc=False):
    """An attempt of a step ended: with a value, or with an error that may be worth another attempt."""

    location: str
    attempt: int
    value: bytes | None = None
    error: ErrorRecord | None = None
    retryable: bool = False


class MessageReceived(Struct, frozen=True):
    """A message of the run's inbox."""

    message: Message


class RecordRunningSteps(Struct, frozen=True):
    """Write the pending entries of these running steps, so that people see them."""

    locations: tuple[str, ...]


class AwaitingResult(Struct, frozen=True):
    """An errand was run and there is no result yet: mail will bring one for each of these runs.

    `ours`: False for a child that was there before, and so is nobody's to stop.
    """

    location: str
    runs: tuple[str, ...]
    created: bool = True


Input = StepDone | MessageReceived | RecordRunningSteps | AwaitingResult


class RunStep(Struct, frozen=True):
    """Execute an attempt of a step. `call` is what the workflow asked for; it never leaves the process."""

    location: str
    attempt: int
    name: str
    call: Any
    idempotency_key: str


class CancelStep(Struct, frozen=True):
    """Cancel the body of a step that the workflow no longer waits for."""

    location: str


class SendEvent(Struct, frozen=True):
    """Put an event into a run's mailbox."""

    run_id: str
    message: Message


class BroadcastEvent(Struct, frozen=True):
    """Put an event into a topic."""

    event: TopicEvent


class StartChild(Struct, frozen=True, kw_only=True):
    """Start a run, once; with a `target`, report its end to this run there."""

    run_id: str
    workflow: str
    version: int
    input: bytes
    attached: bool
    created_by: str  # names this very start, so that a child that was there before is told from one's own
    target: str | None = None
    definition: Any = None  # never leaves the process


class ObserveRun(Struct, frozen=True):
    """Report the end of a run to this run, at `target`."""

    run_id: str
    target: str


class StopRun(Struct, frozen=True):
    """Ask a run to stop."""

    run_id: str


class StopChildren(Struct, frozen=True):
    """Ask every attached child that is still open to stop, and report the end of each at `target`."""

    target: str


ExternalAction = SendEvent | BroadcastEvent | StartChild | ObserveRun | StopRun | StopChildren


class ExternalEffect(Struct, frozen=True):
    """Do something to another run or a topic, on behalf of a pending entry. Safe to repeat: its ids are determined.

    It ends with a `StepDone`, or with `Standing` if mail is to bring the result.
    """

    location: str
    attempt: int
    work: ExternalAction


Effect = RunStep | CancelStep | ExternalEffect


class Succeeded(Struct, frozen=True):
    """The workflow returned this value."""

    value: bytes


class Failed(Struct, frozen=True):
    """The workflow raised; `retryable` if its run-level retry policy takes this error."""

    error: ErrorRecord
    retryable: bool = False


class Cancelled(Struct, frozen=True):
    """The workflow ended after it was cancelled, whatever its function did."""


class Continued(Struct, frozen=True):
    """The run begins anew: same id, fresh history but for these entries (compensations that outlive it)."""

    workflow: str
    version: int
    input: bytes
    at: float | None = None
    run_attempt: int = 1
    pool: str | None = None
    carried: tuple[Entry, ...] = ()


Outcome = Succeeded | Failed | Cancelled | Continued


class TurnExtras(Struct, frozen=True, gc=False, kw_only=True):
    """What a turn changes besides the history: all of it in the same commit.

    `dropped` are locations whose entries, and all below them, are no longer needed. `returned` are numbers of
    assignments that no receive wants: they go back to their place in the topic.
    """

    dropped: tuple[str, ...] = ()
    subscribe: tuple[Subscription, ...] = ()
    unsubscribe: tuple[str, ...] = ()  # targets
    released_assignments: tuple[int, ...] = ()
    published: tuple[PublishedValue, ...] = ()
    streamed: tuple[StreamItem, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()


class Turn(Struct, frozen=True, gc=False):
    """What came of advancing a run: to be committed in one write, before any effect is carried out.

    `busy`: work is under way or about to be, so the run needs an owner. Otherwise, and without an outcome, it is
    suspended: `waits` says for what, `wake_at` when to look again. `pins` are entries that need not be written for
    their own sake, only together with something else (a replay without new input writes nothing). `more`: it could go
    on at once, and does so in a turn of its own, so that no turn grows without bound. `extras` is what few turns have.
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
