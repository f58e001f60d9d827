"""Compensations and exit hooks: functions that a run executes when it is rolled back, and when it ends.

Outside of loops every replay registers them again, and nothing is written. In the body of a loop the entries that would
register them are pruned later. There each is recorded, with the name and the arguments of its function; so are all of
them when a run continues as another. A record and a registration at the same location are one compensation. The record
also names the rollback scope that has executed it: a replay that passes this scope takes the compensation again.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from perdure.codec import Codec
from perdure.codec.parameters import Parameters
from perdure.errors import WorkflowMisuse
from perdure.model.records import Entry, EntryStatus
from perdure.runner.entry_log import EntryLog
from perdure.runner.history import History
from perdure.runner.iterations import RunningIterations
from perdure.workflows.rollback import ROLLBACK_SCOPES
from perdure.workflows.steps import Step, StepCall, StepOptions, get_step_body

RECORDS = "~compensation"


class Compensation(Struct):
    """One registered function. `order` is the completion during which it was registered, and which one of those."""

    key: str  # the location of the step, or of the registration
    kind: str  # "rollback" or "exit"
    order: tuple[int, int]
    fn: Callable[..., Any] | Step[Any, Any] | None
    args: Callable[[], Sequence[Any]]
    of: str | None  # the location of the step that it compensates
    blocks: tuple[str, ...] = ()  # names of the rollback scopes around the registration
    path: str | None = None  # the import path of the function, if it comes from a record
    record: Entry | None = None


class CompensationRecord(Struct, frozen=True, omit_defaults=True):
    """A `Compensation` as the detail of an entry."""

    kind: str
    fn: str
    args: tuple[str, ...]  # each encoded, in base64
    order: tuple[int, int]
    of: str | None = None
    blocks: tuple[str, ...] = ()
    taken_by: str | None = None  # the rollback scope that executed it; "" is the end of the run


class Compensations:
    """See the module's docstring."""

    __slots__ = ("_codec", "_counted", "_done", "_iterations", "_log", "_registered")

    def __init__(self, log: EntryLog, codec: Codec, history: History, iterations: RunningIterations) -> None:
        self._log = log
        self._codec = codec
        self._counted = (0, 0)
        self._registered: dict[str, Compensation] = {}
        self._done: set[str] = set()  # keys of records that a rollback scope has executed
        self._iterations = iterations
        if history.compensation_records:
            self._load(history)

    # --- registering

    def check(self, fn: Any, scope: str) -> None:
        """Raise `WorkflowMisuse` in a loop if a function has no import path."""
        if self._iterations.contain(scope):
            import_path(fn)

    def on_step_completed(self, call: StepCall, entry: Entry) -> None:
        """Register the compensation of a step that succeeded."""
        returns, value = call.step.body.returns, entry.value
        fn = call.step.settings.compensate

        def result() -> Sequence[Any]:
            what = f"the result of step {entry.location}"
            return (None if value is None else self._codec.decode(value, returns, what=what),)

        self._register(
            Compensation(entry.location, "rollback", self._order(), fn, result, entry.location, call.rollback_scopes)
        )

    def add(self, kind: str, location: str, fn: Any, args: tuple[Any, ...]) -> None:
        """Register a function by `on_rollback` or `on_exit`."""
        blocks = ROLLBACK_SCOPES.get() if kind == "rollback" else ()
        self._register(Compensation(location, kind, self._order(), fn, lambda: args, None, blocks))

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

    # --- records

    def carried_over(self) -> tuple[Entry, ...]:
        """Return records of all registered compensations, for the run that this one continues as."""
        records = [self._build_record(each) for each in sorted(self._registered.values(), key=lambda each: each.order)]
        return tuple(
            msgspec.structs.replace(record, call_seq=number, location=f"{RECORDS}/~before/{number}")
            for number, record in enumerate(records, 1)
        )

    def _build_record(self, compensation: Compensation) -> Entry:
        args = tuple(base64.b64encode(self._codec.encode(arg)).decode() for arg in compensation.args())
        path = compensation.path or import_path(compensation.fn)
        detail = CompensationRecord(
            compensation.kind, path, args, compensation.order, compensation.of, compensation.blocks
        )
        return Entry(
            location=f"{RECORDS}/{compensation.key}",
            kind="compensation",
            name=path.rpartition(":")[2],
            status=EntryStatus.SUCCEEDED,
            call_seq=self._log.next_call_seq(),
            detail=msgspec.json.encode(detail),
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
            args = _RecordedArguments(self._codec, record)
            self._registered[key] = Compensation(
                key, record.kind, order, None, args, record.of, record.blocks, record.fn, entry
            )


def _as_cancelled(record: Entry, taken_by: str) -> Entry:
    detail = msgspec.json.decode(record.detail or b"", type=CompensationRecord)
    detail = msgspec.structs.replace(detail, taken_by=taken_by)
    return msgspec.structs.replace(record, status=EntryStatus.CANCELLED, detail=msgspec.json.encode(detail))


class _RecordedArguments:
    """The arguments of a recorded function, decoded by its annotations when it is called."""

    def __init__(self, codec: Codec, record: CompensationRecord) -> None:
        self._codec = codec
        self._record = record

    def __call__(self) -> Sequence[Any]:
        fn = import_by_path(self._record.fn)
        hints = list(Parameters.of(fn.fn if isinstance(fn, Step) else fn, skip=0).hints.values())
        hints += [Any] * (len(self._record.args) - len(hints))
        return [
            self._codec.decode(base64.b64decode(arg), hint, what=f"an argument of {self._record.fn}")
            for arg, hint in zip(self._record.args, hints, strict=False)
        ]


def import_path(fn: Any) -> str:
    """Return the path by which a function can be imported. Raises `WorkflowMisuse` if there is none."""
    inner = fn.fn if isinstance(fn, Step) else fn
    module, name = getattr(inner, "__module__", None), getattr(inner, "__qualname__", None)
    if module and name and "<" not in name:
        path = f"{module}:{name}"
        try:
            same = import_by_path(path)
        except (ImportError, AttributeError):
            same = None
        if same is fn or getattr(same, "fn", same) is inner:
            return path
    raise WorkflowMisuse(
        f"{inner!r} is to run when this run is rolled back, after the loop iteration or generation that registers it "
        "is deleted: it must be a function that can be imported by its name, at the top of a module"
    )


def import_by_path(path: str) -> Any:
    """Return the function at a path."""
    module, _, name = path.partition(":")
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def build_call(compensation: Compensation) -> Any:
    """Return the durable call that executes a compensation. Must be called inside the run."""
    fn = compensation.fn if compensation.fn is not None else import_by_path(compensation.path or "")
    if isinstance(fn, Step):
        step = fn.options(compensate=None)
    else:
        step = Step(get_step_body(fn), getattr(fn, "__name__", None) or type(fn).__name__, StepOptions())
    return step(*compensation.args())
