"""AttemptTracker: the steps and external effects of a run that are to start, are running, or hold the run.

A step is not recorded when it starts: a replay requests it again and so derives that it must run. The exceptions are
retries, whose number and due time are durable, and steps with `at_most_once`.
"""

from __future__ import annotations

from perdure.model.records import EntryStatus, ErrorRecord
from perdure.model.turns import StopRun
from perdure.runner.entry_log import EntryLog
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.pending import PendingEntry
from perdure.runner.tasks import EntryFuture
from perdure.runner.timers import TimerQueue

PENDING, SUCCEEDED = EntryStatus.PENDING, EntryStatus.SUCCEEDED
EXHAUSTED = b'"exhausted"'
"""Marks a step that has no attempts left and holds its run (`suspend_on_failure`)."""


class AttemptTracker:
    """See the module's docstring. Dictionaries are keyed by location, in order of request; others only read them.

    to_start           steps whose next attempt starts with this turn
    effects_to_start   external effects that start with this turn
    stop_requests      requests to stop another run; no task awaits them, but the run ends after them
    exhausted          steps without attempts left, which hold the run
    dropped            running steps that were cancelled in this turn
    running_count      the number of steps and effects whose `running` is set
    """

    __slots__ = (
        "_log",
        "_loop",
        "_timers",
        "dropped",
        "effects_to_start",
        "exhausted",
        "running_count",
        "stop_requests",
        "to_start",
    )

    def __init__(self, log: EntryLog, loop: WorkflowLoop, timers: TimerQueue) -> None:
        self._log = log
        self._loop = loop
        self._timers = timers
        self.to_start: dict[str, PendingEntry] = {}
        self.effects_to_start: dict[str, PendingEntry] = {}
        self.stop_requests: dict[str, PendingEntry] = {}
        self.exhausted: dict[str, PendingEntry] = {}
        self.dropped: list[str] = []
        self.running_count = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a step or external effect is running or about to start."""
        return bool(self.running_count or self.to_start or self.effects_to_start or self.stop_requests)

    # --- starting

    def schedule(self, pending: PendingEntry) -> None:
        """Start the next attempt of a step with this turn."""
        self.to_start[pending.location] = pending

    def unschedule(self, location: str) -> PendingEntry | None:
        """Do not start the step at this location; return it if it was scheduled."""
        return self.to_start.pop(location, None)

    def schedule_effect(self, pending: PendingEntry) -> None:
        """Start an external effect with this turn."""
        self.effects_to_start[pending.location] = pending

    def take_steps(self) -> list[PendingEntry]:
        """Return the steps to start, marked as running (see `start`, which is inlined here: once per step)."""
        steps = list(self.to_start.values())
        self.to_start.clear()
        self.running_count += len(steps)
        for pending in steps:
            pending.running = True
            if pending.call.step.settings.at_most_once and pending.attempts < pending.attempt:  # type: ignore[union-attr]
                self.record_started(pending)
        return steps

    def take_effects(self) -> list[PendingEntry]:
        """Return the external effects to start, marked as running."""
        effects = list(self.effects_to_start.values())
        self.effects_to_start.clear()
        for pending in effects:
            self.start(pending)
        return effects

    def start(self, pending: PendingEntry) -> None:
        """Mark an attempt as running. That of an `at_most_once` step is recorded before its body can run."""
        pending.running = True
        self.running_count += 1
        call = pending.call
        if call is not None and call.step.settings.at_most_once and pending.attempts < pending.attempt:
            self.record_started(pending)

    def resume_running(self, location: str) -> None:
        """Mark a scheduled step as running without starting it: this process executes it since before a reload."""
        pending = self.to_start.pop(location, None)
        if pending is not None:
            pending.running = True
            self.running_count += 1

    def record_started(self, pending: PendingEntry) -> None:
        """Record that the current attempt of a step has started."""
        pending.attempts, pending.due_at = pending.attempt, None
        self._log.record_pending(pending)

    # --- ends of attempts

    def end(self, pending: PendingEntry) -> None:
        """Mark a running attempt as no longer running."""
        pending.running = False
        self.running_count -= 1

    def drop_effect(self, pending: PendingEntry) -> None:
        """Neither start an external effect nor wait for it; a late result of it is ignored."""
        if pending.running:
            self.end(pending)
        self.effects_to_start.pop(pending.location, None)

    def cancel(self, pending: PendingEntry) -> bool:
        """Remove a cancelled entry. Return whether its external effect may have started before."""
        location = pending.location
        self.to_start.pop(location, None)
        self.exhausted.pop(location, None)
        may_have_started = self.effects_to_start.pop(location, None) is None or pending.recorded is not None
        if pending.running:
            self.end(pending)
            if pending.call is not None:
                self.dropped.append(location)
        return may_have_started

    def take_dropped(self) -> list[str]:
        """Return the locations of running steps that were cancelled in this turn."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def schedule_retry(self, pending: PendingEntry, due_at: float, error: ErrorRecord | None) -> None:
        """Plan the next attempt of a step and record it."""
        pending.attempts, pending.attempt = pending.attempt, pending.attempt + 1
        pending.due_at, pending.error = due_at, error
        self._log.record_pending(pending)
        self._timers.set(pending.location, due_at)

    def start_retry(self, pending: PendingEntry) -> None:
        """Start the next attempt of a step whose retry is due."""
        self._timers.remove(pending.location)
        pending.due_at = None
        self.to_start[pending.location] = pending

    def exhaust(self, pending: PendingEntry, error: ErrorRecord | None) -> None:
        """Hold the run because a step has no attempts left."""
        pending.attempts, pending.error, pending.detail, pending.due_at = pending.attempt, error, EXHAUSTED, None
        self.exhausted[pending.location] = pending
        self._log.record_pending(pending)

    def resume_exhausted(self, pending: PendingEntry) -> None:
        """Keep holding the run for a recorded step without attempts left."""
        self.exhausted[pending.location] = pending

    def restart_exhausted(self) -> None:
        """Give steps that hold the run all their attempts again, and start them."""
        for location, pending in self.exhausted.items():
            pending.attempts, pending.attempt, pending.error, pending.detail = 0, 1, None, None
            self._log.record_pending(pending)
            self.to_start[location] = pending
        self.exhausted.clear()

    # --- stop requests

    def stop_run(self, location: str, run_id: str) -> None:
        """Request that a cancelled child is stopped. The run does not end before that is done."""
        pending = self._log.new_unordered(location, "stop", run_id, EntryFuture(loop=self._loop))
        self._schedule_stop(pending)
        self._log.record_pending(pending)

    def resume_stop_requests(self, history: History) -> None:
        """Schedule recorded stop requests that are not done yet; no call of user code requests them again."""
        for entry in history.by_location.values():
            if entry.kind == "stop" and entry.status is PENDING:
                self._schedule_stop(PendingEntry.from_record(entry, EntryFuture(loop=self._loop), None, None))

    def _schedule_stop(self, pending: PendingEntry) -> None:
        pending.action = StopRun(pending.name)
        self.stop_requests[pending.location] = self.effects_to_start[pending.location] = pending

    def complete_stop(self, location: str, error: ErrorRecord | None, now: float) -> bool:
        """Record that a stop request is done. False if there is none at this location."""
        stop = self.stop_requests.pop(location, None)
        if stop is None:
            return False
        self.end(stop)
        stop.error = error
        self._log.record(stop.to_entry(SUCCEEDED, settled_at=now))
        return True
