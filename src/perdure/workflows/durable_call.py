"""A durable call as an object: begun when it is first awaited, accepted wherever a coroutine is."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar, cast

T = TypeVar("T")

_CONSUMED = object()  # in place of the steps of a call that was awaited, has ended or could not begin


class DurableCall(Coroutine[None, None, T]):
    """A durable call that begins when it is first awaited. It is a coroutine, so `gather`, `create_task` and
    `TaskGroup` take it, and a task made of it opens no scope of its own.
    """

    __slots__ = ("__weakref__", "_coroutine", "name", "number")

    name: str
    number: int  # a hash that is the same on every replay
    _coroutine: Any  # what is being awaited; None until then

    def _start(self) -> Any:
        """Ask the run; gives something to await."""
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
        self._coroutine = _CONSUMED  # also if it cannot begin
        return self._start().__await__()  # type: ignore[no-any-return]  # a cast is a call, and this is made per step

    def send(self, value: None) -> None:
        if self._coroutine is None or self._coroutine is _CONSUMED:
            self._coroutine = self.__await__()
        try:
            return cast("None", self._coroutine.send(value))
        except BaseException:  # its end, by a result or an error
            self._coroutine = _CONSUMED
            raise

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> None:
        steps, self._coroutine = self._coroutine, _CONSUMED
        if steps is None or steps is _CONSUMED:
            raise typ
        return cast("None", steps.throw(typ) if isinstance(typ, BaseException) else steps.throw(typ, val, tb))

    def close(self) -> None:
        steps, self._coroutine = self._coroutine, _CONSUMED
        if steps is not None and steps is not _CONSUMED:
            steps.close()

    def __del__(self) -> None:
        if self._coroutine is None and not getattr(asyncio._get_running_loop(), "closing", False):
            # A run that is dropped from memory would have come to it: then it is no mistake.
            warnings.warn(f"{self.name}: a durable call was never awaited", RuntimeWarning, stacklevel=2)


class CommandCall(DurableCall[T]):
    """A durable call that is a question to the run."""

    __slots__ = ("_ask",)

    def __init__(self, name: str, ask: Callable[[], Any], number: int) -> None:
        self.name = name
        self.number = number
        self._ask = ask
        self._coroutine = None

    def _start(self) -> Any:
        return self._ask()
