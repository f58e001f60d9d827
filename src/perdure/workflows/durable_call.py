"""DurableCall: an awaitable that starts when it is first awaited and is accepted wherever a coroutine is.

This module knows no run; subclasses start the operation.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar, cast

T = TypeVar("T")

_CONSUMED = object()  # Sentinel: the call was already awaited, finished or failed to start.


class DurableCall(Coroutine[None, None, T]):
    """A durable call that starts when it is first awaited.

    It is a coroutine, so `gather`, `create_task` and `TaskGroup` accept it. A task that runs it opens no scope.
    """

    __slots__ = ("__weakref__", "_coroutine", "name", "number")

    name: str
    number: int  # The hash, which is the same on every replay.
    _coroutine: Any  # The started coroutine or _CONSUMED; None before the first await.

    def _start(self) -> Any:
        """Request the operation from the run. Return an awaitable."""
        raise NotImplementedError

    @property
    def __name__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    def __await__(self) -> Generator[Any, Any, T]:
        if self._coroutine is not None:
            raise RuntimeError(f"{self.name}: a durable call can be awaited only once")
        self._coroutine = _CONSUMED  # Set first: a call that fails to start is consumed too.
        return self._start().__await__()  # type: ignore[no-any-return]  # No cast: this runs per step.

    def send(self, value: None) -> None:
        if self._coroutine is None or self._coroutine is _CONSUMED:
            self._coroutine = self.__await__()
        try:
            return cast("None", self._coroutine.send(value))
        except BaseException:  # StopIteration with the result, or an error.
            self._coroutine = _CONSUMED
            raise

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> None:
        coroutine, self._coroutine = self._coroutine, _CONSUMED
        if coroutine is None or coroutine is _CONSUMED:
            raise typ
        return cast("None", coroutine.throw(typ) if isinstance(typ, BaseException) else coroutine.throw(typ, val, tb))

    def close(self) -> None:
        coroutine, self._coroutine = self._coroutine, _CONSUMED
        if coroutine is not None and coroutine is not _CONSUMED:
            coroutine.close()

    def __del__(self) -> None:
        if self._coroutine is None and not getattr(asyncio._get_running_loop(), "closing", False):
            # No warning while a run is evicted from memory: the workflow would have awaited the call later.
            warnings.warn(f"{self.name}: a durable call was never awaited", RuntimeWarning, stacklevel=2)


class CommandCall(DurableCall[T]):
    """A durable call that issues a command to the run."""

    __slots__ = ("_request",)

    def __init__(self, name: str, request: Callable[[], Any], number: int) -> None:
        self.name = name
        self.number = number
        self._request = request
        self._coroutine = None

    def _start(self) -> Any:
        return self._request()
