"""Inputs: what came in from outside since the last turn, taken one after the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from perdure.model.records import EntryStatus, Message, RunResult
from perdure.model.turns import AwaitingResult, Input, MessageReceived, RecordRunningSteps, StartChild, StepDone
from perdure.runner.completions import SUCCEEDED, CompletionApplier
from perdure.runner.entry_tracker import EXHAUSTED
from perdure.runner.pending import PendingEntry
from perdure.workflows.children import encode_child_detail, encode_child_outcome

LOGGER = logging.getLogger("perdure.workflow")
CANCEL = "~cancel"
PENDING = EntryStatus.PENDING


class InputApplier(CompletionApplier):
    """See the module's docstring."""

    __slots__ = ()

    def _take(self, given: Input, now: float) -> None:
        match given:
            case StepDone():
                self._take_attempt(given, now)
            case MessageReceived(message):
                self._take_mail(message, now)
            case AwaitingResult():
                self._take_standing(given, now)
            case RecordRunningSteps():
                self._expose(given.locations)

    def _take_attempt(self, done: StepDone, now: float) -> None:
        ledger = self._ledger
        if ledger.stop_requests and self._stopped(done, now):
            return
        if ledger.nursery.watches and ledger.nursery.errand_done(done.location, ended=True):
            return
        pending = ledger.pending.get(done.location)
        if pending is None or pending.attempt != done.attempt or not pending.under_way or self._loop.stopped:
            return  # the late result of an attempt that was given up
        pending.under_way = False
        ledger.running_count -= 1
        if pending.call is None:
            self._errand_done(pending, done, now)
        elif done.error is None:
            self._complete(pending, now, value=done.value)
        elif not self._schedule_retry(pending, done, now) and not self._hold_on_exhausted(pending, done):
            self._complete(pending, now, error=done.error)

    def _stopped(self, done: StepDone, now: float) -> bool:
        """Whether this was the errand of stopping a run that nobody waits for."""
        ledger = self._ledger
        stop = ledger.stop_requests.pop(done.location, None)
        if stop is None:
            return False
        stop.under_way = False
        ledger.running_count -= 1
        stop.error = done.error
        ledger.changed[done.location] = stop.entry(SUCCEEDED, settled_at=now)
        return True

    def _errand_done(self, pending: PendingEntry, done: StepDone, now: float) -> None:
        if done.error is None and done.value is not None and pending.kind in ("child", "result", "outcome"):
            self._child_ended(pending, msgspec.json.decode(done.value, type=RunResult), now)
        else:
            work = pending.work
            if pending.kind == "start_child" and isinstance(work, StartChild) and self._existed(done.value):
                self._not_ours(pending, work)
            self._complete(pending, now, value=done.value, error=done.error)

    def _existed(self, started: bytes | None) -> bool:
        return started is not None and not self._start.codec.decode(started)["created"]

    def _not_ours(self, pending: PendingEntry, work: StartChild) -> None:
        """The run of this id was there before: it is independent, and what the entry keeps says so."""
        pending.work = msgspec.structs.replace(work, attached=False)
        pending.detail = encode_child_detail(pending.work)

    def _child_ended(self, pending: PendingEntry, ending: RunResult, now: float) -> None:
        id = str(msgspec.json.decode(pending.detail or b"{}").get("id", ""))
        value, error, pending.detail = encode_child_outcome(pending.kind, id, ending)
        self._complete(pending, now, value=value, error=error)

    def _take_standing(self, standing: AwaitingResult, now: float) -> None:
        """An errand was run; from now on the run waits for mail."""
        if self._ledger.nursery.watches and self._ledger.nursery.errand_done(standing.location, ended=False):
            return
        pending = self._ledger.pending.get(standing.location)
        if pending is None or not pending.under_way:
            return
        pending.under_way = False
        self._ledger.running_count -= 1
        ended = pending.awaited or set()
        pending.awaited = set(standing.runs) - ended
        if not standing.created and isinstance(pending.work, StartChild):
            self._not_ours(pending, pending.work)
            self._ledger.changed[pending.location] = pending.entry(PENDING)
        if not pending.awaited and pending.kind == "children":
            self._complete(pending, now)

    def _schedule_retry(self, pending: PendingEntry, done: StepDone, now: float) -> bool:
        """Plan the next attempt, if there is one: how many there were and when it is due are durable."""
        assert pending.call is not None
        retry = pending.call.step.settings.retry
        if retry is None or not done.retryable or done.attempt >= retry.max_attempts:
            return False
        try:
            due_at = now + self._pause(retry, done.location, done.attempt)
        except Exception as error:  # the user's delay function failed: the step cannot go on
            LOGGER.error("run %s: Retry.delay of %s raised", self.info.id, done.location, exc_info=error)
            return False
        pending.attempts, pending.attempt = done.attempt, done.attempt + 1
        pending.due_at, pending.error = due_at, done.error
        self._ledger.changed[done.location] = pending.entry(PENDING)
        self._ledger.alarms.set(done.location, due_at)
        return True

    def _hold_on_exhausted(self, pending: PendingEntry, done: StepDone) -> bool:
        """Let a step without attempts left hold the run, if that is wanted or the history depends on its success."""
        redone = pending is self._rerun_pending
        wanted = (
            self._start.definition.settings.suspend_on_failure and pending.detail is None and not self._function_outcome
        )
        typed = done.error is not None and done.error.fields is not None
        if not redone and (not wanted or typed):
            return False
        pending.attempts, pending.error, pending.detail, pending.due_at = done.attempt, done.error, EXHAUSTED, None
        self._ledger.exhausted[pending.location] = pending
        self._ledger.changed[pending.location] = pending.entry(PENDING)
        return True

    def _take_mail(self, message: Message, now: float) -> None:
        mailroom = self._mailroom
        match message.kind:
            case "cancel":
                mailroom.discard(message)
                if not self._loop.stopped:
                    self._stop("cancel", now)
            case "resume":
                mailroom.discard(message)
                self._resume(now)
            case "child":
                self._on_child_result(message, now)
            case "deferred" if not message.id.startswith(f"deferred/{self._start.epoch}/"):
                mailroom.discard(message)  # meant for a generation that is gone
            case "event" | "assignment" | "deferred":
                mailroom.add(message)

    def _resume(self, now: float) -> None:
        """A retry that was waiting need not wait any longer, and a step that holds the run gets its attempts back."""
        ledger = self._ledger
        for location, pending in ledger.pending.items():
            if pending.call is not None and location in ledger.alarms.due:
                ledger.alarms.set(location, now)
                if pending is self._rerun_pending:
                    pending.due_at = now
        for location, pending in ledger.exhausted.items():
            pending.attempts, pending.attempt, pending.error, pending.detail = 0, 1, None, None
            ledger.changed[location] = pending.entry(PENDING)
            ledger.to_start[location] = pending
        ledger.exhausted.clear()

    def _on_child_result(self, message: Message, now: float) -> None:
        """A run has ended that something here waits for, or did."""
        self._mailroom.discard(message)
        if self._ledger.nursery.watches and self._ledger.nursery.on_child_ended(message.target or ""):
            return
        location = (message.target or "").partition("/")[2]
        pending = self._ledger.pending.get(location)
        if pending is None or pending.target != message.target or self._loop.stopped:
            return
        if pending.kind != "children":
            self._child_ended(pending, msgspec.json.decode(message.body or b"{}", type=RunResult), now)
        elif pending.under_way:  # the list of those that are open is still being made
            pending.awaited = (pending.awaited or set()) | {message.name}
        elif pending.awaited is not None:
            pending.awaited.discard(message.name)
            if not pending.awaited:
                self._complete(pending, now)

    def _expose(self, locations: Sequence[str]) -> None:
        for location in locations:
            pending = self._ledger.pending.get(location)
            if pending is not None and pending.under_way and pending.attempts < pending.attempt:
                self._record_begun(pending)

    def _stop(self, reason: str, now: float) -> None:
        """Raise cancellation in the workflow, once, for a caller's cancel or a limit that was exceeded."""
        if self._stop_reason is None and self._function_outcome is None:
            self._record_external(CANCEL, "cancel", reason, now)

    def _fire_due(self, now: float) -> None:
        """Sleeps, timers and retries whose moment has come, earliest first; then the run's own limits."""
        ledger, loop = self._ledger, self._loop
        subscribing: list[
            PendingEntry
        ] = []  # those have yet to hear what their topics hold, in the turn after this one
        while not loop.stopped and (location := ledger.alarms.pop_due(now)) is not None:
            pending = ledger.pending.get(location)
            if pending is not None and pending.target in ledger.extras.subscribed:
                subscribing.append(pending)
            elif pending is None:
                self._record_external(location, "timer", "timer", now)
            elif pending.call is not None:
                ledger.to_start[location] = pending
            else:
                self._time_out(pending, now)
            if ledger.instant or ledger.waiting:
                self._complete_immediate(now)
        for pending in subscribing:
            if pending.due_at is not None and ledger.pending.get(pending.location) is pending:
                ledger.alarms.set(pending.location, pending.due_at)
        limit = self._limit()
        if limit is not None and limit[0] <= now and not loop.stopped:
            self._stop(limit[1], now)
