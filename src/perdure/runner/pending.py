"""PendingEntry: an entry that a run has requested and that is not completed."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perdure.model.records import Entry, EntryStatus, ErrorRecord
from perdure.model.turns import ExternalAction

if TYPE_CHECKING:
    from perdure.workflows.commands import Command
    from perdure.workflows.steps import StepCall

PENDING = EntryStatus.PENDING  # bound once: looking up an enum member costs 850 instructions on Python 3.11


class PendingEntry:
    """One requested entry, with the future that its task awaits.

    Its record is built only when it is written: most steps are written once, when they are completed.

    `attempt` is the attempt that is next or running, `attempts` the number that is recorded as started. `call` is the
    call of a step, `command` that of anything else. `action` is the external effect of a command; `awaited` are runs
    whose ends arrive as messages. `recorded` is the status on record, None for a new request. `seq` is set for a step
    that runs again after a rewind: its recorded position in the order of completions. `notes` are what a step's next
    attempt needs of earlier ones.
    """

    __slots__ = (
        "action",
        "attempt",
        "attempts",
        "awaited",
        "call",
        "call_seq",
        "command",
        "detail",
        "due_at",
        "error",
        "fingerprint",
        "future",
        "generation",
        "kind",
        "location",
        "name",
        "notes",
        "ordinal",
        "recorded",
        "running",
        "seq",
        "started_at",
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
        command: Command | None = None,
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
        self.running = False
        self.command = command
        self.detail: bytes | None = None
        self.notes: bytes | None = None
        self.seq: int | None = None
        self.action: ExternalAction | None = None
        self.awaited: set[str] | None = None

    @property
    def target(self) -> str:
        """The address of messages for this entry. It names the generation: messages for an earlier one do not match."""
        return f"{self.generation}/{self.location}"

    @classmethod
    def from_record(
        cls, record: Entry, future: Future[Any], call: StepCall | None, command: Command | None
    ) -> PendingEntry:
        """Build the pending entry of a record that a replay requests again."""
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
            command,
        )
        pending.detail = record.detail
        pending.notes = record.value if record.status is PENDING else None
        pending.seq = record.seq if record.status is PENDING else None
        pending.attempts = record.attempts
        pending.due_at = record.due_at
        pending.error = record.error
        pending.recorded = record.status
        # An entry that waits for a retry gets a new attempt; an attempt that a crash interrupted keeps its number.
        pending.attempt = record.attempts + 1 if record.due_at is not None else max(record.attempts, 1)
        return pending

    def to_entry(
        self,
        status: EntryStatus,
        *,
        seq: int | None = None,
        value: bytes | None = None,
        settled_at: float | None = None,
    ) -> Entry:
        """Build the record of this entry in its present state."""
        if status is PENDING:
            seq, value = self.seq, self.notes
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
    """An awaitable that never completes, for handlers that keep making durable calls while their run is evicted."""

    def __await__(self) -> Any:
        while True:
            yield


def first_iteration(loop: str, *pending: Iterable[str]) -> int | None:
    """Return the first iteration of a loop that has a location among these."""
    below = f"{loop}/~"
    found = (location.removeprefix(below) for each in pending for location in each if location.startswith(below))
    return min((int(location.partition("/")[0]) for location in found), default=None)
