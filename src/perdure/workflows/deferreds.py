"""Deferreds: one-shot values that a caller completes from outside with a token.

This module knows the run only as a `DeferredHost`; it knows no store.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from perdure.codec import Codec
from perdure.codec.failures import error_from_record
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import SigningKey
from perdure.model.validation import check_name
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.tokens import bind_epoch, make_token

T = TypeVar("T")


class DeferredHost(Protocol):
    """The run, as deferreds use it."""

    @property
    def codec(self) -> Codec: ...

    @property
    def id(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def module(self) -> str: ...

    @property
    def signing(self) -> tuple[Sequence[SigningKey], float]: ...

    def escape(self, name: str) -> str: ...

    def next_number(self) -> int: ...

    def issue(self, command: Command) -> Any: ...


class Deferred(Generic[T]):
    """A value completed from outside. `await` returns the value or raises the failure.

    All deferreds with the same name in a run are the same deferred.
    """

    def __init__(self, run: DeferredHost, name: str, kind: Any, raises: Any) -> None:
        kinds = raises if isinstance(raises, tuple) else (raises,)
        if any(not (isinstance(each, type) and issubclass(each, Exception)) for each in kinds):
            raise InvalidArgument(f"raises must be an exception type or a tuple of them, not {raises!r}")
        self._run = run
        self._kind = kind
        self._raises = kinds
        self.name = check_name("a deferred's name", name)

    @property
    def token(self) -> str:
        """Signed, URL-safe capability to complete this deferred. Identical on every replay."""
        keys, at = self._run.signing
        if not keys:
            raise WorkflowMisuse(
                "tokens are not available: this engine has no signing keys because it runs without a store"
            )
        epoch = bind_epoch(self._run.epoch, self._run.incarnation)
        return make_token(keys, self._run.id, epoch, self.name, at=at)

    def __await__(self) -> Generator[Any, Any, T]:
        run = self._run

        def request() -> Any:
            what = f"the value of deferred {self.name!r}"
            return run.issue(
                Command(
                    kind="deferred",
                    name=self.name,
                    segment=run.escape(self.name),
                    read=lambda entry: run.codec.decode(entry.value or b"null", self._kind, what=what),
                    fail=lambda entry: error_from_record(entry.error, run.codec, self._raises, run.module),  # type: ignore[arg-type]
                    deferred=self.name,
                )
            )

        call: CommandCall[T] = CommandCall(self.name, request, run.next_number())
        return call.__await__()

    def __repr__(self) -> str:
        return f"<deferred {self.name}>"
