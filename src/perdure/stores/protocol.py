"""The Store protocol: where runs, histories, mail and workers live.

The seam between deciding and keeping. Decisions are the engine's; a store gives atomicity and order, in domain verbs,
batch first, with frozen records in and out. It knows neither clocks (every write carries the engine's time) nor
workflow code. `perdure.testing.StoreContract` is the suite that every store passes.

What every store promises

- **One write, one run.** Each `Write` touches one run (or one worker) and is all or nothing; what it does to topics, or
  to a dead letter, is part of it, wherever those are kept. A batch of writes is one round trip and one durable commit;
  when it raises, nothing of it was stored (or, if the connection broke, its answer was lost: the same batch may be sent
  again, and each write recognises itself).
- **Compare and set.** A `CommitTurn` names the position that it was computed from. It is refused (`Superseded`) if the
  history has moved, if the run belongs to another worker, or if its own worker was declared gone. A position once
  taken is never given again: a stale commit can neither overwrite nor slip into a gap.
- **Numbers follow commits.** Mail is numbered in the order in which it was committed, per run.
- **`wake_at`** is the earliest moment that someone must look at a run. A commit never overwrites a wake-up that mail
  which it has not seen has set.
- **Terminal is final**: nothing but `rewind` changes a run that has ended.
- **Duties.** A run that ended while somebody observes its end, with unread events in its inbox, or by being terminated
  (its attached children must follow) is `unsettled` until `Settle` says that all of that was done. It is not pruned.
- **Topics.** Publishing an event and subscribing to its topic are in one order: an event finds every subscription that
  stood before it, and a subscription every queued event that it may have; neither can miss the other. An event is
  *assigned* by putting an `assignment` into the inbox of a run, which uses up that subscription in all its topics.
  The event keeps its place until the assignment is consumed (it is gone, or seen by this run) or returned (it is
  offered to the next in line). No run is given the same event twice, except after returning it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from perdure.model.records import (
    DeadLetter,
    Ending,
    Entry,
    ErrorRecord,
    Held,
    Hint,
    Message,
    PublishedValue,
    RunQuery,
    RunRecord,
    RunStatus,
    StreamItem,
    TopicEvent,
    TurnExtras,
    Wait,
    WorkerRecord,
)

# --- writes --------------------------------------------------------------------------------------------------------


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
    held: Held | None = None
    drift: tuple[str, ...] = ()
    recoveries: int = 0
    result: bytes | None = None
    error: ErrorRecord | None = None
    ended_at: float | None = None
    prune_at: float | None = None


class Restart(Struct, frozen=True, kw_only=True):
    """Begin the run's history anew in the same commit: all entries go, the mailbox stays, generation and epoch go up.

    The turn's own entries belong to the old history and go too, but take their positions: the fence moves behind them.
    `entries` are those that the new history begins with, from `base + 1`. Subscriptions of the run go. Without
    `begun_at` the new generation begins when it is claimed, and until then waits like a new run.
    """

    workflow: str
    version: int
    input: bytes
    begun_at: float | None
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
    restart: Restart | None = None
    extras: TurnExtras | None = None
    observed: bool = False  # that somebody is told of its end is known to its worker; no store need look at this


class Deliver(Struct, frozen=True, kw_only=True):
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

    With `unless_begun` only a run that never executed is ended. Answers `Committed`, `Begun`, `Ended` or `Missing`.
    """

    run_id: str
    turn_id: str
    now: float
    status: RunStatus = RunStatus.CANCELLED
    unless_begun: bool = False
    prune_after: float | None = None


class ReleaseRun(Struct, frozen=True, kw_only=True):
    """Give an owned run back, due at once; no recovery is counted. Answers `Committed` or `Superseded`."""

    run_id: str
    worker: str
    now: float


class Observe(Struct, frozen=True, kw_only=True):
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


class Moved(Struct, frozen=True):
    """An unread event that goes to its topic or, if that is full, becomes this dead letter."""

    number: int
    to: Publish
    otherwise: DeadLetter


class Settle(Struct, frozen=True, kw_only=True):
    """Tick off duties of a run that has ended: observers told, mail dealt with, its children told to end.

    Answers `Committed`, or `Missing`. Once nothing is left the run is settled. Nothing is done to a run that owes
    nothing: it was settled before, or has been rewound. What is `moved` out of its mail goes to its topic by this very
    write: if it is not unread any more, it goes nowhere.
    """

    run_id: str
    now: float
    told: tuple[Observer, ...] = ()
    consumed: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()  # assignments: back to their topics
    moved: tuple[Moved, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    orphans: bool = False  # attached children of a terminated run have been told


class Publish(Struct, frozen=True, kw_only=True):
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
    place: int
    now: float
    page: int = 500


class Replay(Struct, frozen=True, kw_only=True):
    """Send a dead letter again and remove it: both, or neither if the send is refused.

    What is sent has an id that no other call gives, by which a repeated call is recognised. Whoever else replays or
    removes the letter, wherever to, one of them does. Answers what `send` answers, or `Gone`.
    """

    letter_id: str
    send: Deliver | Publish


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
    | Deliver
    | EndRun
    | ReleaseRun
    | Observe
    | RewindRun
    | Settle
    | Publish
    | FanOut
    | Replay
    | AppendStream
    | SupersedeStream
)


# --- answers -------------------------------------------------------------------------------------------------------


class Created(Struct, frozen=True):
    """The run was made by this call; `owned` says whether the given owner got it."""

    owned: bool


class Exists(Struct, frozen=True):
    """The id was taken by this run."""

    record: RunRecord


class Committed(Struct, frozen=True, gc=False):
    """The write is durable. `mail`: the inbox holds messages that it has not seen."""

    mail: bool = False


class Superseded(Struct, frozen=True):
    """Somebody else moved the run on, owns it, or declared this worker gone: drop it and load again."""


class Ended(Struct, frozen=True):
    """The run had ended already, like this; who wants to observe it learns with what."""

    status: RunStatus
    ending: Ending | None = None


class Observing(Struct, frozen=True):
    """The end of the run will be told."""


class Published(Struct, frozen=True):
    """The event is accepted: how many runs it was assigned to, and whether there are more to come (`FanOut`).

    `fresh` is False if an event with its id had been accepted before.
    """

    place: int
    woken: int
    more: bool = False
    fresh: bool = True


class Begun(Struct, frozen=True):
    """The run has executed already."""


class Missing(Struct, frozen=True):
    """There is no such run."""


class Gone(Struct, frozen=True):
    """There is no such dead letter: it was never there, or somebody else was first."""


class Delivered(Struct, frozen=True):
    """The message is in the inbox; `fresh` is False if one with its id had been accepted before.

    `owner` is the worker that executes the run now, if any.
    """

    number: int
    fresh: bool
    owner: str | None = None


class Full(Struct, frozen=True):
    """The inbox holds as many messages as it may."""

    pending: int


Answer = (
    Created
    | Exists
    | Committed
    | Superseded
    | Ended
    | Begun
    | Missing
    | Gone
    | Delivered
    | Full
    | Observing
    | Published
)


# --- reading -------------------------------------------------------------------------------------------------------


class Snapshot(Struct, frozen=True):
    """A run as of one moment: its row, every entry row in order of position, its unread mail in order of number."""

    record: RunRecord
    position: int
    entries: tuple[Entry, ...]
    inbox: tuple[Message, ...]


class Unsettled(Struct, frozen=True):
    """A run that has ended and what it still owes; observers and mail in pages. `orphans`: it was terminated."""

    record: RunRecord
    observers: tuple[Observer, ...]
    mail: tuple[Message, ...]
    orphans: bool


class Key(Struct, frozen=True):
    """A random key of the store. The newest signs; older ones are kept to check what they have signed."""

    number: int
    made_at: float
    secret: bytes


class Claim(Struct, frozen=True, kw_only=True):
    """Ask for up to `limit` due runs that nobody owns, earliest first, of these (workflow, version) pairs, shards."""

    worker: str
    now: float
    workflows: tuple[tuple[str, int], ...]
    pool: str = "default"
    shards: frozenset[int] | None = None  # None: all
    limit: int = 100
    due_by: float | None = None  # only what was due by this moment already; None: by now


class ClaimedRun(Struct, frozen=True):
    """A run that was claimed, the highest number that its inbox has given so far, and where its history stands.

    By the position a worker knows whether a copy that it kept in memory is still the run.
    """

    id: str
    inbox_last: int
    position: int = 0


class RunPage(Struct, frozen=True):
    """One page of a query; `next` continues it, None at the end."""

    runs: tuple[RunRecord, ...]
    next: str | None = None


class StoredEntry(Struct, frozen=True):
    """An entry with the position at which it was (last) written."""

    position: int
    entry: Entry


@runtime_checkable
class Store(Protocol):
    """See the module's docstring for what each of these promises. Errors are `StoreError`s, `retryable` or not."""

    # opening and closing
    async def open(self, *, shards: int) -> None:
        """Connect, migrate under a lock, and refuse what is not ours, newer than us, or cut into other shards."""

    async def close(self) -> None: ...

    async def now(self) -> float:
        """The store's time, by which workers with wrong clocks agree."""

    def on_change(self, hint: Hint) -> Callable[[], None]:
        """Call `hint` when runs became due, got mail or ended. May come late, twice or never. Returns the way out.

        Called on the event loop that opened the store.
        """

    # commit and load
    async def commit(self, batch: Sequence[Write]) -> list[Answer]:
        """Carry out all writes in one durable commit, and answer each."""

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        """The runs with their histories, in one query, in the order asked."""

    async def records(self, ids: Sequence[str]) -> list[RunRecord | None]:
        """The rows alone."""

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        """The run's unread mail with a higher number than `after`, in order."""

    async def history(self, run_id: str, after: int = 0) -> list[StoredEntry]:
        """Entry rows written after this position, in order."""

    # due and claim
    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        """Make the worker owner of due runs. Each is given to one worker only; none to a worker declared gone.

        Runs that a commit is just changing may be passed over, but not if those are all: none means that none was due.
        A claimed run is `running`, its `wake_at` is cleared, and `begun_at` set if it is its generation's first time.
        """

    async def next_wake(self, pool: str) -> float | None:
        """When the earliest unowned run of this pool is due."""

    async def owned(self, worker: str) -> list[str]:
        """Every run that this worker owns: asked after the answer to a claim got lost."""

    async def mailed(self, worker: str, limit: int = 100) -> list[str]:
        """Runs that this worker owns and that have a wake-up (mail) waiting for it."""

    async def wake_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        """Make runs that are held for this reason due, because other code may fit them. How many."""

    # workers
    async def join(self, worker: WorkerRecord) -> bool:
        """Add a worker. False if its id is another's."""

    async def renew(self, worker: WorkerRecord) -> bool:
        """Renew its lease. False if it was declared gone, or forgotten since: it must come back under another id."""

    async def workers(self) -> list[WorkerRecord]: ...

    async def declare_gone(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        """From now on nothing that this worker commits is taken. Its row stays until its runs are released.

        With `unless_renewed_after`, only if its lease still ends no later than that. False if it did not apply.
        """

    async def release(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        """A page of the worker's runs is given back, due at once; each counts one more recovery if `recovered`."""

    async def retire(self, worker_id: str) -> None:
        """Forget the worker, whose runs have all been released."""

    # queries and upkeep
    async def runs(self, query: RunQuery) -> RunPage: ...

    async def prune(self, now: float, limit: int = 500, *, remember: float = 0.0) -> int:
        """Delete finished, settled runs whose `prune_at` has come and whose parent is not open, with all that they own;
        expired events of topics and values; ids of consumed events `remember` seconds after. How many runs.

        What expires at `now` has expired. An id is that of an event in a mailbox, or of one that has left its topic
        (read, expired or with nobody to have it); ids of other mail are kept as long as the run.
        """

    async def keys(self, name: str, now: float) -> list[Key]:
        """The keys of this name, newest last; the first one is made if there is none. The same for everyone."""

    async def add_key(self, name: str, now: float) -> Key:
        """Make another key of this name, which is the newest from now on."""

    # finished runs, families, topics and what runs show
    async def unsettled(self, limit: int = 100) -> list[Unsettled]:
        """Runs that have ended and still owe something, those that ended first first."""

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        """Attached children of a run that have not ended, by id, in pages."""

    async def unfinished(self, limit: int = 100) -> list[TopicEvent]:
        """Events still to be assigned to subscriptions that stood when they were published, by topic and place."""

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        """The events that a topic holds, queued or assigned, in order of place."""

    async def published(self, run_id: str) -> list[PublishedValue]:
        """What a run shows, by key; what has expired too, until it is pruned."""

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        """Items of a run's stream from this offset on."""

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        """Dead letters in the order in which they came, of one kind or one event's name if given."""

    async def dead_letter(self, letter_id: str) -> DeadLetter | None: ...

    async def remove_dead_letter(self, letter_id: str) -> bool:
        """Delete it. False if there is none: somebody else was first."""
