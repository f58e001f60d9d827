"""`@workflow`: definitions of workflows, their options, and the options of one start.

A definition is a value that contains a function. It knows no run, engine or store.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from perdure.codec.annotations import enclosing_names, return_type
from perdure.codec.parameters import Parameters
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.tags import Tags
from perdure.model.validation import (
    check_count,
    check_public_name,
    check_seconds,
    check_tags,
    describe_value,
    refuse_reserved_tags,
)
from perdure.retry import Retry
from perdure.workflows.context import Context
from perdure.workflows.registry import Registry
from perdure.workflows.schedules import Schedule
from perdure.workflows.start_options import StartKeywords, StartOptions, build_start_options
from perdure.workflows.steps import Raises, check_raises
from perdure.workflows.work_queues import WorkQueue

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_VERSION = 2**31 - 1  # the largest that every store holds


@dataclass(frozen=True, slots=True)
class WorkflowOptions:
    """Options of a workflow; durations are in seconds."""

    idempotency_key: Callable[..., str] | None = None
    retry: Retry | None = None
    timeout: float | None = None
    max_suspend: float | None = None
    suspend_on_failure: bool = False
    pool: str = "default"
    tags: Tags = field(default_factory=dict)
    retention: float | None = None
    raises: Raises = ()
    strict: bool = False
    queue: WorkQueue | str | None = None
    schedule: Schedule | None = None


class Workflow(Generic[P, R_co]):
    """A workflow definition: name, version, function, types and options. A call runs the function inline."""

    def __init__(self, fn: Callable[..., Any], name: str, version: int, options: WorkflowOptions) -> None:
        self.fn = fn
        self.name = name
        self.version = version
        self.settings = options
        self.parameters = Parameters.of(fn, skip=1)
        self._enclosing_names = enclosing_names(fn)
        update_wrapper(self, fn)

    @cached_property
    def returns(self) -> Any:
        """The result type. Resolved on first use, so that annotations may name types that are defined later."""
        return return_type(self.fn, self._enclosing_names)

    @property
    def origin(self) -> tuple[str, str]:
        """Module and qualified name. A later definition with the same origin replaces this one."""
        return (self.fn.__module__, self.fn.__qualname__)

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        return cast("Coroutine[Any, Any, R_co]", self.fn(ctx, *args, **kwargs))

    def options(self, **options: Unpack[StartKeywords]) -> BoundWorkflow[P, R_co]:
        """Return the workflow bound to options for one start, separate from its own keyword arguments."""
        return BoundWorkflow(self, build_start_options(options))

    def __repr__(self) -> str:
        return f"<workflow {self.name} v{self.version}>"


@dataclass(frozen=True, slots=True)
class BoundWorkflow(Generic[P, R_co]):
    """A workflow bound to the options of one start."""

    workflow: Workflow[P, R_co]
    start: StartOptions


class WorkflowLookup(Protocol):
    """Finds the workflows that a worker can execute: the catalog of an engine, or the registry of the process."""

    def find(self, name: str, version: int) -> Workflow[Any, Any] | None:
        """Return the definition of this name and version, or None."""

    def latest(self, name: str) -> Workflow[Any, Any] | None:
        """Return the definition with the highest version of this name, or None."""


class WorkflowDecorator(Protocol):
    """The decorator that `workflow(...)` with options returns."""

    def __call__(self, fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Workflow[P, R]: ...


@overload
def workflow(fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Workflow[P, R]: ...
@overload
def workflow(
    *,
    name: str | None = None,
    version: int = 1,
    idempotency_key: Callable[..., str] | None = None,
    retry: Retry | None = None,
    timeout: float | timedelta | None = None,
    max_suspend: float | timedelta | None = None,
    suspend_on_failure: bool = False,
    pool: str = "default",
    tags: Tags | None = None,
    retention: float | timedelta | None = None,
    raises: type[Exception] | Raises = (),
    strict: bool = False,
    queue: WorkQueue | str | None = None,
    schedule: Schedule | None = None,
) -> WorkflowDecorator: ...
def workflow(fn: Any = None, /, *, name: str | None = None, version: int = 1, **options: Any) -> Any:
    """Define a workflow from an `async def` whose first parameter is the Context; the others are the payload."""
    settings = _workflow_options(options)
    check_count("a workflow's version", version, maximum=MAX_VERSION)

    def decorate(fn: Any) -> Workflow[Any, Any]:
        _check_workflow_function(fn)
        definition = Workflow[Any, Any](
            fn, check_public_name("a workflow's name", name or fn.__name__), version, settings
        )
        _check_schedule(definition)
        REGISTRY.add(definition)
        return definition

    return decorate if fn is None else decorate(fn)


def _workflow_options(options: dict[str, Any]) -> WorkflowOptions:
    unknown = set(options) - {option.name for option in dataclasses.fields(WorkflowOptions)}
    if unknown:
        raise InvalidArgument(f"@workflow has no option {', '.join(sorted(unknown))}")
    if options.get("retry") is not None and not isinstance(options["retry"], Retry):
        raise InvalidArgument(f"retry must be a Retry or None, not {options['retry']!r}")
    if options.get("retry") is not None and options["retry"].max_elapsed is not None:
        raise InvalidArgument(
            "Retry.max_elapsed is for steps; use timeout= of the workflow, which limits all attempts of a run together"
        )
    for duration in ("timeout", "max_suspend", "retention"):
        if options.get(duration) is not None:
            options[duration] = check_seconds(
                f"a workflow's {duration}", options[duration], zero=duration == "retention"
            )
    if "raises" in options:
        options["raises"] = check_raises(options["raises"])
    if "pool" in options:
        options["pool"] = check_public_name("a workflow's pool", options["pool"])
    if "queue" in options:
        options["queue"] = _check_queue(options["queue"])
    options["tags"] = check_tags(options.get("tags"))
    refuse_reserved_tags(options["tags"])
    return WorkflowOptions(**options)


def _check_schedule(definition: Workflow[Any, Any]) -> None:
    """Raise `InvalidArgument` if a declared schedule cannot start the workflow."""
    schedule, required = definition.settings.schedule, definition.parameters.required
    if schedule is None:
        return
    if not isinstance(schedule, Schedule):
        raise InvalidArgument(f"a workflow's schedule must be a Schedule, not {describe_value(schedule)}")
    if required:
        raise InvalidArgument(
            f"workflow {definition.name!r} declares a schedule, which starts it without a payload, but it has required "
            f"parameters: {', '.join(required)}; give them defaults, or use engine.schedule(...) with arguments"
        )


def _check_queue(queue: Any) -> WorkQueue | str | None:
    if queue is None or isinstance(queue, WorkQueue):
        return queue
    if isinstance(queue, str):
        return check_public_name("a workflow's queue", queue)
    raise InvalidArgument(f"a workflow's queue must be a WorkQueue or its name, not {describe_value(queue)}")


def _check_workflow_function(fn: Any) -> None:
    name = getattr(fn, "__name__", repr(fn))
    if not inspect.iscoroutinefunction(fn):
        raise WorkflowMisuse(f"workflow {name!r} must be an `async def`; use steps for blocking code")
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise WorkflowMisuse(
            f"workflow {name!r} must take the Context as its first parameter: async def {name}(ctx, ...)"
        )
    annotation = parameters[0].annotation
    type_name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if annotation is not inspect.Parameter.empty and type_name.rpartition(".")[2] not in ("Context", "Any"):
        raise WorkflowMisuse(
            f"the first parameter of workflow {name!r} is annotated {type_name or annotation!r}; it must be the Context"
        )


REGISTRY: Registry[Workflow[Any, Any]] = Registry()
