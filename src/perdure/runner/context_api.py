"""What a run answers to its workflow and to its loop: the calls behind `Context`, and what the loop reports.

Each hands over to the ledger, which knows what is recorded, or to the loop, which knows who is asking. Driving the run
is the runner's business.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.codec import JSON, Codec
from perdure.codec.failures import error_to_record
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.ids import keyed_run_id
from perdure.model.locations import escape_segment
from perdure.model.records import DeadLetter, Entry, ErrorRecord, SigningKey, Wait
from perdure.model.turns import Continued, StopChildren
from perdure.model.validation import check_name
from perdure.runner.cleanup import roll_back, wait_shielded
from perdure.runner.compensations import Compensation, Compensations, call_of
from perdure.runner.entry_tracker import EntryTracker
from perdure.runner.event_loop import WorkflowLoop
from perdure.runner.history import History
from perdure.runner.scopes import Scope
from perdure.runner.tasks import Closed, WorkflowTask
from perdure.workflows.children import ChildSpec
from perdure.workflows.commands import Command
from perdure.workflows.context import Context, RunInfo
from perdure.workflows.definition import REGISTRY, BoundWorkflow, StartOptions, Workflow
from perdure.workflows.rollback import ROLLBACK_SCOPES
from perdure.workflows.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")
CHILDREN = "~children"


class RunStart(Struct, frozen=True):
    """Everything that a run is replayed from."""

    definition: Workflow[Any, Any]
    facts: RunInfo
    input: bytes
    seed: int
    first_executed_at: float
    history: Sequence[Entry] = ()
    deadline_at: float | None = None
    codec: Codec = JSON
    strict: bool = False
    under_way: frozenset[str] = frozenset()  # steps that are executing in this process, from before a reload
    run_attempt: int = 1
    epoch: int = 0
    keys: tuple[SigningKey, ...] = ()
    waits: tuple[Wait, ...] = ()  # what it was last suspended for: who is to tell it of a run's end knows so already


class ContextApi:
    """See the module's docstring."""

    __slots__ = (
        "_context",
        "_continued",
        "_history",
        "_ledger",
        "_loop",
        "_may_have_children",
        "_start",
        "info",
        "replaying",
    )

    def __init__(self, start: RunStart) -> None:
        self.info = start.facts
        self.replaying = len(start.history) > 0
        self._start = start
        self._history = History(start.history)
        first = self._history.first_executed_at
        first_executed_at = max(start.first_executed_at if first is None else first, self._history.rewound.get(0, 0.0))
        self._loop = WorkflowLoop(self, start.seed, first_executed_at, self.open_scope(""))
        strict = start.strict or start.definition.settings.strict
        self._ledger = EntryTracker(start.facts, self._history, self._loop, start.codec, strict)
        for wait in start.waits:
            if wait.kind == "child" and wait.location is not None and wait.name is not None:
                self._ledger.standing.setdefault(wait.location, set()).add(wait.name)
        self._continued: Continued | None = None
        self._may_have_children = start.epoch > 0  # whether there may be attached children
        self._context: Context | None = Context(self)

    # --- what the context asks and reads

    @property
    def context(self) -> Context:
        if self._context is None:
            raise Closed
        return self._context

    @property
    def codec(self) -> Codec:
        return self._start.codec

    @property
    def id(self) -> str:
        return self.info.id

    def request_step(self, call: StepCall) -> Any:
        step = call.step
        if step.settings.compensate is not None:
            self._ledger.compensations.check(step.settings.compensate, self._loop.scope().path)
            call.rollback_scopes = ROLLBACK_SCOPES.get()
        return self._ledger.request("step", step.name, step.segment, call=call)

    def sleep_until(self, due_at: float) -> Any:
        if due_at > self._loop.now or self._ledger.has_asked_for_sleep(due_at):
            return self._ledger.request("sleep", "sleep", "sleep", due_at=due_at)
        self._loop.callbacks += 1  # it does not wait, and so could spin
        if not self._ledger.can_request() or self._loop.spinning:
            return self._ledger.never_completing()
        done = self._loop.create_future()
        done.set_result(None)
        return done

    def issue(self, command: Command) -> Any:
        if command.kind in ("child", "start_child"):
            self._may_have_children = True
        return self._ledger.issue(command)

    def locate(self, segment: str) -> str:
        """Take the next place of this (escaped) segment in the current scope."""
        return self._loop.scope().locate(segment)

    def escape(self, name: str) -> str:
        return escape_segment(name)

    def open_scope_for_branches(self, name: str) -> str:
        return self._loop.scope().locate(escape_segment(name))

    def start_branch(self, path: str, branch: str | int, work: Any) -> WorkflowTask:
        label = escape_segment(branch) if isinstance(branch, str) else f"~{branch}"
        return self._loop.start_branch(work, label, self.open_scope(f"{path}/{label}"))

    def record_note(self, kind: str, location: str, value: Any) -> None:
        self._ledger.note(kind, location, self._start.codec.encode(value))

    def continue_as(self, workflow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Nothing more of this generation happens: the call never returns, and the drain stops."""
        if self._ledger.can_request():
            definition = self._successor(workflow)
            what = f"payload of workflow {definition.name!r}"
            payload = definition.parameters.encode(self._start.codec, args, kwargs, what=what)
            carried = self._ledger.compensations.carried_over()
            self._continued = Continued(
                definition.name, definition.version, payload, pool=definition.settings.pool, carried=carried
            )
            self._loop.halted = True
        return self._ledger.never_completing()

    def _successor(self, workflow: Any) -> Workflow[Any, Any]:
        if workflow is None:
            own = self._start.definition
            newest = REGISTRY.latest(own.name)
            return newest if newest is not None and newest.version > own.version else own
        if not isinstance(workflow, Workflow):
            raise WorkflowMisuse(f"continue_as takes a @workflow function, not {workflow!r}")
        return workflow

    def build_child_spec(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], id: str | None
    ) -> ChildSpec:
        """Check everything about a child before it is asked for."""
        self._ledger.check_inside()
        if isinstance(target, BoundWorkflow):
            given = target.start
            if id is not None or given != StartOptions(id=given.id):
                raise InvalidArgument("a child takes an id only: give it once, and no other option of a start")
            target, id = target.workflow, given.id
        definition = REGISTRY.latest(target) if isinstance(target, str) else target
        if not isinstance(definition, Workflow):
            raise WorkflowMisuse(f"a child is started with a @workflow function or its name, not {target!r}")
        what = f"payload of workflow {definition.name!r}"
        payload = definition.parameters.encode(self._start.codec, args, kwargs, what=what)
        key = definition.settings.idempotency_key
        if id is None and key is not None:
            id = keyed_run_id(definition.name, key(*args, **kwargs))
        return ChildSpec(definition, payload, None if id is None else check_name("a run's id", id))

    def pin_version(self, gate: str, latest: int) -> int:
        return self._ledger.pin_version(gate, latest, self.replaying)

    def skip_removed_entry(self, name: str, kind: str) -> None:
        self._ledger.account_removed(name, kind, self.replaying)

    def now(self) -> float:
        return self._loop.now

    def current_location(self) -> str:
        return self._loop.scope().path

    def next_number(self) -> int:
        self._loop.number += 1
        return self._loop.number

    def scope_random(self, purpose: str) -> random.Random:
        self._ledger.check_inside()
        return self._loop.scope().random(purpose, f"{self._start.seed}/{self._start.epoch}")

    @property
    def epoch(self) -> int:
        return self._start.epoch

    @property
    def signing(self) -> tuple[tuple[SigningKey, ...], float]:
        """The keys for tokens, and the moment by which one of them is chosen: the same on every replay."""
        return self._start.keys, self._start.first_executed_at

    @property
    def module(self) -> str:
        """Where the workflow is defined."""
        return self._start.definition.fn.__module__

    # --- loops

    def last_iteration(self, location: str) -> int:
        return self._history.iterations.get(location, 0)

    def first_retained_iteration(self, location: str) -> int:
        return self._history.kept_from.get(location, 0)

    def loop_ended(self, location: str) -> bool:
        """Whether the record says that the loop at this location has come to its end."""
        entry = self._history.by_location.get(location)
        if entry is None or entry.seq is None:
            return False
        self._ledger.asked_before(self._history.last_asked.get(location, entry))
        return True

    def end_loop(self, location: str, value: bytes) -> None:
        self._ledger.settle_soon(location, value)

    def fail_loop(self, location: str, error: BaseException | None) -> None:
        """The body raised, or the loop was cancelled."""
        record: ErrorRecord | None = None
        if isinstance(error, Exception):
            record = error_to_record(error, self._start.codec)
        self._ledger.fail_loop_entry(location, record)

    @contextlib.contextmanager
    def iteration(self, path: str) -> Iterator[None]:
        """Make everything that the current task asks for part of this iteration."""
        iterations = self._ledger.compensations.iterations
        iterations.add(path)
        try:
            with self.inside(path):
                yield
        finally:
            iterations.discard(path)

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Make everything that the current task asks for part of this scope."""
        task = self._loop.running_task()
        assert isinstance(task, WorkflowTask)
        outer, task.scope = task.scope, self.open_scope(path)
        try:
            yield
        finally:
            task.scope = outer

    def tasks_in_scope(self, path: str) -> list[WorkflowTask]:
        """Tasks that were opened in a scope, or below it, and are not done."""
        below = f"{path}/"
        return [
            task
            for task in self._loop.live
            if not task.done() and (task.parent.path == path or task.parent.path.startswith(below))
        ]

    def prune(self, location: str, first: int, end: int) -> int:
        """Let go of these iterations of a loop, up to one that has something pending. Gives the first that is left.

        The entries of attached children that may be running, and of settled deferreds, outlast their iterations.
        """
        ledger = self._ledger
        for iteration in range(first, end):
            path = f"{location}/~{iteration}"
            below = f"{path}/"
            if any(
                pending.startswith(below) for waiting in (ledger.pending, ledger.stop_requests) for pending in waiting
            ):
                end = iteration
                break
            for spent in (path, *ledger.compensations.spent_in(path)):
                ledger.forget(spent)
            if ledger.deferreds:
                ledger.keep_deferreds(path)
        ledger.nursery.keep_after_pruning(location, end)
        return end

    # --- compensation

    @property
    def compensations(self) -> Compensations:
        return self._ledger.compensations

    def register(self, kind: str, fn: Any, args: tuple[Any, ...]) -> None:
        if not callable(fn):
            raise WorkflowMisuse(f"on_{kind} takes a function to call, not {fn!r}")
        if self._ledger.can_request():
            scope = self._loop.scope()
            self._ledger.compensations.check(fn, scope.path)
            self._ledger.compensations.add(kind, scope.locate(f"~on_{kind}"), fn, args)

    def request_compensation(self, undo: Compensation) -> Any:
        call = call_of(undo)
        detail = msgspec.json.encode({"of": undo.of})
        call.close()  # it is asked for here and not awaited itself
        return self._ledger.request("step", call.step.name, escape_segment(call.step.name), call=call, detail=detail)

    def ask_stop_children(self) -> Any:
        if not self._may_have_children:
            return None
        question = Command(kind="children", name="children", segment=CHILDREN, effect=StopChildren, fixed_location=True)
        return self._ledger.issue(question)

    def dead_letter_compensation(self, undo: Compensation, error: BaseException) -> None:
        """A compensation or exit that could not be carried out."""
        if self.replaying:
            return
        facts = self.info
        what = "compensation" if undo.kind == "rollback" else "exit"
        name = undo.path or getattr(undo.fn, "__name__", repr(undo.fn))
        LOGGER.error("run %s: %s %s failed: %s", facts.id, what, name, error)
        self._ledger.extras.add_dead_letter(
            DeadLetter(
                id=f"{what}/{facts.id}/{facts.generation}/{undo.key}",
                kind="compensation",
                at=self._loop.now,
                reason=f"{what} {name} for {undo.of or undo.key}: {error}",
                original_target=facts.id,
                target_status="running",
            )
        )

    async def roll_back(self, scope: str) -> None:
        """Carry out what was registered in this rollback scope. Cannot be cancelled."""
        if self._loop.closing:
            self._loop.refuse()
            return
        undos = self._ledger.compensations.take("rollback", scope)
        if undos:
            cleanup_scope = self.open_scope(self.locate("~rollback"))
            task = self._loop.start_branch(roll_back(self, undos), "~rollback", cleanup_scope)
            self._ledger.cleanup_tasks.add(task)
            await wait_shielded(task)

    # --- what the loop tells

    def open_scope(self, path: str) -> Scope:
        return Scope(path, self._history.scope(path))

    def timer_set(self, location: str, when: float) -> None:
        self._ledger.alarms.set(location, when)

    def timer_cancelled(self, location: str) -> None:
        self._ledger.alarms.remove(location)

    def on_cancelled(self, location: str) -> None:
        self._ledger.on_cancelled(location)

    def on_self_cancel(self) -> None:
        """A task that is running has been cancelled, most often by itself."""
        self._ledger.self_cancelled = True

    def log_unretrieved_error(self, scope: str, message: str, error: BaseException | None) -> None:
        if not self.replaying:
            LOGGER.error("run %s at %s: %s", self.info.id, scope or "its own scope", message, exc_info=error)
