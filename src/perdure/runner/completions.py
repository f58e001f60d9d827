"""Completions: letting what is done have its effect, one at a time and in one order, live and on replay alike.

A completion is applied (`_apply`) by answering the task that waits for it and draining the loop. What is answered at
once (a receive whose event is there, a published value, a loop's next iteration) is a completion of its own too, after
the drain in which it was asked for (`_settle_ready`).
"""

from __future__ import annotations

from contextvars import Context as VariableContext

import msgspec

from perdure.codec.failures import error_to_record
from perdure.errors import InvalidPayload
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Hold, Message, RunResult, StreamItem
from perdure.runner.context_api import RunStart
from perdure.runner.pending import PendingEntry
from perdure.runner.tasks import WorkflowTask
from perdure.runner.turn_builder import TurnBuilder

MAX_IMMEDIATE_PER_TURN = 1_000  # answers that are known at once, in one turn: what is more goes into a turn of its own
SUCCEEDED, FAILED = EntryStatus.SUCCEEDED, EntryStatus.FAILED


class CompletionApplier(TurnBuilder):
    """See the module's docstring."""

    __slots__ = ("_exit", "_main", "_ready", "_variables")

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self._main: WorkflowTask | None = None
        self._variables = VariableContext()
        self._exit: SystemExit | None = None
        self._ready = 0  # answers that were known at once, in this turn

    def _function_ended(self) -> None:
        """Called when the workflow function has ended, or the run was halted."""
        raise NotImplementedError

    def _drain(self) -> None:
        try:
            if not self._loop.drain():
                return
        except SystemExit as exit:
            self._exit = exit
            self._loop.halted = True
        if self._loop.spinning and not self._loop.stopped:
            reason = "the workflow ran 100,000 call-backs without waiting for anything durable"
            self._ledger.hold(Hold("livelock", reason, line=self._waiting_line()))
        if self._loop.stopped and self._function_outcome is None:
            self._function_ended()

    def _apply(self, entry: Entry) -> None:
        """Let a completion, recorded or new, have its effect on the waiting tasks; run them until they wait again."""
        ledger, loop, location = self._ledger, self._loop, entry.location
        ledger.seq = entry.seq or ledger.seq
        if entry.ordinal < 0:
            ledger.asked_before(entry)
        if entry.settled_at is not None and entry.settled_at > loop.now:  # time never goes back
            loop.now = entry.settled_at
        if self._history.rewound:
            loop.pass_time(self._history.rewound.get(ledger.seq))
        loop.callbacks = 0
        pending = ledger.pending.pop(location, None)
        if pending is not None:
            if pending.call is None:  # a step that waits for its next attempt is not done
                ledger.alarms.remove(location)
            ledger.answer(pending.future, pending.call, pending.question, entry)
        elif entry.kind == "timer":
            ledger.alarms.remove(location)
            if not loop.fire(location):
                ledger.diverge(location, "a timer that fired", "no such timer", self._waiting_line())
        elif entry.kind == "cancel":
            self._stop_reason = entry.name
            assert self._main is not None
            self._main.cancel()
        elif location not in ledger.removed:
            ledger.diverge(location, f"{entry.kind} {entry.name!r}", "nothing", self._waiting_line())
        self._drain()

    def _complete(
        self, pending: PendingEntry, now: float, *, value: bytes | None = None, error: ErrorRecord | None = None
    ) -> None:
        """Something asked for is done: that is a new completion, or the old one in its place if it is done again."""
        ledger = self._ledger
        pending.error = error
        if pending.call is not None:
            pending.attempts = pending.attempt
            pending.due_at = None
        else:
            self._answered(pending, now, error)
        seq = ledger.seq + 1
        if pending.seq is not None:
            seq, pending.seq, self._rerun_pending = pending.seq, None, None
            self._history.advance()
        status = SUCCEEDED if error is None else FAILED
        entry = pending.entry(status, seq=seq, value=value, settled_at=now)
        ledger.changed[pending.location] = entry
        self._apply(entry)

    def _answered(self, pending: PendingEntry, now: float, error: ErrorRecord | None) -> None:
        """What else changes when a question is answered: subscriptions, and what is shown to others."""
        ledger, question = self._ledger, pending.question
        if pending.under_way:  # mail was faster than the report of the errand
            pending.under_way = False
            ledger.running_count -= 1
        ledger.effects_to_start.pop(pending.location, None)
        if question is None:
            return
        ledger.extras.unsubscribe(pending)
        shows = question.publishes
        if shows is not None and error is None:
            if isinstance(shows, StreamItem):
                shows = msgspec.structs.replace(shows, location=pending.location, at=now)
            ledger.extras.publish(shows)

    def _complete_immediate(self, now: float) -> None:
        """Settle what can be settled without anything happening outside, one at a time."""
        ledger, loop = self._ledger, self._loop
        while not loop.stopped and self._ready < MAX_IMMEDIATE_PER_TURN:
            if ledger.instant:
                location = next(iter(ledger.instant))
                value = ledger.instant.pop(location)
                pending = ledger.pending.get(location)
                if pending is not None:
                    self._ready += 1
                    self._settle_known(pending, value, now)
            elif not self._settle_from_mail(now):
                return

    def _settle_known(self, pending: PendingEntry, value: bytes | None, now: float) -> None:
        question = pending.question
        if value is None and question is not None and question.deferred is not None:
            before = self._ledger.deferreds[question.deferred]
            self._settle_deferred(pending, before.value, before.error, now)
        else:
            self._complete(pending, now, value=value)

    def _settle_from_mail(self, now: float) -> bool:
        """Give the earliest mail that is waited for to who has waited longest. False if there is none."""
        ledger, mailroom = self._ledger, self._mailroom
        for location in [each for each, pending in ledger.waiting.items() if ledger.pending.get(each) is not pending]:
            del ledger.waiting[location]
        chosen = mailroom.next_receiver(ledger.waiting.values())
        if chosen is None:
            return False
        messages = mailroom.take_for(chosen, now)
        if messages:  # else it could not be used, and the next one may be
            del ledger.waiting[chosen.location]
            self._ready += 1
            self._receive(chosen, messages, now)
        return True

    def _receive(self, pending: PendingEntry, messages: list[Message], now: float) -> None:
        """An open ask is answered by mail, which is consumed in the same commit."""
        codec, question = self._start.codec, pending.question
        assert question is not None
        self._mailroom.consumed.extend(message.number for message in messages)
        pending.detail = msgspec.json.encode(messages)
        if question.deferred is not None:
            ending = msgspec.json.decode(messages[0].body or b"{}", type=RunResult)
            self._settle_deferred(pending, ending.result, ending.error, now)
        elif question.wants is not None and question.wants.empty_on_timeout:
            values = [codec.decode(message.body or b"null") for message in messages]
            self._complete(pending, now, value=codec.encode(values))
        else:
            self._complete(pending, now, value=messages[0].body)

    def _settle_deferred(
        self, pending: PendingEntry, value: bytes | None, error: ErrorRecord | None, now: float
    ) -> None:
        """With its value if that fits the type it is awaited with, which others of its name may not share."""
        question = pending.question
        assert question is not None
        if value is not None and question.read is not None:
            try:
                question.read(pending.entry(SUCCEEDED, value=value))
                error = None
            except InvalidPayload as misfit:
                error = error_to_record(misfit, self._start.codec, raises=(InvalidPayload,))
        self._complete(pending, now, value=value, error=error)

    def _record_external(self, location: str, kind: str, name: str, now: float) -> None:
        """Something that nobody asked for happens to the run: a timer fires, a cancel comes. It is a completion too."""
        ledger = self._ledger
        entry = Entry(
            location=location,
            kind=kind,
            name=name,
            status=SUCCEEDED,
            call_seq=ledger.next_ask(),
            seq=ledger.seq + 1,
            generation=self.info.generation,
            started_at=now,
            settled_at=now,
        )
        ledger.changed[location] = entry
        self._apply(entry)

    def _time_out(self, pending: PendingEntry, now: float) -> None:
        """A sleep is over; a receive has waited long enough."""
        wants = pending.question.wants if pending.question is not None else None
        if wants is None:
            self._complete(pending, now)
        elif wants.empty_on_timeout:
            self._complete(pending, now, value=self._start.codec.encode([]))
        else:
            error = ErrorRecord("TimeoutError", "no event came in time", qualified="builtins:TimeoutError")
            self._complete(pending, now, error=error)
