"""Runner: one run in memory. `advance(now, inputs) -> Turn` is all that it does.

The invariants, and where they are kept

- Completions are applied one at a time in the order of `seq`, draining the loop in between, live and on replay alike
  (`_apply`). So a task sees the same world at the same point however often it is replayed.
- A scope's asks follow its recorded order (ledger.py); an ask that differs, or a record that nobody asks for, is
  divergence: user code sees nothing of it, the call never returns, and the run is held.
- Effects come out only at the end of a turn (`_finish`), after the last recorded completion: a race's loser is not
  started again, and a step that is asked for and given up in one turn never starts.
- A turn lists every entry that changed, except plain steps that merely started: those are derived again by replay.
- Nothing is rolled back: a runner whose turn was refused, or that diverged, is closed and made anew from the history.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Sequence
from contextvars import Context as VariableContext

from perdure.failures import INTERRUPTED
from perdure.records import (
    CancelStep,
    Effect,
    Entry,
    EntryStatus,
    ErrorRecord,
    Expose,
    Held,
    Input,
    Mail,
    Outcome,
    RunStep,
    StepDone,
    Turn,
    Wait,
)
from perdure.retry import Retry
from perdure.runner import closing
from perdure.runner.facade import Facade, RunStart
from perdure.runner.outcome import failed, outcome_of
from perdure.runner.pending import Pending
from perdure.runner.scheduled import WorkflowTask
from perdure.runner.where import waiting_line

__all__ = ["RunStart", "Runner"]

LOGGER = logging.getLogger("perdure.workflow")
CANCEL = "~cancel"


class Runner(Facade):
    """See the module's docstring. Make it, advance it any number of times, close it."""

    __slots__ = ("_consumed", "_exit", "_limited", "_main", "_stop_reason", "_variables")

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self._main: WorkflowTask | None = None
        self._variables = VariableContext()
        self._consumed: list[int] = []
        self._stop_reason: str | None = None
        self._limited = start.deadline_at is not None or start.definition.settings.max_suspend is not None
        self._exit: SystemExit | None = None

    # --- the door

    def advance(self, now: float, inputs: Sequence[Input] = ()) -> Turn:
        """Replay what is recorded (the first time), apply the inputs, then what is due by `now`."""
        loop = self._loop
        loop.open = True
        loop.callbacks = 0
        try:
            if self._main is None:
                self._begin()
                self._replay(now)
            for given in inputs:
                if not loop.stopped:
                    self._take(given, max(now, loop.now))
            if self._limited or self._ledger.alarms:
                self._fire_due(max(now, loop.now))
            return self._finish()
        except BaseException:  # KeyboardInterrupt abandons the turn; so would a defect of ours
            self.close()
            raise
        finally:
            loop.open = False

    def close(self) -> None:
        """Drop the run from memory. Its handlers run, but whatever they ask for is refused and nothing is recorded."""
        if self._context is None:
            return
        self._ledger.ended = True
        self._variables.copy().run(closing.close, self._loop, self.facts.id)
        self._context = None

    # --- replay

    def _begin(self) -> None:
        definition = self._start.definition
        args, kwargs = definition.parameters.decode(
            self._start.codec, self._start.input, what=f"payload of workflow {definition.name!r}"
        )
        closing.LIVE.add(self._loop)
        # Made inside the run's own context, so that nothing of the caller's leaks into the function.
        coro = self._variables.run(definition.fn, self._context, *args, **kwargs)
        self._main = self._loop.start_main(coro, definition.name, self._variables)
        self._drain()

    def _replay(self, now: float) -> None:
        history, ledger, loop = self._history, self._ledger, self._loop
        while (entry := history.next_settled) is not None and not loop.stopped:
            history.step_on()
            self._apply(entry)
        if not loop.halted or self._continued is not None:
            self._check_all_asked()
        self.replaying = False
        for location in self._start.under_way & ledger.to_start.keys():
            self._set_under_way(ledger.to_start.pop(location))
        if not loop.stopped:
            self._interrupt_at_most_once(max(now, loop.now))

    def _check_all_asked(self) -> None:
        history, diverge = self._history, self._ledger.diverge
        line = self._waiting_line()
        entry = history.unasked()
        if entry is not None:
            diverge(entry.location, f"{entry.kind} {entry.name!r}", "nothing", line)
        elif (entry := history.next_settled) is not None:
            diverge(entry.location, f"{entry.kind} {entry.name!r}", "the end of the workflow", line)
        elif not self._loop.stopped and (entry := history.kept_cancelled(list(self._ledger.pending))) is not None:
            diverge(entry.location, f"{entry.kind} {entry.name!r}, cancelled", "it without cancelling it", line)

    def _interrupt_at_most_once(self, now: float) -> None:
        """An attempt that was recorded as begun and has no outcome was cut short; it must not run again."""
        for location, pending in list(self._ledger.to_start.items()):
            assert pending.call is not None
            begun = pending.recorded is not None and pending.attempts >= pending.attempt
            given_up = self._loop.stopped or location not in self._ledger.to_start  # because of one before it
            if begun and pending.call.step.settings.at_most_once and not given_up:
                del self._ledger.to_start[location]
                self._settle(pending, now, error=ErrorRecord(INTERRUPTED, "", location=location))

    # --- applying completions

    def _drain(self) -> None:
        try:
            self._loop.drain()
        except SystemExit as exit:
            self._exit = exit
            self._loop.halted = True
        if self._loop.spinning and not self._loop.stopped:
            reason = "the workflow ran 100,000 call-backs without waiting for anything durable"
            self._ledger.hold(Held("spinning", reason, line=self._waiting_line()))

    def _apply(self, entry: Entry) -> None:
        """Let a completion, recorded or new, have its effect on the waiting tasks; run them until they wait again."""
        ledger, loop, location = self._ledger, self._loop, entry.location
        ledger.seq = entry.seq or ledger.seq
        if entry.ordinal < 0:
            ledger.asked_before(entry)
        loop.pass_time(entry.settled_at)
        loop.callbacks = 0
        pending = ledger.pending.pop(location, None)
        if pending is not None:
            if pending.call is None:  # a step that waits for its next attempt is not done
                ledger.alarms.remove(location)
            ledger.answer(pending.future, pending.call, entry)
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

    def _settle(
        self, pending: Pending, now: float, *, value: bytes | None = None, error: ErrorRecord | None = None
    ) -> None:
        """Something asked for is done: that is a new completion."""
        ledger = self._ledger
        pending.error = error
        if pending.call is not None:
            pending.attempts = pending.attempt
            pending.due_at = None
        status = EntryStatus.SUCCEEDED if error is None else EntryStatus.FAILED
        entry = pending.entry(status, seq=ledger.seq + 1, value=value, settled_at=now)
        ledger.changed[pending.location] = entry
        self._apply(entry)

    def _happen(self, location: str, kind: str, name: str, now: float) -> None:
        """Something that nobody asked for happens to the run: a timer fires, a cancel comes. It is a completion too."""
        ledger = self._ledger
        entry = Entry(
            location=location,
            kind=kind,
            name=name,
            status=EntryStatus.SUCCEEDED,
            asked=ledger.next_ask(),
            seq=ledger.seq + 1,
            generation=self.facts.generation,
            started_at=now,
            settled_at=now,
        )
        ledger.changed[location] = entry
        self._apply(entry)

    # --- inputs

    def _take(self, given: Input, now: float) -> None:
        match given:
            case StepDone():
                self._take_attempt(given, now)
            case Mail():
                self._take_mail(given, now)
            case Expose():
                self._expose(given.locations)

    def _take_attempt(self, done: StepDone, now: float) -> None:
        pending = self._ledger.pending.get(done.location)
        if pending is None or pending.attempt != done.attempt or not pending.under_way:
            return  # the late result of an attempt that was given up
        pending.under_way = False
        self._ledger.under_way -= 1
        if done.error is None:
            self._settle(pending, now, value=done.value)
        elif not self._try_again_later(pending, done, now):
            self._settle(pending, now, error=done.error)

    def _try_again_later(self, pending: Pending, done: StepDone, now: float) -> bool:
        """Plan the next attempt, if there is one: how many there were and when it is due are durable."""
        assert pending.call is not None
        retry = pending.call.step.settings.retry
        if retry is None or not done.retryable or done.attempt >= retry.max_attempts:
            return False
        try:
            due_at = now + self._pause(retry, done.location, done.attempt)
        except Exception as error:  # the user's delay function failed: the step cannot go on
            LOGGER.error("run %s: Retry.delay of %s raised", self.facts.id, done.location, exc_info=error)
            return False
        pending.attempts, pending.attempt = done.attempt, done.attempt + 1
        pending.due_at, pending.error = due_at, done.error
        self._ledger.changed[done.location] = pending.entry(EntryStatus.PENDING)
        self._ledger.alarms.set(done.location, due_at)
        return True

    def _pause(self, retry: Retry, location: str, attempt: int) -> float:
        chance = zlib.crc32(f"{self._start.seed}/{location}/{attempt}".encode()) / 2**32
        return retry.pause_after(attempt, chance)

    def _take_mail(self, mail: Mail, now: float) -> None:
        message = mail.message
        if message.kind == "cancel":
            self._consumed.append(message.number)
            self._stop("cancel", now)
        elif message.kind == "resume":
            self._consumed.append(message.number)
            for location, pending in self._ledger.pending.items():
                if pending.call is not None and location in self._ledger.alarms:
                    self._ledger.alarms.set(location, now)  # a retry that was waiting need not wait any longer

    def _expose(self, locations: Sequence[str]) -> None:
        for location in locations:
            pending = self._ledger.pending.get(location)
            if pending is not None and pending.under_way and pending.attempts < pending.attempt:
                self._record_begun(pending)

    def _stop(self, reason: str, now: float) -> None:
        """Raise cancellation in the workflow, once, for a caller's cancel or a limit that was exceeded."""
        if self._stop_reason is None:
            self._happen(CANCEL, "cancel", reason, now)

    def _fire_due(self, now: float) -> None:
        """Sleeps, timers and retries whose moment has come, earliest first; then the run's own limits."""
        ledger, loop = self._ledger, self._loop
        while not loop.stopped and (location := ledger.alarms.pop_due(now)) is not None:
            pending = ledger.pending.get(location)
            if pending is None:
                self._happen(location, "timer", "timer", now)
            elif pending.call is not None:
                ledger.to_start[location] = pending
            else:
                self._settle(pending, now)
        limit = self._limit()
        if limit is not None and limit[0] <= now and not loop.stopped:
            self._stop(limit[1], now)

    def _limit(self) -> tuple[float, str] | None:
        """The run's own next limit: when, and which. A suspension counts from the last thing that happened."""
        deadline_at, max_suspend = self._start.deadline_at, self._start.definition.settings.max_suspend
        if (deadline_at is None and max_suspend is None) or self._stop_reason is not None:
            return None
        limits: list[tuple[float, str]] = []
        if deadline_at is not None:
            limits.append((deadline_at, "timeout"))
        if max_suspend is not None and not self._busy:
            limits.append((self._quiet_since() + max_suspend, "max_suspend"))
        return min(limits, default=None)

    def _quiet_since(self) -> float:
        """When the run last moved: a completion, or an attempt that failed (its pause leads back from its due time)."""
        moments = [self._loop.now]
        for location, pending in self._ledger.pending.items():
            retry = pending.call.step.settings.retry if pending.call is not None else None
            if retry is not None and pending.due_at is not None:
                with contextlib.suppress(Exception):  # the user's delay function
                    moments.append(pending.due_at - self._pause(retry, location, pending.attempts))
        return max(moments)

    # --- the turn

    def _finish(self) -> Turn:
        ledger = self._ledger
        if ledger.held is not None:
            self.close()
            return Turn(held=ledger.held)
        outcome = self._take_outcome() if self._loop.stopped else None
        effects = self._hand_out() if outcome is None else ()
        if ledger.dropped:
            effects = (*(CancelStep(location) for location in ledger.dropped), *effects)
            ledger.dropped = []
        entries = tuple(ledger.changed.values())
        ledger.changed.clear()
        if outcome is None and ledger.under_way:
            # The common case first: a step is done and the next one begins.
            consumed = self._take_consumed() if self._consumed else ()
            pins = self._take_pins() if ledger.pins and (entries or consumed) else ()
            drift = tuple(ledger.drift) if ledger.drift else ()
            return Turn(entries, pins, consumed, effects, True, (), self._wake_at(), None, None, drift)
        consumed, pins, drift = self._take_consumed(), self._take_pins(), tuple(ledger.drift)
        if outcome is not None:
            self.close()
            return Turn(entries, pins, consumed, effects, outcome=outcome, drift=drift)
        wake_at, waits, held = self._wake_at(), tuple(self._waits()), None
        if wake_at is None and not waits:
            held = Held("deadlock", "nothing can wake this run", line=self._waiting_line())
        return Turn(entries, pins, consumed, effects, False, waits, wake_at, None, held, drift)

    def _take_consumed(self) -> tuple[int, ...]:
        consumed = tuple(self._consumed)
        self._consumed.clear()
        return consumed

    def _take_pins(self) -> tuple[Entry, ...]:
        """Pinned versions: they go with a turn that is written in any case, so that a mere replay writes nothing."""
        pins = tuple(self._ledger.pins.values())
        self._ledger.pins.clear()
        return pins

    def _hand_out(self) -> tuple[Effect, ...]:
        ledger = self._ledger
        effects: list[Effect] = []
        for location, pending in ledger.to_start.items():
            call = pending.call
            assert call is not None
            self._set_under_way(pending)
            if call.step.settings.at_most_once and pending.attempts < pending.attempt:
                self._record_begun(pending)  # on record before the body begins
            key = f"{self.facts.id}/{pending.generation}/{location}"
            effects.append(RunStep(location, pending.attempt, pending.name, call, key))
        ledger.to_start.clear()
        return tuple(effects)

    def _set_under_way(self, pending: Pending) -> None:
        pending.under_way = True
        self._ledger.under_way += 1

    def _record_begun(self, pending: Pending) -> None:
        pending.attempts, pending.due_at = pending.attempt, None
        self._ledger.changed[pending.location] = pending.entry(EntryStatus.PENDING)

    @property
    def _busy(self) -> bool:
        return bool(self._ledger.under_way or self._ledger.to_start)

    def _wake_at(self) -> float | None:
        """When to look at the run again, if nothing else happens."""
        if not self._limited:
            return self._ledger.alarms.earliest() if self._ledger.alarms else None
        earliest, limit = self._ledger.alarms.earliest(), self._limit()
        if limit is None:
            return earliest
        return limit[0] if earliest is None else min(earliest, limit[0])

    def _waits(self) -> list[Wait]:
        waits: list[Wait] = []
        for due_at, location in self._ledger.alarms.standing():
            pending = self._ledger.pending.get(location)
            if pending is not None and pending.call is not None:
                waits.append(Wait("retry", location, pending.name, due_at))
            else:
                waits.append(Wait("timer", location, None, due_at))
        return waits

    def _take_outcome(self) -> Outcome | None:
        definition, codec = self._start.definition, self._start.codec
        assert self._main is not None
        if self._exit is not None:
            self._loop.halted = False
            self._cancel_what_is_left()
            if self._main.done() and not self._main.cancelled():
                self._main.exception()  # nobody else looks at it
            return failed(self._exit, definition, codec)
        outcome: Outcome
        if self._continued is not None and self._stop_reason is None:
            self._loop.halted = False
            outcome = self._continued
        elif self._main.done() or self._continued is not None:
            outcome = outcome_of(self._main, definition, codec, self._stop_reason)
        else:
            return None
        self._cancel_what_is_left()
        return outcome

    def _cancel_what_is_left(self) -> None:
        """The function has ended: tasks still pending are cancelled with their steps, and not waited for."""
        self._ledger.ended = True
        for task in list(self._loop.live):
            if not task.done():
                task.cancel()
        self._loop.callbacks = 0
        try:
            self._loop.drain(to_the_end=True)
        except SystemExit:
            LOGGER.warning("run %s: a task raised SystemExit after the workflow had ended", self.facts.id)

    def _waiting_line(self) -> str | None:
        lines = (waiting_line(task.get_coro()) for task in self._loop.live if not task.done())
        return next((line for line in lines if line is not None), None)
