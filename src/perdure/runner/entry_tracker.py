"""EntryTracker: the entries that a run requests, compared with its history.

A request is either recorded (a replay) or new. Within a scope, requests must follow the recorded order. One that
differs is divergence, which holds the run: `held` is set, the loop halts, and the call that made the request never
returns. User code sees nothing of it.

The tracker owns an `EntryLog` (what the commit records) and an `AttemptTracker` (what starts and runs). Each of the
three writes its own fields only; collaborators of the runner read fields and call methods.
"""

from __future__ import annotations

import logging
from asyncio import Future, events
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from perdure.codec import Codec, fingerprint
from perdure.codec.attempt_notes import decode_notes, encode_notes
from perdure.codec.failures import error_from_record, step_error_from_record
from perdure.errors import HistoryDiverged, WorkflowMisuse
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Hold, Wait
from perdure.model.turns import StartChild
from perdure.runner.attempt_tracker import EXHAUSTED, AttemptTracker
from perdure.runner.child_tracker import CHILDREN, ChildTracker, match_recorded_child
from perdure.runner.compensations import Compensations
from perdure.runner.deadlines import DeferredDeadlines
from perdure.runner.entry_log import EntryLog
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.function_names import RegisteredFunctions
from perdure.runner.history import History
from perdure.runner.open_receives import OpenReceives
from perdure.runner.pending import NeverCompletes, PendingEntry
from perdure.runner.remote_attempts import RemoteAttempts, is_remote
from perdure.runner.source_lines import caller_source_line
from perdure.runner.tasks import EntryFuture
from perdure.runner.timers import TimerQueue
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import Command
from perdure.workflows.context import RunInfo
from perdure.workflows.step_arguments import check_arguments
from perdure.workflows.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")
PENDING, CANCELLED = EntryStatus.PENDING, EntryStatus.CANCELLED
SUCCEEDED, FAILED = EntryStatus.SUCCEEDED, EntryStatus.FAILED


class EntryTracker:
    """See the module's docstring. Dictionaries are keyed by location, in order of request, if not said otherwise.

    pending         requested and not completed
    immediate       requests whose result is known: each is a completion of its own, after the present drain
    waiting         requests that a message completes
    observed        runs whose end a request observes since before the run was loaded
    deferreds       by name: the entry that consumed the message of a completed deferred
    drift           locations of steps whose arguments differ from the recorded ones
    cleanup_tasks   tasks of rollbacks and cleanup, which may make requests after the function has ended
    """

    __slots__ = (
        "_codec",
        "_history",
        "_info",
        "_loop",
        "_self_cancelled",
        "_strict",
        "attempts",
        "children",
        "cleanup_tasks",
        "compensations",
        "deadlines",
        "deferreds",
        "drift",
        "ended",
        "extras",
        "held",
        "immediate",
        "log",
        "observed",
        "pending",
        "remote",
        "timers",
        "waiting",
    )

    def __init__(
        self,
        info: RunInfo,
        history: History,
        loop: WorkflowLoop,
        codec: Codec,
        extras: TurnExtrasBuilder,
        functions: RegisteredFunctions,
        *,
        strict: bool,
        epoch: int,
    ) -> None:
        self._info = info
        self._history = history
        self._loop = loop
        self._codec = codec
        self._strict = strict
        self._self_cancelled = False
        self.extras = extras
        self.timers = TimerQueue()
        self.log = EntryLog(history, loop, extras, info.generation)
        self.attempts = AttemptTracker(self.log, loop, self.timers)
        self.compensations = Compensations(self.log, codec, history, functions, loop.iterations)
        self.children = ChildTracker(self.log, self.attempts, loop, history)
        self.remote = RemoteAttempts(info, codec, self.attempts, self.children)
        self.deadlines = DeferredDeadlines(info.id, epoch, self.log, self.attempts, self.timers, loop, history)
        self.pending: dict[str, PendingEntry] = {}
        self.immediate: dict[str, bytes | None] = {}
        self.waiting = OpenReceives()
        self.observed: dict[str, set[str]] = {}
        self.deferreds: dict[str, Entry] = {}
        for entry in history.past_deferreds():
            self.deferreds.setdefault(entry.name, entry)
        self.drift: list[str] = []
        self.cleanup_tasks: set[Any] = set()
        self.ended = False
        self.held: Hold | None = None

    def add_observed_runs(self, waits: Sequence[Wait]) -> None:
        """Note which runs are observed since an earlier suspension: their ends arrive as messages anyway."""
        for wait in waits:
            if wait.kind in ("child", "step") and wait.location is not None and wait.name is not None:
                self.observed.setdefault(wait.location, set()).add(wait.name)

    # --- requests of user code

    def request(
        self,
        kind: str,
        name: str,
        segment: str,
        *,
        call: StepCall | None = None,
        due_at: float | None = None,
        command: Command | None = None,
        detail: bytes | None = None,
    ) -> Any:
        """Request an entry at the next location of the current scope; return what the task awaits."""
        loop = self._loop
        # A step call has read the running loop itself; for other requests it is read here, which is a system call.
        outside = not loop.open or (call is None and events._get_running_loop() is not loop)
        if (self.ended or loop.closing or outside) and not self.can_request():
            return self.never_completing()
        scope = loop.scope()
        ordinal = scope.ordinal
        marks: bytes | None = None
        if call is not None:
            marks = fingerprint(self._codec, call.args, call.kwargs)
            if call.checks:
                self._check_arguments(call, marks, scope.recorded.get(ordinal))
        scope.ordinal = ordinal + 1
        location = scope.locate(segment)
        log = self.log
        call_seq = log.next_call_seq()
        future = self._future(location, asyncio_future=call is not None and not self._self_cancelled)
        if ordinal <= scope.last_recorded:
            record = scope.recorded.pop(ordinal, None)
            if record is not None:
                if record.call_seq > call_seq:
                    log.count_recorded(record)  # pruned entries were counted too
                if self._matches(record, kind, location, marks):
                    self._request_recorded(record, future, call, command, due_at)
                return future
            # A gap, with later entries recorded: a step that was running at the crash. It starts again (ADR 2).
            # Everything else is recorded when it is requested, and cannot be missing.
            if kind != "step":
                self.diverge(location, "a step that was under way", f"{kind} {location!r}", caller_source_line())
                return future
        pending = PendingEntry(
            location, kind, name, call_seq, ordinal, self._info.generation, loop.now, future, call, marks, command
        )
        pending.detail = detail
        self.pending[location] = pending
        if due_at is not None:
            pending.due_at = due_at
            self.timers.set(location, due_at)
        if call is None:
            self._prepare(pending)
            log.record_pending(pending)
            self._subscribe(pending)
        else:
            self.attempts.schedule(pending)
        return future

    def _future(self, location: str, *, asyncio_future: bool) -> Future[Any]:
        """Return the future that a task awaits.

        asyncio's own future has a fast path in asyncio's tasks (2 % of a step). It cannot report that it is cancelled;
        `WorkflowTask.cancel` does so for it. A task that cancels itself while it runs is the exception: asyncio cancels
        its next future without calling `cancel` on the task, so such a run gets futures that report it themselves.
        """
        loop = self._loop
        loop.number = number = loop.number + 1  # counted for both kinds: later objects hash by the next number
        future: Any
        if asyncio_future:
            future = Future(loop=loop)
        else:
            future = EntryFuture(loop=loop)
            future.number = number
            future.listener = self
        future.location = location
        return future  # type: ignore[no-any-return]

    def issue(self, command: Command) -> Any:
        """Request an entry that is neither a step nor a sleep; return what the task awaits."""
        if command.fixed_location:
            return self._request_at_fixed_location(command)
        return self.request(
            command.kind,
            command.name,
            command.segment,
            due_at=command.due_at,
            command=command,
            detail=command.detail,
        )

    def _request_at_fixed_location(self, command: Command) -> Any:
        """Request an entry outside of the order of any scope; its location alone finds its record."""
        if not self.can_request():
            return self.never_completing()
        location = command.segment
        future = self._future(location, asyncio_future=False)
        record = self._history.by_location.get(location)
        if record is not None and record.kind == command.kind:
            self.log.count_recorded(record)
            self._request_recorded(record, future, None, command)
            return future
        pending = self.log.new_unordered(location, command.kind, command.name, future, command)
        self.pending[location] = pending
        self._prepare(pending)
        self.log.record_pending(pending)
        return future

    def has_recorded_sleep(self, until: float) -> bool:
        """Return whether the next recorded entry is this sleep. After a rewind its time may be in the past."""
        record = self.next_recorded()
        return record is not None and record.kind == "sleep" and record.due_at in (until, None)

    def next_recorded(self) -> Entry | None:
        """Return the recorded entry that the next request of the current scope must match; None if it is new."""
        scope = self._loop.scope()
        return scope.recorded.get(scope.ordinal)

    def can_request(self) -> bool:
        """Return whether the running task may request entries: not if the run has ended, except for its cleanup.

        Raises `Closed` while the run is evicted (False after too many calls), `WorkflowMisuse` outside of the run.
        """
        if self._loop.closing:
            self._loop.refuse()
            return False
        self.check_inside()
        return not self.ended or self._loop.running_task() in self.cleanup_tasks

    def check_inside(self) -> None:
        """Raise `WorkflowMisuse` if the context is used in a step, in another run or anywhere else outside."""
        if events._get_running_loop() is not self._loop:
            raise WorkflowMisuse(
                f"the context of run {self._info.id!r} was used outside of its workflow function: "
                "pass the step what it needs as an argument"
            )

    def never_completing(self) -> Any:
        """Return an awaitable that never completes."""
        return NeverCompletes() if self._loop.closing else self._loop.create_future()

    def on_self_cancel(self) -> None:
        """Handle a task that cancelled itself; it may do so again (see `_future`)."""
        self._self_cancelled = True

    # --- requests that are recorded

    def _request_recorded(
        self,
        record: Entry,
        future: Future[Any],
        call: StepCall | None,
        command: Command | None,
        due_at: float | None = None,
    ) -> None:
        loop, history = self._loop, self._history
        if (
            record is history.next_completion
            and not loop.ready
            and record.status is not PENDING
            and not _is_about_to_be_cancelled(loop)
            and history.allows_fast_path
        ):
            # Fast path: every task waits and this entry is the next completion, so draining would lead just here.
            history.advance()
            loop.callbacks = 0
            self.log.move_to(record)
            self._resolve_future(future, call, command, record)
            return
        pending = PendingEntry.from_record(record, future, call, command)
        self.pending[record.location] = pending
        if record.status is PENDING:
            self._resume_pending(pending, due_at)

    def _resume_pending(self, pending: PendingEntry, due_at: float | None) -> None:
        """Continue with an entry that was pending when the run was last in memory."""
        location = pending.location
        if pending.due_at is None and due_at is not None and self._was_reopened(pending):
            # The row that the rewind has reopened was a cancelled one, which has no deadline: the code gives it anew.
            pending.due_at = due_at
            self.log.record_pending(pending)
        if pending.due_at is not None:
            self.timers.set(location, pending.due_at)
        if pending.call is None:
            self._prepare(pending)
            if pending.generation != self._info.generation and pending.command is not None and pending.command.wants:
                # A rewind removes the subscriptions of a run: subscribe again, once in this generation.
                pending.generation = self._info.generation
                self._subscribe(pending)
                self.log.record_pending(pending)
        elif pending.detail == EXHAUSTED:
            self.attempts.resume_exhausted(pending)
        elif pending.due_at is None and pending.seq is None:
            self._resume_step(pending, pending.call)

    def _resume_step(self, pending: PendingEntry, call: StepCall) -> None:
        """Start a step that was under way, or wait for its internal run, whose end this run observes already."""
        if call.step.is_remote:
            pending.awaited = self.observed.pop(pending.location, None)
        if pending.awaited is None:
            self.attempts.schedule(pending)
        else:
            self.remote.prepare(pending)

    def _was_reopened(self, pending: PendingEntry) -> bool:
        """Return whether a rewind reopened an entry without a deadline: a sleep always has one, a receive may not."""
        return pending.kind == "sleep" or pending.generation != self._info.generation

    def _check_arguments(self, call: StepCall, marks: bytes | None, record: Entry | None) -> None:
        """Raise `InvalidPayload` if the arguments of a step do not fit. Called before the request counts.

        Arguments with the recorded fingerprint are not checked again: what is recorded is valid.
        """
        if record is None or marks is None or record.fingerprint != marks:
            check_arguments(call.name, call.args, call.kwargs, call.checks)

    def _matches(self, record: Entry, kind: str, location: str, marks: bytes | None) -> bool:
        """Return whether a request is the recorded one; otherwise hold the run.

        Changed arguments of a step are divergence in strict runs only. Otherwise they are noted and logged.
        """
        if record.location != location or record.kind != kind:
            self.diverge(location, f"{record.kind} {record.location!r}", f"{kind} {location!r}", caller_source_line())
            return False
        if kind != "step" or record.fingerprint is None or record.fingerprint == marks:
            return True
        line = caller_source_line()
        if self._strict:
            self.diverge(location, "other arguments", "the same step with changed ones", line)
            return False
        self.drift.append(location)
        info = self._info
        LOGGER.warning(
            "Run %s: arguments of step %s differ from the recorded ones (%s)",
            info.id,
            location,
            line,
            extra={"run_id": info.id, "workflow": info.workflow, "location": location},
        )
        return True

    # --- commands

    def _prepare(self, pending: PendingEntry) -> None:
        """Arrange how a command gets its result: at once, by an external effect, or by a message."""
        command = pending.command
        if command is None:
            return
        if command.immediate_value is not None:
            self.immediate[pending.location] = command.immediate_value
        elif command.effect is not None:
            self._prepare_effect(pending, command)
        elif command.deferred is not None and command.deferred in self.deferreds:
            self.immediate[pending.location] = None  # completed before, under the same name
        elif command.wants is not None or command.deferred is not None:
            self.waiting.add(pending)

    def _prepare_effect(self, pending: PendingEntry, command: Command) -> None:
        assert command.effect is not None
        pending.action = command.effect(pending.target)
        if command.describe is not None:
            if pending.recorded is None or pending.detail is None:
                pending.detail = command.describe(pending.action)
            elif isinstance(pending.action, StartChild) and match_recorded_child(
                pending, pending.action, command.describe
            ):
                self.log.record_pending(pending)
        pending.awaited = self.observed.pop(pending.location, None) if pending.recorded is not None else None
        if pending.awaited is None:
            self.attempts.schedule_effect(pending)

    def _subscribe(self, pending: PendingEntry) -> None:
        if pending.command is not None and pending.command.wants is not None:
            self.extras.subscribe(pending.target, tuple(pending.command.wants.types))

    # --- completions

    def complete(
        self, pending: PendingEntry, now: float, value: bytes | None = None, error: ErrorRecord | None = None
    ) -> None:
        """Record a requested entry as succeeded or failed, and give its result to the task that awaits it.

        A rerun step completes at its recorded position in the order of completions, everything else at the end.
        """
        log, call, location = self.log, pending.call, pending.location
        pending.error = error
        if call is not None:
            pending.attempts = pending.attempt
            pending.due_at = None
        else:
            self.timers.remove(location)
            self.waiting.remove(location)
            # A message may complete an entry before the worker reports its external effect.
            self.attempts.drop_effect(pending)
            self.extras.unsubscribe(pending)
        seq = pending.seq
        if seq is None:
            seq = log.seq + 1
        else:
            pending.seq = None
            self._history.advance()
        entry = pending.to_entry(SUCCEEDED if error is None else FAILED, seq=seq, value=value, settled_at=now)
        log.record(entry)
        log.move_to(entry)
        self.pending.pop(location, None)
        self._resolve_future(pending.future, call, pending.command, entry)

    def complete_soon(self, location: str, value: bytes) -> None:
        """Complete a pending entry after the present drain, as a completion of its own."""
        if location in self.pending:
            self.immediate[location] = value

    def take_immediate(self) -> tuple[PendingEntry, bytes | None] | None:
        """Return the next pending entry whose result is known, with its value."""
        while self.immediate:
            location = next(iter(self.immediate))
            value = self.immediate.pop(location)
            pending = self.pending.get(location)
            if pending is not None:
                return pending, value
        return None

    def apply(self, entry: Entry) -> bool:
        """Give a recorded completion to the task that awaits it. False if no request is pending at its location."""
        log, location = self.log, entry.location
        log.move_to(entry)
        if entry.ordinal < 0:
            log.count_recorded(entry)
        pending = self.pending.pop(location, None)
        if pending is None:
            return False
        call = pending.call
        if call is None:  # a step's timer is its next attempt, which is not over
            self.timers.remove(location)
            self.waiting.remove(location)
        self._resolve_future(pending.future, call, pending.command, entry)
        return True

    def _resolve_future(
        self, future: Future[Any], call: StepCall | None, command: Command | None, entry: Entry
    ) -> None:
        """Give the waiting task its result. It is always decoded from the record, so that no object is shared."""
        try:
            if command is not None:
                if command.deferred is not None:
                    self._on_deferred_completed(command.deferred, entry)
                if command.kind in CHILDREN:
                    self.children.note(entry)
            if entry.status is FAILED:
                future.set_exception(self._error(call, command, entry))
                future._log_traceback = False  # a task that was cancelled meanwhile may never retrieve it
                return
            if call is not None:
                if call.step.settings.compensate is not None:
                    self.compensations.on_step_completed(call, entry)
                value = None
                if entry.value is not None:
                    value = self._codec.decode(entry.value, call.step.body.recorded_as, what="the recorded result")
            else:
                value = command.read(entry) if command is not None and command.read is not None else None
        except Exception as mismatch:  # not only InvalidPayload: an imported entry may contain anything
            self.diverge(entry.location, "a result", f"one of another type ({mismatch})", None)
        else:
            future.set_result(value)

    def _on_deferred_completed(self, name: str, entry: Entry) -> None:
        """Complete all waits for a deferred with the same result: every deferred of one name is the same one."""
        self.deferreds.setdefault(name, entry)
        if self.deadlines.pending:
            self.deadlines.end(name)
        for location in self.waiting.take_all_for_deferred(name):
            self.immediate[location] = None

    def _error(self, call: StepCall | None, command: Command | None, entry: Entry) -> BaseException:
        assert entry.error is not None
        if call is not None:
            raises = call.step.settings.raises
            return step_error_from_record(
                entry.error, self._codec, location=entry.location, attempts=entry.attempts, raises=raises
            )
        if command is not None and command.fail is not None:
            return command.fail(entry)
        return error_from_record(entry.error, self._codec)

    def resume(self, now: float) -> None:
        """Make waiting retries due, and start steps that hold the run."""
        for location, pending in self.pending.items():
            if pending.call is not None and location in self.timers.due:
                self.timers.set(location, now)
        for pending in self.attempts.exhausted.values():
            if is_remote(pending):
                self.remote.count_starts(pending)
            if pending.notes is not None:  # the heartbeat stays; the time of `max_elapsed` starts again
                pending.notes = encode_notes(self._codec, replace(decode_notes(self._codec, pending.notes), since=None))
        self.attempts.restart_exhausted()

    # --- cancellation and loops

    def on_cancelled(self, location: str) -> None:
        """Handle the cancellation of a task that awaits the entry at this location."""
        if self._loop.closing:
            return
        pending = self.pending.pop(location, None)
        if pending is None:
            return
        self.timers.remove(location)
        self.waiting.remove(location)
        self.immediate.pop(location, None)
        may_have_started = self.attempts.cancel(pending)
        stop = self._history.by_location.get(f"{location}/~stop")
        if stop is not None:
            self.log.count_recorded(stop)
        elif isinstance(pending.action, StartChild) and pending.action.attached and may_have_started:
            self.attempts.stop_run(f"{location}/~stop", pending.action.run_id)
        self.extras.unsubscribe(pending)
        if pending.recorded is not CANCELLED:
            pending.due_at = None
            self.log.record(pending.to_entry(CANCELLED, settled_at=self._loop.now))

    def fail_loop_entry(self, location: str, error: ErrorRecord | None) -> None:
        """Record that a loop's body raised, or that its task was cancelled. A replay derives both again."""
        pending = self.pending.pop(location, None)
        if pending is None or self._loop.closing:
            return
        status = CANCELLED if error is None else FAILED
        if pending.recorded is not status:
            pending.error = error
            self.log.record(pending.to_entry(status, settled_at=self._loop.now))

    def keep_deferreds(self, path: str) -> None:
        """Record the completed deferreds below a deleted path again: a later wait for their names must find them."""
        below = f"{path}/"
        for entry in self.deferreds.values():
            if entry.location.startswith(below):
                self.log.record(entry)

    def on_removed(self, entry: Entry) -> None:
        """Handle a recorded entry that the code no longer requests: `ctx.removed` accounts for it."""
        self.log.count_recorded(entry)
        if entry.kind == "deferred" and entry.seq is not None:
            self.deferreds.setdefault(entry.name, entry)  # the message is consumed: a later wait must find its value

    # --- the end of the run

    def end(self) -> None:
        """Accept requests from cleanup tasks only: the workflow function has ended."""
        self.ended = True

    def add_cleanup_task(self, task: Any) -> None:
        """Let a task make requests after the workflow function has ended."""
        self.cleanup_tasks.add(task)

    def diverge(self, location: str, recorded: str, asked: str, line: str | None) -> None:
        """Hold the run because code and history differ. The first difference counts."""
        if self.held is None:
            error = HistoryDiverged(location, recorded, asked, line)
            self.hold(Hold("diverged", str(error), location, recorded, asked, line))

    def hold(self, held: Hold) -> None:
        """Hold the run and stop the drain at once."""
        self.held = held
        self._loop.halted = True


def _is_about_to_be_cancelled(loop: WorkflowLoop) -> bool:
    task = loop.running_task()
    return task is None or bool(task._must_cancel)  # type: ignore[attr-defined]
