"""EntryLog: numbers the requests of a run and collects the entries that the next commit records."""

from __future__ import annotations

from asyncio import Future
from typing import Any

from perdure.model.records import Entry, EntryStatus
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.pending import PendingEntry
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import Command

PENDING, SUCCEEDED = EntryStatus.PENDING, EntryStatus.SUCCEEDED


class EntryLog:
    """See the module's docstring.

    `call_seq` is the number of the last request, across all scopes. `seq` is the number of the last completion that
    was applied. `changed` are entries to record: everything that a replay could not derive again is there when the turn
    ends. Only the methods of this class write it.
    """

    __slots__ = ("_extras", "_generation", "_history", "_loop", "call_seq", "changed", "seq")

    def __init__(self, history: History, loop: WorkflowLoop, extras: TurnExtrasBuilder, generation: int) -> None:
        self._history = history
        self._loop = loop
        self._extras = extras
        self._generation = generation
        self.call_seq = 0
        self.seq = 0
        self.changed: dict[str, Entry] = {}

    # --- numbers

    def next_call_seq(self) -> int:
        """Return the number of the next request."""
        self.call_seq += 1
        return self.call_seq

    def count_recorded(self, entry: Entry) -> None:
        """Count a recorded entry that no call requests, so that new requests are numbered after it."""
        self.call_seq = max(self.call_seq, entry.call_seq)

    def move_to(self, entry: Entry) -> None:
        """Set position and time of the run to those of a completion. Time never decreases."""
        self.seq = seq = entry.seq or self.seq
        loop, at = self._loop, entry.settled_at
        if at is not None and at > loop.now:
            loop.now = at
        if self._history.rewound:
            loop.pass_time(self._history.rewound.get(seq))

    # --- records

    def record(self, entry: Entry) -> None:
        """Record an entry with the next commit."""
        self.changed[entry.location] = entry

    def record_pending(self, pending: PendingEntry) -> None:
        """Record an entry as pending, in its present state."""
        self.changed[pending.location] = pending.to_entry(PENDING)

    def record_note(self, kind: str, location: str, value: bytes) -> None:
        """Record a value that no later call requests, outside of the order of its scope; once."""
        call_seq = self.next_call_seq()
        if location not in self._history.by_location:
            now = self._loop.now
            self.changed[location] = Entry(
                location,
                kind,
                location.rpartition("/")[2],
                SUCCEEDED,
                call_seq,
                value=value,
                generation=self._generation,
                started_at=now,
                settled_at=now,
            )

    def record_external(self, location: str, kind: str, name: str, now: float, value: bytes | None = None) -> Entry:
        """Record and return the completion of something that no call requested: a fired timer, a cancel."""
        entry = Entry(
            location=location,
            kind=kind,
            name=name,
            status=SUCCEEDED,
            call_seq=self.next_call_seq(),
            seq=self.seq + 1,
            value=value,
            generation=self._generation,
            started_at=now,
            settled_at=now,
        )
        self.changed[location] = entry
        return entry

    def take_changed(self) -> tuple[Entry, ...]:
        """Return the entries that this turn's commit records."""
        entries = tuple(self.changed.values())
        self.changed.clear()
        return entries

    def delete(self, path: str) -> None:
        """Delete everything at and below a path from the history."""
        self._extras.drop(path)
        self._history.delete(path)
        below = f"{path}/"
        for location in [each for each in self.changed if each == path or each.startswith(below)]:
            del self.changed[location]

    def new_unordered(
        self, location: str, kind: str, name: str, future: Future[Any], command: Command | None = None
    ) -> PendingEntry:
        """Build a pending entry without an ordinal: it stands outside of the order of its scope."""
        generation, now = self._generation, self._loop.now
        return PendingEntry(
            location, kind, name, self.next_call_seq(), -1, generation, now, future, None, None, command
        )
