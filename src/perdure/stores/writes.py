"""Write commands: what a worker or client asks a store to commit, as data."""

from __future__ import annotations

from msgspec import Struct

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
from perdure.model.turns import TurnExtras


class Observer(Struct, frozen=True):
    """Who is to be told of a run's end, and where in that run the news is expected."""

    run_id: str
    target: str


class CreateRun(Struct, frozen=True, gc=False):
    """Make a run unless its id is taken. With an owner it is born claimed (if that worker is alive), else it is due.

    Answers `Created`, or `Exists` with the record that was there, which is not observed. A repeated call with the same
    `created_by` answers `Created` again or, if it observes and the run has ended, `Ended` with how. A fork is made with
    a history and an inbox; theirs are the positions and numbers from 1. `observer` observes it as by an `Observe`.
    """

    record: RunRecord
    entries: tuple[Entry, ...] = ()
    inbox: tuple[Message, ...] = ()
    observer: Observer | None = None


class RunPatch(Struct, frozen=True, gc=False, kw_only=True):
    """The run's row after a turn; written only when status, wait, owner or outcome change."""

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
    """Begin the run's history anew in the same commit: all entries go, the mailbox stays, generation and epoch go up.

    The turn's own entries belong to the old history and go too, but take their positions: the fence moves behind them.
    `entries` are those that the new history begins with, from `base + 1`. Subscriptions of the run go. Without
    `first_executed_at` the new generation begins when it is claimed, and until then waits like a new run.
    """

    workflow: str
    version: int
    input: bytes
    first_executed_at: float | None
    run_attempt: int = 1
    pool: str | None = None  # None: stays
    entries: tuple[Entry, ...] = ()


class CommitTurn(Struct, frozen=True, gc=False, kw_only=True):
    """Append a turn's entries at `base + 1 ...` (a marker if it has none) and apply its patch, if nobody was first.

    `seen` is the highest number of the inbox that the turn knew of, `consumed` what it took. `owned`: the worker
    believes to own the run, and is refused if it does not; otherwise an unowned run will do as well.
    `extras.dropped` are locations whose entries (all rows, and those of every location below, `location + "/"`) are no
    longer needed; the turn's own entries are written after that. The fence then moves up to this turn.
    Subscriptions: `unsubscribe` first, then `returned`, then `subscribe`, which may find a queued event: its assignment
    is mail that the turn has not seen. Of several topics the event that was sent first is taken (of equal ones that of
    the topic named first). A target that stands already keeps its standing. Subscriptions of a run that ends or begins
    anew go, before anything is returned, and it makes none. An assignment that is returned is as if it had never been
    in the inbox; given again it has a new number. Published values replace those of the same key. Streamed items get
    the next offsets of their streams. Answers `Committed`, `Superseded`, `Ended` or `Missing`.
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
    restart: ContinueAs | None = None
    extras: TurnExtras | None = None
    observed: bool = False  # that somebody is told of its end is known to its worker; no store need look at this


class DeliverMessage(Struct, frozen=True, kw_only=True):
    """Put a message into a run's inbox, once per message id, and make the run due.

    A held run is woken by a resume or a cancel only; so is one whose generation has yet to begin, whose time would else
    be cut short: the delay of a new run, or the pause before its next attempt. `limit` bounds the unread events and
    assignments; other mail is never refused. Answers `Delivered`, `Ended`, `Missing` or `Full`.
    """

    run_id: str
    message: Message
    now: float
    limit: int | None = None


class EndRun(Struct, frozen=True, kw_only=True):
    """End a run from outside, at once and for good; takes a position, so that a turn in the making is refused.

    With `only_if_not_started` only a run that never executed is ended.
    Results: `Committed`, `AlreadyStarted`, `AlreadyEnded` or `RunMissing`.
    """

    run_id: str
    turn_id: str
    now: float
    status: RunStatus = RunStatus.CANCELLED
    only_if_not_started: bool = False
    prune_after: float | None = None


class ReleaseRun(Struct, frozen=True, kw_only=True):
    """Give an owned run back, due at once; no recovery is counted. Answers `Committed` or `Superseded`."""

    run_id: str
    worker: str
    now: float


class ObserveRunEnd(Struct, frozen=True, kw_only=True):
    """Have `observer` told at `target` when this run ends, once per observer and target.

    Answers `Observing`, `Ended` with how, or `Missing`.
    """

    run_id: str
    observer: str
    target: str


class RewindRun(Struct, frozen=True, kw_only=True):
    """Cut a run's history back, ended or not, if it still is at `base`.

    The rows of exactly these locations go (all rows of each); `entries` are appended at `base + 1 ...` (a marker if
    there are none) and the fence moves behind them. The generation goes up; owner, result, error, end, hold, waits and
    subscriptions go; the run is due. `returned` are messages that it had consumed: unread again, under their old
    numbers, as they are given here. Items of streams written at dropped locations are marked as superseded.
    `recoveries`, `drift` and `prune_at` are cleared, and so are duties of the end that is undone, but observers not
    yet told stay.
    Answers `Committed`, `Superseded` or `Missing`; a repeated call with the same `turn_id` answers `Committed` again.
    """

    run_id: str
    base: int
    turn_id: str
    now: float
    dropped: tuple[str, ...]
    entries: tuple[Entry, ...] = ()
    returned: tuple[Message, ...] = ()
    deadline_at: float | None = None  # of the run, from now on


class RedirectedEvent(Struct, frozen=True):
    """An unread event that goes to its topic or, if that is full, becomes this dead letter."""

    number: int
    to: PublishEvent
    otherwise: DeadLetter


class FinalizeRun(Struct, frozen=True, kw_only=True):
    """Tick off duties of a run that has ended: observers told, mail dealt with, its children told to end.

    Answers `Committed`, or `Missing`. Once nothing is left the run is settled. Nothing is done to a run that owes
    nothing: it was settled before, or has been rewound. What is `moved` out of its mail goes to its topic by this very
    write: if it is not unread any more, it goes nowhere.
    """

    run_id: str
    now: float
    notified: tuple[Observer, ...] = ()
    consumed: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()  # assignments: back to their topics
    moved: tuple[RedirectedEvent, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    orphans: bool = False  # attached children of a terminated run have been told


class PublishEvent(Struct, frozen=True, kw_only=True):
    """Accept an event into its topic, once per id, and assign it to runs that wait.

    With `consume` the subscription that has stood longest gets it; else all that stand do, in that order, a page of
    them in this commit and the rest by `FanOut`. What is not assigned and may be read later is queued, if there is
    room: `limit` bounds the events that wait there for a reader (not expired, not `after_wait`, and those with
    `consume` while they are not assigned). One that has expired on arrival is accepted and dropped. While an earlier
    event of the topic is unfinished all of this is left to `FanOut`, so that nobody is given a later event instead of
    the earlier. Answers `Published` or `Full`.
    """

    event: TopicEvent
    now: float
    limit: int | None = None
    page: int = 500


class FanOut(Struct, frozen=True, kw_only=True):
    """Assign an event to the next page of the subscriptions that stood when it was published. Answers `Published`.

    A page counts the subscriptions looked at, whether they may have the event or not. If an earlier event of the topic
    is unfinished it is that one's page, and `woken` is 0. Nothing is done if the event is not unfinished.
    """

    topic: str
    offset: int
    now: float
    page: int = 500


class ReplayDeadLetter(Struct, frozen=True, kw_only=True):
    """Send a dead letter again and remove it: both, or neither if the send is refused.

    What is sent has an id that no other call gives, by which a repeated call is recognised. Whoever else replays or
    removes the letter, wherever to, one of them does. Answers what `send` answers, or `Gone`.
    """

    letter_id: str
    send: DeliverMessage | PublishEvent


class AppendStream(Struct, frozen=True, kw_only=True):
    """Append what a step has written, if `worker` owns the run.

    Answers `Committed`, `Superseded`, `Ended` or `Missing`. The items are of one writer. `first` is how many that
    writer had appended before, to all streams of the run: by it a repeated call is recognised, and what is there
    already is passed over. None: the call is not to be repeated.
    """

    run_id: str
    worker: str
    items: tuple[StreamItem, ...]
    first: int | None = None


class SupersedeStream(Struct, frozen=True, kw_only=True):
    """Mark what earlier executions of the step at this location have written. Answers `Committed` or `Missing`.

    A location is that of the run's present epoch, here as in `RewindRun`: what was written before the run began anew
    stays as it is.
    """

    run_id: str
    location: str
    writer: str  # the execution that begins


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
)
