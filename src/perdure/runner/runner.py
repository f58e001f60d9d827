"""Runner: one run in memory. `advance(now, inputs) -> Turn` interprets it; `close` drops it from memory.

A long turn or replay can be computed in parts, so that the worker does other work in between: `advance` and
`continue_turn` return None while the turn is not complete. Nothing leaves the runner before that. Where a turn is
paused has no influence on it. Without `RunStart.should_pause` a turn is always complete.

A turn is computed in this order: replay (the first time), inputs, due timers, then the turn itself. Inputs and recorded
completions are applied by the `CompletionApplier`, which drains the loop after each. While the loop drains, user code
calls the `ContextApi`. Invariants, and where they are kept:

- Completions are applied one at a time in the order of `seq`, live and on replay alike (completions.py).
- The requests of a scope follow its recorded order (entry_tracker.py). A request that differs, or a record that is not
  requested, is divergence: user code sees nothing of it, the call never returns, and the run is held.
- Effects leave the runner only at the end of a turn, after the last recorded completion (turn_builder.py).
- A turn lists every entry that changed, except steps without `at_most_once` that merely started: replay derives them
  again (attempt_tracker.py).
- State is never rolled back. A runner whose turn was rejected, or that diverged, is closed, and the run is loaded again
  from its history.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.codec.failures import INTERRUPTED
from perdure.model.records import EntryStatus, ErrorRecord
from perdure.model.turns import Input, MessageReceived, StepDone, Turn
from perdure.runner import eviction
from perdure.runner.attempt_tracker import EXHAUSTED
from perdure.runner.completions import CompletionApplier
from perdure.runner.context_api import ContextApi
from perdure.runner.function_end import FunctionEnd
from perdure.runner.inputs import InputApplier
from perdure.runner.pending import PendingEntry
from perdure.runner.remote_attempts import is_remote
from perdure.runner.state import RunnerState, RunStart
from perdure.runner.turn_builder import TurnBuilder

__all__ = ["RunStart", "Runner"]

PENDING = EntryStatus.PENDING


class Runner:
    """See the module's docstring. Create it, advance it any number of times, close it."""

    __slots__ = ("_completions", "_inputs", "_now", "_postponed_inputs", "_replayed", "_turns", "state")

    def __init__(self, start: RunStart) -> None:
        self.state = state = RunnerState(start)
        self._completions = CompletionApplier(state, FunctionEnd(state, ContextApi(state)))
        self._inputs = InputApplier(state, self._completions)
        self._turns = TurnBuilder(state)
        self._now = 0.0  # of the present turn
        self._replayed = False
        self._postponed_inputs: list[Input] = []  # wait until the replay is complete

    def advance(self, now: float, inputs: Sequence[Input] = ()) -> Turn | None:
        """Replay the history (the first time), apply the inputs and what is due by `now`, and return the turn.

        None if the turn was paused: then it is either continued or abandoned with the runner, and no other turn can
        start. The runner is closed if the run has ended or is held by divergence, and if anything is raised.
        """
        self.state.loop.callbacks = 0
        self.state.immediate_count = 0
        self.state.inputs = inputs
        self._now = now
        return self._compute(inputs)

    def continue_turn(self) -> Turn | None:
        """Continue a paused turn. None if it was paused again."""
        self.state.loop.paused = False
        return self._compute(self._inputs.left, paused_before=True)

    def _compute(self, inputs: Sequence[Input], *, paused_before: bool = False) -> Turn | None:
        loop = self.state.loop
        loop.open = True
        try:
            if paused_before:
                self._completions.drain()
            if not loop.paused:
                self._apply(inputs)
            if loop.paused:
                return None
            turn = self._turns.build()
            if turn.outcome is not None or self.state.entries.held is not None:
                self.close()
            return turn
        except BaseException:  # KeyboardInterrupt, or a defect of the runner: the turn is abandoned
            self.close()
            raise
        finally:
            loop.open = False

    def _apply(self, inputs: Sequence[Input]) -> None:
        """Apply the history, the inputs and what is due. If the loop is paused, the next call continues."""
        state, now = self.state, self._now
        loop, entries = state.loop, state.entries
        if not self._replayed:
            self._postponed_inputs.extend(inputs)
            inputs = ()
            if not self._catch_up(now):
                return
            inputs, self._postponed_inputs = self._postponed_inputs, []
        if inputs or entries.immediate or entries.waiting:
            self._inputs.apply_all(inputs, now)
        if state.mailbox.unchecked and not loop.paused:
            self._inputs.check_completions(max(now, loop.now))
        if (state.limited or entries.timers.due) and not loop.paused:
            self._inputs.fire_due(max(now, loop.now))
            if state.mailbox.unchecked and not loop.paused:
                self._inputs.check_completions(max(now, loop.now))

    def close(self) -> None:
        """Evict the run from memory. Its handlers run, but their durable calls are refused and nothing is recorded."""
        state = self.state
        if state.context is None:
            return
        state.entries.end()
        state.variables.copy().run(eviction.close, state.loop, state.info)
        state.context = None

    # --- replay

    def _start_function(self) -> None:
        state = self.state
        definition = state.start.definition
        args, kwargs = definition.parameters.decode(
            state.start.codec, state.start.input, what=f"payload of workflow {definition.name!r}"
        )
        eviction.LIVE.add(state.loop)
        # Called in the run's own context, so that no context variable of the worker is visible to the function.
        coro = state.variables.run(definition.fn, state.context, *args, **kwargs)
        state.main = state.loop.start_main(coro, definition.name, state.variables)
        if state.history.by_location:
            state.entries.attempts.resume_stop_requests(state.history)
        self._completions.drain()

    def _catch_up(self, now: float) -> bool:
        """Start the function and replay the history. False if the loop was paused, or a rerun step must complete first.

        The replay waits for steps that run again after a rewind, so that later records are applied in their order.
        """
        state, loop = self.state, self.state.loop
        if state.main is None:
            self._start_function()
        while not loop.paused and not self._replayed:
            if state.rerun_pending is None:
                self._replay(now)
            elif not self._apply_to_rerun(state.rerun_pending, now):
                return False
        return self._replayed

    def _replay(self, now: float) -> None:
        """Apply the recorded completions in their order, up to the end, a step that must run again, or a pause."""
        state = self.state
        history, entries, loop = state.history, state.entries, state.loop
        while (entry := history.next_completion) is not None and not loop.stopped:
            if entry.status is PENDING:
                # A rewind reopened this completion: the step runs again, and completes at its recorded position.
                state.rerun_pending = rerun = entries.pending.get(entry.location)
                if rerun is not None:
                    if rerun.due_at is None and entry.detail != EXHAUSTED:
                        entries.attempts.schedule(rerun)
                    return
            history.advance()
            self._completions.apply(entry)
            if loop.paused or loop.pause_if_due():
                return
        if state.replaying and (not loop.halted or state.continued is not None):
            self._check_all_requested()
        state.replaying = False
        for location in state.start.under_way:
            entries.attempts.resume_running(location)
        if not loop.stopped:
            self._interrupt_at_most_once(max(now, loop.now))
        self._replayed = not loop.paused

    def _apply_to_rerun(self, rerun: PendingEntry, now: float) -> bool:
        """Apply an input for a step that runs again after a rewind. False if there is none; others are postponed."""
        given = next((each for each in self._postponed_inputs if _is_for_rerun(each, rerun.location)), None)
        if given is not None:
            self._postponed_inputs.remove(given)
            self._inputs.apply(given, max(now, self.state.loop.now))
            return True
        if rerun.due_at is not None and rerun.due_at <= now:
            self.state.entries.attempts.start_retry(rerun)
        return False

    def _check_all_requested(self) -> None:
        """Hold the run if its code did not request, or did not cancel, what the history says."""
        state = self.state
        history, entries = state.history, state.entries
        if not history.by_location:
            return
        line = state.loop.waiting_line()
        entry = history.first_unrequested()
        if entry is not None:
            entries.diverge(entry.location, f"{entry.kind} {entry.name!r}", "nothing", line)
        elif (entry := history.next_completion) is not None:
            entries.diverge(entry.location, f"{entry.kind} {entry.name!r}", "the end of the workflow", line)
        elif not state.loop.stopped and (entry := history.find_cancelled(list(entries.pending))) is not None:
            entries.diverge(entry.location, f"{entry.kind} {entry.name!r}, cancelled", "it without cancelling it", line)

    def _interrupt_at_most_once(self, now: float) -> None:
        """Fail `at_most_once` attempts that are recorded as started and have no result: they must not run again."""
        attempts, loop = self.state.entries.attempts, self.state.loop
        for location, pending in list(attempts.to_start.items()):
            assert pending.call is not None
            started = pending.recorded is not None and pending.attempts >= pending.attempt
            # The failure of an earlier step may have cancelled this one or ended the function.
            cancelled = loop.stopped or location not in attempts.to_start
            # The internal run of an attempt on another worker keeps this promise itself.
            if started and pending.call.step.settings.at_most_once and not is_remote(pending) and not cancelled:
                attempts.unschedule(location)
                self._completions.complete(pending, now, None, ErrorRecord(INTERRUPTED, "", location=location))
                if loop.paused:
                    return


def _is_for_rerun(given: Input, location: str) -> bool:
    """Return whether an input is for a rerun step: its result, or a resume that makes its next attempt due."""
    if isinstance(given, StepDone):
        return given.location == location
    return isinstance(given, MessageReceived) and given.message.kind == "resume"
