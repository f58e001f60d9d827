"""Ledger: what a run asks for, held against what is recorded, and what of it the next commit must carry.

An ask either is on record (a replay) or is new. Within a scope asks must follow the recorded order; one that differs is
divergence, which holds the run: `held` is set, the loop halts, and the call that asked never returns.
"""

from __future__ import annotations

import logging
from asyncio import Future, events
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.codec import Codec, fingerprint
from perdure.codec.failures import error_from_record, step_error_from_record
from perdure.errors import HistoryDiverged, InvalidPayload, WorkflowMisuse
from perdure.model.locations import escape_segment, segment_of
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Hold
from perdure.model.turns import StartChild, StopRun
from perdure.runner.child_tracker import CHILDREN, ChildTracker
from perdure.runner.compensations import Compensations
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.pending import NeverCompletes, PendingEntry
from perdure.runner.source_lines import caller_source_line
from perdure.runner.tasks import EntryFuture
from perdure.runner.timers import TimerQueue
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import Command
from perdure.workflows.context import RunInfo
from perdure.workflows.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")
PENDING, CANCELLED, FAILED = EntryStatus.PENDING, EntryStatus.CANCELLED, EntryStatus.FAILED
EXHAUSTED = b'"exhausted"'
"""Marks a step that has no attempts left and holds its run (`suspend_on_failure`)."""


class EntryTracker:
    """See the module's docstring. `to_start` and `dropped` are the steps that the next turn starts and cancels.

    `to_send` are errands that the next turn hands out, `instant` asks whose answer is known and is a completion of its
    own, `stops` errands that nobody waits for but the run's end, `exhausted` steps that hold the run.
    """

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
        "cleanup_tasks",
        "compensations",
        "deferreds",
        "drift",
        "dropped",
        "effects_to_start",
        "ended",
        "exhausted",
        "extras",
        "held",
        "instant",
        "nursery",
        "pending",
        "pins",
        "removed",
        "running_count",
        "self_cancelled",
        "seq",
        "standing",
        "stop_requests",
        "to_start",
        "waiting",
    )

    def __init__(self, facts: RunInfo, history: History, loop: WorkflowLoop, codec: Codec, strict: bool) -> None:
        self._facts = facts
        self._history = history
        self._loop = loop
        self._codec = codec
        self._strict = strict
        self._asked = 0
        self._versions: dict[str, int] = {}
        self.pending: dict[str, PendingEntry] = {}
        self.to_start: dict[str, PendingEntry] = {}
        self.effects_to_start: dict[str, PendingEntry] = {}
        self.instant: dict[str, bytes | None] = {}
        self.waiting: dict[str, PendingEntry] = {}  # asks that mail answers, in order of asking
        self.standing: dict[str, set[str]] = {}  # waits for the end of runs that were set up before the run was loaded
        self.stop_requests: dict[str, PendingEntry] = {}
        self.exhausted: dict[str, PendingEntry] = {}
        # Those that were awaited and settled, by name: the entry that has taken the message.
        self.deferreds: dict[str, Entry] = {}
        for entry in history.past_deferreds():
            self.deferreds.setdefault(entry.name, entry)
        self.extras = TurnExtrasBuilder()
        self.compensations = Compensations(self, codec, history)
        self.cleanup_tasks: set[Any] = set()  # tasks that roll back or end the run: they may ask when nobody else may
        self.running_count = 0
        self.dropped: list[str] = []
        self.alarms = TimerQueue()
        self.changed: dict[str, Entry] = {}
        self.pins: dict[str, Entry] = {}
        self.removed: set[str] = set()
        self.drift: list[str] = []
        self.held: Hold | None = None
        self.ended = False
        self.seq = 0
        self.self_cancelled = False  # a task has cancelled itself, and may do so again
        self.nursery = ChildTracker(self, loop, facts.generation, history)

    # --- asking

    def request(
        self,
        kind: str,
        name: str,
        segment: str,
        *,
        call: StepCall | None = None,
        due_at: float | None = None,
        question: Command | None = None,
        detail: bytes | None = None,
    ) -> Any:
        """Ask for an entry; gives what the task is to await."""
        loop = self._loop
        # A step's call comes from the running loop by itself; of others it is asked, which costs a system call.
        outside = not loop.open or (call is None and events._get_running_loop() is not loop)
        if (self.ended or loop.closing or outside) and not self.can_request():
            return self.never_completing()
        scope = loop.scope()
        ordinal = scope.ordinal
        scope.ordinal = ordinal + 1
        location = scope.locate(segment)
        self._asked = asked = self._asked + 1
        future = self._future(location, plain=call is not None and not self.self_cancelled)
        if ordinal <= scope.last_recorded:
            record = scope.recorded.pop(ordinal, None)
            if record is not None:
                if record.call_seq > asked:
                    self._asked = record.call_seq  # what was pruned was counted too
                if self._fits(record, kind, location, call):
                    self._request_recorded(record, future, call, question, due_at)
                return future
            if kind != "step":
                self.diverge(location, "a step that was under way", f"{kind} {location!r}", caller_source_line())
                return future
        marks = fingerprint(self._codec, call.args, call.kwargs) if call is not None else None
        pending = PendingEntry(
            location, kind, name, asked, ordinal, self._facts.generation, loop.now, future, call, marks, question
        )
        pending.detail = detail
        self.pending[location] = pending
        if due_at is not None:
            pending.due_at = due_at
            self.alarms.set(location, due_at)
        if call is None:
            self._prepare(pending)
            self.changed[location] = pending.entry(PENDING)
            self._subscribe(pending)
        else:
            self.to_start[location] = pending
        return future

    def _future(self, location: str, *, plain: bool) -> Future[Any]:
        """What a task is to wait on. A plain one is asyncio's own, for which asyncio's tasks have a short way (2 % of a
        step): it cannot say that it is cancelled, so its task does. Not one that has cancelled itself while it runs:
        that cancels whatever it waits for next, and says nothing."""
        loop = self._loop
        loop.number = number = loop.number + 1  # for a plain one too: what comes after it hashes by the next
        future: Any
        if plain:
            future = Future(loop=loop)
        else:
            future = EntryFuture(loop=loop)
            future.number = number
            future.keeper = self
        future.location = location
        return future  # type: ignore[no-any-return]

    def has_asked_for_sleep(self, until: float) -> bool:
        """Whether the next thing on record is a sleep until this moment: since a rewind that may be in the past."""
        scope = self._loop.scope()
        record = scope.recorded.get(scope.ordinal)
        return record is not None and record.kind == "sleep" and record.due_at in (until, None)

    def issue(self, question: Command) -> Any:
        """Ask a question that is neither a step nor a sleep."""
        if question.fixed_location:
            return self._ask_outside(question)
        return self.request(question.kind, question.name, question.segment, due_at=question.due_at, question=question)

    def _ask_outside(self, question: Command) -> Any:
        """An ask at a location of its own, outside of the order of any scope: found on record by that location."""
        if not self.can_request():
            return self.never_completing()
        loop, location = self._loop, question.segment
        future = self._future(location, plain=False)
        record = self._history.by_location.get(location)
        if record is not None and record.kind == question.kind:
            self.asked_before(record)
            self._request_recorded(record, future, None, question)
            return future
        pending = PendingEntry(
            location,
            question.kind,
            question.name,
            self.next_ask(),
            -1,
            self._facts.generation,
            loop.now,
            future,
            None,
            None,
            question,
        )
        self.pending[location] = pending
        self._prepare(pending)
        self.changed[location] = pending.entry(PENDING)
        return future

    def _request_recorded(
        self,
        record: Entry,
        future: Future[Any],
        call: StepCall | None,
        question: Command | None,
        due_at: float | None = None,
    ) -> None:
        """An ask that is on record: answer it at once where that is what would happen next anyway."""
        loop, history = self._loop, self._history
        if (
            record is history.next_settled
            and not loop.ready
            and record.status is not PENDING
            and not _about_to_be_cancelled(loop)
        ):
            # Fast path: every task waits and this is the next completion, so draining would lead just here.
            history.advance()
            loop.callbacks = 0
            self.seq = record.seq or self.seq
            loop.pass_time(record.settled_at)
            if history.rewound:
                loop.pass_time(history.rewound.get(self.seq))
            self.answer(future, call, question, record)
            return
        pending = PendingEntry.of(record, future, call, question)
        self.pending[record.location] = pending
        if record.status is PENDING:
            self._take_up(pending, due_at)

    def _take_up(self, pending: PendingEntry, due_at: float | None) -> None:
        """Go on with what was pending when the run was last seen."""
        location = pending.location
        if pending.due_at is None and due_at is not None and self._was_opened_again(pending):
            # Its last row said only that it was given up: its deadline is the one that it is asked for with now.
            pending.due_at = due_at
            self.changed[location] = pending.entry(PENDING)
        if pending.due_at is not None:
            self.alarms.set(location, pending.due_at)
        if pending.call is None:
            self._prepare(pending)
            if pending.generation != self._facts.generation and pending.question is not None and pending.question.wants:
                # A rewind has let go of what the run had subscribed to: it does so again, once, in this generation.
                pending.generation = self._facts.generation
                self._subscribe(pending)
                self.changed[location] = pending.entry(PENDING)
        elif pending.detail == EXHAUSTED:
            self.exhausted[location] = pending
        elif pending.due_at is None and pending.seq is None:
            self.to_start[location] = pending

    def _was_opened_again(self, pending: PendingEntry) -> bool:
        """Whether a rewind has opened it from a row without a deadline: a sleep always has one, a receive may not."""
        return pending.kind == "sleep" or pending.generation != self._facts.generation

    def _prepare(self, pending: PendingEntry) -> None:
        """See to it that a question gets its answer."""
        question = pending.question
        if question is None:
            return
        if question.immediate_value is not None:
            self.instant[pending.location] = question.immediate_value
        elif question.effect is not None:
            pending.work = question.effect(pending.target)
            if question.describe is not None:
                if pending.recorded is None or pending.detail is None:
                    pending.detail = question.describe(pending.work)
                elif isinstance(pending.work, StartChild):
                    self._match_recorded_child(pending, pending.work, question.describe)
            pending.awaited = self.standing.pop(pending.location, None) if pending.recorded is not None else None
            if pending.awaited is None:
                self.effects_to_start[pending.location] = pending
        elif question.deferred is not None and question.deferred in self.deferreds:
            self.instant[pending.location] = None  # as it was answered before
        elif question.wants is not None or question.deferred is not None:
            self.waiting[pending.location] = pending

    def _match_recorded_child(
        self, pending: PendingEntry, work: StartChild, describe: Callable[[StartChild], bytes]
    ) -> None:
        """A child that is on record as asked for. After a rewind, and in a fork, it is another one: that goes on record
        before it is started, so that who rewinds the run again finds it."""
        child = msgspec.json.decode(pending.detail or b"{}")
        if child.get("id") != work.run_id:
            pending.detail = describe(work)
            self.changed[pending.location] = pending.entry(PENDING)
        elif not child.get("attached"):
            pending.work = replace(work, attached=False)  # as the answer to its start has said

    def _subscribe(self, pending: PendingEntry) -> None:
        if pending.question is not None and pending.question.wants is not None:
            self.extras.subscribe(pending.target, tuple(pending.question.wants.types))

    def _fits(self, record: Entry, kind: str, location: str, call: StepCall | None) -> bool:
        if record.location != location or record.kind != kind:
            self.diverge(location, f"{record.kind} {record.location!r}", f"{kind} {location!r}", caller_source_line())
            return False
        if call is None or record.fingerprint is None:
            return True
        if record.fingerprint == fingerprint(self._codec, call.args, call.kwargs):
            return True
        line = caller_source_line()
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

    def can_request(self) -> bool:
        """Raise while the run is being closed, or from outside of it; False if it has asked too often, or has ended."""
        if self._loop.closing:
            self._loop.refuse()
            return False
        self.check_inside()
        return not self.ended or self._loop.running_task() in self.cleanup_tasks

    def check_inside(self) -> None:
        """Refuse a context that was carried out of its workflow, into a step or another run."""
        if events._get_running_loop() is not self._loop:
            raise WorkflowMisuse(
                f"the context of run {self._facts.id!r} was used outside of its workflow function: "
                "give the step what it needs as an argument"
            )

    def never_completing(self) -> Any:
        """Something to await that never comes."""
        return NeverCompletes() if self._loop.closing else self._loop.create_future()

    def next_ask(self) -> int:
        self._asked += 1
        return self._asked

    def asked_before(self, entry: Entry) -> None:
        """Count what is on record without being asked for: new asks come after it."""
        self._asked = max(self._asked, entry.call_seq)

    # --- answering

    def answer(self, future: Future[Any], call: StepCall | None, question: Command | None, entry: Entry) -> None:
        """Give the waiting task its result: always decoded from the record, a new object each time."""
        if question is not None and question.deferred is not None:
            self._deferred_settled(question.deferred, entry)
        if question is not None and question.kind in CHILDREN:
            self.nursery.note(entry)
        if entry.status is FAILED:
            future.set_exception(self._error(call, question, entry))
            future._log_traceback = False  # a task that was cancelled meanwhile may never look
            return
        try:
            if call is not None:
                if call.step.settings.compensate is not None:
                    self.compensations.step_done(call, entry)
                value = None
                if entry.value is not None:
                    value = self._codec.decode(entry.value, call.step.body.returns, what="the recorded result")
            else:
                value = question.read(entry) if question is not None and question.read is not None else None
        except InvalidPayload as misfit:
            self.diverge(entry.location, "a result", f"one of another type ({misfit})", None)
        else:
            future.set_result(value)

    def _deferred_settled(self, name: str, entry: Entry) -> None:
        """All of one name are the same: who waits for it elsewhere gets the same answer, now."""
        self.deferreds.setdefault(name, entry)
        for location, waiting in list(self.waiting.items()):
            if waiting.question is not None and waiting.question.deferred == name:
                del self.waiting[location]
                self.instant[location] = None

    def _error(self, call: StepCall | None, question: Command | None, entry: Entry) -> BaseException:
        assert entry.error is not None
        if call is not None:
            raises = call.step.settings.raises
            return step_error_from_record(
                entry.error, self._codec, location=entry.location, attempts=entry.attempts, raises=raises
            )
        if question is not None and question.fail is not None:
            return question.fail(entry)
        return error_from_record(entry.error, self._codec)

    def on_cancelled(self, location: str) -> None:
        """A task was cancelled while it waited for this."""
        if self._loop.closing:
            return
        pending = self.pending.pop(location, None)
        if pending is None:
            return
        self.alarms.remove(location)
        self.to_start.pop(location, None)
        self.exhausted.pop(location, None)
        self.instant.pop(location, None)
        handed_out = self.effects_to_start.pop(location, None) is None or pending.recorded is not None
        if pending.under_way:
            pending.under_way = False
            self.running_count -= 1
            if pending.call is not None:
                self.dropped.append(location)
        stop = self._history.by_location.get(f"{location}/~stop")
        if stop is not None:
            self.asked_before(stop)
        elif isinstance(pending.work, StartChild) and pending.work.attached and handed_out:
            self.stop_run(f"{location}/~stop", pending.work.run_id)
        self.extras.unsubscribe(pending)
        if pending.recorded is not CANCELLED:
            pending.due_at = None
            self.changed[location] = pending.entry(CANCELLED, settled_at=self._loop.now)

    def fail_loop_entry(self, location: str, error: ErrorRecord | None) -> None:
        """A loop's body raised, or its task was cancelled: the loop ends so, which a replay finds out by itself."""
        pending = self.pending.pop(location, None)
        if pending is None or self._loop.closing:
            return
        status = CANCELLED if error is None else FAILED
        if pending.recorded is not status:
            pending.error = error
            self.changed[location] = pending.entry(status, settled_at=self._loop.now)

    def settle_soon(self, location: str, value: bytes) -> None:
        """The answer to something that is pending is known: a completion of its own, after the present drain."""
        if location in self.pending:
            self.instant[location] = value

    def forget(self, path: str) -> None:
        """Everything at and below this path is no longer needed."""
        self.extras.drop(path)
        below = f"{path}/"
        for known in (self.changed, self._history.by_location):
            for location in [each for each in known if each == path or each.startswith(below)]:
                del known[location]

    def keep_deferreds(self, path: str) -> None:
        """What was forgotten with this path may be waited for again, and nobody can complete it twice: it outlasts."""
        below = f"{path}/"
        for entry in self.deferreds.values():
            if entry.location.startswith(below):
                self.changed[entry.location] = entry

    def stop_run(self, location: str, run_id: str) -> None:
        """Have a run stopped that nobody waits for any more. The run does not end before that was done."""
        pending = PendingEntry(
            location,
            "stop",
            run_id,
            self.next_ask(),
            -1,
            self._facts.generation,
            self._loop.now,
            EntryFuture(loop=self._loop),
            None,
            None,
        )
        self._send_stop(pending)
        self.changed[location] = pending.entry(PENDING)

    def take_up_stops(self) -> None:
        """Those that are on record and were not carried out yet; no code asks for them."""
        for entry in self._history.by_location.values():
            if entry.kind == "stop" and entry.status is PENDING:
                self._send_stop(PendingEntry.of(entry, EntryFuture(loop=self._loop), None, None))

    def _send_stop(self, pending: PendingEntry) -> None:
        pending.work = StopRun(pending.name)
        self.stop_requests[pending.location] = self.effects_to_start[pending.location] = pending

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
        location = f"~version/{escape_segment(gate)}"
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
        gate = scope.locate(f"~removed[{escape_segment(name)}]")
        absent = self._history.by_location.get(gate)
        if absent is not None:
            self.asked_before(absent)
            return
        record = scope.recorded.get(scope.ordinal)
        if record is not None and record.kind == kind and record.name == name:
            del scope.recorded[scope.ordinal]
            self.removed.add(record.location)
            scope.locate(segment_of(record.location))
        elif record is None and kind == "step" and scope.ordinal < scope.last_recorded:
            scope.locate(escape_segment(name))  # it was under way, and so not on record, when later ones were done
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
            self.hold(Hold("diverged", str(error), location, recorded, asked, line))

    def hold(self, held: Hold) -> None:
        self.held = held
        self._loop.halted = True


def _about_to_be_cancelled(loop: WorkflowLoop) -> bool:
    task = loop.running_task()
    return task is None or bool(task._must_cancel)  # type: ignore[attr-defined]
