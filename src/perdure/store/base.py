"""The Store protocol: where runs, histories, mail and workers live.

The seam between deciding and keeping. Decisions are the engine's; a store gives atomicity and order, in domain verbs,
batch first, with frozen records in and out. It knows neither clocks (every write carries the engine's time) nor
workflow code. `perdure.testing.StoreContract` is the suite that every store passes.

What every store promises

- **One write, one run.** Each `Write` touches one run (or one worker) and is all or nothing. A batch of writes is one
  round trip and one durable commit; when it raises, nothing of it was stored (or, if the connection broke, its answer
  was lost: the same batch may be sent again, and each write recognises itself).
- **Compare and set.** A `CommitTurn` names the position that it was computed from. It is refused (`Superseded`) if the
  history has moved, if the run belongs to another worker, or if its own worker was declared gone. A position once
  taken is never given again: a stale commit can neither overwrite nor slip into a gap.
- **Numbers follow commits.** Mail is numbered in the order in which it was committed, per run.
- **`wake_at`** is the earliest moment that someone must look at a run. A commit never overwrites a wake-up that mail
  which it has not seen has set.
- **Terminal is final**: nothing but `rewind` changes a run that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from perdure.records import (
    DeadLetter,
    Entry,
    ErrorRecord,
    Held,
    Hint,
    Message,
    RunQuery,
    RunRecord,
    RunStatus,
    Wait,
    WorkerRecord,
)

# --- writes --------------------------------------------------------------------------------------------------------


class CreateRun(Struct, frozen=True, gc=False):
    """Make a run unless its id is taken. With an owner it is born claimed (if that worker is alive), else it is due.

    Answers `Created`, or `Exists` with the record that was there. A repeated call with the same `created_by` answers
    `Created` again.
    """

    record: RunRecord


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
    """Begin the run's history anew in the same commit: all entries go, the mailbox stays, the generation goes up.

    The turn's own entries belong to the old history and go too, but take their positions: the fence moves behind them.
    """

    workflow: str
    version: int
    input: bytes
    begun_at: float | None
    run_attempt: int = 1


class CommitTurn(Struct, frozen=True, gc=False, kw_only=True):
    """Append a turn's entries at `base + 1 ...` (a marker if it has none) and apply its patch, if nobody was first.

    `seen` is the highest number of the inbox that the turn knew of, `consumed` what it took. `owned`: the worker
    believes to own the run, and is refused if it does not; otherwise an unowned run will do as well.
    `dropped` are positions whose entries are no longer needed; the fence then moves up to this turn.
    Answers `Committed`, `Superseded`, `Ended` or `Missing`.
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
    dropped: tuple[int, ...] = ()
    restart: Restart | None = None
    dead_letters: tuple[DeadLetter, ...] = ()


class Deliver(Struct, frozen=True, kw_only=True):
    """Put a message into a run's inbox, once per message id, and make the run due.

    A held run is woken by a resume or a cancel only. Answers `Delivered`, `Ended`, `Missing` or `Full`.
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


Write = CreateRun | CommitTurn | Deliver | EndRun | ReleaseRun


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
    """The run had ended already, like this."""

    status: RunStatus


class Begun(Struct, frozen=True):
    """The run has executed already."""


class Missing(Struct, frozen=True):
    """There is no such run."""


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


Answer = Created | Exists | Committed | Superseded | Ended | Begun | Missing | Delivered | Full


# --- reading -------------------------------------------------------------------------------------------------------


class Snapshot(Struct, frozen=True):
    """A run as of one moment: its row, every entry row in order of position, its unread mail in order of number."""

    record: RunRecord
    position: int
    entries: tuple[Entry, ...]
    inbox: tuple[Message, ...]


class Claim(Struct, frozen=True, kw_only=True):
    """Ask for up to `limit` due runs that nobody owns, earliest first, of these (workflow, version) pairs, shards."""

    worker: str
    now: float
    workflows: tuple[tuple[str, int], ...]
    pool: str = "default"
    shards: frozenset[int] | None = None  # None: all
    limit: int = 100


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
    async def renew(self, worker: WorkerRecord) -> bool:
        """Add the worker or renew its lease. False if it was declared gone: it must come back under another id."""

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

    async def dead_letters(self, limit: int = 100, after: str | None = None) -> list[DeadLetter]: ...

    async def prune(self, now: float, limit: int = 500) -> int:
        """Delete finished runs whose `prune_at` has come, with everything that they own. How many."""

    async def secret(self, name: str) -> bytes:
        """A random key that is made once per store and name, and the same for everyone."""
