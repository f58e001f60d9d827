"""Ledger: what a run asks for, held against what is recorded, and what of it the next commit must carry.

An ask either is on record (a replay) or is new. Within a scope asks must follow the recorded order; one that differs is
divergence, which holds the run: `held` is set, the loop halts, and the call that asked never returns.
"""

from __future__ import annotations

import logging
from asyncio import events
from typing import Any

from perdure.codec import Codec, fingerprint
from perdure.context import RunFacts
from perdure.errors import HistoryDiverged, InvalidPayload, WorkflowMisuse
from perdure.failures import step_error
from perdure.records import Entry, EntryStatus, Held
from perdure.runner.alarms import Alarms
from perdure.runner.history import History
from perdure.runner.locations import escape, segment_of
from perdure.runner.loop import WorkflowLoop
from perdure.runner.pending import EntryFuture, Forever, Pending
from perdure.runner.where import calling_line
from perdure.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")
PENDING, CANCELLED, FAILED = EntryStatus.PENDING, EntryStatus.CANCELLED, EntryStatus.FAILED


class Ledger:
    """See the module's docstring. `to_start` and `dropped` are the steps that the next turn starts and cancels."""

    __slots__ = (
        "_asked",
        "_codec",
        "_facts",
        "_history",
        "_loop",
        "_strict",
        "_versions",
        "alarms",
        "changed",
        "drift",
        "dropped",
        "ended",
        "held",
        "pending",
        "pins",
        "removed",
        "seq",
        "to_start",
        "under_way",
    )

    def __init__(self, facts: RunFacts, history: History, loop: WorkflowLoop, codec: Codec, strict: bool) -> None:
        self._facts = facts
        self._history = history
        self._loop = loop
        self._codec = codec
        self._strict = strict
        self._asked = 0
        self._versions: dict[str, int] = {}
        self.pending: dict[str, Pending] = {}
        self.to_start: dict[str, Pending] = {}
        self.under_way = 0
        self.dropped: list[str] = []
        self.alarms = Alarms()
        self.changed: dict[str, Entry] = {}
        self.pins: dict[str, Entry] = {}
        self.removed: set[str] = set()
        self.drift: list[str] = []
        self.held: Held | None = None
        self.ended = False
        self.seq = 0

    # --- asking

    def ask(
        self, kind: str, name: str, segment: str, *, call: StepCall | None = None, due_at: float | None = None
    ) -> Any:
        """Ask for an entry; gives what the task is to await."""
        loop = self._loop
        if (self.ended or loop.closing or events._get_running_loop() is not loop) and not self.may_ask():
            return self.never()
        scope = loop.scope()
        ordinal = scope.ordinal
        scope.ordinal = ordinal + 1
        location = scope.place(segment)
        self._asked = asked = self._asked + 1
        future = EntryFuture(loop=loop)
        future.number = loop.next_number()
        future.location = location
        future.keeper = self
        if ordinal <= scope.last_recorded:
            record = scope.recorded.pop(ordinal, None)
            if record is not None:
                if self._fits(record, kind, location, call):
                    self._ask_again(record, future, call)
                return future
            if kind != "step":
                self.diverge(location, "a step that was under way", f"{kind} {location!r}", calling_line())
                return future
        marks = fingerprint(self._codec, call.args, call.kwargs) if call is not None else None
        pending = Pending(location, kind, name, asked, ordinal, self._facts.generation, loop.now, future, call, marks)
        self.pending[location] = pending
        if due_at is not None:
            pending.due_at = due_at
            self.alarms.set(location, due_at)
        if call is None:
            self.changed[location] = pending.entry(PENDING)
        else:
            self.to_start[location] = pending
        return future

    def _ask_again(self, record: Entry, future: EntryFuture, call: StepCall | None) -> None:
        """An ask that is on record: answer it at once where that is what would happen next anyway."""
        loop, history = self._loop, self._history
        if record is history.next_settled and not loop.ready and not _about_to_be_cancelled(loop):
            # Fast path: every task waits and this is the next completion, so draining would lead just here.
            history.step_on()
            loop.callbacks = 0
            self.seq = record.seq or self.seq
            loop.pass_time(record.settled_at)
            self.answer(future, call, record)
            return
        pending = Pending.of(record, future, call)
        self.pending[record.location] = pending
        if record.status is PENDING:
            if record.due_at is not None:
                self.alarms.set(record.location, record.due_at)
            elif call is not None:
                self.to_start[record.location] = pending

    def _fits(self, record: Entry, kind: str, location: str, call: StepCall | None) -> bool:
        if record.location != location or record.kind != kind:
            self.diverge(location, f"{record.kind} {record.location!r}", f"{kind} {location!r}", calling_line())
            return False
        if call is None or record.fingerprint is None:
            return True
        if record.fingerprint == fingerprint(self._codec, call.args, call.kwargs):
            return True
        line = calling_line()
        if self._strict:
            self.diverge(location, "other arguments", "the same step with changed ones", line)
            return False
        self.drift.append(location)
        LOGGER.warning(
            "run %s: step %s was recorded with other arguments than this replay gives it (%s)",
            self._facts.id,
            location,
            line,
        )
        return True

    def may_ask(self) -> bool:
        """Raise while the run is being closed, or from outside of it; False if it has asked too often, or has ended."""
        if self._loop.closing:
            self._loop.refuse()
            return False
        self.check_inside()
        return not self.ended

    def check_inside(self) -> None:
        """Refuse a context that was carried out of its workflow, into a step or another run."""
        if events._get_running_loop() is not self._loop:
            raise WorkflowMisuse(
                f"the context of run {self._facts.id!r} was used outside of its workflow function: "
                "give the step what it needs as an argument"
            )

    def never(self) -> Any:
        """Something to await that never comes."""
        return Forever() if self._loop.closing else self._loop.create_future()

    def next_ask(self) -> int:
        self._asked += 1
        return self._asked

    def asked_before(self, entry: Entry) -> None:
        """Count what is on record without being asked for: new asks come after it."""
        self._asked = max(self._asked, entry.asked)

    # --- answering

    def answer(self, future: EntryFuture, call: StepCall | None, entry: Entry) -> None:
        """Give the waiting task its result: always decoded from the record, a new object each time."""
        if entry.status is FAILED:
            assert entry.error is not None
            raises = call.step.settings.raises if call is not None else ()
            future.set_exception(
                step_error(entry.error, self._codec, location=entry.location, attempts=entry.attempts, raises=raises)
            )
            future._log_traceback = False  # a task that was cancelled meanwhile may never look
        elif call is None or entry.value is None:
            future.set_result(None)
        else:
            try:
                value = self._codec.decode(entry.value, call.step.body.returns, what="the recorded result")
            except InvalidPayload as misfit:
                self.diverge(entry.location, "a result", f"one of another type ({misfit})", None)
            else:
                future.set_result(value)

    def given_up(self, location: str) -> None:
        """A task was cancelled while it waited for this."""
        if self._loop.closing:
            return
        pending = self.pending.pop(location, None)
        if pending is None:
            return
        self.alarms.remove(location)
        self.to_start.pop(location, None)
        if pending.under_way:
            pending.under_way = False
            self.under_way -= 1
            self.dropped.append(location)
        if pending.recorded is not CANCELLED:
            pending.due_at = None
            self.changed[location] = pending.entry(CANCELLED, settled_at=self._loop.now)

    def note(self, kind: str, location: str, value: bytes) -> None:
        """Write down something that nobody asks for again: it stands outside of its scope's order."""
        asked = self.next_ask()
        if location not in self._history.by_location:
            now = self._loop.now
            self.changed[location] = Entry(
                location,
                kind,
                location.rpartition("/")[2],
                EntryStatus.SUCCEEDED,
                asked,
                value=value,
                generation=self._facts.generation,
                started_at=now,
                settled_at=now,
            )

    # --- code that has changed

    def pin_version(self, gate: str, latest: int, replaying: bool) -> int:
        self.check_inside()
        location = f"~version/{escape(gate)}"
        pinned = self._versions.get(location)
        if pinned is not None:
            return pinned
        record = self._history.by_location.get(location)
        if record is not None:
            pinned = int(record.name)
            self.asked_before(record)
        else:
            pinned = 1 if replaying else latest
            self._pin(location, "version", str(pinned), replaying)
        self._versions[location] = pinned
        return pinned

    def account_removed(self, name: str, kind: str, replaying: bool) -> None:
        """Pass over the entry that older code made here. That a run has none is pinned: what new code then asks for
        may look just like it, or be under way and leave a gap where it would have been."""
        self.check_inside()
        scope = self._loop.scope()
        gate = scope.place(f"~removed[{escape(name)}]")
        absent = self._history.by_location.get(gate)
        if absent is not None:
            self.asked_before(absent)
            return
        record = scope.recorded.get(scope.ordinal)
        if record is not None and record.kind == kind and record.name == name:
            del scope.recorded[scope.ordinal]
            self.removed.add(record.location)
            scope.place(segment_of(record.location))
        elif record is None and kind == "step" and scope.ordinal < scope.last_recorded:
            scope.place(escape(name))  # it was under way, and so not on record, when later ones were done
        else:
            self._pin(gate, "removed", name, replaying)
            return
        self.next_ask()
        scope.ordinal += 1

    def _pin(self, location: str, kind: str, name: str, replaying: bool) -> None:
        now = self._loop.now
        self.pins[location] = Entry(
            location,
            kind,
            name,
            EntryStatus.SUCCEEDED,
            self._asked if replaying else self.next_ask(),  # what is on record was counted without it
            generation=self._facts.generation,
            started_at=now,
            settled_at=now,
        )

    def diverge(self, location: str, recorded: str, asked: str, line: str | None) -> None:
        if self.held is None:
            error = HistoryDiverged(location, recorded, asked, line)
            self.hold(Held("diverged", str(error), location, recorded, asked, line))

    def hold(self, held: Held) -> None:
        self.held = held
        self._loop.halted = True


def _about_to_be_cancelled(loop: WorkflowLoop) -> bool:
    task = loop.running_task()
    return task is None or bool(task._must_cancel)  # type: ignore[attr-defined]
