"""Runner: one run in memory. `advance(now, inputs) -> Turn` is all that it does.

The invariants, and where they are kept

- Completions are applied one at a time in the order of `seq`, draining the loop in between, live and on replay alike
  (`_apply`). So a task sees the same world at the same point however often it is replayed. What is answered at once (a
  receive whose event is there, a published value, a loop's next iteration) is a completion of its own too, after the
  drain in which it was asked for (`_settle_ready`).
- A scope's asks follow its recorded order (ledger.py); an ask that differs, or a record that nobody asks for, is
  divergence: user code sees nothing of it, the call never returns, and the run is held.
- Effects come out only at the end of a turn (`_finish`), after the last recorded completion: a race's loser is not
  started again, and a step that is asked for and given up in one turn never starts.
- A turn lists every entry that changed, except plain steps that merely started: those are derived again by replay.
- Nothing is rolled back: a runner whose turn was refused, or that diverged, is closed and made anew from the history.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import Context as VariableContext

from perdure.codec.failures import INTERRUPTED
from perdure.model.records import ErrorRecord, Hold
from perdure.model.turns import (
    CancelStep,
    Continued,
    Failed,
    Input,
    MessageReceived,
    Outcome,
    StepDone,
    Succeeded,
    Turn,
)
from perdure.runner import eviction as closing
from perdure.runner.cleanup import run_cleanup
from perdure.runner.completions import MAX_IMMEDIATE_PER_TURN
from perdure.runner.context_api import RunStart
from perdure.runner.entry_tracker import EXHAUSTED
from perdure.runner.inputs import PENDING, InputApplier
from perdure.runner.outcomes import failed, outcome_of

__all__ = ["RunStart", "Runner"]

LOGGER = logging.getLogger("perdure.workflow")


class Runner(InputApplier):
    """See the module's docstring. Make it, advance it any number of times, close it."""

    __slots__ = ("_postponed_inputs",)

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self._postponed_inputs: list[Input] = []  # what has to wait until a step was done again

    # --- the door

    def advance(self, now: float, inputs: Sequence[Input] = ()) -> Turn:
        """Replay what is recorded (the first time), apply the inputs, then what is due by `now`."""
        loop = self._loop
        loop.open = True
        loop.callbacks = 0
        self._ready = 0
        try:
            if self._main is None:
                self._begin()
                self._replay(now)
            if self._rerun_pending is not None:
                inputs = self._rerun_step(inputs, now)
            if self._rerun_pending is None:
                if inputs or self._ledger.instant or self._ledger.waiting:
                    self._apply_inputs(inputs, now)
                if self._limited or self._ledger.alarms.due:
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
        self._variables.copy().run(closing.close, self._loop, self.info.id)
        self._context = None

    def _apply_inputs(self, inputs: Sequence[Input], now: float) -> None:
        ledger, loop = self._ledger, self._loop
        if ledger.instant or ledger.waiting:
            self._complete_immediate(max(now, loop.now))
        for number, given in enumerate(inputs, 1):
            moment = now if now > loop.now else loop.now
            if type(given) is StepDone:
                self._take_attempt(given, moment)
            else:
                self._take(given, moment)
            if ledger.instant or ledger.waiting:
                # Events that come together are there together: a batch gets all, and the mailbox goes before a topic.
                if _is_event(given) and _is_event(*inputs[number : number + 1]):
                    continue
                self._complete_immediate(max(now, loop.now))

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
        if self._history.by_location:
            self._ledger.take_up_stops()
        self._drain()

    def _replay(self, now: float) -> None:
        history, ledger, loop = self._history, self._ledger, self._loop
        while (entry := history.next_settled) is not None and not loop.stopped:
            if entry.status is PENDING:  # settled once, undone, and now to be done again in its place
                self._rerun_pending = ledger.pending.get(entry.location)
                if self._rerun_pending is not None:
                    if self._rerun_pending.due_at is None and entry.detail != EXHAUSTED:
                        ledger.to_start[entry.location] = self._rerun_pending
                    return
            history.advance()
            self._apply(entry)
        if not loop.halted or self._continued is not None:
            self._check_all_asked()
        self.replaying = False
        for location in self._start.under_way:
            if location in ledger.to_start:
                self._set_under_way(ledger.to_start.pop(location))
        if not loop.stopped:
            self._interrupt_at_most_once(max(now, loop.now))

    def _rerun_step(self, inputs: Sequence[Input], now: float) -> Sequence[Input]:
        """While a step of the kept history is done again nothing else happens; gives what came meanwhile."""
        self._postponed_inputs.extend(inputs)
        while (redoing := self._rerun_pending) is not None:
            given = next((each for each in self._postponed_inputs if _is_for_rerun(each, redoing.location)), None)
            if given is not None:
                self._postponed_inputs.remove(given)
                self._take(given, max(now, self._loop.now))
            elif redoing.due_at is not None and redoing.due_at <= now:
                self._ledger.alarms.remove(redoing.location)
                redoing.due_at = None
                self._ledger.to_start[redoing.location] = redoing
                return ()
            else:
                return ()
            if self._rerun_pending is None:
                self._replay(now)
        inputs, self._postponed_inputs = self._postponed_inputs, []
        return inputs

    def _check_all_asked(self) -> None:
        history, diverge = self._history, self._ledger.diverge
        if not history.by_location:
            return
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
                self._complete(pending, now, error=ErrorRecord(INTERRUPTED, "", location=location))

    # --- the end

    def _function_ended(self) -> None:
        """The function has ended, or the run was halted. Begin with what there is to do before the run may end."""
        definition, codec, main = self._start.definition, self._start.codec, self._main
        if main is None or self._ledger.held is not None:
            return
        if self._exit is not None:
            self._loop.halted = False
            self._cancel_what_is_left()
            if main.done() and not main.cancelled():
                main.exception()  # nobody else looks at it
            self._function_outcome = failed(self._exit, definition, codec)
        elif self._continued is not None and self._stop_reason is None:
            self._loop.halted = False
            self._function_outcome = self._continued
            self._cancel_what_is_left()
        else:
            self._function_outcome = outcome_of(main, definition, codec, self._stop_reason)
            self._loop.halted = False
            self._cancel_what_is_left()
        self._start_cleanup(self._function_outcome)
        if self._loop.main is main and not main.done():
            self._loop.halted = True  # a handler of it waits for what nobody gives it any more

    def _start_cleanup(self, outcome: Outcome) -> None:
        ledger, loop = self._ledger, self._loop
        goes_on = isinstance(outcome, Continued)
        unhappy = not goes_on and not isinstance(outcome, Succeeded)
        again = isinstance(outcome, Failed) and outcome.retryable and self._tries_left()
        rolling = [task for task in ledger.cleanup_tasks if not task.done()]
        due = not goes_on and (ledger.compensations or (unhappy and self._may_have_children))
        if not rolling and not due:
            return
        work = run_cleanup(self, rolling, compensate=unhappy, run_exit_hooks=not goes_on and not again)
        task = loop.start_main(work, "~finale", VariableContext())
        ledger.cleanup_tasks.add(task)
        self._drain()

    def _tries_left(self) -> bool:
        retry = self._start.definition.settings.retry
        return retry is not None and self._start.run_attempt < retry.max_attempts

    def _cancel_what_is_left(self) -> None:
        """The function has ended: tasks still pending are cancelled with their steps, and not waited for."""
        ledger, loop = self._ledger, self._loop
        ledger.ended = True
        for task in list(loop.live):
            if not task.done() and task not in ledger.cleanup_tasks:
                task.cancel()
        loop.callbacks = 0
        try:
            loop.drain(to_the_end=True)
        except SystemExit:
            LOGGER.warning("run %s: a task raised SystemExit after the workflow had ended", self.info.id)

    # --- the turn

    def _finish(self) -> Turn:
        ledger = self._ledger
        if ledger.held is not None:
            self.close()
            return Turn(held=ledger.held)
        over = self._function_outcome is not None and self._loop.stopped and self._rerun_pending is None
        outcome = self._function_outcome if over and not ledger.stop_requests else None
        more = not over and self._ready >= MAX_IMMEDIATE_PER_TURN
        effects = self._take_effects() if outcome is None else ()
        if ledger.dropped:
            effects = (*(CancelStep(location) for location in ledger.dropped), *effects)
            ledger.dropped = []
        if self._mailroom.assigned:
            self._mailroom.release_unwanted(ledger.pending)
        extras = ledger.extras.take() if ledger.extras.any else None
        entries = tuple(ledger.changed.values())
        ledger.changed.clear()
        if outcome is None and (ledger.running_count or more):
            # The common case first: a step is done and the next one begins.
            consumed = self._take_consumed() if self._mailroom.consumed else ()
            pins = self._take_pins() if ledger.pins and (entries or consumed) else ()
            drift = tuple(ledger.drift) if ledger.drift else ()
            timed = self._limited or ledger.alarms.due or self._rerun_pending is not None
            wake_at = self._wake_at() if timed else None
            return Turn(entries, pins, consumed, effects, True, (), wake_at, None, None, drift, more, extras)
        consumed, pins, drift = self._take_consumed(), self._take_pins(), tuple(ledger.drift)
        if outcome is not None:
            self.close()
            return Turn(entries, pins, consumed, effects, outcome=outcome, drift=drift, extras=extras)
        wake_at, waits, held = self._wake_at(), tuple(self._waits()), self._held_by_failure()
        if held is None and wake_at is None and not waits:
            held = Hold("deadlock", "nothing can wake this run", line=self._waiting_line())
        return Turn(entries, pins, consumed, effects, False, waits, wake_at, None, held, drift, False, extras)


def _is_for_rerun(given: Input, location: str) -> bool:
    """Whether it is for a step that is done again: its outcome, or that it need not wait for its next attempt."""
    if isinstance(given, StepDone):
        return given.location == location
    return isinstance(given, MessageReceived) and given.message.kind == "resume"


def _is_event(given: Input | None = None) -> bool:
    return isinstance(given, MessageReceived) and given.message.kind in ("event", "assignment")
