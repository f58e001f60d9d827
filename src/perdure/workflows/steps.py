"""`@step`: a function with side effects whose result is recorded.

A step knows no run, engine or store. A call checks whether the running event loop belongs to a workflow (attribute
`perdure_run`); if so, it returns a `StepCall` for that run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from perdure.codec.annotations import enclosing_names, return_type
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.locations import escape_segment
from perdure.model.validation import check_name, check_seconds
from perdure.retry import Retry
from perdure.workflows.durable_call import DurableCall
from perdure.workflows.types import Complete

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Raises = tuple[type[Exception], ...]


class Unset:
    """The type of UNSET, the default of options for which None is a valid value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of a step. `retry=None` means one attempt, `timeout=None` no limit."""

    retry: Retry | None = field(default_factory=Retry)
    timeout: float | None = None
    retry_on_timeout: bool = False
    raises: Raises = ()
    compensate: Callable[..., Any] | None = None
    at_most_once: bool = False
    pool: str | None = None
    key: str | None = None


class StepBody:
    """The function of a step, with properties that are computed once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._enclosing_names = enclosing_names(fn)

    @cached_property
    def returns(self) -> Any:
        """The result type. Resolved on first use, so that annotations may name types that are defined later."""
        return return_type(self.fn, self._enclosing_names)


_BODIES: WeakKeyDictionary[Callable[..., Any], StepBody] = WeakKeyDictionary()


def get_step_body(fn: Callable[..., Any]) -> StepBody:
    """Return the body of a function. Cached per function if the function can be weakly referenced."""
    try:
        found = _BODIES.get(fn)
        if found is None:
            found = _BODIES[fn] = StepBody(fn)
    except TypeError:  # The callable cannot be hashed or weakly referenced.
        return StepBody(fn)
    return found


class Step(Generic[P, R_co]):
    """A function with side effects. A call inside a workflow is durable; elsewhere it calls the function."""

    def __init__(self, body: StepBody, name: str, options: StepOptions) -> None:
        self.body = body
        self.fn = body.fn
        self.name = name
        self.settings = options
        self.segment = (
            escape_segment(name) if options.key is None else f"{escape_segment(name)}[{escape_segment(options.key)}]"
        )
        update_wrapper(self, body.fn, updated=())  # Without `__dict__`: the function may have an attribute `name`.

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[None, None, R_co]:
        loop: Any = asyncio._get_running_loop()
        run = getattr(loop, "perdure_run", None)
        if run is not None:
            loop.number += 1
            return StepCall(self, args, kwargs, run, loop.number)
        if self.body.is_async:
            return cast("Coroutine[None, None, R_co]", self.fn(*args, **kwargs))
        return cast("Coroutine[None, None, R_co]", asyncio.to_thread(self.fn, *args, **kwargs))

    def options(
        self,
        *,
        name: str | Unset = UNSET,
        key: object = UNSET,
        retry: Retry | Unset | None = UNSET,
        timeout: float | timedelta | Unset | None = UNSET,
        retry_on_timeout: bool | Unset = UNSET,
        raises: type[Exception] | Raises | Unset = UNSET,
        compensate: Callable[..., Any] | Unset | None = UNSET,
        at_most_once: bool | Unset = UNSET,
        pool: str | Unset | None = UNSET,
    ) -> Step[P, R_co]:
        """Return a copy of the step with some options changed."""
        given: dict[str, Any] = {
            "key": key if isinstance(key, Unset) else str(key),
            "retry": retry,
            "timeout": timeout,
            "retry_on_timeout": retry_on_timeout,
            "raises": raises,
            "compensate": compensate,
            "at_most_once": at_most_once,
            "pool": pool,
        }
        changed = {option: value for option, value in given.items() if not isinstance(value, Unset)}
        settings = check_step_options(replace(self.settings, **changed))
        return Step(self.body, self.name if isinstance(name, Unset) else check_name("a step's name", name), settings)

    def __repr__(self) -> str:
        return f"<step {self.name}>"


STEPS: dict[tuple[str, str], Step[Any, Any]] = {}
"""The steps that this process has defined, by origin. A later one with the same origin replaces an earlier one."""


def step_origin(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return module and qualified name of the function of a step; empty for a callable object without them."""
    return (getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", None) or "")


class StepCall(DurableCall[Any]):
    """One call of a step by a workflow, with what the executor needs to execute it."""

    __slots__ = ("_run", "args", "kwargs", "read_outcome", "rollback_scopes", "step")

    rollback_scopes: tuple[str, ...]  # Around a call that has a compensation; set when the call starts.
    read_outcome: Callable[[], Complete[Any]]  # Of the run; set for a call of an exit function only.

    def __init__(
        self, step: Step[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Any, number: int
    ) -> None:
        # Hot path: one is created per step, so all attributes are set without a call of the base class.
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.name = step.name
        self.number = number
        self._run = run
        self._coroutine = None

    def _start(self) -> Any:
        return self._run.request_step(self)


def check_step_options(options: StepOptions) -> StepOptions:
    """Return validated options in canonical form. Raises `InvalidArgument` for an invalid option."""
    if options.retry is not None and not isinstance(options.retry, Retry):
        raise InvalidArgument(f"retry must be a Retry or None, not {options.retry!r}")
    raises = options.raises if isinstance(options.raises, tuple) else (options.raises,)
    for kind in raises:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidArgument(f"raises must be an exception type or a tuple of them, not {kind!r}")
    if options.compensate is not None and not callable(options.compensate):
        raise InvalidArgument(f"compensate must be a function of the step's result, not {options.compensate!r}")
    if options.pool is not None:  # Rejected, because ignoring it would be misleading.
        raise InvalidArgument("pool= of a step is not supported in this version; remove it")
    timeout = None if options.timeout is None else check_seconds("a step's timeout", options.timeout, zero=False)
    key = None if options.key is None else check_name("a step's key", options.key)
    return replace(options, raises=raises, timeout=timeout, key=key)


class StepDecorator(Protocol):
    """The decorator that `step(...)` with options returns."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]: ...


class CompensatedStepDecorator(Protocol[R]):
    """The decorator that `step(compensate=...)` returns: the compensation takes the result of the step."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]: ...


@overload
def step(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, R]: ...
@overload
def step(fn: Callable[P, R], /) -> Step[P, R]: ...
@overload
def step(
    *,
    compensate: Callable[[R], Awaitable[object] | object],
    name: str | None = None,
    retry: Retry | None = ...,
    timeout: float | timedelta | None = None,
    retry_on_timeout: bool = False,
    raises: type[Exception] | Raises = (),
    at_most_once: bool = False,
    pool: str | None = None,
) -> CompensatedStepDecorator[R]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = ...,
    timeout: float | timedelta | None = None,
    retry_on_timeout: bool = False,
    raises: type[Exception] | Raises = (),
    at_most_once: bool = False,
    pool: str | None = None,
) -> StepDecorator: ...
def step(fn: Any = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Define a step from a function. Its result is recorded once and reused on every replay."""
    unknown = set(options) - {option.name for option in dataclasses.fields(StepOptions)} | ({"key"} & set(options))
    if unknown:
        raise InvalidArgument(f"@step has no option {', '.join(sorted(unknown))}")
    settings = check_step_options(StepOptions(**options))

    def decorate(fn: Any) -> Step[Any, Any]:
        if isinstance(fn, Step) or not callable(fn):
            raise WorkflowMisuse(f"@step must decorate a function, not {fn!r}")
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise WorkflowMisuse(f"step {fn.__name__!r} is a generator; return a value or write to a stream")
        name_or_default = name or getattr(fn, "__name__", None) or type(fn).__name__
        defined = Step[Any, Any](StepBody(fn), check_name("a step's name", name_or_default), settings)
        STEPS[step_origin(fn)] = defined
        return defined

    return decorate if fn is None else decorate(fn)
