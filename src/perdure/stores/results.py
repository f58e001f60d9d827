"""Results of writes and reads of a store, as data."""

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
    """The run was made by this call; `owned` says whether the given owner got it."""

    owned: bool


class IdTaken(Struct, frozen=True):
    """The id was taken by this run."""

    record: RunRecord


class Committed(Struct, frozen=True, gc=False):
    """The write is durable. `mail`: the inbox holds messages that it has not seen."""

    mail: bool = False


class Superseded(Struct, frozen=True):
    """Somebody else moved the run on, owns it, or declared this worker gone: drop it and load again."""


class AlreadyEnded(Struct, frozen=True):
    """The run had ended already, like this; who wants to observe it learns with what."""

    status: RunStatus
    ending: RunResult | None = None


class Observing(Struct, frozen=True):
    """The end of the run will be told."""


class EventPublished(Struct, frozen=True):
    """The event is accepted: how many runs it was assigned to, and whether there are more to come (`FanOut`).

    `fresh` is False if an event with its id had been accepted before.
    """

    offset: int
    woken: int
    more: bool = False
    fresh: bool = True


class AlreadyStarted(Struct, frozen=True):
    """The run has executed already."""


class RunMissing(Struct, frozen=True):
    """There is no such run."""


class DeadLetterMissing(Struct, frozen=True):
    """There is no such dead letter: it was never there, or somebody else was first."""


class MessageDelivered(Struct, frozen=True):
    """The message is in the inbox; `fresh` is False if one with its id had been accepted before.

    `owner` is the worker that executes the run now, if any.
    """

    number: int
    fresh: bool
    owner: str | None = None


class LimitReached(Struct, frozen=True):
    """The inbox holds as many messages as it may."""

    pending: int


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
    | Observing
    | EventPublished
)


class Snapshot(Struct, frozen=True):
    """A run as of one moment: its row, every entry row in order of position, its unread mail in order of number."""

    record: RunRecord
    position: int
    entries: tuple[Entry, ...]
    inbox: tuple[Message, ...]


class UnfinalizedRun(Struct, frozen=True):
    """A run that has ended and what it still owes; observers and mail in pages. `orphans`: it was terminated."""

    record: RunRecord
    observers: tuple[Observer, ...]
    mail: tuple[Message, ...]
    orphans: bool


class ClaimedRun(Struct, frozen=True):
    """A run that was claimed, the highest number that its inbox has given so far, and where its history stands.

    By the position a worker knows whether a copy that it kept in memory is still the run.
    """

    id: str
    last_message_no: int
    position: int = 0


class RunPage(Struct, frozen=True):
    """One page of a query; `next` continues it, None at the end."""

    runs: tuple[RunRecord, ...]
    next: str | None = None


class StoredEntry(Struct, frozen=True):
    """An entry with the position at which it was (last) written."""

    position: int
    entry: Entry
