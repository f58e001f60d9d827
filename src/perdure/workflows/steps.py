"""`@step`: a unit of side effects whose result is recorded.

A step knows nothing of runs, engines or stores. A call of it only looks whether the running event loop belongs to a
workflow (`perdure_run`), and hands itself over if it does.
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

from perdure.codec.annotations import enclosing_names, returns_of
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.locations import escape_segment
from perdure.model.validation import check_name, check_seconds
from perdure.retry import Retry
from perdure.workflows.durable_call import DurableCall

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Raises = tuple[type[Exception], ...]


class Unset:
    """The type of UNSET: an option that was not given, where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is executed. `retry=None` is one attempt, `timeout=None` no limit."""

    retry: Retry | None = field(default_factory=Retry)
    timeout: float | None = None
    retry_on_timeout: bool = False
    raises: Raises = ()
    compensate: Callable[..., Any] | None = None
    at_most_once: bool = False
    pool: str | None = None
    key: str | None = None


class Body:
    """The function of a step, and what is found out about it once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._nearby = enclosing_names(fn)

    @cached_property
    def returns(self) -> Any:
        """The type of its result; found when first needed, so that it may name what is defined later."""
        return returns_of(self.fn, self._nearby)


_BODIES: WeakKeyDictionary[Callable[..., Any], Body] = WeakKeyDictionary()


def body_of(fn: Callable[..., Any]) -> Body:
    """The body that a function is; found out once per function where that can be remembered."""
    try:
        found = _BODIES.get(fn)
        if found is None:
            found = _BODIES[fn] = Body(fn)
    except TypeError:  # a callable that cannot be hashed or weakly referenced
        return Body(fn)
    return found


class Step(Generic[P, R_co]):
    """A unit of side effects. In a workflow a call of it is durable; anywhere else it just runs."""

    def __init__(self, body: Body, name: str, options: StepOptions) -> None:
        self.body = body
        self.fn = body.fn
        self.name = name
        self.settings = options
        self.segment = (
            escape_segment(name) if options.key is None else f"{escape_segment(name)}[{escape_segment(options.key)}]"
        )
        update_wrapper(self, body.fn, updated=())  # not its attributes: it may have a `name` of its own

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
        """The same step with some options changed, for this call."""
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
        settings = checked_options(replace(self.settings, **changed))
        return Step(self.body, self.name if isinstance(name, Unset) else check_name("a step's name", name), settings)

    def __repr__(self) -> str:
        return f"<step {self.name}>"


class StepCall(DurableCall[Any]):
    """One call of a step by a workflow: what the executor needs to carry it out."""

    __slots__ = ("_run", "args", "blocks", "kwargs", "step")

    blocks: tuple[str, ...]  # the rollback scopes around a call that has a compensation; set when it begins

    def __init__(
        self, step: Step[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Any, number: int
    ) -> None:
        # One is made per step: everything is set here, without a detour over the base class.
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.name = step.name
        self.number = number
        self._run = run
        self._coroutine = None

    def _start(self) -> Any:
        return self._run.ask_step(self)


def checked_options(options: StepOptions) -> StepOptions:
    """The options in canonical form; a bad one is refused with a message that names it."""
    if options.retry is not None and not isinstance(options.retry, Retry):
        raise InvalidArgument(f"retry must be a Retry or None, not {options.retry!r}")
    raises = options.raises if isinstance(options.raises, tuple) else (options.raises,)
    for kind in raises:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidArgument(f"raises must name exception types, not {kind!r}")
    if options.compensate is not None and not callable(options.compensate):
        raise InvalidArgument(f"compensate must be a function of the step's result, not {options.compensate!r}")
    if options.pool is not None:  # to accept it and do nothing would be worse than to refuse it
        raise InvalidArgument("pool= of a step is not part of this version yet; leave it out")
    timeout = None if options.timeout is None else check_seconds("a step's timeout", options.timeout, zero=False)
    key = None if options.key is None else check_name("a step's key", options.key)
    return replace(options, raises=raises, timeout=timeout, key=key)


class StepDecorator(Protocol):
    """What `step(...)` with options returns."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]: ...


class CompensatedStepDecorator(Protocol[R]):
    """What `step(compensate=...)` returns: the compensation takes the step's result."""

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
    """Make a function a step: its result is recorded once, and replayed ever after."""
    unknown = set(options) - {option.name for option in dataclasses.fields(StepOptions)} | ({"key"} & set(options))
    if unknown:
        raise InvalidArgument(f"@step has no option {', '.join(sorted(unknown))}")
    settings = checked_options(StepOptions(**options))

    def decorate(fn: Any) -> Step[Any, Any]:
        if isinstance(fn, Step) or not callable(fn):
            raise WorkflowMisuse(f"@step goes on a function, not on {fn!r}")
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise WorkflowMisuse(f"step {fn.__name__!r} is a generator; return a value, or write to a stream instead")
        return Step(
            Body(fn), check_name("a step's name", name or getattr(fn, "__name__", None) or type(fn).__name__), settings
        )

    return decorate if fn is None else decorate(fn)
