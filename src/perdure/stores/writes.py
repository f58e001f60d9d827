"""Writes: the commands that a worker or client commits to a store, as data.

Each docstring states what the write does, how a repeated call is recognised, and the results that it can have
(`perdure.stores.results`). `perdure.stores.protocol` states the guarantees that all writes share.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from perdure.model.queue_records import PartitionOverride, Place, QueueOverride, QueuePause, QueueSettings, Take
from perdure.model.records import (
    DeadLetter,
    Entry,
    ErrorRecord,
    Hold,
    Message,
    RunRecord,
    RunStatus,
    StreamItem,
    TopicEvent,
    Wait,
)
from perdure.model.tags import TagValue
from perdure.model.turns import TurnExtras


class Observer(Struct, frozen=True):
    """A run to notify of another run's end, and the location (`target`) in it that expects the notification."""

    run_id: str
    target: str


class Predecessor(Struct, frozen=True):
    """The generation of a run that a new run replaces, as its caller has read it."""

    created_by: str
    generation: int


class CreateRun(Struct, frozen=True, gc=False):
    """Create a run unless its id is taken.

    The store derives status, owner and times of the new run. A `record.owner` that is a live worker owns the run from
    the start, which counts as its first execution; `record.wake_at` is then ignored. Otherwise the run has no owner and
    is due at `record.wake_at` (None: at `created_at`). A fork has a history, whose positions start at 1, and an inbox,
    whose numbers start after `received`: the history names the messages up to that number, and a rewind returns them
    under their numbers. `observer` is added as by `ObserveRunEnd`.

    With `replaces`, a run of this id that is still this generation, has ended and needs no finalization is replaced:
    all that it owns is deleted, and the new run has no history. The positions and message numbers of the old run stay
    taken: the fence is one behind its last position, and messages are numbered after its last one. So a late write to
    the old generation changes nothing. Without such a run the id is taken, or the run is created as above.

    With `place` the run waits in a queue: it has no owner and no `wake_at`, whatever the record says, until an `Admit`
    takes its place. The id is checked before the queue and its dedupe key. If the key is taken (see `Place`), no run is
    created, observed or replaced, and the result is `Joined`. The store remembers the `created_by` of the last start
    that changed a place by joining it ("replace" or `debounce`): its repetition joins that place again, admitted or
    not. A queue whose last admission found `max_waiting` places refuses new places. Without `place` the run has no
    queue, whatever the record says.

    Idempotent by `created_by`.
    Results: `Created`; `IdTaken` (not observed, not replaced); `AlreadyEnded` if a repeated call observes a run that
    has ended; with a place also `Joined`, `LimitReached` or `QueueMissing`.
    """

    record: RunRecord
    entries: tuple[Entry, ...] = ()
    inbox: tuple[Message, ...] = ()
    received: int = 0
    observer: Observer | None = None
    replaces: Predecessor | None = None
    place: Place | None = None


class RunPatch(Struct, frozen=True, gc=False, kw_only=True):
    """The run's row after a turn. Written only when status, wait, owner or outcome change."""

    status: RunStatus
    owner: str | None = None
    wake_at: float | None = None
    waits: tuple[Wait, ...] = ()
    held: Hold | None = None
    drift: tuple[str, ...] = ()
    recoveries: int = 0
    result: bytes | None = None
    error: ErrorRecord | None = None
    ended_at: float | None = None
    prune_at: float | None = None


class ContinueAs(Struct, frozen=True, kw_only=True):
    """Restart the run's history in the same commit: delete all entries and increment generation and epoch.

    The inbox stays; subscriptions are removed. The turn's own entries belong to the old history: they are not stored,
    but take their positions, so the fence moves behind them. The new history starts with `entries`, from `base + 1`.
    Without `first_executed_at` the new generation starts when it is claimed and waits like a new run until then.
    """

    workflow: str
    version: int
    input: bytes
    first_executed_at: float | None
    run_attempt: int = 1
    pool: str | None = None  # None: unchanged
    entries: tuple[Entry, ...] = ()


class CommitTurn(Struct, frozen=True, gc=False, kw_only=True):
    """Append a turn's entries at `base + 1 ...` (a marker if it has none) and apply its patch.

    Accepted or rejected by the acceptance rule of a turn in `perdure.stores.protocol`. `owned` means that the worker
    claims to own the run; otherwise a run without an owner is accepted too. `seen` is the highest message number that
    the turn knew of, `consumed` the numbers that it took.

    `extras.dropped` are locations whose entries are deleted, with those of every location below (`location + "/"`). The
    turn's own entries are written after that, and the fence moves up to this turn. `extras.replaced` are positions up
    to `base` whose rows are deleted: the turn appends later versions of their entries. Positions without a row are
    skipped.

    Subscriptions change in this order: `unsubscribe`, `released_assignments`, `subscribe`. A subscription may find a
    queued event; its assignment is a message that the turn has not seen. Of several topics it takes the event sent
    first, and of equal ones that of the topic named first. An existing target keeps its subscription and its age. A run
    that ends or restarts loses its subscriptions before anything is released, and makes none. A released assignment
    leaves the inbox without a trace; assigned again, it has a new number. So does a released completion of a deferred:
    another message of its id is accepted.

    Published values replace those of the same key. Streamed items get the next offsets of their streams.

    Idempotent by `turn_id` at its position. Results: `Committed`, `Superseded`, `AlreadyEnded` or `RunMissing`.
    """

    run_id: str
    base: int
    turn_id: str
    worker: str
    owned: bool
    now: float
    entries: tuple[Entry, ...] = ()
    patch: RunPatch | None = None
    seen: int = 0
    consumed: tuple[int, ...] = ()
    continue_as: ContinueAs | None = None
    extras: TurnExtras | None = None
    observed: bool = False  # the worker knows of observers of the run's end; a store may ignore this


class DeliverMessage(Struct, frozen=True, kw_only=True):
    """Put a message into a run's inbox and make the run due.

    A run that waits in a queue is not woken (see Queues in the protocol). A held run is woken only by a resume or a
    cancel. So is a run whose generation has not started: a message does not shorten the delay of a new run or the
    backoff before its next attempt. `limit` is the maximum number of unread events and assignments of the event's name;
    other messages are never refused.

    Idempotent by the message's id, also after it was consumed, until the id is pruned.
    Results: `MessageDelivered`, `AlreadyEnded`, `RunMissing` or `LimitReached`.
    """

    run_id: str
    message: Message
    now: float
    limit: int | None = None


class EndRun(Struct, frozen=True, kw_only=True):
    """End a run from outside, at once. It takes a position, so that a turn computed meanwhile is rejected.

    With `only_if_not_started` only a run that never executed is ended.

    Idempotent by `turn_id`. Results: `Committed`, `AlreadyStarted`, `AlreadyEnded` or `RunMissing`.
    """

    run_id: str
    turn_id: str
    now: float
    status: RunStatus = RunStatus.CANCELLED
    only_if_not_started: bool = False
    prune_after: float | None = None


class ReleaseRun(Struct, frozen=True, kw_only=True):
    """Release a run that the worker owns, due at once, without counting a recovery.

    Idempotent while the run has no owner. Results: `Committed` or `Superseded`.
    """

    run_id: str
    worker: str
    now: float


class ObserveRunEnd(Struct, frozen=True, kw_only=True):
    """Add an observer: run `observer` is notified at `target` when this run ends.

    Idempotent by observer and target. Results: `ObserverAdded`, `AlreadyEnded` with the result, or `RunMissing`.
    """

    run_id: str
    observer: str
    target: str


class RewindRun(Struct, frozen=True, kw_only=True):
    """Rewind a run, ended or not, to an earlier point of its history if `base` is its last position.

    The rows of exactly the `dropped` locations are deleted. `entries` are appended at `base + 1 ...` (a marker if there
    are none) and the fence moves behind them. The generation is incremented. The run is due and has no owner, result,
    error, end, hold, waits or subscriptions; `recoveries`, `drift` and `prune_at` are cleared. `returned` are messages
    that the run had consumed: they are unread again as given here, under their old numbers. Stream items written at
    dropped locations are marked as superseded. The undone end needs no finalization; observers that were not notified
    stay.

    If the run has ended and `place` is given, it waits in that queue until an `Admit` takes its place; its queue,
    partition and priority are those of the place, which has no dedupe key. A run that has not ended keeps its place or
    slot, and `place` is ignored. `QueueMissing` if the queue is unknown: nothing was changed. A full queue accepts it.

    Idempotent by `turn_id`. Results: `Committed`, `Superseded`, `RunMissing` or `QueueMissing`.
    """

    run_id: str
    base: int
    turn_id: str
    now: float
    dropped: tuple[str, ...]
    entries: tuple[Entry, ...] = ()
    returned: tuple[Message, ...] = ()
    deadline_at: float | None = None  # the run's deadline from now on
    place: Place | None = None


class RedirectedEvent(Struct, frozen=True):
    """An unread event that moves to its topic or, if the topic is full, becomes the dead letter `otherwise`."""

    number: int
    to: PublishEvent
    otherwise: DeadLetter


class FinalizeRun(Struct, frozen=True, kw_only=True):
    """Record finalization of an ended run: observers notified, unread events processed, attached children ended.

    When nothing is pending the run is finalized. A run that needs no finalization (finalized before, rewound, or not
    ended) is left unchanged. Events in `redirected` go to their topics in this write, unless they are
    no longer unread.

    Idempotent. Results: `Committed` or `RunMissing`.
    """

    run_id: str
    now: float
    notified: tuple[Observer, ...] = ()
    consumed: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()  # assignments: back to their topics
    redirected: tuple[RedirectedEvent, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    orphaned_children: bool = False  # the attached children of a terminated run were ended


class PublishEvent(Struct, frozen=True, kw_only=True):
    """Accept an event into its topic and assign it to subscribed runs.

    With `consume` the oldest eligible subscription gets it. Otherwise all eligible ones do, oldest first: a page of
    them in this commit, the rest by `FanOut`. An event that is not assigned and may be read later is queued. `limit` is
    the maximum number of events that wait in the topic for a reader; expired and `after_wait` events do not count, nor
    do assigned events with `consume`. An event that has expired on arrival is accepted and dropped. While the fan-out
    of an earlier event is unfinished, all assignment is left to `FanOut`, so that no run gets a later event instead of
    the earlier one.

    Idempotent by the event's id, until the id is pruned. Results: `EventPublished` or `LimitReached`.
    """

    event: TopicEvent
    now: float
    limit: int | None = None
    page: int = 500


class FanOut(Struct, frozen=True, kw_only=True):
    """Assign an event to the next page of the subscriptions that existed when it was published.

    A page counts all subscriptions examined, eligible or not. If an earlier event of the topic is unfinished, that
    event's page is processed and `woken` is 0. An event whose fan-out is finished is left unchanged.

    Not idempotent: a repeated call processes the next page, which is safe. Result: `EventPublished`.
    """

    topic: str
    offset: int
    now: float
    page: int = 500


class ReplayDeadLetter(Struct, frozen=True, kw_only=True):
    """Send a dead letter again and remove it: both, or neither if the send is refused.

    Of all calls that replay or remove a dead letter, to whatever target, exactly one succeeds.

    Idempotent by the id of what is sent, which must be unique to this call.
    Results: those of `send`, or `DeadLetterMissing`.
    """

    dead_letter_id: str
    send: DeliverMessage | PublishEvent


class AppendStream(Struct, frozen=True, kw_only=True):
    """Append stream items that a step has written, if `worker` owns the run.

    All items are of one writer. `first` is the number of items that this writer appended before, over all streams of
    the run. Idempotent by `first`: items that are already stored are skipped. With None the call must not be repeated.

    Results: `Committed`, `Superseded`, `AlreadyEnded` or `RunMissing`.
    """

    run_id: str
    worker: str
    items: tuple[StreamItem, ...]
    first: int | None = None


class SupersedeStream(Struct, frozen=True, kw_only=True):
    """Mark the stream items that earlier executions of the step at this location have written.

    A location belongs to the run's current epoch, here as in `RewindRun`: items written before the run restarted are
    left unchanged. Idempotent. Results: `Committed` or `RunMissing`.
    """

    run_id: str
    location: str
    writer: str  # the execution that starts


class Admit(Struct, frozen=True, kw_only=True):
    """Admit waiting runs of a queue, as a plan says that was made from its `QueueView` of version `base`.

    First, up to `promote` delayed places with `eligible_at <= now` become eligible, with new place numbers in the order
    of (eligible_at, number). Then each take, of another partition each, marks the first places of its partition, in the
    order of (priority, number), as held, up to its count. Places that are not eligible, have expired, or belong to held
    runs or to runs that `serves` does not contain are skipped; at most the first `scan` places of a partition are
    examined. Another transaction's lock ends a take early: a place is never passed over because of a lock. An admitted
    run is due at `now`, does not wait any more, and has the gate of this write. Takes with count 0 store the
    partition's state, too, also of a partition that the store does not know.

    The store writes `state`, the numbers of runs taken, and a new version. `tolerance`: with a `now` that differs from
    the store's clock by more seconds, nothing is done: `Superseded`.

    Not idempotent: a repeated call is `Superseded`. Results: `Admitted`, `Superseded` or `QueueMissing`.
    """

    queue: str
    base: int
    now: float
    state: bytes
    takes: tuple[Take, ...] = ()
    serves: tuple[tuple[str, int, str], ...] = ()  # (workflow, version, pool) that a live worker executes
    gate: bool = False  # the queue limits runs per worker
    full: bool = False  # the queue holds `max_waiting` places: new places are refused until the next admission
    promote: int = 0
    scan: int = 200
    tolerance: float | None = None


class ConfigureQueue(Struct, frozen=True, kw_only=True):
    """Create a queue, or change its settings, its override or its pause. Each of the three is replaced as given.

    `base` is the version that the caller has read; 0 creates the queue, with version 1. All partitions with waiting
    runs become ready, because a limit may have risen.

    Idempotent if the stored values equal the given ones. Results: `Committed` with the new version, or `Superseded`.
    """

    name: str
    base: int
    declared: QueueSettings
    override: QueueOverride = QueueOverride()
    paused: QueuePause | None = None


class ConfigurePartition(Struct, frozen=True, kw_only=True):
    """Set or remove the override of one partition of a queue. Changes the version of the queue.

    The partition may be new. Idempotent: an equal override changes nothing. Results: `Committed` or `QueueMissing`.
    """

    queue: str
    partition: str
    override: PartitionOverride | None


class Requeue(Struct, frozen=True, kw_only=True):
    """Give a waiting run another priority. It keeps its place number. Results: `Committed`, `NotQueued`, `RunMissing`.

    `queue` must be the queue of the run, otherwise `NotQueued`. A run that holds a slot is `NotQueued`, too, unless it
    has this priority. Idempotent.
    """

    run_id: str
    queue: str
    priority: int


class LeaveQueue(Struct, frozen=True, kw_only=True):
    """Take a run out of its queue: its slot is free, or a run that waits is due at once without a slot.

    `queue` must be the queue of the run. The run keeps the name of its queue and loses its gate. A waiting run is not
    held any more: it processes its `pause` itself. Idempotent only in its effect: a repeated call is `NotQueued`.
    Results: `Committed`, `NotQueued` or `RunMissing`.
    """

    run_id: str
    queue: str
    now: float


class PutDocument(Struct, frozen=True, kw_only=True):
    """Write a document if `base` is its version; 0 creates it. Without a body the document is deleted.

    Idempotent by `write_id`, which is stored with the document: a repeated call that finds its own write, or finds the
    document that it was to delete missing, is `Committed`. Results: `Committed` with the new version (0 if deleted) or
    `Superseded`.
    """

    kind: str
    id: str
    base: int
    body: bytes | None
    write_id: str
    due_at: float | None = None
    expires_at: float | None = None


class TagRun(Struct, frozen=True, kw_only=True):
    """Change tags of a run that no worker executes: set these values; None removes a tag. See `perdure.model.tags`.

    It takes no position, because tags are no input of the workflow's code: the next load sees them. A run with an owner
    is `Superseded`: its worker must apply the change. An ended run may be tagged too.

    Idempotent. Results: `Committed`, `Superseded` or `RunMissing`.
    """

    run_id: str
    tags: Mapping[str, TagValue | None]


Write = (
    CreateRun
    | CommitTurn
    | DeliverMessage
    | EndRun
    | ReleaseRun
    | ObserveRunEnd
    | RewindRun
    | FinalizeRun
    | PublishEvent
    | FanOut
    | ReplayDeadLetter
    | AppendStream
    | SupersedeStream
    | Admit
    | ConfigureQueue
    | ConfigurePartition
    | Requeue
    | LeaveQueue
    | PutDocument
    | TagRun
)


def subject_of(write: Write) -> str:
    """Return the name of the run, topic, queue or kind of documents that a write concerns.

    Its writes stay in order, in one partition.
    """
    match write:
        case CreateRun():
            return write.record.id
        case PublishEvent():
            return write.event.topic
        case FanOut():
            return write.topic
        case ReplayDeadLetter():
            return subject_of(write.send)
        case Admit() | ConfigurePartition():
            return write.queue
        case ConfigureQueue():
            return write.name
        case PutDocument():
            return write.kind
        case _:
            return write.run_id
