"""`@step`: a function with side effects whose result is recorded.

A step knows no run, engine or store. A call checks whether the running event loop belongs to a workflow (attribute
`perdure_run`); if so, it returns a `StepCall` for that run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context as VariableContext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, update_wrapper
from types import FunctionType, MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from perdure.codec.annotations import describe_missing_return, enclosing_names, return_type
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.locations import escape_segment
from perdure.model.validation import check_name, check_seconds
from perdure.retry import Retry
from perdure.workflows.durable_call import DurableCall
from perdure.workflows.step_arguments import NO_CHECKS, Checks, StepArguments
from perdure.workflows.types import Complete

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)

Raises = tuple[type[Exception], ...]


class Unset:
    """The type of UNSET, the default of options for which None is a valid value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()
CONTEXTS = ("empty", "inherit")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of a step. `retry=None` means one attempt, `timeout=None` and `heartbeat_timeout=None` no limit."""

    retry: Retry | None = field(default_factory=Retry)
    timeout: float | None = None
    retry_on_timeout: bool = False
    heartbeat_timeout: float | None = None
    raises: Raises = ()
    compensate: Callable[..., Any] | None = None
    at_most_once: bool = False
    pool: str | None = None
    key: str | None = None
    context: str = "empty"


class StepKeywords(TypedDict, total=False):
    """Options that `@step`, `options()` and `ctx.step` take. Besides: `name`, `compensate` and, per call, `key`."""

    retry: Retry | None
    timeout: float | timedelta | None
    retry_on_timeout: bool
    heartbeat_timeout: float | timedelta | None
    raises: type[Exception] | Raises
    at_most_once: bool
    pool: str | None
    context: Literal["empty", "inherit"]


class StepBody:
    """The function of a step, with properties that are computed once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._enclosing_names = enclosing_names(fn)
        self.arguments = StepArguments(fn, self._enclosing_names, is_method=False)

    @cached_property
    def method_arguments(self) -> StepArguments:
        """The arguments of a call as a method: without `self`."""
        return StepArguments(self.fn, self._enclosing_names, is_method=True)

    @cached_property
    def returns(self) -> Any:
        """The result type. Resolved on first use, so that annotations may name types that are defined later."""
        return return_type(self.fn, self._enclosing_names)

    @cached_property
    def missing_type(self) -> str | None:
        """Why the result type is unknown; None if the function declares one, which may be `Any`."""
        return describe_missing_return(self.fn, self._enclosing_names)


_BODY = "__perdure_step_body__"


def get_step_body(fn: Callable[..., Any]) -> StepBody:
    """Return the body of a function.

    It is an attribute of the function: a workflow may pass a new closure to each `ctx.step`, and a cache of them would
    grow without bound.
    """
    if not isinstance(fn, FunctionType):
        return StepBody(fn)
    found = fn.__dict__.get(_BODY)
    if found is None or found.fn is not fn:  # `functools.wraps` copies the attributes of another function
        found = fn.__dict__[_BODY] = StepBody(fn)
    return cast("StepBody", found)


class Step(Generic[P, R_co]):
    """A function with side effects. A call inside a workflow is durable; elsewhere it calls the function.

    A step that is defined in a class is a method: `service.charge` is bound to `service`, which is not recorded.
    """

    binds: Literal["instance", "class", "nothing"] = "instance"  # what access through a class or instance binds
    is_method = False  # defined in a class, and not bound
    is_plain: bool  # has no limit of time and no compensation, and its body gets an empty context
    __isabstractmethod__ = False

    def __init__(self, body: StepBody, name: str, options: StepOptions) -> None:
        self.body = body
        self.fn = body.fn
        self.arguments = body.arguments
        self.name = name
        self.settings = options
        self.is_plain = _is_plain(options)
        self.segment = (
            escape_segment(name) if options.key is None else f"{escape_segment(name)}[{escape_segment(options.key)}]"
        )
        update_wrapper(self, body.fn, updated=())  # Without `__dict__`: the function may have an attribute `name`.

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[None, None, R_co]:
        loop: Any = asyncio._get_running_loop()
        run = getattr(loop, "perdure_run", None)
        if run is not None:
            if len(args) == 1 and type(args[0]) is self.arguments.single and not kwargs:
                checks = NO_CHECKS  # the fast path, which saves 1 % of a step
            else:
                checks = self._bind(args, kwargs, run)
            loop.number += 1
            return StepCall(self, args, kwargs, run, loop.number, checks)
        if self.body.is_async:
            return cast("Coroutine[None, None, R_co]", self.fn(*args, **kwargs))
        return cast("Coroutine[None, None, R_co]", asyncio.to_thread(self.fn, *args, **kwargs))

    def call_unchecked(self, args: Sequence[Any]) -> StepCall:
        """Return the call of a rollback. Its arguments are not checked: a rollback must run, and failures are recorded.

        Must be called inside a run.
        """
        loop: Any = asyncio._get_running_loop()
        loop.number += 1
        return StepCall(self, tuple(args), {}, loop.perdure_run, loop.number, NO_CHECKS)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Any) -> Checks:
        try:
            return self.arguments.bind(args, kwargs)
        except TypeError:
            if run.has_recorded_step(self.name, args, kwargs):  # by a version that did not bind arguments
                return NO_CHECKS
            raise

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None, /) -> Step[P, R_co]: ...
    @overload
    def __get__(self: Step[Concatenate[S, Q], R], instance: S, owner: type[Any] | None = None, /) -> Step[Q, R]: ...
    def __get__(self, instance: Any, owner: type[Any] | None = None, /) -> Any:
        """Return the step bound to an instance, like a method of it."""
        if self.binds == "instance":
            return self if instance is None else BoundStep(self, instance)
        return BoundStep(self, type(instance) if owner is None else owner) if self.binds == "class" else self

    def __set_name__(self, owner: type[Any], name: str) -> None:
        defined_here = getattr(self.body.fn, "__qualname__", "") == f"{owner.__qualname__}.{name}"
        if defined_here and self.binds != "nothing":
            self.is_method = True

    @property
    def compensation(self) -> Callable[..., Any] | None:
        """The function that compensates a call of this step."""
        return self.settings.compensate

    def options(
        self,
        *,
        name: str | Unset = UNSET,
        key: object = UNSET,
        compensate: Callable[..., Any] | Unset | None = UNSET,
        **options: Unpack[StepKeywords],
    ) -> Step[P, R_co]:
        """Return a copy of the step with some options changed."""
        changed: dict[str, Any] = {**options}
        if not isinstance(key, Unset):
            changed["key"] = str(key)
        if not isinstance(compensate, Unset):
            changed["compensate"] = compensate
        _refuse_unknown("options()", changed)
        settings = check_step_options(replace(self.settings, **changed))
        new_name = self.name if isinstance(name, Unset) else check_name("a step's name", name)
        return self._copy(new_name, settings)

    def _copy(self, name: str, settings: StepOptions) -> Step[P, R_co]:
        copied = Step[P, R_co](self.body, name, settings)
        copied.binds = self.binds
        copied.is_method = self.is_method
        return copied

    def __repr__(self) -> str:
        return f"<step {self.name}>"


class BoundStep(Step[P, R_co]):
    """A step that is a method, with the instance or class that it is called on."""

    def __init__(self, step: Step[Any, R_co], instance: Any) -> None:
        # Hot path: one is created per access, so `update_wrapper` is replaced by the properties below.
        body = self.body = step.body
        self.name = step.name
        self.settings = step.settings
        self.is_plain = step.is_plain
        self.segment = step.segment
        self.instance = instance
        self.fn = MethodType(body.fn, instance)
        self.arguments = body.method_arguments

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    @property
    def __name__(self) -> str:
        return self.fn.__name__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.fn.__doc__

    def __get__(self, instance: Any, owner: type[Any] | None = None, /) -> Any:
        return self

    @property
    def compensation(self) -> Callable[..., Any] | None:
        """The function that compensates a call: a method of the same class is called on the same instance."""
        compensate = self.settings.compensate
        cls = self.instance if isinstance(self.instance, type) else type(self.instance)
        name = getattr(compensate, "__name__", "")
        if name and any(vars(each).get(name) is compensate for each in cls.__mro__):
            return cast("Callable[..., Any]", getattr(self.instance, name))
        return compensate

    def _copy(self, name: str, settings: StepOptions) -> Step[P, R_co]:
        return BoundStep(Step[Any, R_co](self.body, name, settings), self.instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundStep):
            return NotImplemented
        return (self.fn, self.name, self.settings) == (other.fn, other.name, other.settings)

    def __hash__(self) -> int:
        return hash((self.fn, self.name))


def _is_plain(options: StepOptions) -> bool:
    limits = (options.timeout, options.heartbeat_timeout, None if options.retry is None else options.retry.max_elapsed)
    return limits == (None, None, None) and options.compensate is None and options.context == "empty"


def inherits_context(fn: Any) -> bool:
    """Return whether a function is a step that gets the context variables of its caller."""
    return isinstance(fn, Step) and fn.settings.context == "inherit"


def make_step(fn: Callable[..., Any], name: str, options: StepOptions) -> Step[Any, Any]:
    """Return the step of an undecorated function or method, with checked options."""
    if isinstance(fn, BoundStep | MethodType):
        instance = fn.instance if isinstance(fn, BoundStep) else fn.__self__
        function: Any = fn.body.fn if isinstance(fn, BoundStep) else fn.__func__
        return BoundStep(Step(get_step_body(function), name, options), instance)
    return Step(get_step_body(fn.fn if isinstance(fn, Step) else fn), name, options)


STEPS: dict[tuple[str, str], Step[Any, Any]] = {}
"""The steps that this process has defined, by origin. A later one with the same origin replaces an earlier one."""


def step_origin(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return module and qualified name of the function of a step; empty for a callable object without them."""
    return (getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", None) or "")


class StepCall(DurableCall[Any]):
    """One call of a step by a workflow, with what the executor needs to execute it."""

    __slots__ = ("_run", "args", "checks", "kwargs", "read_outcome", "rollback_scopes", "step", "variables")

    rollback_scopes: tuple[str, ...]  # Around a call that has a compensation; set when the call starts.
    variables: VariableContext  # Of the caller, if the step or its compensation inherits them; set at the start.
    read_outcome: Callable[[], Complete[Any]]  # Of the run; set for a call of an exit function only.

    def __init__(
        self,
        step: Step[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Any,
        number: int,
        checks: Checks,
    ) -> None:
        # Hot path: one is created per step, so all attributes are set without a call of the base class.
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.checks = checks
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
    raises = check_raises(options.raises)
    if options.compensate is not None and not callable(options.compensate):
        raise InvalidArgument(f"compensate must be a function of the step's result, not {options.compensate!r}")
    if options.context not in CONTEXTS:
        raise InvalidArgument(f"context of a step must be 'empty' or 'inherit', not {options.context!r}")
    if options.pool is not None:  # Rejected, because ignoring it would be misleading.
        raise InvalidArgument("pool= of a step is not supported in this version; remove it")
    timeout = None if options.timeout is None else check_seconds("a step's timeout", options.timeout, zero=False)
    silence = options.heartbeat_timeout
    silence = None if silence is None else check_seconds("a step's heartbeat_timeout", silence, zero=False)
    key = None if options.key is None else check_name("a step's key", options.key)
    return replace(options, raises=raises, timeout=timeout, heartbeat_timeout=silence, key=key)


def check_raises(raises: object) -> Raises:
    """Return the option `raises` as a tuple. Raises `InvalidArgument` for anything but subclasses of `Exception`."""
    kinds = raises if isinstance(raises, tuple) else (raises,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidArgument(f"raises must be an exception type or a tuple of them, not {kind!r}")
    return kinds


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


class CompensatedMethodDecorator(Protocol[S, R]):
    """The decorator that `step(compensate=...)` returns for a method: the compensation is a method, too."""

    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> Step[Concatenate[S, P], R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], R], /) -> Step[Concatenate[S, P], R]: ...


@overload
def step(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Step[P, R]: ...
@overload
def step(fn: Callable[P, R], /) -> Step[P, R]: ...
@overload
def step(
    *,
    compensate: Callable[[R], Awaitable[object] | object],
    name: str | None = None,
    **options: Unpack[StepKeywords],
) -> CompensatedStepDecorator[R]: ...
@overload
def step(
    *,
    compensate: Callable[[S, R], Awaitable[object] | object],
    name: str | None = None,
    **options: Unpack[StepKeywords],
) -> CompensatedMethodDecorator[S, R]: ...
@overload
def step(*, name: str | None = None, **options: Unpack[StepKeywords]) -> StepDecorator: ...
def step(fn: Any = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Define a step from a function or method. Its result is recorded once and reused on every replay."""
    if "key" in options:
        raise InvalidArgument("@step has no option key, which belongs to a call: use options(key=...)")
    settings = build_step_options("@step", options)

    def decorate(fn: Any) -> Step[Any, Any]:
        binds = _BINDINGS.get(type(fn))
        fn = fn if binds is None else fn.__func__
        if isinstance(fn, Step) or not callable(fn):
            raise WorkflowMisuse(f"@step must decorate a function, not {fn!r}")
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise WorkflowMisuse(f"step {fn.__name__!r} is a generator; return a value or write to a stream")
        name_or_default = name or getattr(fn, "__name__", None) or type(fn).__name__
        defined = Step[Any, Any](StepBody(fn), check_name("a step's name", name_or_default), settings)
        defined.binds = binds or ("instance" if isinstance(fn, FunctionType) else "nothing")
        if getattr(fn, "__isabstractmethod__", False):
            defined.__isabstractmethod__ = True
        STEPS[step_origin(fn)] = defined
        return defined

    return decorate if fn is None else decorate(fn)


_BINDINGS: dict[type, Literal["class", "nothing"]] = {classmethod: "class", staticmethod: "nothing"}


def build_step_options(taken_by: str, options: Mapping[str, Any]) -> StepOptions:
    """Return validated options from keyword arguments. Raises `InvalidArgument` for an unknown or invalid one."""
    _refuse_unknown(taken_by, options)
    return check_step_options(StepOptions(**options))


def _refuse_unknown(taken_by: str, options: Mapping[str, Any]) -> None:
    unknown = set(options) - {option.name for option in dataclasses.fields(StepOptions)}
    if unknown:
        raise InvalidArgument(f"{taken_by} has no option {', '.join(sorted(unknown))}")
