"""Registered names of the functions that compensations and exit hooks call.

A record that outlives its history names its function. Stored data may come from an import, so a name selects among
functions that the code of this process has registered, and nothing is imported for it:

    function:undo               a function that the module of the workflow defines
    step:refund                 a step that the module of the workflow defines
    step:shop.payments:refund   a step that another module defines

Records of earlier versions name `shop.payments:refund`. They are found if this is one of the above.
"""

from __future__ import annotations

import re
import sys
from types import FunctionType, ModuleType
from typing import Any

from perdure.errors import WorkflowMisuse
from perdure.workflows.definition import Workflow, WorkflowLookup
from perdure.workflows.steps import STEPS, BoundStep, Step, step_origin

WorkflowKey = tuple[str, int]  # name and version
_STEP, _FUNCTION = "step:", "function:"
_FORM = re.compile(r"(function:|step:([\w.]+:)?)[\w.<>]+")  # `make.<locals>.undo` is the step of a function `make`


class RegisteredFunctions:
    """The functions that the records of one run can name."""

    __slots__ = ("_definition", "_workflows")

    def __init__(self, definition: Workflow[Any, Any], workflows: WorkflowLookup) -> None:
        self._definition = definition
        self._workflows = workflows

    def name_of(self, fn: Any) -> str:
        """Return the registered name of a function. Raises `WorkflowMisuse` if it has none."""
        return _registered_name(fn, self._definition.fn.__module__)

    def find(self, name: str, registered_by: WorkflowKey | None) -> Any:
        """Return the step or function of a recorded name, or None.

        `registered_by` is the workflow whose module the name is about; None is the workflow of the run.
        """
        definition: Workflow[Any, Any] | None = self._definition
        if registered_by is not None and registered_by != self._key:
            definition = self._workflows.find(*registered_by)
        return None if definition is None else _find_registered(name, definition.fn.__module__)

    def key_in(self, successor: Workflow[Any, Any]) -> WorkflowKey | None:
        """Return the workflow that relative names are about when the run continues as `successor`; None: that one."""
        return None if successor.fn.__module__ == self._definition.fn.__module__ else self._key

    @property
    def _key(self) -> WorkflowKey:
        return (self._definition.name, self._definition.version)


def has_valid_form(name: str) -> bool:
    """Return whether a name has one of the forms that this version records."""
    return _FORM.fullmatch(name) is not None


def is_relative(name: str) -> bool:
    """Return whether a name is about the module of the workflow that has recorded it."""
    return ":" not in name.removeprefix(_STEP).removeprefix(_FUNCTION)


def _registered_name(fn: Any, module: str) -> str:
    if isinstance(fn, BoundStep):
        raise WorkflowMisuse(
            f"{fn!r} is a method of {fn.instance!r}, to run when this run is rolled back or ends, after the loop "
            "iteration or generation that registers it is deleted: no instance is stored; use a step that is a "
            "function, and read what it needs from current_step().state"
        )
    if isinstance(fn, Step):
        defined_in, name = step_origin(fn.fn)
        known = STEPS.get((defined_in, name))
        if name and known is not None and known.fn is fn.fn:
            return f"{_STEP}{name}" if defined_in == module else f"{_STEP}{defined_in}:{name}"
    elif isinstance(fn, FunctionType) and _find_function(module, fn.__qualname__) is fn:
        return f"{_FUNCTION}{fn.__qualname__}"
    raise WorkflowMisuse(
        f"{fn!r} is to run when this run is rolled back or ends, after the loop iteration or generation that registers "
        f"it is deleted: it must be a step, or a function at the top of module {module!r}; decorate it with @step"
    )


def _find_registered(name: str, module: str) -> Any:
    if name.startswith(_STEP):
        defined_in, _, qualified = name.removeprefix(_STEP).rpartition(":")
        return _find_step(defined_in or module, qualified)
    if name.startswith(_FUNCTION):
        return _find_function(module, name.removeprefix(_FUNCTION))
    defined_in, _, qualified = name.partition(":")
    found = _find_step(defined_in, qualified)
    return _find_function(module, qualified) if found is None and defined_in == module else found


def _find_step(module: str, qualified: str) -> Step[Any, Any] | None:
    """Return a step that is not a method: a record has no instance to call a method on."""
    found = STEPS.get((module, qualified))
    return None if found is None or found.is_method else found


def _find_function(module: str, qualified: str) -> FunctionType | None:
    """Return the function that a module defines under a name. One that the module has only imported does not count.

    Reads namespaces without `getattr`, because a module or class may execute code for an unknown attribute.
    """
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
        found = found.__func__ if isinstance(found, staticmethod) else found
    found = found.fn if isinstance(found, Step) else found
    if not isinstance(found, FunctionType):
        return None
    return found if (found.__module__, found.__qualname__) == (module, qualified) else None
