"""ContextApi: the calls behind `Context`, and what the event loop reports about its tasks.

User code reaches it while the loop drains. Each call delegates to the entry tracker, which compares requests with the
history, or to the loop, which knows the running task. It never advances the run: that is the runner's task.
"""

from __future__ import annotations

import contextlib
import logging
import random
from asyncio import events
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any

import msgspec

from perdure.codec import Codec, fingerprint
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidArgument, PerdureError, WorkflowMisuse
from perdure.model.ids import keyed_run_id
from perdure.model.locations import escape_segment
from perdure.model.records import DeadLetter, Entry, ErrorRecord, Hold, SigningKey
from perdure.model.turns import Continued, StopChildren
from perdure.model.validation import check_name
from perdure.runner.child_tracker import STARTS_CHILD
from perdure.runner.cleanup import roll_back, wait_shielded
from perdure.runner.compensations import Compensation, Compensations
from perdure.runner.event_loop import THREAD_WAIT
from perdure.runner.eviction import log_unhandled
from perdure.runner.outcomes import as_complete
from perdure.runner.pending import first_iteration
from perdure.runner.scopes import Scope
from perdure.runner.source_lines import caller_source_line
from perdure.runner.state import RunnerState
from perdure.runner.tasks import Closed, WorkflowTask
from perdure.workflows.children import ChildSpec
from perdure.workflows.commands import Command
from perdure.workflows.context import Context
from perdure.workflows.deferreds import DECLARED_TYPES
from perdure.workflows.definition import REGISTRY, BoundWorkflow, Workflow
from perdure.workflows.rollback import ROLLBACK_SCOPES
from perdure.workflows.start_options import NO_OPTIONS, StartOptions, split_keywords
from perdure.workflows.steps import StepCall, inherits_context
from perdure.workflows.tokens import bind_epoch

LOGGER = logging.getLogger("perdure.workflow")
CHILDREN = "~children"


class ContextApi:
    """See the module's docstring. Implements `RunApi` for the context, `LoopOwner` for the loop and `CleanupHost`."""

    __slots__ = ("_entries", "_history", "_loop", "_state", "info")

    def __init__(self, state: RunnerState) -> None:
        self._state = state
        self._entries = state.entries
        self._history = state.history
        self._loop = state.loop
        self.info = state.info
        # Eviction replaces both references, which are the only ones that point back here.
        state.loop.perdure_run = self
        state.context = Context(self)

    # --- requests

    def request_step(self, call: StepCall) -> Any:
        """Request a step; return what the task awaits."""
        step = call.step
        if not step.is_plain:
            self._note_surroundings(call)
        return self._entries.request("step", step.name, step.segment, call=call)

    def _note_surroundings(self, call: StepCall) -> None:
        """Note what the body or the compensation of a step needs of the code that calls it."""
        step, settings = call.step, call.step.settings
        if settings.compensate is not None:
            self._entries.compensations.check(step.compensation, self._loop.scope().path)
            call.rollback_scopes = ROLLBACK_SCOPES.get()
        if settings.context == "inherit" or inherits_context(settings.compensate):
            call.variables = copy_context()

    def has_recorded_step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the history has a call of a step of this name with these arguments."""
        marks = fingerprint(self._state.start.codec, args, kwargs)
        recorded = self._history.by_location.values()
        return marks is not None and any(each.name == name and each.fingerprint == marks for each in recorded)

    def sleep_until(self, due_at: float) -> Any:
        """Request a sleep; one that is over already completes at once and is not recorded."""
        entries, loop = self._entries, self._loop
        if due_at > loop.now or entries.has_recorded_sleep(due_at):
            return entries.request("sleep", "sleep", "sleep", due_at=due_at)
        loop.callbacks += 1  # counts towards the livelock limit: it waits for nothing durable
        if not entries.can_request() or loop.spinning:
            return entries.never_completing()
        done = loop.create_future()
        done.set_result(None)
        return done

    def issue(self, command: Command) -> Any:
        """Request anything that is neither a step nor a sleep; return what the task awaits."""
        issued = self._entries.issue(command)
        if command.kind in STARTS_CHILD and (location := getattr(issued, "location", None)) is not None:
            self._entries.children.on_requested(location)
        return issued

    def next_recorded(self) -> Entry | None:
        """Return the recorded entry that the next request of the current scope must match; None if it is new."""
        return self._entries.next_recorded()

    def record_note(self, kind: str, location: str, value: Any) -> None:
        """Record a value for people to read."""
        self._entries.log.record_note(kind, location, self._state.start.codec.encode(value))

    def continue_as(self, workflow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """End this generation: the call never returns, and the drain stops."""
        state, entries = self._state, self._entries
        if entries.can_request():
            definition = self._successor(workflow)
            what = f"payload of workflow {definition.name!r}"
            payload = definition.parameters.encode(state.start.codec, args, kwargs, what=what)
            carried = entries.compensations.carried_over(definition)
            state.continued = Continued(
                definition.name, definition.version, payload, pool=definition.settings.pool, carried=carried
            )
            self._loop.halted = True
        return entries.never_completing()

    def _successor(self, workflow: Any) -> Workflow[Any, Any]:
        """Return the given workflow, or the newest version of the run's own that this worker can execute."""
        if workflow is None:
            own = self._state.start.definition
            newest = self._state.start.workflows.latest(own.name)
            return newest if newest is not None and newest.version > own.version else own
        if not isinstance(workflow, Workflow):
            raise WorkflowMisuse(f"continue_as takes a @workflow function, not {workflow!r}")
        return workflow

    def build_child_spec(self, target: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> ChildSpec:
        """Check everything about a child before it is requested, and return it encoded.

        `given` are keyword arguments: an id, and parts of the payload; for a bound workflow the payload alone.
        """
        self._entries.check_inside()
        options, kwargs = NO_OPTIONS, given
        if isinstance(target, BoundWorkflow):
            options, target = target.start, target.workflow
        elif given:
            options, kwargs = split_keywords(given)
        id = options.id
        definition = target
        if isinstance(target, str):  # another worker may execute the child
            definition = self._state.start.workflows.latest(target) or REGISTRY.latest(target)
        if not isinstance(definition, Workflow):
            raise WorkflowMisuse(f"a child is started with a @workflow function or its name, not {target!r}")
        has_second_id = id is not None and "id" in kwargs and definition.parameters.find_unknown(("id",))
        if has_second_id or options not in (NO_OPTIONS, StartOptions(id=id)):
            raise InvalidArgument(
                "a child takes an id only: give it once, and no other option of a start; to pass a workflow parameter "
                "that is named like an option, pass it positionally or use run_child(wf.options(...), ...)"
            )
        what = f"payload of workflow {definition.name!r}"
        payload = definition.parameters.encode(self._state.start.codec, args, kwargs, what=what)
        key = definition.settings.idempotency_key
        if id is None and key is not None:
            id = keyed_run_id(definition.name, key(*args, **kwargs))
        return ChildSpec(definition, payload, None if id is None else check_name("a run's id", id))

    def pin_version(self, gate: str, latest: int) -> int:
        """Return the version of the run at a gate."""
        return self._state.versions.pin_version(gate, latest, self._state.replaying)

    def skip_removed_entry(self, name: str, kind: str) -> None:
        """Skip an entry that older code made at this point."""
        self._state.versions.skip_removed(name, kind, self._state.replaying)

    # --- what user code reads

    @property
    def context(self) -> Context:
        context = self._state.context
        if context is None:
            raise Closed
        return context

    @property
    def replaying(self) -> bool:
        return self._state.replaying

    @property
    def codec(self) -> Codec:
        return self._state.start.codec

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def origin(self) -> str:
        return self.info.origin

    @property
    def incarnation(self) -> str:
        return self.info.incarnation

    @property
    def epoch(self) -> int:
        return self._state.start.epoch

    @property
    def signing(self) -> tuple[tuple[SigningKey, ...], float]:
        """The keys for tokens, and the time that selects one of them: the same on every replay."""
        return self._state.start.keys, self._state.start.first_executed_at

    @property
    def module(self) -> str:
        """The module that defines the workflow."""
        return self._state.start.definition.fn.__module__

    def now(self) -> float:
        return self._loop.now

    def next_number(self) -> int:
        return self._loop.next_number()

    def scope_random(self, purpose: str) -> random.Random:
        """Return the random numbers of the current scope for a purpose; each generation has its own."""
        self._entries.check_inside()
        start = self._state.start
        return self._loop.scope().random(purpose, f"{start.seed}/{start.epoch}")

    def declare_deferred(self, name: str, kind: Any, timeout: float | None) -> None:
        """Note the type of a deferred that the code creates, and record when it times out."""
        state, entries = self._state, self._entries
        if timeout is not None:
            entries.check_inside()
        elif events._get_running_loop() is not self._loop:
            return  # a step that only needs the token
        if self._loop.closing or name in entries.deferreds:
            return
        kinds = state.mailbox.declare(name, kind)
        if state.start.keys:
            epoch = bind_epoch(state.start.epoch, self.info.incarnation)
            DECLARED_TYPES.declare(state.start.keys, self.info.id, epoch, name, kinds)
        if timeout is not None and not entries.ended:
            due_at = self._loop.now + timeout
            entries.deadlines.set(name, due_at, self.info.generation, replaying=state.replaying)

    # --- scopes and branches

    def current_location(self) -> str:
        return self._loop.scope().path

    def locate(self, segment: str) -> str:
        """Return the next location of an escaped segment in the current scope."""
        return self._loop.scope().locate(segment)

    def escape(self, name: str) -> str:
        return escape_segment(name)

    def open_scope(self, path: str, *, shared: bool = False) -> Scope:
        """Open a scope with its recorded entries. A scope inside a shared one is shared too."""
        return Scope(path, self._history.scope(path), shared=shared or self._loop.scope().shared)

    def open_scope_for_branches(self, name: str) -> str:
        return self._loop.scope().locate(escape_segment(name))

    def start_branch(self, path: str, branch: str | int, work: Any) -> WorkflowTask:
        label = escape_segment(branch) if isinstance(branch, str) else f"~{branch}"
        return self._loop.start_branch(work, label, self.open_scope(f"{path}/{label}"))

    @contextlib.contextmanager
    def inside(self, path: str, *, shared: bool = False) -> Iterator[None]:
        """Make requests of the current task part of another scope."""
        task = self._loop.running_task()
        assert isinstance(task, WorkflowTask)
        outer, task.scope = task.scope, self.open_scope(path, shared=shared)
        try:
            yield
        finally:
            task.scope = outer

    def shared_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Make requests of the current task, and of tasks that it opens, part of a scope with this name."""
        self._entries.check_inside()
        if self._loop.running_task() is None:
            raise WorkflowMisuse(f"ctx.scope({name!r}) was used in a callback; use it in a coroutine")
        return self._inside_shared(name)

    @contextlib.contextmanager
    def _inside_shared(self, name: str) -> Iterator[None]:
        with self.inside(self.locate(escape_segment(name)), shared=True):
            yield

    # --- loops

    def last_iteration(self, location: str) -> int:
        """Return the last committed iteration of a loop: a replay starts there."""
        return self._history.iterations.get(location, 0)

    def first_retained_iteration(self, location: str) -> int:
        """Return the first iteration of a loop that is not pruned."""
        return self._history.kept_from.get(location, 0)

    def loop_ended(self, location: str) -> bool:
        """Return whether the loop at this location is recorded as ended. Its iterations are not replayed then."""
        entry = self._history.by_location.get(location)
        if entry is None or entry.seq is None:
            return False
        self._entries.log.count_recorded(self._history.last_requested.get(location, entry))
        return True

    def end_loop(self, location: str, value: bytes) -> None:
        """Complete a loop, after the present drain."""
        self._entries.complete_soon(location, value)

    def fail_loop(self, location: str, error: BaseException | None) -> None:
        """Record that the body of a loop raised, or that the loop was cancelled."""
        record: ErrorRecord | None = None
        if isinstance(error, Exception):
            record = error_to_record(error, self._state.start.codec)
        self._entries.fail_loop_entry(location, record)

    @contextlib.contextmanager
    def iteration(self, path: str) -> Iterator[None]:
        """Make requests of the current task part of an iteration, whose entries are pruned later."""
        iterations = self._loop.iterations
        iterations.enter(path)
        try:
            with self.inside(path):
                yield
        finally:
            iterations.leave(path)
            self._state.versions.leave_iteration(path)

    def tasks_in_iteration(self, path: str) -> list[WorkflowTask]:
        """Return the running tasks that were started in an iteration, or in a scope inside it."""
        return self._loop.iterations.running_tasks(path)

    def prune(self, location: str, first: int, end: int) -> int:
        """Delete iterations `first` to `end` of a loop, up to one with a pending entry; return the first that stays.

        Entries of attached children that may be running, and of completed deferreds, outlive their iterations.
        """
        entries = self._entries
        pending = first_iteration(location, entries.pending, entries.attempts.stop_requests)
        end = end if pending is None else max(first, min(pending, end))
        for iteration in range(first, end):
            path = f"{location}/~{iteration}"
            for deleted in (path, *entries.compensations.take_done_in(path)):
                entries.log.delete(deleted)
            self._state.versions.delete_pins(path)
            if entries.deferreds:
                entries.keep_deferreds(path)
        entries.children.keep_after_pruning(location, end)
        return end

    # --- compensation and cleanup

    @property
    def compensations(self) -> Compensations:
        return self._entries.compensations

    def register(self, kind: str, fn: Any, args: tuple[Any, ...]) -> None:
        """Register a function for the rollback or the exit of the run."""
        if not callable(fn):
            raise WorkflowMisuse(f"on_{kind} takes a function to call, not {fn!r}")
        entries = self._entries
        if entries.can_request():
            scope = self._loop.scope()
            entries.compensations.check(fn, scope.path)
            entries.compensations.add(kind, scope.locate(f"~on_{kind}"), fn, args)

    def request_compensation(self, compensation: Compensation) -> Any:
        """Request the step that executes a compensation or an exit hook. If the code does not have it, hold the run."""
        entries = self._entries
        try:
            call = entries.compensations.build_call(compensation)
        except PerdureError as error:
            entries.diverge(compensation.location, f"{compensation.kind} {compensation.function!r}", str(error), None)
            return entries.never_completing()
        if compensation.kind == "exit" and (outcome := self._state.function_outcome) is not None:
            start = self._state.start
            call.read_outcome = partial(as_complete, outcome, start.definition, start.codec)
        detail = msgspec.json.encode({"of": compensation.of})
        call.close()  # the request below replaces awaiting it
        return self._entries.request("step", call.step.name, escape_segment(call.step.name), call=call, detail=detail)

    def request_stop_children(self) -> Any:
        """Request that all attached children are stopped; None if the run cannot have any."""
        if not self._state.may_have_children:
            return None
        command = Command(kind="children", name="children", segment=CHILDREN, effect=StopChildren, fixed_location=True)
        return self._entries.issue(command)

    def dead_letter_compensation(self, compensation: Compensation, error: BaseException) -> None:
        """Store a dead letter for a compensation or exit hook that failed. A replay stores none."""
        if self._state.replaying:
            return
        info = self.info
        what = "compensation" if compensation.kind == "rollback" else "exit"
        name = compensation.function
        LOGGER.error(
            "%s %s of run %s failed and was dead-lettered: %s",
            what.capitalize(),
            name,
            info.id,
            error,
            extra={"run_id": info.id, "workflow": info.workflow, "location": compensation.key},
        )
        self._state.extras.add_dead_letter(
            DeadLetter(
                id=f"{what}/{info.origin}/{info.generation}/{compensation.key}",
                kind="compensation",
                at=self._loop.now,
                reason=f"{what} {name} for {compensation.of or compensation.key}: {error}",
                original_target=info.id,
                target_status="running",
            )
        )

    async def roll_back(self, scope: str) -> None:
        """Execute the compensations of a rollback scope. Cannot be cancelled."""
        if self._loop.closing:
            self._loop.refuse()
            return
        compensations = self._entries.compensations.take("rollback", scope)
        if compensations:
            cleanup_scope = self.open_scope(self.locate("~rollback"))
            task = self._loop.start_branch(roll_back(self, compensations), "~rollback", cleanup_scope)
            self._entries.add_cleanup_task(task)
            await wait_shielded(task)

    # --- reports of the event loop

    def timer_set(self, location: str, when: float) -> None:
        self._entries.timers.set(location, when)

    def timer_cancelled(self, location: str) -> None:
        self._entries.timers.remove(location)

    def on_cancelled(self, location: str) -> None:
        """Handle the cancellation of a task that awaits the entry at this location."""
        self._entries.on_cancelled(location)

    def on_self_cancel(self) -> None:
        """Handle the cancellation of the running task, most often by itself."""
        self._entries.on_self_cancel()

    def on_thread_wait(self) -> None:
        """Hold the run: its code is about to wait for a thread."""
        self._entries.hold(Hold("deadlock", THREAD_WAIT, line=caller_source_line()))

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None:
        """Log an error that no code handles; not on replay, which raises the same errors again."""
        if not self._state.replaying:
            log_unhandled(self.info, scope, message, error)
