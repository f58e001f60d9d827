"""Internal workflows: perdure's own work on a store, as durable runs that every worker executes.

Their names, and the ids of their runs, begin with a tilde, which is reserved: users cannot define, start, rewind, fork
or send to such runs. They accept cancel, pause and resume. Lists of runs show them only on request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.errors import InvalidArgument
from perdure.model.records import RunRecord
from perdure.workflows.definition import Workflow, WorkflowOptions
from perdure.workflows.registry import Registry

INTERNAL_PREFIX = "~"
INTERNAL_POOL = "~perdure"
INTERNAL_RETENTION_SECONDS = 7 * 86_400.0
INTERNAL: Registry[Workflow[Any, Any]] = Registry()


def internal_workflow(name: str, version: int = 1) -> Callable[[Any], Workflow[Any, Any]]:
    """Return a decorator that defines an internal workflow."""
    assert name.startswith(INTERNAL_PREFIX)

    def decorate(fn: Any) -> Workflow[Any, Any]:
        options = WorkflowOptions(pool=INTERNAL_POOL, retention=INTERNAL_RETENTION_SECONDS)
        definition = Workflow[Any, Any](fn, name, version, options)
        INTERNAL.add(definition)
        return definition

    return decorate


def is_internal_name(name: str) -> bool:
    """Return whether a name of a workflow, queue, pool or run is reserved for perdure."""
    return name.startswith(INTERNAL_PREFIX)


def refuse_internal(record: RunRecord, action: str) -> None:
    """Raise `InvalidArgument` if the run is internal. `action` is what it does not accept: "forked", "sent to"."""
    if is_internal_name(record.workflow):
        raise InvalidArgument(
            f"run {record.id!r} of {record.workflow!r} is perdure's own and cannot be {action}; "
            "it can be cancelled, paused and resumed"
        )
