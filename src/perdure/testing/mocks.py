"""Step mocks: replace the body of a step in a test, and record every call.

Only the body is replaced. Name, location, retries, backoff, timeouts and compensation apply as before. The result type
applies too, so that a mock cannot return a value that the step could not return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import Context as VariableContext
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from perdure.errors import CriticalError, InvalidArgument
from perdure.model.turns import RunStep
from perdure.model.validation import check_name
from perdure.workflows.step_context import current_step
from perdure.workflows.steps import Step, StepBody, Unset

Target = Step[Any, Any] | Callable[..., Any] | str


@dataclass(frozen=True, slots=True)
class MockCall:
    """One call of a mocked step, with its run, location and attempt."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run_id: str
    location: str
    attempt: int


class StepMock:
    """Replaces one step until `stop()`, the end of its `with` block, or the shutdown of the engine."""

    def __init__(self, target: Target, returns: Any, raises: Any, side_effect: Any) -> None:
        given = [each for each in (returns, raises, side_effect) if not isinstance(each, Unset)]
        if len(given) > 1:
            raise InvalidArgument("a mock takes only one of returns=, raises= and side_effect=")
        self.name = _name_of(target)
        self.calls: list[MockCall] = []
        self.stopped = False
        self._fn = None if isinstance(target, str) else _function_of(target)
        self._returns = None if isinstance(returns, Unset) else returns
        self._raises = None if isinstance(raises, Unset) else _checked_error(raises)
        self._effect = None if isinstance(side_effect, Unset) else _checked_effect(side_effect)

    def stop(self) -> None:
        """Restore the body of the step."""
        self.stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<mock of {self.name}, called {len(self.calls)} times>"

    # --- interface of the engine

    def takes(self, step: Step[Any, Any]) -> bool:
        """Return whether this mock replaces `step`: the same function under any name, or any function of its name."""
        return not self.stopped and (step.name == self.name if self._fn is None else _function_of(step) is self._fn)

    def in_place_of(self, requested: RunStep) -> RunStep:
        """Return the step attempt with the mock as its body."""
        original = requested.call.step
        step: Step[Any, Any] = Step(_MockBody(self._call, original.body), original.name, original.settings)
        call = requested.call
        variables = call.variables if original.settings.context == "inherit" else None
        return replace(requested, call=_MockedCall(step, call.args, call.kwargs, variables))

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        self.calls.append(MockCall(args, kwargs, step.run_id, step.location, step.attempt))
        if self._raises is not None:
            raise self._raises
        if self._effect is None:
            return self._returns
        if callable(self._effect):
            result = self._effect(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        return self._next_result(self._effect)

    def _next_result(self, results: Iterator[Any]) -> Any:
        try:
            result = next(results)
        except StopIteration:
            raise CriticalError(f"{self!r}: side_effect= has no result left for this call") from None
        if isinstance(result, BaseException) or (isinstance(result, type) and issubclass(result, BaseException)):
            raise result
        return result


class _MockBody(StepBody):
    """The mock's function, with the type of the result of the original."""

    def __init__(self, fn: Callable[..., Any], original: StepBody) -> None:
        super().__init__(fn)
        self._original = original

    @cached_property
    def returns(self) -> Any:
        return self._original.returns

    @cached_property
    def missing_type(self) -> str | None:
        return self._original.missing_type


@dataclass(frozen=True, slots=True)
class _MockedCall:
    """The part of a `StepCall` that the executor reads."""

    step: Step[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    variables: VariableContext | None


def _function_of(target: Step[Any, Any] | Callable[..., Any]) -> Any:
    """Return the function of a step, or of a method of any instance."""
    fn = getattr(target, "fn", target)
    return getattr(fn, "__func__", fn)


def _name_of(target: Target) -> str:
    if isinstance(target, str):
        return check_name("a step's name", target)
    if not callable(target):
        raise InvalidArgument(f"the target of a mock must be a step, its function or its name, not {target!r}")
    return str(getattr(target, "name", None) or getattr(target, "__name__", None) or type(target).__name__)


def _checked_error(raises: Any) -> BaseException | type[BaseException]:
    if isinstance(raises, BaseException) or (isinstance(raises, type) and issubclass(raises, BaseException)):
        return raises
    raise InvalidArgument(f"raises= must be an exception, not {raises!r}")


def _checked_effect(effect: Any) -> Callable[..., Any] | Iterator[Any]:
    if callable(effect):
        return effect  # type: ignore[no-any-return]
    if isinstance(effect, Iterable) and not isinstance(effect, (str, bytes)):
        return iter(effect)
    raise InvalidArgument(f"side_effect= must be a function or a list of results, not {effect!r}")
