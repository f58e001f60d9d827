"""Runner: one run in memory. `advance(now, inputs) -> Turn` is all that it does.

The invariants, and where they are kept

- Completions are applied one at a time in the order of `seq`, draining the loop in between, live and on replay alike
  (`_apply`). So a task sees the same world at the same point however often it is replayed.
- A scope's asks follow its recorded order (`_ask`); an ask that differs, or a record that nobody asks for, is divergence:
  user code sees nothing of it, the call never returns, and the run is held.
- Effects come out only at the end of a turn (`_finish`), after the last recorded completion: a race's loser is not
  started again, and a step that is asked for and given up in one turn never starts.
- A turn lists every entry that changed, except plain steps that merely started: those are derived again by replay.
- Nothing is rolled back: a runner whose turn was refused, or that diverged, is closed and made anew from the history.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Sequence
from contextvars import Context as VariableContext
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from perdure.codec import JSON, Codec, fingerprint
from perdure.context import Context, RunFacts
from perdure.definition import Workflow
from perdure.errors import HistoryDiverged, InvalidPayload
from perdure.failures import INTERRUPTED, step_error
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
from perdure.runner import closing
from perdure.runner.alarms import Alarms
from perdure.runner.history import History
from perdure.runner.locations import Scope, escape, scope_of
from perdure.runner.loop import Closed, WorkflowLoop, WorkflowTask
from perdure.runner.outcome import failed, outcome_of
from perdure.runner.pending import EntryFuture, Forever, Pending
from perdure.runner.where import calling_line, waiting_line
from perdure.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")
CANCEL = "~cancel"
MAX_REFUSED = 100  # asks that a closing run may make before it gets no answer at all


@dataclass(frozen=True, slots=True)
class RunStart:
    """Everything that a run is replayed from."""

    definition: Workflow[Any, Any]
    facts: RunFacts
    input: bytes
    seed: int
    begun_at: float
    history: Sequence[Entry] = ()
    deadline_at: float | None = None
    codec: Codec = field(default=JSON)
    strict: bool = False
    under_way: frozenset[str] = frozenset()  # steps that are executing in this process, from before a reload


class Runner:
    """See the module's docstring. Make it, advance it any number of times, close it."""

    def __init__(self, start: RunStart) -> None:
        self.facts = start.facts
        self.replaying = True
        self._start = start
        self._codec = start.codec
        self._history = History(start.history)
        self._seq = 0
        self._asked = 0
        self._pending: dict[str, Pending] = {}
        self._alarms = Alarms()
        self._changed: dict[str, Entry] = {}
        self._pins: dict[str, Entry] = {}
        self._versions: dict[str, int] = {}
        self._removed: set[str] = set()
        self._dropped_steps: list[str] = []
        self._consumed: list[int] = []
        self._drift: list[str] = []
        self._stop_reason: str | None = None
        self._held: Held | None = None
        self._exit: SystemExit | None = None
        self._refused = 0
        self._ended = False
        root = self.open_scope("")
        self._loop = WorkflowLoop(self, start.seed, start.begun_at, root)
        self._main: WorkflowTask | None = None
        self._variables = VariableContext()
        self.context = Context(self)

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
                if not self._stopped():
                    self._take(given, max(now, loop.now))
            self._fire_due(max(now, loop.now))
            return self._finish()
        except BaseException:  # KeyboardInterrupt abandons the turn; so would a defect of ours
            self.close()
            raise
        finally:
            loop.open = False

    def close(self) -> None:
        """Drop the run from memory. Its handlers run, but whatever they ask for is refused and nothing is recorded."""
        self._ended = True
        self._variables.copy().run(closing.close, self._loop, self.facts.id)

    # --- replay

    def _begin(self) -> None:
        definition = self._start.definition
        args, kwargs = definition.parameters.decode(
            self._codec, self._start.input, what=f"payload of workflow {definition.name!r}"
        )
        closing.LIVE.add(self._loop)
        # Made inside the run's own context, so that nothing of the caller's leaks into the function.
        coro = self._variables.run(definition.fn, self.context, *args, **kwargs)
        self._main = self._loop.start_main(coro, definition.name, self._variables)
        self._drain()

    def _replay(self, now: float) -> None:
        history = self._history
        while (entry := history.next_settled) is not None and not self._stopped():
            history.step_on()
            self._apply(entry)
        if self._held is None and self._exit is None:
            self._check_all_asked()
        self.replaying = False
        for location in self._start.under_way & self._pending.keys():
            self._pending[location].waiting, self._pending[location].under_way = False, True
        if not self._stopped():
            self._interrupt_at_most_once(max(now, self._loop.now))

    def _check_all_asked(self) -> None:
        entry = self._history.unasked()
        if entry is not None:
            self._diverge(entry.location, f"{entry.kind} {entry.name!r}", "nothing", None)
            return
        if self._history.next_settled is not None:
            entry = self._history.next_settled
            self._diverge(entry.location, f"{entry.kind} {entry.name!r}", "the end of the workflow", None)
            return
        entry = self._history.kept_cancelled(list(self._pending))
        if entry is not None:
            self._diverge(entry.location, f"{entry.kind} {entry.name!r}, cancelled", "it without cancelling it", None)

    def _interrupt_at_most_once(self, now: float) -> None:
        """An attempt that was recorded as begun and has no outcome was cut short; it must not run again."""
        for location, pending in list(self._pending.items()):
            call = pending.call
            begun = pending.waiting and pending.entry.attempts >= pending.attempt
            if call is not None and call.step.settings.at_most_once and begun and location in self._history.by_location:
                pending.waiting = False
                self._settle(pending, now, error=ErrorRecord(INTERRUPTED, "", location=location))

    # --- applying completions

    def _drain(self) -> None:
        try:
            self._loop.drain(self._stopped)
        except SystemExit as exit:
            self._exit = exit

    def _stopped(self) -> bool:
        return (
            self._held is not None
            or self._exit is not None
            or (self._main is not None and self._main.done())
            or (self._loop.spinning and self._hold_spinning())
        )

    def _apply(self, entry: Entry) -> None:
        """Let a completion, recorded or new, have its effect on the waiting tasks, and run them until they wait again."""
        self._seq = entry.seq or self._seq
        self._loop.now = max(self._loop.now, entry.settled_at or 0.0)
        if entry.kind == "timer":
            self._alarms.remove(entry.location)
            if not self._loop.fire(entry.location):
                self._diverge(entry.location, "a timer that fired", "no such timer", None)
        elif entry.kind == "cancel":
            self._stop_reason = entry.name
            assert self._main is not None
            self._main.cancel()
        else:
            pending = self._pending.pop(entry.location, None)
            if pending is not None:
                self._alarms.remove(entry.location)
                self._answer(pending, entry)
            elif entry.location not in self._removed:
                self._diverge(entry.location, f"{entry.kind} {entry.name!r}", "nothing", None)
        self._drain()

    def _answer(self, pending: Pending, entry: Entry) -> None:
        """Give the waiting task its result: always decoded from the record, a new object each time."""
        future, call = pending.future, pending.call
        if entry.status is EntryStatus.FAILED:
            assert entry.error is not None
            raises = call.step.settings.raises if call is not None else ()
            error = step_error(
                entry.error, self._codec, location=entry.location, attempts=entry.attempts, raises=raises
            )
            future.set_exception(error)
            future._log_traceback = False  # a task that was cancelled meanwhile may never look
        elif call is None or entry.value is None:
            future.set_result(None)
        else:
            try:
                future.set_result(self._codec.decode(entry.value, call.step.body.returns, what=f"result of {entry.location}"))
            except InvalidPayload as misfit:
                self._diverge(entry.location, "a result", f"one of another type ({misfit})", None)

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
        pending = self._pending.get(done.location)
        if pending is None or pending.attempt != done.attempt or not pending.under_way:
            return  # the late result of an attempt that was given up
        pending.under_way = False
        if done.error is None:
            self._settle(pending, now, value=done.value)
            return
        assert pending.call is not None
        retry = pending.call.step.settings.retry
        if retry is not None and done.retryable and done.attempt < retry.max_attempts:
            chance = zlib.crc32(f"{self._start.seed}/{done.location}/{done.attempt}".encode()) / 2**32
            try:
                due_at = now + retry.pause_after(done.attempt, chance)
            except Exception as error:  # the user's delay function failed: the step cannot go on
                LOGGER.exception("run %s: Retry.delay of %s raised", self.facts.id, done.location, exc_info=error)
            else:
                pending.attempt = done.attempt + 1
                self._change(pending, attempts=done.attempt, due_at=due_at, error=done.error)
                self._alarms.set(done.location, due_at)
                return
        self._settle(pending, now, error=done.error)

    def _take_mail(self, mail: Mail, now: float) -> None:
        message = mail.message
        if message.kind == "cancel":
            self._consumed.append(message.number)
            self._stop("cancel", now)
        elif message.kind == "resume":
            self._consumed.append(message.number)
            for location, pending in self._pending.items():
                if pending.call is not None and location in self._alarms:
                    self._alarms.set(location, now)  # a retry that was waiting need not wait any longer

    def _expose(self, locations: Sequence[str]) -> None:
        for location in locations:
            pending = self._pending.get(location)
            if pending is not None and pending.under_way and pending.entry.attempts < pending.attempt:
                self._change(pending, attempts=pending.attempt, due_at=None)

    def _stop(self, reason: str, now: float) -> None:
        """Raise cancellation in the workflow, once, for a caller's cancel or a limit that was exceeded."""
        if self._stop_reason is None:
            entry = Entry(
                location=CANCEL,
                kind="cancel",
                name=reason,
                status=EntryStatus.SUCCEEDED,
                asked=self._next_ask(),
                seq=self._seq + 1,
                generation=self.facts.generation,
                started_at=now,
                settled_at=now,
            )
            self._changed[CANCEL] = entry
            self._apply(entry)

    def _fire_due(self, now: float) -> None:
        """Sleeps, timers and retries whose moment has come, earliest first; then the run's own limits."""
        while not self._stopped() and (location := self._alarms.pop_due(now)) is not None:
            pending = self._pending.get(location)
            if pending is None:
                self._fire_timer(location, now)
            elif pending.call is not None:
                pending.waiting = True
            else:
                self._settle(pending, now)
        if not self._stopped() and self._stop_reason is None:
            limit = self._limit()
            if limit is not None and limit[0] <= now:
                self._stop(limit[1], now)

    def _fire_timer(self, location: str, now: float) -> None:
        entry = Entry(
            location=location,
            kind="timer",
            name="timer",
            status=EntryStatus.SUCCEEDED,
            asked=self._next_ask(),
            seq=self._seq + 1,
            generation=self.facts.generation,
            started_at=now,
            settled_at=now,
        )
        self._changed[location] = entry
        self._apply(entry)

    def _settle(
        self, pending: Pending, now: float, *, value: bytes | None = None, error: ErrorRecord | None = None
    ) -> None:
        status = EntryStatus.SUCCEEDED if error is None else EntryStatus.FAILED
        attempts = pending.attempt if pending.call is not None else 0
        self._change(
            pending, status=status, seq=self._seq + 1, value=value, error=error, attempts=attempts, settled_at=now
        )
        self._apply(pending.entry)

    def _change(self, pending: Pending, **changes: Any) -> None:
        pending.entry = replace(pending.entry, **changes)
        self._changed[pending.entry.location] = pending.entry

    def _limit(self) -> tuple[float, str] | None:
        """The run's own next limit: when, and which. A suspension counts from the last thing that happened."""
        limits: list[tuple[float, str]] = []
        if self._start.deadline_at is not None:
            limits.append((self._start.deadline_at, "timeout"))
        max_suspend = self._start.definition.settings.max_suspend
        if max_suspend is not None and not self._busy():
            limits.append((self._loop.now + max_suspend, "max_suspend"))
        return min(limits, default=None)

    # --- what the workflow asks for

    def ask_step(self, call: StepCall) -> Any:
        step = call.step
        segment = escape(step.name)
        if step.settings.key is not None:
            segment = f"{segment}[{escape(step.settings.key)}]"
        attempts = 1 if step.settings.at_most_once else 0
        return self._ask("step", step.name, segment, call=call, attempts=attempts)

    def ask_sleep(self, due_at: float) -> Any:
        if due_at <= self._loop.now:
            self._check_may_ask()
            done = self._loop.create_future()
            done.set_result(None)
            return done
        return self._ask("sleep", "sleep", "sleep", due_at=due_at)

    def _ask(
        self,
        kind: str,
        name: str,
        segment: str,
        *,
        call: StepCall | None = None,
        attempts: int = 0,
        due_at: float | None = None,
    ) -> Any:
        if not self._check_may_ask():
            return Forever()
        loop = self._loop
        scope = loop.scope()
        ordinal = scope.ordinal
        scope.ordinal = ordinal + 1
        location = scope.place(segment)
        asked = self._next_ask()
        record = scope.recorded.pop(ordinal, None)
        future = EntryFuture(loop, loop.next_number(), location, self)
        if record is not None:
            if record.location != location or record.kind != kind:
                self._diverge(location, f"{record.kind} {record.location!r}", f"{kind} {location!r}", calling_line())
                return future
            if call is not None and not self._same_arguments(record, call):
                return future
            return self._ask_again(record, future, call)
        if ordinal < scope.last_recorded and kind != "step":
            self._diverge(location, "a step that was under way", f"{kind} {location!r}", calling_line())
            return future
        entry = Entry(
            location=location,
            kind=kind,
            name=name,
            status=EntryStatus.PENDING,
            asked=asked,
            ordinal=ordinal,
            attempts=attempts,
            generation=self.facts.generation,
            started_at=loop.now,
            due_at=due_at,
            fingerprint=fingerprint(self._codec, call.args, call.kwargs) if call is not None else None,
        )
        pending = self._pending[location] = Pending(entry, future, call)
        if call is None or attempts:
            self._changed[location] = entry
        if due_at is not None:
            self._alarms.set(location, due_at)
        pending.waiting = call is not None
        return future

    def _ask_again(self, record: Entry, future: EntryFuture, call: StepCall | None) -> EntryFuture:
        """An ask that is on record: answer it at once where that is what would happen next anyway, else wait for its turn."""
        loop = self._loop
        pending = Pending(record, future, call)
        if record is self._history.next_settled and not loop.ready and not _about_to_be_cancelled(loop):
            # Fast path: every task waits and this is the next completion, so draining would lead just here.
            self._history.step_on()
            self._seq = record.seq or self._seq
            loop.now = max(loop.now, record.settled_at or 0.0)
            self._answer(pending, record)
            return future
        self._pending[record.location] = pending
        if record.status is EntryStatus.PENDING:
            if record.due_at is not None:
                self._alarms.set(record.location, record.due_at)
            if call is not None:
                waits_for_retry = record.due_at is not None
                pending.attempt = record.attempts + 1 if waits_for_retry else max(record.attempts, 1)
                pending.waiting = not waits_for_retry
        return future

    def _same_arguments(self, record: Entry, call: StepCall) -> bool:
        """False if other arguments than the recorded ones count as divergence; they are reported in any case."""
        if record.fingerprint is None or record.fingerprint == fingerprint(self._codec, call.args, call.kwargs):
            return True
        if self._start.strict or self._start.definition.settings.strict:
            self._diverge(record.location, "other arguments", "the same step with changed ones", calling_line())
            return False
        self._drift.append(record.location)
        LOGGER.warning(
            "run %s: step %s was recorded with other arguments than this replay gives it (%s)",
            self.facts.id,
            record.location,
            calling_line(),
        )
        return True

    def _check_may_ask(self) -> bool:
        """Raise while the run is being closed; False once it has asked too often even so, or has ended."""
        if self._loop.closing:
            self._refused += 1
            if self._refused > MAX_REFUSED:
                return False
            raise Closed
        return not self._ended

    def _next_ask(self) -> int:
        self._asked += 1
        return self._asked

    def ask_cancelled(self, location: str) -> None:
        """A task gave up what it waited for."""
        if self._loop.closing:
            return
        pending = self._pending.pop(location, None)
        if pending is None:
            return
        self._alarms.remove(location)
        if pending.under_way:
            self._dropped_steps.append(location)
        if pending.entry.status is not EntryStatus.CANCELLED:
            self._change(pending, status=EntryStatus.CANCELLED, settled_at=self._loop.now, due_at=None)

    def pin_version(self, gate: str, latest: int) -> int:
        location = f"~version/{escape(gate)}"
        pinned = self._versions.get(location)
        if pinned is None:
            record = self._history.by_location.get(location)
            if record is not None:
                pinned = int(record.name)
            else:
                pinned = 1 if self.replaying and self._history.by_location else latest
                self._pins[location] = Entry(
                    location=location,
                    kind="version",
                    name=str(pinned),
                    status=EntryStatus.SUCCEEDED,
                    asked=self._next_ask(),
                    generation=self.facts.generation,
                    started_at=self._loop.now,
                    settled_at=self._loop.now,
                )
            self._versions[location] = pinned
        return pinned

    def account_removed(self, name: str, kind: str) -> None:
        scope = self._loop.scope()
        record = scope.recorded.get(scope.ordinal)
        if record is not None and record.kind == kind and record.name == name:
            del scope.recorded[scope.ordinal]
            self._removed.add(record.location)
        elif record is not None or scope.ordinal >= scope.last_recorded:
            return  # this run never made it
        scope.place(escape(name))
        scope.ordinal += 1

    # --- what the loop tells us

    def open_scope(self, path: str) -> Scope:
        return Scope(path, self._history.scope(path))

    def timer_set(self, location: str, when: float) -> None:
        self._alarms.set(location, when)

    def timer_cancelled(self, location: str) -> None:
        self._alarms.remove(location)

    def report_lost(self, scope: str, message: str, error: BaseException | None) -> None:
        if not self.replaying:
            LOGGER.error("run %s at %s: %s", self.facts.id, scope or "its own scope", message, exc_info=error)

    # --- what the context reads

    def now(self) -> float:
        return self._loop.now

    def here(self) -> str:
        return self._loop.scope().path

    def next_number(self) -> int:
        return self._loop.next_number()

    def scope_random(self, purpose: str) -> random.Random:
        return self._loop.scope().random(purpose, f"{self._start.seed}/{self.facts.id}/{self.facts.generation}")

    # --- the turn

    def _finish(self) -> Turn:
        if self._held is not None:
            self.close()
            return Turn(held=self._held)
        outcome = self._take_outcome()
        effects = self._hand_out() if outcome is None else ()
        cancels = tuple(CancelStep(location) for location in self._dropped_steps)
        busy = self._busy()
        wake_at, waits = (None, ()) if outcome is not None else self._wake()
        held = None
        if outcome is None and not busy and wake_at is None and not waits:
            held = Held("deadlock", "nothing can wake this run", line=self._waiting_line())
        turn = Turn(
            entries=tuple(self._changed.values()),
            pins=tuple(self._pins.values()),
            consumed=tuple(self._consumed),
            effects=cancels + effects,
            busy=busy and outcome is None,
            waits=waits,
            wake_at=wake_at,
            outcome=outcome,
            held=held,
            drift=tuple(self._drift),
        )
        self._changed.clear()
        self._dropped_steps.clear()
        self._consumed.clear()
        if turn.entries or turn.consumed or not busy:
            self._pins.clear()  # they go with a turn that is written in any case
        if outcome is not None:
            self.close()
        return turn

    def _hand_out(self) -> tuple[Effect, ...]:
        effects: list[Effect] = []
        for location, pending in self._pending.items():
            if not pending.waiting or pending.call is None:
                continue
            pending.waiting = False
            pending.under_way = True
            if pending.call.step.settings.at_most_once and pending.entry.attempts < pending.attempt:
                self._change(pending, attempts=pending.attempt, due_at=None)  # on record before the body begins
            key = f"{self.facts.id}/{pending.entry.generation}/{location}"
            effects.append(RunStep(location, pending.attempt, pending.entry.name, pending.call, key))
        return tuple(effects)

    def _busy(self) -> bool:
        return any(pending.under_way or pending.waiting for pending in self._pending.values())

    def _wake(self) -> tuple[float | None, tuple[Wait, ...]]:
        """When to look at the run again, and what it waits for."""
        moments = [moment for moment in (self._alarms.earliest(),) if moment is not None]
        limit = self._limit()
        if limit is not None and self._stop_reason is None:
            moments.append(limit[0])
        return min(moments, default=None), tuple(self._waits())

    def _waits(self) -> list[Wait]:
        waits: list[Wait] = []
        for due_at, location in self._alarms.standing():
            pending = self._pending.get(location)
            if pending is not None and pending.call is not None:
                waits.append(Wait("retry", location, pending.entry.name, due_at))
            else:
                waits.append(Wait("timer", location, None, due_at))
        return waits

    def _take_outcome(self) -> Outcome | None:
        definition = self._start.definition
        if self._exit is not None:
            return failed(self._exit, definition, self._codec)
        assert self._main is not None
        if not self._main.done():
            return None
        outcome = outcome_of(self._main, definition, self._codec, self._stop_reason)
        self._cancel_what_is_left()
        return outcome

    def _cancel_what_is_left(self) -> None:
        """The function has ended: tasks still pending are cancelled with their steps, and not waited for."""
        self._ended = True
        for task in list(self._loop.live):
            if not task.done():
                task.cancel()
        self._loop.callbacks = 0
        try:
            self._loop.drain(lambda: self._loop.spinning)
        except SystemExit:
            LOGGER.warning("run %s: a task raised SystemExit after the workflow had ended", self.facts.id)

    # --- being held

    def _diverge(self, location: str, recorded: str, asked: str, line: str | None) -> None:
        if self._held is None:
            error = HistoryDiverged(location, recorded, asked, line)
            self._held = Held("diverged", str(error), location, recorded, asked, line)

    def _hold_spinning(self) -> bool:
        reason = "the workflow ran 100,000 call-backs without waiting for anything durable"
        self._held = Held("spinning", reason, line=self._waiting_line())
        return True

    def _waiting_line(self) -> str | None:
        lines = (waiting_line(task.get_coro()) for task in self._loop.live if not task.done())
        return next((line for line in lines if line is not None), None)


def _about_to_be_cancelled(loop: WorkflowLoop) -> bool:
    task = loop.running_task()
    return task is None or bool(task._must_cancel)  # type: ignore[attr-defined]
