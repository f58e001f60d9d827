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

from perdure.model.queries import RunQuery
from perdure.model.records import (
    ChangeCallback,
    DeadLetter,
    Message,
    PublishedValue,
    RunRecord,
    SigningKey,
    StreamItem,
    TopicEvent,
    WorkerRecord,
)
from perdure.stores.results import ClaimedRun, RunPage, Snapshot, StoredEntry, UnfinalizedRun, WriteResult
from perdure.stores.writes import Write

# --- writes --------------------------------------------------------------------------------------------------------


# --- answers -------------------------------------------------------------------------------------------------------


# --- reading -------------------------------------------------------------------------------------------------------


class Claim(Struct, frozen=True, kw_only=True):
    """Ask for up to `limit` due runs that nobody owns, earliest first, of these (workflow, version) pairs, shards."""

    worker: str
    now: float
    workflows: tuple[tuple[str, int], ...]
    pool: str = "default"
    shards: frozenset[int] | None = None  # None: all
    limit: int = 100
    due_by: float | None = None  # only what was due by this moment already; None: by now


@runtime_checkable
class Store(Protocol):
    """See the module's docstring for what each of these promises. Errors are `StoreError`s, `retryable` or not."""

    # opening and closing
    async def open(self, *, shards: int) -> None:
        """Connect, migrate under a lock, and refuse what is not ours, newer than us, or cut into other shards."""

    async def close(self) -> None: ...

    async def now(self) -> float:
        """The store's time, by which workers with wrong clocks agree."""

    def on_change(self, hint: ChangeCallback) -> Callable[[], None]:
        """Call `hint` when runs became due, got mail or ended. May come late, twice or never. Returns the way out.

        Called on the event loop that opened the store.
        """

    # commit and load
    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
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
        A claimed run is `running`, its `wake_at` is cleared, and `first_executed_at` is set at the first claim of its
        generation.
        """

    async def next_wake(self, pool: str) -> float | None:
        """When the earliest unowned run of this pool is due."""

    async def owned(self, worker: str) -> list[str]:
        """Every run that this worker owns: asked after the answer to a claim got lost."""

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        """Runs that this worker owns and that have a wake-up (mail) waiting for it."""

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        """Make runs that are held for this reason due, because other code may fit them. How many."""

    # workers
    async def join(self, worker: WorkerRecord) -> bool:
        """Add a worker. False if its id is another's."""

    async def renew(self, worker: WorkerRecord) -> bool:
        """Renew its lease. False if it was declared gone, or forgotten since: it must come back under another id."""

    async def workers(self) -> list[WorkerRecord]: ...

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        """From now on nothing that this worker commits is taken. Its row stays until its runs are released.

        With `unless_renewed_after`, only if its lease still ends no later than that. False if it did not apply.
        """

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        """A page of the worker's runs is given back, due at once; each counts one more recovery if `recovered`."""

    async def remove_worker(self, worker_id: str) -> None:
        """Forget the worker, whose runs have all been released."""

    # queries and upkeep
    async def runs(self, query: RunQuery) -> RunPage: ...

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> int:
        """Delete finished, settled runs whose `prune_at` has come and whose parent is not open, with all that they own;
        expired events of topics and values; ids of consumed events `remember` seconds after. How many runs.

        What expires at `now` has expired. An id is that of an event in a mailbox, or of one that has left its topic
        (read, expired or with nobody to have it); ids of other mail are kept as long as the run.
        """

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        """The keys of this name, newest last; the first one is made if there is none. The same for everyone."""

    async def add_key(self, name: str, now: float) -> SigningKey:
        """Make another key of this name, which is the newest from now on."""

    # finished runs, families, topics and what runs show
    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        """Runs that have ended and still owe something, those that ended first first."""

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        """Attached children of a run that have not ended, by id, in pages."""

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
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
