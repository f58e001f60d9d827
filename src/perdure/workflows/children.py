"""Children: runs that a workflow starts, waits for, and takes down with it.

A child's id is determined by its place in the parent's history, so that it is started once, whatever crashes. That it
was asked for is on record before it is started; its end comes back as mail, in the same way as to anyone else who
waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from perdure.codec import Codec
from perdure.codec.failures import error_from_record
from perdure.errors import ChildFailed
from perdure.model.records import Entry, ErrorRecord, RunResult, RunStatus
from perdure.model.turns import ExternalAction, ObserveRun, StartChild
from perdure.model.validation import MAX_NAME
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.types import Complete

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CANCELLED = "RunCancelled"


class ChildSpec(Struct, frozen=True):
    """What is to be started: a definition, its encoded payload, and the id if one is given."""

    definition: Any
    input: bytes
    id: str | None


class ChildHost(Protocol):
    """What children ask of the run."""

    @property
    def codec(self) -> Codec: ...

    @property
    def id(self) -> str: ...

    def escape(self, name: str) -> str: ...

    def next_number(self) -> int: ...

    def issue(self, question: Command) -> Any: ...

    def build_child_spec(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], id: str | None
    ) -> ChildSpec: ...


class Child(Generic[R_co]):
    """A child that was started. Waiting for it, in any number of places, is durable."""

    def __init__(self, run: ChildHost, id: str, definition: Any, *, created: bool) -> None:
        self._run = run
        self._definition = definition
        self.id = id
        self.created = created  # False: a run of this id was there already, and is not attached

    def result(self) -> Coroutine[None, None, R_co]:
        """Wait for its end and give its value. Raises `ChildFailed` if it failed or was cancelled."""
        return cast("Coroutine[None, None, R_co]", self._wait("result"))

    def outcome(self) -> Coroutine[None, None, Complete[R_co]]:
        """Wait for its end and say how it came out; does not raise because the child failed."""
        return cast("Coroutine[None, None, Complete[R_co]]", self._wait("outcome"))

    def _wait(self, kind: str) -> Any:
        run = self._run
        read = _outcome if kind == "outcome" else _value
        name = f"{self._definition.name}:{kind}"

        def ask() -> Any:
            return run.issue(
                Command(
                    kind=kind,
                    name=name,
                    segment=run.escape(name),
                    read=lambda entry: read(run, self._definition, entry),
                    fail=lambda entry: _failure(run, self.id, entry),
                    effect=lambda target: ObserveRun(self.id, target),
                    describe=lambda work: msgspec.json.encode({"id": self.id}),
                )
            )

        return CommandCall(name, ask, run.next_number())

    def __repr__(self) -> str:
        return f"<child run {self.id}>"


def run_child(run: ChildHost, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], id: str | None) -> Any:
    """Start a child and wait for its result."""
    order = run.build_child_spec(target, args, kwargs, id)

    def ask() -> Any:
        return run.issue(
            Command(
                kind="child",
                name=order.definition.name,
                segment=run.escape(order.definition.name),
                read=lambda entry: _value(run, order.definition, entry),
                fail=lambda entry: _failure(run, _id_in(entry), entry),
                effect=lambda target: _start(run, order, target, attached=True, observed=True),
                describe=encode_child_detail,
            )
        )

    return CommandCall(order.definition.name, ask, run.next_number())


def start_child(
    run: ChildHost, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], id: str | None, detached: bool
) -> Any:
    """Start a child; gives a handle to wait with."""
    order = run.build_child_spec(target, args, kwargs, id)

    def read(entry: Entry) -> Any:
        started = run.codec.decode(entry.value or b"{}")
        return Child(run, started["id"], order.definition, created=started["created"])

    def ask() -> Any:
        return run.issue(
            Command(
                kind="start_child",
                name=order.definition.name,
                segment=run.escape(order.definition.name),
                read=read,
                effect=lambda target: _start(run, order, target, attached=not detached, observed=False),
                describe=encode_child_detail,
            )
        )

    return CommandCall(order.definition.name, ask, run.next_number())


def child_id(run_id: str, target: str) -> str:
    """The id of the child that a place in a run's history stands for; hashed where it would be too long."""
    generation, _, location = target.partition("/")
    id = f"{run_id}/{location}" if generation == "0" else f"{run_id}/{location}@{generation}"
    if len(id) <= MAX_NAME:
        return id
    return f"{id[:400]}-{hashlib.sha256(id.encode()).hexdigest()[:32]}"


def _start(run: ChildHost, order: ChildSpec, target: str, *, attached: bool, observed: bool) -> StartChild:
    return StartChild(
        run_id=order.id or child_id(run.id, target),
        workflow=order.definition.name,
        version=order.definition.version,
        input=order.input,
        attached=attached,
        created_by=f"child/{run.id}/{target}",
        target=target if observed else None,
        definition=order.definition,
    )


def encode_child_detail(work: ExternalAction) -> bytes:
    """What the entry of a child keeps of it."""
    assert isinstance(work, StartChild)
    return msgspec.json.encode({"id": work.run_id, "attached": work.attached})


def _value(run: ChildHost, definition: Any, entry: Entry) -> Any:
    what = f"the result of child {_id_in(entry)!r}"
    return None if entry.value is None else run.codec.decode(entry.value, definition.returns, what=what)


def _outcome(run: ChildHost, definition: Any, entry: Entry) -> Complete[Any]:
    """Told as a success of the waiting, whatever became of the child: how is in the entry's detail."""
    detail = msgspec.json.decode(entry.detail or b"{}")
    status = RunStatus(detail.get("status", RunStatus.SUCCEEDED))
    error = msgspec.convert(detail["error"], ErrorRecord) if detail.get("error") else None
    return Complete(status, _value(run, definition, entry), error)


def _failure(run: ChildHost, id: str, entry: Entry) -> BaseException:
    """`ChildFailed` with the child's error; what kept it from being started or found comes as itself."""
    error = entry.error
    assert error is not None
    if "status" not in msgspec.json.decode(entry.detail or b"{}"):
        return error_from_record(error, run.codec)
    failed = ChildFailed(id, error.type, error.message, error.location)
    failed.__cause__ = None if error.type == CANCELLED else error_from_record(error, run.codec)
    return failed


def encode_child_outcome(kind: str, id: str, ending: RunResult) -> tuple[bytes | None, ErrorRecord | None, bytes]:
    """What the entry of a wait keeps of a child's end: value, error and detail."""
    error = ending.error
    if ending.status is RunStatus.CANCELLED:
        error = ErrorRecord(CANCELLED, f"run {id!r} was cancelled")
    detail = msgspec.json.encode({"id": id, "status": ending.status, **({"error": error} if error else {})})
    if kind == "outcome":
        return ending.result, None, detail
    return ending.result, error, detail


def _id_in(entry: Entry) -> str:
    return str(msgspec.json.decode(entry.detail or b"{}").get("id", ""))
