"""What a run answers to its workflow and to its loop: the calls behind `Context`, and what the loop reports.

Each hands over to the ledger, which knows what is recorded, or to the loop, which knows who is asking. Driving the run
is the runner's business.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from perdure.codec import JSON, Codec
from perdure.context import Context, RunFacts
from perdure.definition import REGISTRY, Workflow
from perdure.errors import WorkflowMisuse
from perdure.records import Continued, Entry
from perdure.runner.history import History
from perdure.runner.ledger import Ledger
from perdure.runner.locations import Scope, escape
from perdure.runner.loop import WorkflowLoop
from perdure.runner.scheduled import Closed, WorkflowTask
from perdure.steps import StepCall

LOGGER = logging.getLogger("perdure.workflow")


class RunStart(Struct, frozen=True):
    """Everything that a run is replayed from."""

    definition: Workflow[Any, Any]
    facts: RunFacts
    input: bytes
    seed: int
    begun_at: float
    history: Sequence[Entry] = ()
    deadline_at: float | None = None
    codec: Codec = JSON
    strict: bool = False
    under_way: frozenset[str] = frozenset()  # steps that are executing in this process, from before a reload


class Facade:
    """See the module's docstring."""

    __slots__ = ("_context", "_continued", "_history", "_ledger", "_loop", "_start", "facts", "replaying")

    def __init__(self, start: RunStart) -> None:
        self.facts = start.facts
        self.replaying = len(start.history) > 0
        self._start = start
        self._history = History(start.history)
        self._loop = WorkflowLoop(self, start.seed, start.begun_at, self.open_scope(""))
        strict = start.strict or start.definition.settings.strict
        self._ledger = Ledger(start.facts, self._history, self._loop, start.codec, strict)
        self._continued: Continued | None = None
        self._context: Context | None = Context(self)

    # --- what the context asks and reads

    @property
    def context(self) -> Context:
        if self._context is None:
            raise Closed
        return self._context

    def ask_step(self, call: StepCall) -> Any:
        name, key = call.step.name, call.step.settings.key
        segment = escape(name) if key is None else f"{escape(name)}[{escape(key)}]"
        return self._ledger.ask("step", name, segment, call=call)

    def ask_sleep(self, due_at: float) -> Any:
        if due_at > self._loop.now:
            return self._ledger.ask("sleep", "sleep", "sleep", due_at=due_at)
        self._loop.callbacks += 1  # it does not wait, and so could spin
        if not self._ledger.may_ask() or self._loop.spinning:
            return self._ledger.never()
        done = self._loop.create_future()
        done.set_result(None)
        return done

    def open_block(self, name: str) -> str:
        return self._loop.scope().place(escape(name))

    def start_branch(self, path: str, branch: str | int, work: Any) -> WorkflowTask:
        label = escape(branch) if isinstance(branch, str) else f"~{branch}"
        return self._loop.start_branch(work, label, self.open_scope(f"{path}/{label}"))

    def note(self, kind: str, location: str, value: Any) -> None:
        self._ledger.note(kind, location, self._start.codec.encode(value))

    def continue_as(self, workflow: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Nothing more of this generation happens: the call never returns, and the drain stops."""
        if self._ledger.may_ask():
            definition = self._successor(workflow)
            what = f"payload of workflow {definition.name!r}"
            payload = definition.parameters.encode(self._start.codec, args, kwargs, what=what)
            self._continued = Continued(definition.name, definition.version, payload)
            self._loop.halted = True
        return self._ledger.never()

    def _successor(self, workflow: Any) -> Workflow[Any, Any]:
        if workflow is None:
            own = self._start.definition
            newest = REGISTRY.latest(own.name)
            return newest if newest is not None and newest.version > own.version else own
        if not isinstance(workflow, Workflow):
            raise WorkflowMisuse(f"continue_as takes a @workflow function, not {workflow!r}")
        return workflow

    def pin_version(self, gate: str, latest: int) -> int:
        return self._ledger.pin_version(gate, latest, self.replaying)

    def account_removed(self, name: str, kind: str) -> None:
        self._ledger.account_removed(name, kind, self.replaying)

    def now(self) -> float:
        return self._loop.now

    def here(self) -> str:
        return self._loop.scope().path

    def next_number(self) -> int:
        return self._loop.next_number()

    def scope_random(self, purpose: str) -> random.Random:
        self._ledger.check_inside()
        return self._loop.scope().random(purpose, f"{self._start.seed}/{self.facts.id}/{self.facts.generation}")

    # --- what the loop tells

    def open_scope(self, path: str) -> Scope:
        return Scope(path, self._history.scope(path))

    def timer_set(self, location: str, when: float) -> None:
        self._ledger.alarms.set(location, when)

    def timer_cancelled(self, location: str) -> None:
        self._ledger.alarms.remove(location)

    def report_lost(self, scope: str, message: str, error: BaseException | None) -> None:
        if not self.replaying:
            LOGGER.error("run %s at %s: %s", self.facts.id, scope or "its own scope", message, exc_info=error)
