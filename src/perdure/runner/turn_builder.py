"""TurnBuilder: the turn that follows from the state of a run: entries, effects to start, waits and wake-up time.

Effects leave the runner only here, after the last recorded completion was applied. So the loser of a recorded race is
not started again, and a step that is requested and cancelled in one turn never starts.
"""

from __future__ import annotations

from perdure.model.records import Hold, Message, Wait
from perdure.model.turns import CancelStep, Effect, ExternalEffect, RunStep, Turn
from perdure.runner import limits
from perdure.runner.completions import MAX_IMMEDIATE_PER_TURN
from perdure.runner.pending import PendingEntry
from perdure.runner.state import RunnerState


class TurnBuilder:
    """See the module's docstring."""

    __slots__ = ("_attempts", "_entries", "_extras", "_log", "_mailbox", "_state", "_timers", "_versions")

    def __init__(self, state: RunnerState) -> None:
        self._state = state
        self._entries = state.entries
        self._attempts = state.entries.attempts
        self._log = state.entries.log
        self._timers = state.entries.timers
        self._extras = state.extras
        self._mailbox = state.mailbox
        self._versions = state.versions

    def build(self) -> Turn:
        """Build the turn, and take from the state what it contains."""
        state, entries, attempts = self._state, self._entries, self._attempts
        if entries.held is not None:
            return Turn(held=entries.held)
        outcome, more, held = None, False, None
        if state.function_outcome is not None and state.loop.stopped and state.rerun_pending is None:
            if not attempts.stop_requests:
                outcome = state.function_outcome
        else:
            more = state.immediate_count >= MAX_IMMEDIATE_PER_TURN
        effects: tuple[Effect, ...] = ()
        if state.pause is not None and outcome is None:
            held, more = self._hold_of_pause(state.pause), False
        elif outcome is None:
            effects = self._take_effects()
        if attempts.dropped:
            effects = (*(CancelStep(location) for location in attempts.take_dropped()), *effects)
        if self._mailbox.assigned:
            self._mailbox.release_unwanted(entries.pending)
        extras = self._extras.take() if self._extras.any else None
        changed = self._log.take_changed()
        consumed = self._mailbox.take_consumed() if self._mailbox.consumed else ()
        drift = tuple(entries.drift) if entries.drift else ()
        if outcome is None and (attempts.running_count or more):
            # The common case: a step is completed and the next one starts.
            # Pins are written with turns that are written anyway, so that a mere replay writes nothing.
            pins = self._versions.take_pins() if self._versions.pins and (changed or consumed) else ()
            timed = state.limited or self._timers.due or state.rerun_pending is not None
            wake_at = self._wake_at() if timed else None
            return Turn(changed, pins, consumed, effects, True, (), wake_at, None, None, drift, more, extras)
        pins = self._versions.take_pins()
        if outcome is not None:
            return Turn(changed, pins, consumed, effects, outcome=outcome, drift=drift, extras=extras)
        wake_at, waits, held = self._wake_at(), tuple(self._waits()), held or self._hold_of_exhausted_step()
        if held is None and wake_at is None and not waits:
            held = Hold("deadlock", "nothing can wake this run", line=state.loop.waiting_line())
        return Turn(changed, pins, consumed, effects, False, waits, wake_at, None, held, drift, False, extras)

    # --- effects

    def _take_effects(self) -> tuple[Effect, ...]:
        attempts, rerun = self._attempts, self._state.rerun_pending
        if rerun is not None:
            # The replay waits for this step. Nothing else may start: a later record may show that it was cancelled.
            scheduled = attempts.unschedule(rerun.location)
            if scheduled is None:
                return ()
            attempts.start(scheduled)
            return (self._run_step(scheduled),)
        effects: tuple[Effect, ...] = ()
        if attempts.to_start:
            effects = tuple([self._run_step(pending) for pending in attempts.take_steps()])
        if attempts.effects_to_start:
            effects = (*effects, *[_external_effect(pending) for pending in attempts.take_effects()])
        return effects

    def _run_step(self, pending: PendingEntry) -> RunStep:
        call, location = pending.call, pending.location
        assert call is not None
        key = f"{self._state.info.id}/{pending.generation}/{location}"
        return RunStep(location, pending.attempt, pending.name, call, key, pending.notes, pending.error)

    # --- waiting

    def _wake_at(self) -> float | None:
        """Return when the run must be advanced again if no input arrives."""
        state = self._state
        if state.rerun_pending is not None:
            return state.rerun_pending.due_at
        earliest = self._timers.earliest() if self._timers.due else None
        limit = limits.next_limit(state) if state.limited else None
        if limit is None:
            return earliest
        return limit[0] if earliest is None else min(earliest, limit[0])

    def _waits(self) -> list[Wait]:
        """Return what a suspended run waits for."""
        waits: list[Wait] = []
        pending_entries = self._entries.pending
        for location, pending in pending_entries.items():
            kind = _WAITS.get(pending.kind)
            if kind == "child" and location in self._attempts.effects_to_start:
                continue  # the run is paused; after a resume, a wait for the child would prevent its start
            if kind is not None:
                names = pending.awaited if pending.awaited is not None else {pending.name}
                until = self._entries.deadlines.due_at(pending.name) if kind == "deferred" else pending.due_at
                waits += [Wait(kind, location, name, until) for name in sorted(names)]
        for due_at, location in self._timers.pending():
            found = pending_entries.get(location)
            if (found is not None and found.kind in _WAITS) or location in self._entries.deadlines.pending:
                continue
            if found is not None and found.call is not None:
                waits.append(Wait("retry", location, found.name, due_at))
            else:
                waits.append(Wait("timer", location, None, due_at))
        return waits

    def _hold_of_pause(self, pause: Message) -> Hold | None:
        """Return the hold of a paused run and consume the request; None while a step or effect is running."""
        if self._attempts.running_count:
            return None
        self._mailbox.discard(pause)
        text = None if pause.body is None else self._state.start.codec.decode(pause.body)
        return Hold("paused", "paused" if text is None else f"paused: {text}")

    def _hold_of_exhausted_step(self) -> Hold | None:
        """Return why the run is held if a step without attempts left holds it."""
        for location, pending in self._attempts.exhausted.items():
            error = pending.error
            reason = f"step {location} failed" + (f": {error.type}: {error.message}" if error is not None else "")
            return Hold("step_failed", reason, location)
        return None


def _external_effect(pending: PendingEntry) -> ExternalEffect:
    assert pending.action is not None
    return ExternalEffect(pending.location, pending.attempt, pending.action)


_WAITS = {
    "receive": "event",
    "receive_batch": "event",
    "receive_request": "event",
    "child": "child",
    "result": "child",
    "outcome": "child",
    "children": "child",
    "deferred": "deferred",
}
"""The kind of wait, by the kind of entry that waits."""
