"""The Store protocol: runs, histories, inboxes, topics, dead letters and workers, in domain verbs.

The execution layer decides; a store makes each decision atomic, ordered and durable. It takes and returns frozen
records, batch first. It knows no workflow code and reads no clock to decide: every call carries the engine's time.
`perdure.testing.StoreContract` is the suite that every store passes. A missing capability is an error, never a silent
fallback. Errors are `StoreError`s, `retryable` or not.

Acceptance rule of a turn

A `CommitTurn` names the position (`base`) in the run's history that it was computed from. The first rule that applies
gives the result:

  1. The run is unknown: `RunMissing`.
  2. The turn's id is stored at its position: `Committed` (a repeated call).
  3. The run has ended: `AlreadyEnded`.
  4. The worker is fenced: `Superseded`.
  5. Another worker owns the run, the turn claims ownership that the worker does not have, or the run waits in a queue:
     `Superseded`.
  6. `base` is not the run's last position (the fence counts): `Superseded`.
  7. Otherwise the turn is applied: `Committed`.

A worker that the store does not know counts as fenced. The fence is the position up to which a run's history was cut,
restarted or ended from outside; the rows up to it may be deleted. A position is never given twice.

Guarantees of every store

- **Unreadable rows.** Reads of several rows decode row by row, so that a row that cannot be decoded affects no other.
  `load` and `records` return an `UnreadableRun` for it, `runs` lists it in `RunPage.unreadable`, and all other lists
  skip and log it. Reads within one run raise a `StoreError` that is not retryable.
- **One write, one run.** A `Write` changes one run (or one topic) and is all or nothing. Its changes to topics and dead
  letters are part of it.
- **One batch, one commit.** A batch is one round trip and one durable commit; its writes apply in order. If `commit`
  raises, nothing of the batch is stored. If the connection broke, the batch may be stored: send the same batch again.
- **Idempotence.** Each write recognises its own repetition by an id that it carries, and returns the same kind of
  result.
- **Compare-and-set.** Turns and rewinds are rejected unless they name the run's last position.
- **Message numbers follow commits.** The messages of a run are numbered in the order in which they were committed.
- **`wake_at`** is the earliest time at which a worker must process a run. A turn never overwrites the wake-up of a
  message that the turn has not seen.
- **An end is final.** Only `RewindRun` changes the outcome of an ended run, and only a `CreateRun` with `replaces`
  replaces the run.
- **Finalization.** A run needs finalization when it has ended and has observers to notify, has unread events, or was
  terminated (its attached children must end too). `FinalizeRun` records what was done. Such a run is not pruned.
- **Topics.** Publishes and subscribes on a topic are serialized. An event sees every earlier subscription; a
  subscription sees every queued event that it is eligible for. Neither can miss the other. Assigning an event puts an
  `assignment` message into a run's inbox and removes the subscription from all its topics. The event keeps its offset
  until the assignment is consumed or released. A consumed event is deleted, or marked as seen by this run; a released
  one is offered to the next subscription. A run gets an event at most once, except after releasing it.
- **Documents.** A document is written by compare-and-set on its version. A version is never given twice.
- **Queues.** A run of a queue has a place in every commit from its creation to its end, and the place waits or holds a
  slot. Every write that ends a run deletes its place in the same commit; the run keeps the name of its queue and has no
  gate. While a run waits, no write sets its `wake_at`: no message, resume, retry, tag or rewind. Only an end, `Admit`
  and `LeaveQueue` end the wait. A `pause` message to a waiting run sets `held` (`paused_in_queue`), a `resume` or
  `cancel` clears it: no worker processes the message before the admission, which skips held runs. An `Admit` is applied
  only to the version of the queue that its plan was made from; until then slots only become free. A commit that frees
  a slot, adds a place or changes settings sends a change hint with `queue_hint(name)`.
- **Tags.** The index of a run's tags changes in the same commit as the tags.
- **Deferreds.** All completions of a deferred have one id, so the first one is accepted and the others are repetitions.
  A run that rejects an unread completion, because its value does not fit, releases it like an assignment. The store
  then removes the message with its id, and the next completion is accepted. The id of a consumed completion stays for
  as long as the run does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from perdure.model.documents import Document
from perdure.model.queries import RunQuery
from perdure.model.queue_records import PlaceCursor, PlaceRecord, QueueSummary, QueueView
from perdure.model.records import (
    ChangeCallback,
    DeadLetter,
    Message,
    ProgressCallback,
    PublishedValue,
    RunRecord,
    SigningKey,
    StreamItem,
    TopicEvent,
    WorkerRecord,
)
from perdure.stores.results import (
    ClaimedRun,
    Committed,
    RunMissing,
    RunPage,
    RunRetained,
    Snapshot,
    StoredEntry,
    TopicSummary,
    UnfinalizedRun,
    UnreadableRun,
    WriteResult,
)
from perdure.stores.writes import Write

SCAN_LIMIT = 10_000  # rows that one page of `runs` examines


class Claim(Struct, frozen=True, kw_only=True):
    """A request for up to `limit` due runs without an owner, earliest first, of these (workflow, version) pairs."""

    worker: str
    now: float
    workflows: tuple[tuple[str, int], ...]
    pool: str = "default"
    shards: frozenset[int] | None = None  # None: all
    limit: int = 100
    due_by: float | None = None  # only runs that were due by this time; None: by now
    # Queues with a limit per worker, and how many further runs of each the worker executes. Runs with a gate are
    # claimed only by its name, of all shards.
    gates: tuple[tuple[str, int], ...] = ()


@runtime_checkable
class Store(Protocol):
    """Durable storage of runs. The module's docstring states the guarantees that hold for all methods."""

    # lifecycle

    async def open(self, *, shards: int) -> None:
        """Connect and migrate under a lock.

        Raises a `StoreError` that is not retryable if the data is not perdure's, belongs to a newer version, or has
        another number of shards.
        """

    async def close(self) -> None:
        """Close all connections. Idempotent; stored data is unchanged."""

    async def now(self) -> float:
        """Return the store's current time. Workers use it so that skewed local clocks do not matter."""

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        """Call `callback` when runs became due, got messages or ended. Return a function that unsubscribes it.

        A change hint is best effort: it may come late, twice or never. The callback runs on the event loop on which it
        was subscribed.
        """

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        """Call `callback` after commits to this run, by any process. Return a function that ends this.

        Best effort, as a change hint. Change hints do not cover all commits: a turn that only adds entries, or writes
        output, is notified to followers alone. So a store without followers sends nothing for it.
        """

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        """Apply all writes in one durable commit, in order, and return one result per write.

        Atomic: if it raises, nothing of the batch is stored. Idempotent: a repeated batch changes nothing. Malformed
        writes raise a `StoreError` that is not retryable.
        """

    async def load(self, ids: Sequence[str]) -> Sequence[Snapshot | UnreadableRun | None]:
        """Return the runs with their histories and inboxes, in the order of `ids`, in one query.

        Each snapshot is consistent in itself. An unknown id gives None.
        """

    async def records(self, ids: Sequence[str]) -> Sequence[RunRecord | UnreadableRun | None]:
        """Return the runs' rows alone, in the order of `ids`. An unknown id gives None."""

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        """Return the run's unread messages with a number higher than `after`, in order of number."""

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        """Return the entries written after position `after`, in order of position, up to `limit`."""

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        """Make the worker the owner of due runs and return them, earliest first and equal times by id.

        Atomic: concurrent claims never get the same run. A fenced or unknown worker gets none. A claimed run is
        `running`, its `wake_at` is cleared, and `first_executed_at` is set at the first claim of its generation. Runs
        that another commit is changing may be skipped, but an empty result means that no run was due.
        """

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        """Return when the earliest run without an owner in this pool is due, or None.

        With `gates`, runs with another gate do not count: the worker is full for their queues, and a run of them that
        is due must not hide when the next other run is due.
        """

    async def owned(self, worker: str) -> list[str]:
        """Return the ids of all runs that this worker owns. Used when the result of a claim was lost."""

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        """Return the ids of runs that this worker owns and that got messages which no turn has seen."""

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        """Make runs without an owner that are held for reason `kind` due now. Return their number. Idempotent."""

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        """Add a worker. Return False if its id is taken, also by a fenced worker."""

    async def renew(self, worker: WorkerRecord) -> bool:
        """Replace the worker's record and lease.

        Return False if the worker was fenced or removed: it must join under a new id.
        """

    async def workers(self) -> list[WorkerRecord]:
        """Return all workers by id, fenced ones included."""

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        """Reject all later commits and claims of this worker. Its row stays until its runs are released.

        With `unless_renewed_after`, fence only if the lease ends no later than that time; this and a renewal are
        serialized. Return False if the worker is unknown or has renewed. Fencing a fenced worker returns True.
        """

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        """Release up to `limit` runs of this worker, due at once, and return their ids; an empty page is the last.

        Each release counts one more recovery of the run if `recovered`.
        """

    async def remove_worker(self, worker_id: str) -> None:
        """Remove a worker. If it still owns runs, fence it instead so that they can be released. Idempotent."""

    # queries and maintenance

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        """Return a page of matching runs, newest first. Pages have no gaps or repeats while runs are added.

        `bare`: the records have no payloads (an empty input, no result). Relative times in `query.where` must have been
        resolved. A page examines at most `SCAN_LIMIT` rows.
        """

    async def count(self, query: RunQuery, cap: int) -> int:
        """Return the number of matching runs, at most `cap`. `query.limit` and `query.after` are ignored."""

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        """Delete what has expired by `now`, up to `limit` runs, and return the ids of the deleted runs.

        Deletes finalized runs whose `prune_at` has passed and whose parent is not open, with all that they own; expired
        topic events, published values and documents; and event ids, `keep_ids_for` seconds after the event was consumed
        or left its topic. The ids of other messages are retained as long as their run. Partitions of queues that have
        no places are deleted as `Take` says.
        """

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        """Delete an ended run with all that it owns, at once. Atomic.

        A run owns its history, inbox, remembered message ids, observers, published values and streams; dead letters
        stay. The rules are those of `prune`, without `prune_at`: a run that is open, needs finalization or has an open
        parent is retained. Results: `Committed`, `RunRetained`, or `RunMissing`, also for a repeated call.
        """

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        """Return the keys of this name, newest last. Create the first one if there is none.

        All callers get the same keys.
        """

    async def add_key(self, name: str, now: float) -> SigningKey:
        """Create another key of this name and return it; it is the newest from now on. Concurrent calls all add one."""

    # ended runs, topics, output

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        """Return runs that need finalization, in the order in which they ended."""

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        """Return a page of the ids of attached children that have not ended, in order of id."""

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        """Return events whose fan-out is not finished, in order of topic and offset."""

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        """Return the events stored in a topic, queued or assigned, in order of offset."""

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        """Return the targets of the runs' open receives that have a subscription, in the order of `ids`."""

    async def published(self, run_id: str) -> list[PublishedValue]:
        """Return the run's published values by key. Expired values are included until they are pruned."""

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        """Return items of a run's stream from offset `start`, in order."""

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        """Return a page of topics that have queued events or waiting runs, in order of name."""

    # documents

    async def document(self, kind: str, document_id: str) -> Document | None:
        """Return this document, or None. An expired one is returned until it is pruned."""

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        """Return a page of the documents of a kind, in order of id.

        With `due_by`, return those with `due_at` up to this time instead, in order of (due_at, id); `after` must be
        None. A caller gets the next page by moving the due times.
        """

    # queues

    async def queues(self) -> list[QueueSummary]:
        """Return all queues in order of name."""

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        """Return what an admission is planned from, or None if the queue is unknown. One snapshot.

        It never reads from a replica. `limit` bounds partitions and expired places.
        """

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        """Return a page of the queue's places in order of (partition, priority, number).

        They are the waiting ones, delayed ones included, or those that hold a slot.
        """

    async def place(self, run_id: str) -> PlaceRecord | None:
        """Return the place of this run, waiting or held, or None."""

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        """Return how many places of the run's queue and partition are before its place, at most `cap`.

        They are those with a lower (priority, number). Delayed places do not count. 0 if the run does not wait.
        """

    # dead letters

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        """Return a page of dead letters in the order of their arrival, filtered by kind and event name.

        Raises a `StoreError` if `after` is not a stored dead letter.
        """

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        """Return this dead letter, or None."""

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        """Delete a dead letter. Of concurrent calls and replays exactly one succeeds; the others return False."""
