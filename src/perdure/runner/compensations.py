"""Compensations and exit hooks: functions that a run executes when it is rolled back, and when it ends.

Outside of loops every replay registers them again, and nothing is written. In the body of a loop the entries that would
register them are pruned later. There each is recorded, with the registered name (function_names.py) and the arguments
of its function; so are all of them when a run continues as another. A record and a registration at the same location
are one compensation. The record also names the rollback scope that has executed it: a replay that passes this scope
takes the compensation again. If the code has no function of a recorded name, the run is held.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextvars import Context as VariableContext
from contextvars import copy_context
from typing import Any

import msgspec
from msgspec import Struct

from perdure.codec import Codec
from perdure.codec.parameters import Parameters
from perdure.errors import InvalidPayload, WorkflowMisuse
from perdure.model.records import Entry, EntryStatus
from perdure.runner.entry_log import EntryLog
from perdure.runner.function_names import RegisteredFunctions, WorkflowKey, has_valid_form, is_relative
from perdure.runner.history import History
from perdure.runner.iterations import RunningIterations
from perdure.workflows.definition import Workflow
from perdure.workflows.rollback import ROLLBACK_SCOPES
from perdure.workflows.steps import Step, StepCall, StepOptions, inherits_context, make_step

RECORDS = "~compensation"


class Compensation(Struct):
    """One registered function. `order` is the completion during which it was registered, and which one of those."""

    key: str  # the location of the step, or of the registration
    kind: str  # "rollback" or "exit"
    order: tuple[int, int]
    fn: Any  # a function, a step, or None: not declared as a Step, which type checkers would bind to the instance
    args: Callable[[], Sequence[Any]]
    of: str | None  # the location of the step that it compensates
    blocks: tuple[str, ...] = ()  # names of the rollback scopes around the registration
    variables: VariableContext | None = None  # of the code that registered it, if `fn` inherits them
    record: Entry | None = None
    recorded: CompensationRecord | None = None  # if it was loaded from a record: then `fn` and `args` are unknown

    @property
    def function(self) -> str:
        """The name of the function, for people."""
        if self.recorded is not None:
            return self.recorded.fn.rpartition(":")[2]
        return getattr(self.fn, "__name__", None) or repr(self.fn)

    @property
    def location(self) -> str:
        """The location of the record, or of the registration if there is no record."""
        return self.key if self.record is None else self.record.location


class CompensationRecord(Struct, frozen=True, omit_defaults=True):
    """A `Compensation` as the detail of an entry."""

    kind: str
    fn: str  # the registered name of the function
    args: tuple[str, ...]  # each encoded, in base64
    order: tuple[int, int]
    of: str | None = None
    blocks: tuple[str, ...] = ()
    taken_by: str | None = None  # the rollback scope that executed it; "" is the end of the run
    registered_by: WorkflowKey | None = None  # the workflow whose module `fn` is about, if not that of the run


class Compensations:
    """See the module's docstring."""

    __slots__ = ("_codec", "_counted", "_done", "_functions", "_iterations", "_log", "_registered")

    def __init__(
        self,
        log: EntryLog,
        codec: Codec,
        history: History,
        functions: RegisteredFunctions,
        iterations: RunningIterations,
    ) -> None:
        self._log = log
        self._codec = codec
        self._functions = functions
        self._counted = (0, 0)
        self._registered: dict[str, Compensation] = {}
        self._done: set[str] = set()  # keys of records that a rollback scope has executed
        self._iterations = iterations
        if history.compensation_records:
            self._load(history)

    # --- registering

    def check(self, fn: Any, scope: str) -> None:
        """Raise `WorkflowMisuse` in a loop if a function has no registered name, and anywhere for an unbound method."""
        if isinstance(fn, Step) and fn.is_method:
            raise WorkflowMisuse(
                f"{fn!r} is a method, to be called without an instance when this run is rolled back or ends: "
                "use the method of an instance, or compensate=... of a step of the same class"
            )
        if self._iterations.contain(scope):
            self._functions.name_of(fn)

    def on_step_completed(self, call: StepCall, entry: Entry) -> None:
        """Register the compensation of a step that succeeded."""
        returns, value = call.step.body.returns, entry.value
        fn = call.step.compensation

        def result() -> Sequence[Any]:
            what = f"the result of step {entry.location}"
            return (None if value is None else self._codec.decode(value, returns, what=what),)

        variables = call.variables if inherits_context(fn) else None
        where, scopes = entry.location, call.rollback_scopes
        self._register(Compensation(where, "rollback", self._order(), fn, result, where, scopes, variables))

    def add(self, kind: str, location: str, fn: Any, args: tuple[Any, ...]) -> None:
        """Register a function by `on_rollback` or `on_exit`."""
        blocks = ROLLBACK_SCOPES.get() if kind == "rollback" else ()
        variables = copy_context() if inherits_context(fn) else None
        self._register(Compensation(location, kind, self._order(), fn, lambda: args, None, blocks, variables))

    def _register(self, compensation: Compensation) -> None:
        known = self._registered.get(compensation.key)
        if known is not None:
            compensation.order, compensation.record = known.order, known.record
        self._registered[compensation.key] = compensation
        scope = compensation.key.rpartition("/")[0]
        if compensation.record is not None:
            self._log.count_recorded(compensation.record)
        elif self._iterations.contain(scope):
            compensation.record = self._build_record(compensation)
            self._log.record(compensation.record)

    def _order(self) -> tuple[int, int]:
        seq, count = self._counted
        self._counted = (seq, count + 1) if seq == self._log.seq else (self._log.seq, 0)
        return self._counted

    # --- taking

    def take(self, kind: str, block: str | None = None) -> list[Compensation]:
        """Unregister and return all of a kind (of a rollback scope, if given), the last registered one first."""
        chosen = [
            each for each in self._registered.values() if each.kind == kind and (block is None or block in each.blocks)
        ]
        for compensation in chosen:
            del self._registered[compensation.key]
            if compensation.record is not None:
                self._mark_done(compensation.key, compensation.record, block or "")
        return sorted(chosen, key=lambda each: each.order, reverse=True)

    def _mark_done(self, key: str, record: Entry, block: str) -> None:
        if block:
            self._done.add(key)
        if record.status is EntryStatus.SUCCEEDED:  # otherwise marked before: this is a replay
            self._log.record(_as_cancelled(record, block))

    def take_done_in(self, path: str) -> list[str]:
        """Return the locations of records that are not needed when the iteration at `path` is pruned."""
        keys = [key for key in self._done if key.startswith(f"{path}/")]
        self._done.difference_update(keys)
        return [f"{RECORDS}/{key}" for key in keys]

    def __bool__(self) -> bool:
        return bool(self._registered)

    # --- executing

    def build_call(self, compensation: Compensation) -> StepCall:
        """Return the durable call that executes a compensation. Must be called inside the run.

        Raises a `PerdureError` if this code has no such function, or if its arguments do not match.
        """
        fn, recorded, record = compensation.fn, compensation.recorded, compensation.record
        if recorded is None:
            args = compensation.args()
        else:
            fn = self._find(recorded)
            args = self._decode_arguments(fn, recorded)
        if not isinstance(fn, Step):
            return make_step(fn, _step_name(fn), StepOptions()).call_unchecked(args)
        # A step of `options(name=...)` keeps that name. Earlier versions recorded the name of the function instead.
        renamed = record is not None and recorded is not None and has_valid_form(recorded.fn)
        step = fn.options(compensate=None, name=record.name if renamed and record is not None else fn.name)
        call = step.call_unchecked(args)
        call.variables = compensation.variables or VariableContext()
        return call

    def _find(self, recorded: CompensationRecord) -> Any:
        """Return the function of a record. Raises `WorkflowMisuse` if this code has no such function."""
        found = self._functions.find(recorded.fn, recorded.registered_by)
        if found is None:
            raise WorkflowMisuse(
                f"nothing that is registered as {recorded.fn!r}: this process has no such step, and the module of the "
                "workflow defines no such function"
            )
        return found

    def _decode_arguments(self, fn: Any, recorded: CompensationRecord) -> Sequence[Any]:
        """Return the recorded arguments, decoded by the annotations of the function."""
        what = f"an argument of {recorded.fn}"
        hints = list(Parameters.of(fn.fn if isinstance(fn, Step) else fn, skip=0).hints.values())
        hints += [Any] * (len(recorded.args) - len(hints))
        try:
            encoded = [base64.b64decode(arg, validate=True) for arg in recorded.args]
        except ValueError as error:
            raise InvalidPayload(f"{what}: {error}") from None
        return [self._codec.decode(arg, hint, what=what) for arg, hint in zip(encoded, hints, strict=False)]

    # --- records

    def carried_over(self, successor: Workflow[Any, Any]) -> tuple[Entry, ...]:
        """Return records of all registered compensations, for the workflow that the run continues as."""
        registered_by = self._functions.key_in(successor)
        ordered = sorted(self._registered.values(), key=lambda each: each.order)
        return tuple(
            msgspec.structs.replace(
                self._build_record(each, registered_by), call_seq=number, location=f"{RECORDS}/~before/{number}"
            )
            for number, each in enumerate(ordered, 1)
        )

    def _build_record(self, compensation: Compensation, registered_by: WorkflowKey | None = None) -> Entry:
        known = compensation.recorded
        if known is None:
            args = tuple(base64.b64encode(self._codec.encode(arg)).decode() for arg in compensation.args())
            name = self._functions.name_of(compensation.fn)
            known = CompensationRecord(
                compensation.kind, name, args, compensation.order, compensation.of, compensation.blocks
            )
        if known.registered_by is not None or not is_relative(known.fn):
            registered_by = known.registered_by
        known = msgspec.structs.replace(known, order=compensation.order, taken_by=None, registered_by=registered_by)
        record, fn = compensation.record, compensation.fn
        return Entry(
            location=f"{RECORDS}/{compensation.key}",
            kind="compensation",
            name=record.name if fn is None and record is not None else _step_name(fn),
            status=EntryStatus.SUCCEEDED,
            call_seq=self._log.next_call_seq(),
            detail=msgspec.json.encode(known),
        )

    def _load(self, history: History) -> None:
        """Register recorded compensations, executed ones included: a replay takes them again at the same point.

        An executed one whose rollback scope is before the resume point of a loop is only kept until it is pruned.
        """
        for entry in history.compensation_records:
            record = msgspec.json.decode(entry.detail or b"", type=CompensationRecord)
            key = entry.location.removeprefix(f"{RECORDS}/")
            if record.taken_by and history.is_before_resume_point(record.taken_by):
                self._done.add(key)
                continue
            # Carried over from an earlier generation: registered before everything of this one.
            order = (-1, entry.call_seq) if key.startswith("~before/") else record.order
            self._registered[key] = Compensation(
                key, record.kind, order, None, tuple, record.of, record.blocks, None, entry, record
            )


def _as_cancelled(record: Entry, taken_by: str) -> Entry:
    detail = msgspec.json.decode(record.detail or b"", type=CompensationRecord)
    detail = msgspec.structs.replace(detail, taken_by=taken_by)
    return msgspec.structs.replace(record, status=EntryStatus.CANCELLED, detail=msgspec.json.encode(detail))


def _step_name(fn: Any) -> str:
    """Return the name of the step that executes a function."""
    return fn.name if isinstance(fn, Step) else getattr(fn, "__name__", None) or type(fn).__name__
