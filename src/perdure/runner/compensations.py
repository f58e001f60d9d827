"""Compensations and exits: what a run is to do when it is rolled back, and when it ends, in the order registered.

Outside of loops they are registered again by every replay, and nothing is written. In the body of a loop the entries
that would register them are pruned one day: there each is noted with its function's name and its arguments, and so it
is where a run continues as another. A note and a registration of the same place are one. A note says too by which
rollback it was carried out: a replay that comes by there takes it again.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from perdure.codec import Codec
from perdure.codec.parameters import Parameters
from perdure.errors import WorkflowMisuse
from perdure.model.records import Entry, EntryStatus
from perdure.runner.history import History
from perdure.workflows.rollback import ROLLBACK_SCOPES
from perdure.workflows.steps import Step, StepCall, StepOptions, get_step_body

NOTES = "~compensation"


class EntryRecorder(Protocol):
    """What of the ledger is needed here."""

    seq: int
    changed: dict[str, Entry]

    def next_ask(self) -> int: ...

    def asked_before(self, entry: Entry) -> None: ...


class Compensation(Struct):
    """One registered function. `order` is the completion during which it was registered, and which one of those."""

    key: str  # the location of the step, or of the registration
    kind: str  # "rollback" or "exit"
    order: tuple[int, int]
    fn: Callable[..., Any] | Step[Any, Any] | None
    args: Callable[[], Sequence[Any]]
    of: str | None  # the step that it undoes
    blocks: tuple[str, ...] = ()
    path: str | None = None  # of the function, where it is noted
    noted: Entry | None = None


class CompensationRecord(Struct, frozen=True, omit_defaults=True):
    """An `Undo` as an entry keeps it."""

    kind: str
    fn: str
    args: tuple[str, ...]  # each encoded, in base64
    order: tuple[int, int]
    of: str | None = None
    blocks: tuple[str, ...] = ()
    taken_by: str | None = None  # the rollback scope that has carried it out; "" is the run's end


class Compensations:
    """See the module's docstring."""

    __slots__ = ("_books", "_codec", "_counted", "_found", "_spent", "iterations")

    def __init__(self, books: EntryRecorder, codec: Codec, history: History) -> None:
        self._books = books
        self._codec = codec
        self._counted = (0, 0)
        self._found: dict[str, Compensation] = {}
        self._spent: set[str] = set()  # keys of notes that were carried out by a rollback scope
        self.iterations: set[str] = set()  # the paths of loop iterations that are under way
        if history.notes:
            self._revive(history)

    # --- registering

    def check(self, fn: Any, scope: str) -> None:
        """Refuse a function that could not be found again, where it has to be."""
        if self._in_loop(scope):
            importable(fn)

    def step_done(self, call: StepCall, entry: Entry) -> None:
        """A step that has a compensation succeeded."""
        returns, value = call.step.body.returns, entry.value
        fn = call.step.settings.compensate

        def result() -> Sequence[Any]:
            what = f"the result of step {entry.location}"
            return (None if value is None else self._codec.decode(value, returns, what=what),)

        self._register(
            Compensation(entry.location, "rollback", self._order(), fn, result, entry.location, call.rollback_scopes)
        )

    def add(self, kind: str, place: str, fn: Any, args: tuple[Any, ...]) -> None:
        """`on_rollback` or `on_exit` at this place."""
        blocks = ROLLBACK_SCOPES.get() if kind == "rollback" else ()
        self._register(Compensation(place, kind, self._order(), fn, lambda: args, None, blocks))

    def _register(self, undo: Compensation) -> None:
        noted = self._found.get(undo.key)
        if noted is not None:
            undo.order, undo.noted = noted.order, noted.noted
        self._found[undo.key] = undo
        scope = undo.key.rpartition("/")[0]
        if undo.noted is not None:
            self._books.asked_before(undo.noted)
        elif self._in_loop(scope):
            self._books.changed[f"{NOTES}/{undo.key}"] = undo.noted = self._note(undo)

    def _in_loop(self, scope: str) -> bool:
        return any(scope == path or scope.startswith(f"{path}/") for path in self.iterations)

    def _order(self) -> tuple[int, int]:
        seq, count = self._counted
        self._counted = (seq, count + 1) if seq == self._books.seq else (self._books.seq, 0)
        return self._counted

    # --- taking

    def take(self, kind: str, block: str | None = None) -> list[Compensation]:
        """All of this kind (of this rollback scope), the last one first. They are registered no longer."""
        chosen = [
            undo for undo in self._found.values() if undo.kind == kind and (block is None or block in undo.blocks)
        ]
        for undo in chosen:
            del self._found[undo.key]
            if undo.noted is not None:
                self._mark_done(undo.key, undo.noted, block or "")
        return sorted(chosen, key=lambda undo: undo.order, reverse=True)

    def _mark_done(self, key: str, noted: Entry, block: str) -> None:
        if block:
            self._spent.add(key)
        if noted.status is EntryStatus.SUCCEEDED:  # else a replay takes it again
            self._books.changed[noted.location] = _as_cancelled(noted, block)

    def spent_in(self, path: str) -> list[str]:
        """Locations of notes that nobody needs once this iteration is pruned."""
        keys = [key for key in self._spent if key.startswith(f"{path}/")]
        self._spent.difference_update(keys)
        return [f"{NOTES}/{key}" for key in keys]

    def __bool__(self) -> bool:
        return bool(self._found)

    # --- notes

    def carried_over(self) -> tuple[Entry, ...]:
        """Notes of all that is registered, for a run that continues as another."""
        notes = [self._note(undo) for undo in sorted(self._found.values(), key=lambda undo: undo.order)]
        return tuple(
            msgspec.structs.replace(note, call_seq=number, location=f"{NOTES}/~before/{number}")
            for number, note in enumerate(notes, 1)
        )

    def _note(self, undo: Compensation) -> Entry:
        args = tuple(base64.b64encode(self._codec.encode(arg)).decode() for arg in undo.args())
        note = CompensationRecord(undo.kind, undo.path or importable(undo.fn), args, undo.order, undo.of, undo.blocks)
        return Entry(
            location=f"{NOTES}/{undo.key}",
            kind="compensation",
            name=note.fn.rpartition(":")[2],
            status=EntryStatus.SUCCEEDED,
            call_seq=self._books.next_ask(),
            detail=msgspec.json.encode(note),
        )

    def _revive(self, history: History) -> None:
        """Those that were carried out too: a replay takes them again, unless it does not come by the scope that did."""
        for entry in history.notes:
            note = msgspec.json.decode(entry.detail or b"", type=CompensationRecord)
            key = entry.location.removeprefix(f"{NOTES}/")
            if note.taken_by and history.is_before_resume_point(note.taken_by):
                self._spent.add(key)
                continue
            order = (
                note.order if not key.startswith("~before/") else (-1, entry.call_seq)
            )  # before all of this generation
            args = _Noted(self._codec, note)
            self._found[key] = Compensation(key, note.kind, order, None, args, note.of, note.blocks, note.fn, entry)


def _as_cancelled(noted: Entry, taken_by: str) -> Entry:
    note = msgspec.structs.replace(msgspec.json.decode(noted.detail or b"", type=CompensationRecord), taken_by=taken_by)
    return msgspec.structs.replace(noted, status=EntryStatus.CANCELLED, detail=msgspec.json.encode(note))


class _Noted:
    """The arguments of a noted function, decoded by its annotations when it is called."""

    def __init__(self, codec: Codec, note: CompensationRecord) -> None:
        self._codec = codec
        self._note = note

    def __call__(self) -> Sequence[Any]:
        fn = import_by_path(self._note.fn)
        hints = list(Parameters.of(fn.fn if isinstance(fn, Step) else fn, skip=0).hints.values())
        hints += [Any] * (len(self._note.args) - len(hints))
        return [
            self._codec.decode(base64.b64decode(arg), hint, what=f"an argument of {self._note.fn}")
            for arg, hint in zip(self._note.args, hints, strict=False)
        ]


def importable(fn: Any) -> str:
    """The name by which a function can be found again; `WorkflowMisuse` if there is none."""
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
        "is gone: it must be a function that can be imported by its name, at the top of a module"
    )


def import_by_path(path: str) -> Any:
    """The function of this name."""
    module, _, name = path.partition(":")
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def call_of(undo: Compensation) -> Any:
    """The durable call that carries it out; must be made inside the run."""
    fn = undo.fn if undo.fn is not None else import_by_path(undo.path or "")
    if isinstance(fn, Step):
        step = fn.options(compensate=None)
    else:
        step = Step(get_step_body(fn), getattr(fn, "__name__", None) or type(fn).__name__, StepOptions())
    return step(*undo.args())
