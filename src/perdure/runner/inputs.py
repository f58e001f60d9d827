"""InputApplier: apply what arrived from outside since the last turn, one input after the other, then due timers.

In one turn, results and messages are applied before timers that are due: between a timeout and a message that arrive
together, the message wins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from perdure.model.ids import deferred_message_epoch
from perdure.model.records import ErrorRecord, Message, RunResult
from perdure.model.tags import decode_tag_changes
from perdure.model.turns import (
    AwaitingResult,
    ChildIdTaken,
    Input,
    MessageReceived,
    RecordProgress,
    RecordRunningSteps,
    StartChild,
    StepDone,
)
from perdure.runner import limits
from perdure.runner.completions import CompletionApplier
from perdure.runner.pending import PendingEntry
from perdure.runner.state import RunnerState
from perdure.workflows.children import encode_child_detail, encode_child_outcome

LOGGER = logging.getLogger("perdure.workflow")
CANCEL = "~cancel"


class InputApplier:
    """See the module's docstring."""

    __slots__ = ("_attempts", "_completions", "_entries", "_loop", "_mailbox", "_state", "left")

    def __init__(self, state: RunnerState, completions: CompletionApplier) -> None:
        self._state = state
        self._completions = completions
        self._entries = state.entries
        self._attempts = state.entries.attempts
        self._loop = state.loop
        self._mailbox = state.mailbox
        self.left: Sequence[Input] = ()

    def apply_all(self, inputs: Sequence[Input], now: float) -> None:
        """Apply all inputs of a turn, and after each of them the immediate results that follow from it.

        If `loop.paused` is set on return, `left` are the inputs for the call that continues.
        """
        entries, loop, completions = self._entries, self._loop, self._completions
        if entries.immediate or entries.waiting:
            completions.complete_immediate(max(now, loop.now))
            if loop.paused:
                self.left = inputs
                return
        for number, given in enumerate(inputs, 1):
            at = now if now > loop.now else loop.now
            if type(given) is StepDone:
                self.apply_step_result(given, at)
            else:
                self.apply(given, at)
            if (entries.immediate or entries.waiting) and not loop.paused:
                # Events of one turn are available together: a batch receive gets all of them, and an event of the
                # mailbox is preferred to one of a topic. So the last of several events triggers the receives.
                if _is_event(given) and _is_event(*inputs[number : number + 1]):
                    continue
                completions.complete_immediate(max(now, loop.now))
            if loop.paused or (number < len(inputs) and loop.pause_if_due()):
                self.left = inputs[number:]
                return
        self.left = ()

    def apply(self, given: Input, now: float) -> None:
        """Apply one input."""
        match given:
            case StepDone():
                self.apply_step_result(given, now)
            case MessageReceived(message):
                self._apply_message(message, now)
            case AwaitingResult():
                self._apply_awaiting(given, now)
            case RecordRunningSteps():
                self._record_running(given.locations)
            case RecordProgress():
                self._record_progress(given)
            case ChildIdTaken():
                self._start_with_fallback_id(given.location)

    # --- results

    def apply_step_result(self, done: StepDone, now: float) -> None:
        """Apply the result of a step attempt or of an external effect."""
        entries, attempts = self._entries, self._attempts
        if attempts.stop_requests and attempts.complete_stop(done.location, done.error, now):
            return
        if entries.children.watches and entries.children.on_effect_done(done.location, ended=True):
            return
        if entries.deadlines.pending and entries.deadlines.on_effect_done(done.location, done.error, now):
            return
        pending = entries.pending.get(done.location)
        if pending is None or pending.attempt != done.attempt or not pending.running or self._loop.stopped:
            return  # the late result of a cancelled attempt
        attempts.end(pending)
        if pending.call is None:
            self._apply_effect_result(pending, done, now)
        elif done.error is None:
            self._completions.complete(pending, now, done.value)
        elif not self._schedule_retry(pending, done, now):
            self._log_failed_attempt(pending, done.attempt, done.error, out_of_time=self._is_out_of_time(pending, done))
            if not self._hold_on_exhausted(pending, done):
                self._completions.complete(pending, now, None, done.error)

    def _apply_effect_result(self, pending: PendingEntry, done: StepDone, now: float) -> None:
        if done.error is None and done.value is not None and pending.kind in ("child", "result", "outcome"):
            self._complete_child(pending, msgspec.json.decode(done.value, type=RunResult), now)
        else:
            action = pending.action
            if pending.kind == "start_child" and isinstance(action, StartChild) and self._existed_before(done.value):
                self._detach_child(pending, action)
            self._completions.complete(pending, now, done.value, done.error)

    def _existed_before(self, started: bytes | None) -> bool:
        return started is not None and not self._state.start.codec.decode(started)["created"]

    def _detach_child(self, pending: PendingEntry, action: StartChild) -> None:
        """Note that the run of a child's id existed before: it is independent of this run."""
        pending.action = msgspec.structs.replace(action, attached=False)
        pending.detail = encode_child_detail(pending.action)

    def _start_with_fallback_id(self, location: str) -> None:
        """Start a child under its other id. The id is recorded first: a replay must not start it under both."""
        pending = self._entries.pending.get(location)
        if pending is None or not pending.running or not isinstance(pending.action, StartChild):
            return
        self._attempts.end(pending)
        assert pending.action.fallback_id is not None
        pending.action = msgspec.structs.replace(pending.action, run_id=pending.action.fallback_id, fallback_id=None)
        pending.detail = encode_child_detail(pending.action)
        self._entries.log.record_pending(pending)
        self._attempts.schedule_effect(pending)

    def _complete_child(self, pending: PendingEntry, result: RunResult, now: float) -> None:
        id = _awaited_id(pending)
        value, error, pending.detail = encode_child_outcome(pending.kind, id, result)
        self._completions.complete(pending, now, value, error)

    def _apply_awaiting(self, awaiting: AwaitingResult, now: float) -> None:
        """Note that an external effect is done and that messages will bring the results of the runs it names."""
        entries = self._entries
        if entries.children.watches and entries.children.on_effect_done(awaiting.location, ended=False):
            return
        pending = entries.pending.get(awaiting.location)
        if pending is None or not pending.running:
            return
        self._attempts.end(pending)
        ended = pending.awaited or set()  # results that arrived before this input
        pending.awaited = set(awaiting.runs) - ended
        if not awaiting.created and isinstance(pending.action, StartChild):
            self._detach_child(pending, pending.action)
            entries.log.record_pending(pending)
        if not pending.awaited and pending.kind == "children":
            self._completions.complete(pending, now)

    def _schedule_retry(self, pending: PendingEntry, done: StepDone, now: float) -> bool:
        """Plan the next attempt of a failed step. False if it has none."""
        assert pending.call is not None
        retry = pending.call.step.settings.retry
        if done.notes is not None:
            pending.notes = done.notes
        if retry is None or not done.retryable or done.attempt >= retry.max_attempts:
            return False
        try:
            due_at = now + limits.retry_delay(self._state.start.seed, retry, done.location, done.attempt, done.error)
        except Exception as error:  # raised by the user's delay function
            info = self._state.info
            LOGGER.error(
                "Run %s: Retry.delay of step %s raised; step fails without another attempt",
                info.id,
                done.location,
                exc_info=error,
                extra={"run_id": info.id, "workflow": info.workflow, "location": done.location},
            )
            return False
        if done.retry_until is not None and due_at >= done.retry_until:
            return False
        self._attempts.schedule_retry(pending, due_at, done.error)
        if done.error is not None:
            self._log_failed_attempt(pending, done.attempt, done.error, retry_in=due_at - now)
        return True

    def _is_out_of_time(self, pending: PendingEntry, done: StepDone) -> bool:
        """Return whether a failed step has attempts left, but no time for them."""
        retry = pending.call.step.settings.retry if pending.call is not None else None
        return (
            done.retryable and done.retry_until is not None and retry is not None and done.attempt < retry.max_attempts
        )

    def _log_failed_attempt(
        self,
        pending: PendingEntry,
        attempt: int,
        error: ErrorRecord,
        retry_in: float | None = None,
        *,
        out_of_time: bool = False,
    ) -> None:
        """Log that an attempt of a step failed; without `retry_in` there is no other."""
        info, location = self._state.info, pending.location
        extra = {
            "run_id": info.id,
            "workflow": info.workflow,
            "step": pending.name,
            "location": location,
            "attempt": attempt,
            "error_type": error.type,
            "retry_in": retry_in,
        }
        if retry_in is None:
            text = "Run %s: step %s failed after attempt %d: %s: %s; no %s left"
            left = "time (max_elapsed)" if out_of_time else "attempts"
            LOGGER.error(text, info.id, location, attempt, error.type, error.message, left, extra=extra)
        else:
            text = "Run %s: step %s failed (attempt %d): %s: %s; retrying in %.3g seconds"
            LOGGER.warning(text, info.id, location, attempt, error.type, error.message, retry_in, extra=extra)

    def _hold_on_exhausted(self, pending: PendingEntry, done: StepDone) -> bool:
        """Hold the run for a step without attempts left. False if the step fails instead.

        A rerun step always holds: the rest of the history was recorded after its success. Otherwise
        `suspend_on_failure` decides. Compensations (they have a detail) and typed errors, which the workflow handles,
        never hold.
        """
        state = self._state
        wanted = (
            state.start.definition.settings.suspend_on_failure and pending.detail is None and not state.function_outcome
        )
        typed = done.error is not None and done.error.fields is not None
        if pending is not state.rerun_pending and (not wanted or typed):
            return False
        self._attempts.exhaust(pending, done.error)
        return True

    def _record_running(self, locations: Sequence[str]) -> None:
        """Record slow steps as pending, so that people see what is running."""
        for location in locations:
            pending = self._entries.pending.get(location)
            if pending is not None and pending.running and pending.attempts < pending.attempt:
                self._attempts.record_started(pending)

    def _record_progress(self, progress: RecordProgress) -> None:
        """Record the notes of a running attempt; those of an attempt that has ended are late."""
        pending = self._entries.pending.get(progress.location)
        if pending is not None and pending.running and pending.attempt == progress.attempt:
            pending.notes = progress.notes
            self._attempts.record_started(pending)

    # --- messages

    def _apply_message(self, message: Message, now: float) -> None:
        mailbox = self._mailbox
        match message.kind:
            case "cancel":
                mailbox.discard(message)
                self._end_pause()
                if not self._loop.stopped:
                    self._cancel_function("cancel", now, message.body)
            case "resume":
                mailbox.discard(message)
                self._end_pause()
                self._resume(now)
            case "pause":
                self._end_pause()
                self._state.pause = message
            case "tag":
                mailbox.discard(message)
                self._state.extras.tag(decode_tag_changes(message.body or b"{}"))
            case "child":
                self._apply_child_result(message, now)
            case "deferred" if deferred_message_epoch(message.id) != str(self._state.start.epoch):
                mailbox.discard(message)  # addressed to an earlier generation
            case "deferred" if message.name in self._entries.deferreds:
                mailbox.discard(message)  # a fallback that arrived too late
            case "event" | "assignment" | "deferred":
                mailbox.add(message)

    def check_completions(self, now: float) -> None:
        """Reject completions of deferreds that do not fit. A deferred with one that fits cannot time out any more."""
        for name in self._mailbox.check_completions(now):
            self._entries.deadlines.end(name)

    def _end_pause(self) -> None:
        """Drop a request to hold the run that was not carried out yet."""
        if self._state.pause is not None:
            self._mailbox.discard(self._state.pause)
            self._state.pause = None

    def _resume(self, now: float) -> None:
        """Make waiting retries due now, and give steps that hold the run their attempts back."""
        self._entries.resume(now)
        rerun = self._state.rerun_pending
        if rerun is not None and rerun.call is not None and rerun.location in self._entries.timers.due:
            rerun.due_at = now

    def _apply_child_result(self, message: Message, now: float) -> None:
        """Apply the end of another run to the entry that waits for it, if one still does."""
        entries = self._entries
        self._mailbox.discard(message)
        if entries.children.watches and entries.children.on_child_ended(message.target or "", message.name):
            return
        location = (message.target or "").partition("/")[2]
        pending = entries.pending.get(location)
        if pending is None or pending.target != message.target or self._loop.stopped:
            return
        if pending.kind != "children":
            if message.name != _awaited_id(pending):
                return  # from a child of an earlier run with the id of this one
            self._complete_child(pending, msgspec.json.decode(message.body or b"{}", type=RunResult), now)
        elif pending.running:  # `AwaitingResult`, with the list of open children, is still to come
            pending.awaited = (pending.awaited or set()) | {message.name}
        elif pending.awaited is not None:
            pending.awaited.discard(message.name)
            if not pending.awaited:
                self._completions.complete(pending, now)

    def _cancel_function(self, reason: str, now: float, text: bytes | None = None) -> None:
        """Raise cancellation in the workflow function, once: for a caller's cancel or an exceeded limit.

        `text` is the reason that the caller gave, encoded.
        """
        if self._state.stop_reason is None and self._state.function_outcome is None:
            self._completions.apply_external(CANCEL, "cancel", reason, now, text)

    # --- time

    def fire_due(self, now: float) -> None:
        """Fire sleeps, timers and retries that are due, earliest first; then apply the run's own limits.

        If `loop.paused` is set on return, the next call continues.
        """
        entries, loop = self._entries, self._loop
        timers = entries.timers
        postponed: list[PendingEntry] = []
        while not loop.stopped and not loop.paused and (location := timers.pop_due(now)) is not None:
            pending = entries.pending.get(location)
            if location in entries.deadlines.pending:
                entries.deadlines.fire(location)
            elif pending is None:
                self._completions.apply_external(location, "timer", "timer", now)
            elif pending.target in entries.extras.subscribed:
                # A receive that subscribes with this turn does not time out before its topics were read once.
                postponed.append(pending)
                continue
            elif pending.call is not None:
                self._attempts.schedule(pending)
            else:
                self._completions.time_out(pending, now)
            if (entries.immediate or entries.waiting) and not loop.paused:
                self._completions.complete_immediate(now)
            loop.pause_if_due()
        for pending in postponed:
            if pending.due_at is not None and entries.pending.get(pending.location) is pending:
                timers.set(pending.location, pending.due_at)
        limit = limits.next_limit(self._state) if self._state.limited and not loop.paused else None
        if limit is not None and limit[0] <= now and not loop.stopped:
            self._cancel_function(limit[1], now)


def _is_event(given: Input | None = None) -> bool:
    return isinstance(given, MessageReceived) and given.message.kind in ("event", "assignment")


def _awaited_id(pending: PendingEntry) -> str:
    """Return the id of the run whose end an entry waits for."""
    return str(msgspec.json.decode(pending.detail or b"{}").get("id", ""))
