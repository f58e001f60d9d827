"""Deferreds: one-shot values that a caller completes from outside with a token.

This module knows the run only as a `DeferredHost`; it knows no store.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from perdure.codec import Codec
from perdure.codec.failures import error_from_record
from perdure.errors import InvalidArgument, InvalidPayload, WorkflowMisuse
from perdure.model.records import SigningKey
from perdure.model.validation import check_name, check_seconds
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.tokens import bind_epoch, make_token

T = TypeVar("T")
MAX_DECLARED_TYPES = 10_000


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

    def declare_deferred(self, name: str, kind: Any, timeout: float | None) -> None: ...

    def next_number(self) -> int: ...

    def issue(self, command: Command) -> Any: ...


class Deferred(Generic[T]):
    """A value completed from outside. `await` returns the value or raises the failure.

    All deferreds with the same name in a run are the same deferred: the first timeout counts.
    """

    def __init__(
        self, run: DeferredHost, name: str, kind: Any, raises: Any, timeout: float | timedelta | None = None
    ) -> None:
        kinds = raises if isinstance(raises, tuple) else (raises,)
        if any(not (isinstance(each, type) and issubclass(each, Exception)) for each in kinds):
            raise InvalidArgument(f"raises must be an exception type or a tuple of them, not {raises!r}")
        self._run = run
        self._kind = kind
        self._raises = kinds
        self.name = check_name("a deferred's name", name)
        seconds = None if timeout is None else check_seconds("the timeout of a deferred", timeout)
        run.declare_deferred(self.name, kind, seconds)

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


class DeclaredTypes:
    """The types of the deferreds that runs have created in this process, for callers that complete them.

    A run is identified by the signing keys of its store and its id: two stores may have runs of one id. When there are
    too many, those that were declared first are deleted. A caller then does not know the type, and the run checks it.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[bytes, str, int, str], tuple[Any, ...]] = {}
        self._lock = threading.Lock()  # engines may run in several threads

    def declare(self, keys: Sequence[SigningKey], run_id: str, epoch: int, name: str, kinds: tuple[Any, ...]) -> None:
        """Note the types that a run has declared for a deferred. They replace those of an earlier replay."""
        with self._lock:
            self._kinds.pop(declared := _declared_key(keys, run_id, epoch, name), None)
            self._kinds[declared] = kinds
            if len(self._kinds) > MAX_DECLARED_TYPES:
                del self._kinds[next(iter(self._kinds))]

    def find(self, keys: Sequence[SigningKey], run_id: str, epoch: int, name: str) -> tuple[Any, ...]:
        """Return the types of a deferred; empty if this process does not know them or if it accepts every value."""
        return self._kinds.get(_declared_key(keys, run_id, epoch, name), ())


DECLARED_TYPES = DeclaredTypes()


def _declared_key(keys: Sequence[SigningKey], run_id: str, epoch: int, name: str) -> tuple[bytes, str, int, str]:
    oldest = min(keys, key=lambda key: key.number)  # keys are added and never removed
    return oldest.secret, run_id, epoch, name


def find_mismatch(codec: Codec, value: bytes, name: str, kinds: Iterable[Any]) -> InvalidPayload | None:
    """Return why the value of a deferred fits none of these types; None if it fits one, or if there are none."""
    mismatch = None
    for kind in kinds:
        try:
            codec.decode(value, kind, what=f"the value of deferred {name!r}")
        except InvalidPayload as error:
            mismatch = mismatch or error
        else:
            return None
    return mismatch
