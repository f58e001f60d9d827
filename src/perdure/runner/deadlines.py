"""DeferredDeadlines: deferreds that time out.

A deferred with a timeout has an entry of kind "deadline", recorded when the deferred is created. At its time the run
sends itself a completion that fails the deferred with `TimeoutError`. That message has the id of every completion of
the deferred, so the store decides between them: the first one wins, and a caller that comes later is refused. The entry
stands outside of the order of completions. No task awaits it, and no call of user code need request it again.
"""

from __future__ import annotations

import msgspec

from perdure.model.ids import deferred_message_id
from perdure.model.locations import escape_segment
from perdure.model.records import EntryStatus, ErrorRecord, Message, RunResult, RunStatus
from perdure.model.turns import SendEvent
from perdure.runner.attempt_tracker import AttemptTracker
from perdure.runner.entry_log import EntryLog
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.pending import PendingEntry
from perdure.runner.tasks import EntryFuture
from perdure.runner.timers import TimerQueue

DEADLINE = "deadline"
RETRY_SECONDS = 60.0  # until a completion that could not be sent is sent again
PENDING, SUCCEEDED, CANCELLED = EntryStatus.PENDING, EntryStatus.SUCCEEDED, EntryStatus.CANCELLED


class DeferredDeadlines:
    """See the module's docstring. `pending` are deadlines that are not over, by location."""

    __slots__ = ("_attempts", "_epoch", "_known", "_log", "_loop", "_run_id", "_timers", "pending")

    def __init__(
        self,
        run_id: str,
        epoch: int,
        log: EntryLog,
        attempts: AttemptTracker,
        timers: TimerQueue,
        loop: WorkflowLoop,
        history: History,
    ) -> None:
        self._run_id = run_id
        self._epoch = epoch
        self._log = log
        self._attempts = attempts
        self._timers = timers
        self._loop = loop
        self._known: dict[str, int] = {}  # the call numbers of all deadlines, by location
        self.pending: dict[str, PendingEntry] = {}
        for entry in history.by_location.values():
            if entry.kind == DEADLINE:
                self._known[entry.location] = entry.call_seq
                if entry.status is PENDING and entry.due_at is not None:
                    self._open(PendingEntry.from_record(entry, EntryFuture(loop=loop), None, None), entry.due_at)

    def set(self, name: str, due_at: float, generation: int, *, replaying: bool) -> None:
        """Record when a deferred times out; the first time of each deferred counts."""
        location = _location(name)
        if location in self._known:
            self._log.call_seq = max(self._log.call_seq, self._known[location])
            return
        # As for a pin: the recorded entries after a deadline that new code adds were numbered without it.
        call_seq = self._log.call_seq if replaying else self._log.next_call_seq()
        self._known[location] = call_seq
        future, now = EntryFuture(loop=self._loop), self._loop.now
        pending = PendingEntry(location, DEADLINE, name, call_seq, -1, generation, now, future, None, None)
        self._open(pending, due_at)
        self._log.record_pending(pending)

    def _open(self, pending: PendingEntry, due_at: float) -> None:
        pending.due_at = due_at
        self.pending[pending.location] = pending
        self._timers.set(pending.location, due_at)

    def due_at(self, name: str) -> float | None:
        """Return when a deferred times out, or None."""
        pending = self.pending.get(_location(name))
        return None if pending is None else pending.due_at

    def fire(self, location: str) -> None:
        """Send the run the completion that times the deferred out."""
        pending = self.pending[location]
        message = f"deferred {pending.name!r} was not completed in time"
        error = ErrorRecord("TimeoutError", message, qualified="builtins:TimeoutError")
        completion = Message(
            id=deferred_message_id(self._epoch, pending.name),
            kind="deferred",
            name=pending.name,
            body=msgspec.json.encode(RunResult(RunStatus.FAILED, error=error)),
            sender=self._run_id,
            sent_at=self._loop.now,
        )
        pending.action = SendEvent(self._run_id, completion)
        self._attempts.schedule_effect(pending)

    def on_effect_done(self, location: str, error: ErrorRecord | None, now: float) -> bool:
        """Record that the completion is sent; if that failed, try again. False if no deadline is at this location."""
        pending = self.pending.get(location)
        if pending is None:
            return False
        if error is None:
            self._end(pending, SUCCEEDED)
        else:
            self._attempts.drop_effect(pending)
            pending.action = None
            self._timers.set(location, now + RETRY_SECONDS)
        return True

    def end(self, name: str) -> None:
        """Record that a deferred cannot time out any more, because it was completed."""
        pending = self.pending.get(_location(name))
        if pending is not None:
            self._end(pending, CANCELLED if pending.action is None else SUCCEEDED)

    def end_all(self) -> None:
        """End all deadlines: the workflow function has ended."""
        for pending in list(self.pending.values()):
            self._end(pending, CANCELLED)

    def _end(self, pending: PendingEntry, status: EntryStatus) -> None:
        del self.pending[pending.location]
        self._timers.remove(pending.location)
        self._attempts.drop_effect(pending)
        self._log.record(pending.to_entry(status, settled_at=self._loop.now))


def _location(name: str) -> str:
    return f"~deadline/{escape_segment(name)}"
