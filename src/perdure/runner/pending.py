"""What a run has call_seq for and not yet got: the futures its tasks wait on, and how far their steps are."""

from __future__ import annotations

from asyncio import Future
from typing import TYPE_CHECKING, Any

from perdure.model.records import Entry, EntryStatus, ErrorRecord
from perdure.model.turns import ExternalAction

if TYPE_CHECKING:
    from perdure.workflows.commands import Command
    from perdure.workflows.steps import StepCall

PENDING = EntryStatus.PENDING  # by the name of its class a member costs 850 instructions on 3.11


class PendingEntry:
    """One requested entry. Its record is built when something about it is to be written, and not before: most steps are
    written once, when they are done.

    `attempt` is the one that is next or under way; `attempts` those that are on record as begun. `call` is what a step
    was call_seq with, `question` anything else. `awaited` are runs whose end mail is to bring.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "awaited",
        "call",
        "call_seq",
        "detail",
        "due_at",
        "error",
        "fingerprint",
        "future",
        "generation",
        "kind",
        "location",
        "name",
        "ordinal",
        "question",
        "recorded",
        "seq",
        "started_at",
        "under_way",
        "work",
    )

    def __init__(
        self,
        location: str,
        kind: str,
        name: str,
        call_seq: int,
        ordinal: int,
        generation: int,
        started_at: float,
        future: Future[Any],
        call: StepCall | None,
        fingerprint: bytes | None,
        question: Command | None = None,
    ) -> None:
        self.location = location
        self.kind = kind
        self.name = name
        self.call_seq = call_seq
        self.ordinal = ordinal
        self.generation = generation
        self.started_at = started_at
        self.future = future
        self.call = call
        self.fingerprint = fingerprint
        self.attempt = 1
        self.attempts = 0
        self.due_at: float | None = None
        self.error: ErrorRecord | None = None
        self.recorded: EntryStatus | None = None
        self.under_way = False
        self.question = question
        self.detail: bytes | None = None
        self.seq: int | None = None  # of a step that is to be done again in its old place
        self.work: ExternalAction | None = None
        self.awaited: set[str] | None = None

    @property
    def target(self) -> str:
        """What mail that answers this is addressed to."""
        return f"{self.generation}/{self.location}"

    @classmethod
    def of(cls, record: Entry, future: Future[Any], call: StepCall | None, question: Command | None) -> PendingEntry:
        """What is on record, call_seq for again by a replay."""
        pending = cls(
            record.location,
            record.kind,
            record.name,
            record.call_seq,
            record.ordinal,
            record.generation,
            record.started_at,
            future,
            call,
            record.fingerprint,
            question,
        )
        pending.detail = record.detail
        pending.seq = record.seq if record.status is PENDING else None
        pending.attempts = record.attempts
        pending.due_at = record.due_at
        pending.error = record.error
        pending.recorded = record.status
        # Waiting for a retry, the next attempt is a new one; one that was cut short is repeated under its number.
        pending.attempt = record.attempts + 1 if record.due_at is not None else max(record.attempts, 1)
        return pending

    def entry(
        self,
        status: EntryStatus,
        *,
        seq: int | None = None,
        value: bytes | None = None,
        settled_at: float | None = None,
    ) -> Entry:
        """The record of it as it stands."""
        if status is PENDING:
            seq = self.seq
        return Entry(
            self.location,
            self.kind,
            self.name,
            status,
            self.call_seq,
            self.ordinal,
            seq,
            value,
            self.error,
            self.attempts,
            self.generation,
            self.started_at,
            settled_at,
            self.due_at,
            self.fingerprint,
            self.detail,
        )


class NeverCompletes:
    """An awaitable that never ends: given to handlers that go on asking while their run is being closed."""

    def __await__(self) -> Any:
        while True:
            yield
