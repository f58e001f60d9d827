"""Children: runs that a workflow starts and waits for. An attached child is cancelled when its parent ends.

The id of a child is derived from its location in the history of the parent, so that it is started once even after
crashes. The request is recorded before the child is started. The parent receives the end of the child as a message.
This module knows the run only as a `ChildHost`; it knows no store.
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
from perdure.model.ids import child_creation_id
from perdure.model.queue_records import Place
from perdure.model.records import Entry, ErrorRecord, RunResult, RunStatus
from perdure.model.turns import ExternalAction, ObserveRun, StartChild, StopRun
from perdure.model.validation import MAX_NAME, check_name
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.types import Complete, error_view

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CANCELLED = "RunCancelled"


class ChildSpec(Struct, frozen=True):
    """A validated child start: definition, encoded payload, the id if the workflow gave one, and a place in a queue."""

    definition: Any
    input: bytes
    id: str | None
    place: Place | None = None


class ChildHost(Protocol):
    """The run, as children use it."""

    @property
    def codec(self) -> Codec: ...

    @property
    def id(self) -> str: ...

    @property
    def origin(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    def escape(self, name: str) -> str: ...

    def next_number(self) -> int: ...

    def issue(self, command: Command) -> Any: ...

    def build_child_spec(self, target: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> ChildSpec: ...


class Child(Generic[R_co]):
    """A handle to a started child. Each wait for the child is durable."""

    def __init__(self, run: ChildHost, id: str, definition: Any, *, created: bool) -> None:
        self._run = run
        self._definition = definition
        self.id = id
        self.created = created  # False: a run with this id existed already and is not attached.

    def result(self) -> Coroutine[None, None, R_co]:
        """Wait for the child and return its value. Raises `ChildFailed` if it failed or was cancelled."""
        return cast("Coroutine[None, None, R_co]", self._wait("result"))

    def outcome(self) -> Coroutine[None, None, Complete[R_co]]:
        """Wait for the child and return its outcome. Does not raise if the child failed."""
        return cast("Coroutine[None, None, Complete[R_co]]", self._wait("outcome"))

    def cancel(self, reason: str | None = None) -> Coroutine[None, None, bool]:
        """Request cancellation of the child, once. False if it has ended. Does not wait for its end."""
        return cancel_run(self._run, self.id, reason, f"{self._definition.name}:cancel")

    def _wait(self, kind: str) -> Any:
        run = self._run
        read = _read_outcome if kind == "outcome" else _read_value
        name = f"{self._definition.name}:{kind}"

        def request() -> Any:
            return run.issue(
                Command(
                    kind=kind,
                    name=name,
                    segment=run.escape(name),
                    read=lambda entry: read(run, self._definition, entry),
                    fail=lambda entry: _read_failure(run, self._definition, self.id, entry),
                    effect=lambda target: ObserveRun(self.id, target),
                    describe=lambda action: msgspec.json.encode({"id": self.id}),
                )
            )

        return CommandCall(name, request, run.next_number())

    def __repr__(self) -> str:
        return f"<child run {self.id}>"


def run_child(run: ChildHost, target: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    """Return a durable call that starts a child and waits for its result."""
    spec = run.build_child_spec(target, args, given)

    def request() -> Any:
        return run.issue(
            Command(
                kind="child",
                name=spec.definition.name,
                segment=run.escape(spec.definition.name),
                read=lambda entry: _read_value(run, spec.definition, entry),
                fail=lambda entry: _read_failure(run, spec.definition, _recorded_id(entry), entry),
                effect=lambda target: _start_effect(run, spec, target, attached=True, observed=True),
                describe=encode_child_detail,
            )
        )

    return CommandCall(spec.definition.name, request, run.next_number())


def start_child(run: ChildHost, target: Any, args: tuple[Any, ...], given: Mapping[str, Any], detached: bool) -> Any:
    """Return a durable call that starts a child and returns its handle."""
    spec = run.build_child_spec(target, args, given)

    def read(entry: Entry) -> Any:
        started = run.codec.decode(entry.value or b"{}")
        return Child(run, started["id"], spec.definition, created=started["created"])

    def request() -> Any:
        return run.issue(
            Command(
                kind="start_child",
                name=spec.definition.name,
                segment=run.escape(spec.definition.name),
                read=read,
                effect=lambda target: _start_effect(run, spec, target, attached=not detached, observed=False),
                describe=encode_child_detail,
            )
        )

    return CommandCall(spec.definition.name, request, run.next_number())


def cancel_run(run: ChildHost, run_id: str, reason: str | None, name: str = "cancel") -> Coroutine[None, None, bool]:
    """Return a durable call that requests cancellation of a run. Idempotent: the id is derived from the entry."""
    cancelled = check_name("a run's id", run_id)
    encoded = None if reason is None else run.codec.encode(check_name("a reason", reason))

    def request() -> Any:
        return run.issue(
            Command(
                kind="cancel_run",
                name=name,
                segment=run.escape(name),
                read=lambda entry: run.codec.decode(entry.value or b"false", bool),
                effect=lambda target: StopRun(cancelled, encoded),
                describe=lambda action: msgspec.json.encode({"id": cancelled}),
            )
        )

    return CommandCall("cancel", request, run.next_number())


def child_id(run_id: str, target: str) -> str:
    """Return the id of the child at a target of a run, shortened with a hash if it is too long."""
    generation, _, location = target.partition("/")
    id = f"{run_id}/{location}" if generation == "0" else f"{run_id}/{location}@{generation}"
    return shorten_id(id)


def shorten_id(id: str) -> str:
    """Return the id of a run, shortened with a hash if it is too long."""
    return id if len(id) <= MAX_NAME else f"{id[:400]}-{hashlib.sha256(id.encode()).hexdigest()[:32]}"


def _start_effect(run: ChildHost, spec: ChildSpec, target: str, *, attached: bool, observed: bool) -> StartChild:
    has_fallback = spec.id is None and run.origin != run.id
    return StartChild(
        run_id=spec.id or child_id(run.id, target),
        fallback_id=child_id(run.origin, target) if has_fallback else None,
        workflow=spec.definition.name,
        version=spec.definition.version,
        input=spec.input,
        attached=attached,
        created_by=child_creation_id(run.origin, run.incarnation, target),
        target=target if observed else None,
        definition=spec.definition,
        place=spec.place,
    )


def encode_child_detail(action: ExternalAction) -> bytes:
    """Return the entry detail of a child: its id, and whether it is attached."""
    assert isinstance(action, StartChild)
    return msgspec.json.encode({"id": action.run_id, "attached": action.attached})


def _read_value(run: ChildHost, definition: Any, entry: Entry) -> Any:
    what = f"the result of child {_recorded_id(entry)!r}"
    return None if entry.value is None else run.codec.decode(entry.value, definition.returns, what=what)


def _read_outcome(run: ChildHost, definition: Any, entry: Entry) -> Complete[Any]:
    """Return the outcome of a child. The entry itself succeeded; the status of the child is in its detail."""
    detail = msgspec.json.decode(entry.detail or b"{}")
    status = RunStatus(detail.get("status", RunStatus.SUCCEEDED))
    error = msgspec.convert(detail["error"], ErrorRecord) if detail.get("error") else None
    shown = error_view(error, run.codec, definition.settings.raises)
    return Complete(status, _read_value(run, definition, entry), shown, detail.get("reason"))


def _read_failure(run: ChildHost, definition: Any, id: str, entry: Entry) -> BaseException:
    """Return `ChildFailed` with the error of the child as its cause, of its original type if the workflow declares it.

    An error of starting or finding the child is returned as is.
    """
    error = entry.error
    assert error is not None
    if "status" not in msgspec.json.decode(entry.detail or b"{}"):
        return error_from_record(error, run.codec)
    failed = ChildFailed(id, error.type, error.message, error.location)
    if error.type != CANCELLED:
        failed.__cause__ = error_from_record(error, run.codec, definition.settings.raises)
    return failed


def encode_child_outcome(kind: str, id: str, result: RunResult) -> tuple[bytes | None, ErrorRecord | None, bytes]:
    """Return value, error and detail of the entry that waited for a child, from the result of the child."""
    error = result.error
    given: dict[str, Any] = {"id": id, "status": result.status}
    if result.status is RunStatus.CANCELLED:
        reason = None if error is None else error.message
        error = ErrorRecord(CANCELLED, f"run {id!r} was cancelled" + (f": {reason}" if reason else ""))
        given |= {"reason": reason} if reason else {}
    detail = msgspec.json.encode({**given, **({"error": error} if error else {})})
    if kind == "outcome":
        return result.result, None, detail
    return result.result, error, detail


def _recorded_id(entry: Entry) -> str:
    return str(msgspec.json.decode(entry.detail or b"{}").get("id", ""))
