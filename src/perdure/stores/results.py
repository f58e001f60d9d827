"""Results of a store's writes and reads, as data."""

from __future__ import annotations

from msgspec import Struct

from perdure.model.records import (
    Entry,
    Message,
    RunRecord,
    RunResult,
    RunStatus,
)
from perdure.stores.writes import Observer


class Created(Struct, frozen=True):
    """The run was created by this call. `owned`: the given owner owns it."""

    owned: bool


class IdTaken(Struct, frozen=True):
    """Another call created a run with this id; `record` is that run."""

    record: RunRecord


class Committed(Struct, frozen=True, gc=False):
    """The write is durable. `has_messages`: the inbox holds messages that the turn has not seen.

    `version` is the new version of a document or queue.
    """

    has_messages: bool = False
    version: int = 0


class Superseded(Struct, frozen=True):
    """Rejected: the history moved, another worker owns the run, or this worker is fenced. Load the run again."""


class AlreadyEnded(Struct, frozen=True):
    """The run had ended with this status. `result` is set for writes that observe the run."""

    status: RunStatus
    result: RunResult | None = None


class ObserverAdded(Struct, frozen=True):
    """The observer will be notified when the run ends."""


class EventPublished(Struct, frozen=True):
    """The topic accepted the event.

    `woken` is the number of runs that this call assigned it to; `more` means that `FanOut` has to continue. `fresh` is
    False if an event with this id was accepted before.
    """

    offset: int
    woken: int
    more: bool = False
    fresh: bool = True


class AlreadyStarted(Struct, frozen=True):
    """The run has executed, so `only_if_not_started` does not end it."""


class RunMissing(Struct, frozen=True):
    """There is no run with this id."""


RETAINED_REASONS = ("open", "unfinalized", "parent_open")


class RunRetained(Struct, frozen=True):
    """The run was not deleted: it has not ended, needs finalization, or its parent has not ended."""

    reason: str  # one of RETAINED_REASONS, the first that applies


class DeadLetterMissing(Struct, frozen=True):
    """There is no dead letter with this id: it never existed, or another call replayed or removed it."""


class MessageDelivered(Struct, frozen=True):
    """The message is in the inbox. `fresh` is False if a message with this id was accepted before.

    `owner` is the worker that owns the run now, if any.
    """

    number: int
    fresh: bool
    owner: str | None = None


class LimitReached(Struct, frozen=True):
    """The topic, or the inbox for this name, holds `pending` unread events, which is the limit. Nothing was stored."""

    pending: int


class Joined(Struct, frozen=True):
    """No run was created: `run_id` has the dedupe key. `replaced`: it got the payload of this start.

    `waiting`: it waits for its admission; otherwise it holds a slot.
    """

    run_id: str
    replaced: bool = False
    waiting: bool = True


class QueueMissing(Struct, frozen=True):
    """The store has no queue of this name. Nothing was stored."""


class NotQueued(Struct, frozen=True):
    """The run has no place in this queue: it never had one, left it, or has ended."""


class Admitted(Struct, frozen=True):
    """The admission is durable: these runs, in order, hold a slot and are due. `promoted`: delayed places that became
    eligible. `version` is the new version of the queue."""

    runs: tuple[str, ...] = ()
    promoted: int = 0
    version: int = 0


WriteResult = (
    Created
    | IdTaken
    | Committed
    | Superseded
    | AlreadyEnded
    | AlreadyStarted
    | RunMissing
    | DeadLetterMissing
    | MessageDelivered
    | LimitReached
    | ObserverAdded
    | EventPublished
    | Joined
    | QueueMissing
    | NotQueued
    | Admitted
)


class Snapshot(Struct, frozen=True):
    """A run at one point in time: its row, all entries in order of position, unread messages in order of number."""

    record: RunRecord
    position: int
    entries: tuple[Entry, ...]
    inbox: tuple[Message, ...]


class UnreadableRun(Struct, frozen=True):
    """The mark of a stored run that cannot be decoded: its rows are damaged, or another version wrote them.

    `position` is the last position of its history, None if that cannot be read either.
    """

    id: str
    reason: str
    position: int | None = None

    def __str__(self) -> str:
        return f"run {self.id!r} cannot be read ({self.reason}); see `perdure doctor`"


class UnfinalizedRun(Struct, frozen=True):
    """An ended run and what is pending for its finalization; observers and unread events in pages.

    `orphaned_children`: the run was terminated, and its attached children have to be ended.
    """

    record: RunRecord
    observers: tuple[Observer, ...]
    messages: tuple[Message, ...]
    orphaned_children: bool


class ClaimedRun(Struct, frozen=True):
    """A claimed run, the highest message number of its inbox so far, and its last position.

    The position tells a worker whether its cached copy of the run is current.
    """

    id: str
    last_message_no: int
    position: int = 0


class RunPage(Struct, frozen=True):
    """One page of a query. `next` is the cursor of the next page, None at the end.

    `unreadable` are the marks of runs in the page that cannot be decoded. `scanned` is the number of rows that were
    examined. A page examines a limited number of rows, so it may have fewer runs than requested, or none, and a cursor.
    """

    runs: tuple[RunRecord, ...]
    next: str | None = None
    unreadable: tuple[UnreadableRun, ...] = ()
    scanned: int = 0


class StoredEntry(Struct, frozen=True):
    """An entry and the position at which it was last written."""

    position: int
    entry: Entry


class TopicSummary(Struct, frozen=True):
    """A topic in a list: the events that wait in it for a reader, and the runs that wait for its events."""

    name: str
    queued: int
    waiting: int
