"""What comes out of a turn: effects to hand out, what the run waits for, and when to look at it again."""

from __future__ import annotations

import contextlib
import zlib

from perdure.model.records import Entry, EntryStatus, Hold, Wait
from perdure.model.turns import Effect, ExternalEffect, Outcome, RunStep
from perdure.retry import Retry
from perdure.runner.context_api import ContextApi, RunStart
from perdure.runner.mailbox import Mailbox
from perdure.runner.pending import PendingEntry
from perdure.runner.source_lines import waiting_line


class TurnBuilder(ContextApi):
    """The half of a runner that looks at where the run stands; the other half moves it."""

    __slots__ = ("_function_outcome", "_limited", "_mailroom", "_rerun_pending", "_stop_reason")

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self._mailroom = Mailbox(start.facts.id, start.codec, self._ledger.extras)
        self._stop_reason: str | None = None
        self._function_outcome: Outcome | None = (
            None  # the function's outcome, while the run is being brought to its end
        )
        self._rerun_pending: PendingEntry | None = (
            None  # a step of the kept history that is done again; the replay waits for it
        )
        self._limited = start.deadline_at is not None or start.definition.settings.max_suspend is not None

    # --- effects

    def _take_effects(self) -> tuple[Effect, ...]:
        ledger = self._ledger
        if self._rerun_pending is not None:
            only = ledger.to_start.pop(self._rerun_pending.location, None)
            return () if only is None else (self._run_step(only),)
        if not ledger.to_start and not ledger.effects_to_start:
            return ()
        effects: list[Effect] = [self._run_step(pending) for pending in ledger.to_start.values()]
        ledger.to_start.clear()
        if ledger.effects_to_start:
            for location, pending in ledger.effects_to_start.items():
                assert pending.work is not None
                self._set_under_way(pending)
                effects.append(ExternalEffect(location, pending.attempt, pending.work))
            ledger.effects_to_start.clear()
        return tuple(effects)

    def _run_step(self, pending: PendingEntry) -> RunStep:
        call, location = pending.call, pending.location
        assert call is not None
        pending.under_way = True
        self._ledger.running_count += 1
        if call.step.settings.at_most_once and pending.attempts < pending.attempt:
            self._record_begun(pending)  # on record before the body begins
        key = f"{self.info.id}/{pending.generation}/{location}"
        return RunStep(location, pending.attempt, pending.name, call, key)

    def _set_under_way(self, pending: PendingEntry) -> None:
        pending.under_way = True
        self._ledger.running_count += 1

    def _record_begun(self, pending: PendingEntry) -> None:
        pending.attempts, pending.due_at = pending.attempt, None
        self._ledger.changed[pending.location] = pending.entry(EntryStatus.PENDING)

    def _take_consumed(self) -> tuple[int, ...]:
        consumed = tuple(self._mailroom.consumed)
        self._mailroom.consumed.clear()
        return consumed

    def _take_pins(self) -> tuple[Entry, ...]:
        """Pinned versions: they go with a turn that is written in any case, so that a mere replay writes nothing."""
        pins = tuple(self._ledger.pins.values())
        self._ledger.pins.clear()
        return pins

    # --- waiting

    @property
    def _busy(self) -> bool:
        ledger = self._ledger
        return bool(ledger.running_count or ledger.to_start or ledger.effects_to_start or ledger.stop_requests)

    def _wake_at(self) -> float | None:
        """When to look at the run again, if nothing else happens."""
        if self._rerun_pending is not None:
            return self._rerun_pending.due_at
        if not self._limited:
            return self._ledger.alarms.earliest() if self._ledger.alarms.due else None
        earliest, limit = self._ledger.alarms.earliest(), self._limit()
        if limit is None:
            return earliest
        return limit[0] if earliest is None else min(earliest, limit[0])

    def _waits(self) -> list[Wait]:
        waits: list[Wait] = []
        for location, pending in self._ledger.pending.items():
            kind = _WAITS.get(pending.kind)
            if kind is not None:
                names = pending.awaited if pending.awaited is not None else {pending.name}
                waits += [Wait(kind, location, name, pending.due_at) for name in sorted(names)]
        for due_at, location in self._ledger.alarms.pending():
            found = self._ledger.pending.get(location)
            if found is not None and found.kind in _WAITS:
                continue
            if found is not None and found.call is not None:
                waits.append(Wait("retry", location, found.name, due_at))
            else:
                waits.append(Wait("timer", location, None, due_at))
        return waits

    def _held_by_failure(self) -> Hold | None:
        """Why the run is held, if steps without attempts left hold it."""
        for location, pending in self._ledger.exhausted.items():
            error = pending.error
            reason = f"step {location} failed" + (f": {error.type}: {error.message}" if error is not None else "")
            return Hold("step_failed", f"{reason}; mend it, then resume the run", location)
        return None

    # --- limits

    def _limit(self) -> tuple[float, str] | None:
        """The run's own next limit: when, and which. A suspension counts from the last thing that happened.

        None once the function has ended: what is left to do then cannot be cancelled.
        """
        deadline_at, max_suspend = self._start.deadline_at, self._start.definition.settings.max_suspend
        if (
            (deadline_at is None and max_suspend is None)
            or self._stop_reason is not None
            or self._function_outcome is not None
        ):
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

    def _pause(self, retry: Retry, location: str, attempt: int) -> float:
        chance = zlib.crc32(f"{self._start.seed}/{location}/{attempt}".encode()) / 2**32
        return retry.delay_after(attempt, chance)

    def _waiting_line(self) -> str | None:
        lines = (waiting_line(task.get_coro()) for task in self._loop.live if not task.done())
        return next((line for line in lines if line is not None), None)


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
"""What is waited for, by the kind of entry that waits."""
