"""Mocks: what a step does in a test in place of its body, and a note of every call.

Everything around the body stays as it is: the name and location, retries and their pauses, time-outs, compensation, and
the type of the result, so that a mock cannot return what the step could not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """One execution of a mocked step, and where it came from."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run_id: str
    location: str
    attempt: int


class StepMock:
    """Stands in for one step until `stop()`, the end of its `with` block, or that of the engine."""

    def __init__(self, target: Target, returns: Any, raises: Any, side_effect: Any) -> None:
        given = [each for each in (returns, raises, side_effect) if not isinstance(each, Unset)]
        if len(given) > 1:
            raise InvalidArgument("a mock takes one of returns=, raises= and side_effect=")
        self.name = _name_of(target)
        self.calls: list[MockCall] = []
        self.stopped = False
        self._fn = None if isinstance(target, str) else getattr(target, "fn", target)
        self._returns = None if isinstance(returns, Unset) else returns
        self._raises = None if isinstance(raises, Unset) else _checked_error(raises)
        self._effect = None if isinstance(side_effect, Unset) else _checked_effect(side_effect)

    def stop(self) -> None:
        """Let the step be itself again."""
        self.stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<mock of {self.name}, called {len(self.calls)} times>"

    # --- what the engine asks

    def takes(self, step: Step[Any, Any]) -> bool:
        """Whether it stands in for this one: for the same function under any name, or for any function of its name."""
        return not self.stopped and (step.name == self.name if self._fn is None else step.fn is self._fn)

    def in_place_of(self, asked: RunStep) -> RunStep:
        original = asked.call.step
        step: Step[Any, Any] = Step(_StandIn(self._answer, original.body), original.name, original.settings)
        return replace(asked, call=_MockedCall(step, asked.call.args, asked.call.kwargs))

    async def _answer(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        self.calls.append(MockCall(args, kwargs, step.run_id, step.location, step.attempt))
        if self._raises is not None:
            raise self._raises
        if self._effect is None:
            return self._returns
        if callable(self._effect):
            answer = self._effect(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        return self._next_answer(self._effect)

    def _next_answer(self, answers: Iterator[Any]) -> Any:
        try:
            answer = next(answers)
        except StopIteration:
            raise CriticalError(f"{self!r}: there are no answers left for this call") from None
        if isinstance(answer, BaseException) or (isinstance(answer, type) and issubclass(answer, BaseException)):
            raise answer
        return answer


class _StandIn(StepBody):
    """The mock's function, with the type of the result of the original."""

    def __init__(self, fn: Callable[..., Any], original: StepBody) -> None:
        super().__init__(fn)
        self._original = original

    @cached_property
    def returns(self) -> Any:
        return self._original.returns


@dataclass(frozen=True, slots=True)
class _MockedCall:
    """As much of a `StepCall` as the executor looks at."""

    step: Step[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _name_of(target: Target) -> str:
    if isinstance(target, str):
        return check_name("a step's name", target)
    if not callable(target):
        raise InvalidArgument(f"a mock stands in for a step, its function or its name, not for {target!r}")
    return str(getattr(target, "name", None) or getattr(target, "__name__", None) or type(target).__name__)


def _checked_error(raises: Any) -> BaseException | type[BaseException]:
    if isinstance(raises, BaseException) or (isinstance(raises, type) and issubclass(raises, BaseException)):
        return raises
    raise InvalidArgument(f"raises= takes an exception, not {raises!r}")


def _checked_effect(effect: Any) -> Callable[..., Any] | Iterator[Any]:
    if callable(effect):
        return effect  # type: ignore[no-any-return]
    if isinstance(effect, Iterable) and not isinstance(effect, (str, bytes)):
        return iter(effect)
    raise InvalidArgument(f"side_effect= takes a function or a list of answers, not {effect!r}")
