"""Target: importing the code that holds the workflows.

app.shop              the module; every workflow that is registered once it is imported
app.shop:workflows    an attribute of it: a list of workflows, or one workflow
app.py, shop/app.py   a file, imported with its folder on the path; `:attribute` may follow too
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from perdure.cli.session import FAILED, UsageError
from perdure.cli.settings import find_settings

if TYPE_CHECKING:
    from perdure.workflows.definition import Workflow


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for, split: `module` is a dotted name, `folder` what has to be on the path."""

    text: str
    module: str
    attribute: str | None
    folder: Path


def code_is_named(given: str | None) -> bool:
    """Whether there is a target at all, given or in [tool.perdure]."""
    return given is not None or find_settings().app is not None


def parse_target(given: str | None) -> Target:
    """The target that is meant: given, or the `app` of [tool.perdure]. Nothing is imported yet."""
    folder = Path.cwd()
    if given is None:
        settings = find_settings()
        given, folder = settings.app, settings.folder or folder
    if not given:
        raise UsageError(
            "no code is named", "app.shop:workflows or app.py as the target, or `app` under [tool.perdure]"
        )
    place, _, attribute = given.partition(":")
    if place.endswith(".py") or "/" in place:
        file = (folder / place).resolve()
        if not file.is_file():
            raise UsageError(f"there is no file {file}", "the path of a Python file, or the dotted name of a module")
        return Target(given, file.stem, attribute or None, file.parent)
    return Target(given, place, attribute or None, folder)


def load(target: Target) -> list[Workflow[Any, Any]]:
    """Import the code; its workflows."""
    module = _import(target)
    found = _workflows(target, module)
    if not found:
        raise UsageError(f"{target.text} has no workflows", "an `async def` with @workflow makes one")
    return found


def by_name(workflows: Iterable[Workflow[Any, Any]], name: str) -> Workflow[Any, Any]:
    """The newest version of this name."""
    there = list(workflows)
    matching = [each for each in there if each.name == name]
    if matching:
        return max(matching, key=lambda each: each.version)
    names = ", ".join(sorted({each.name for each in there}))
    raise UsageError(f"no workflow is named {name!r}", f"there are {names}", code=3)


def event_type(name: str) -> type | None:
    """The @event class of this name in the modules that are loaded, if there is just one."""
    from perdure.workflows.events import event_options

    found: set[type] = set()
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()):
            options = event_options(value)
            if options is not None and options.name == name:
                found.add(value)
    return found.pop() if len(found) == 1 else None


def _import(target: Target) -> ModuleType:
    if str(target.folder) not in sys.path:
        sys.path.insert(0, str(target.folder))
    try:
        return importlib.import_module(target.module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == target.module.partition(".")[0]:
            advice = "cd to where it can be imported from"
            raise UsageError(f"there is no module {target.module} in {target.folder}", advice) from None
        lines = "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__))).rstrip()
        raise UsageError(f"{target.module} cannot be imported:\n{lines}", code=FAILED) from None


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of the import machinery."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "importlib" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace


def _workflows(target: Target, module: ModuleType) -> list[Workflow[Any, Any]]:
    from perdure.workflows.definition import REGISTRY, Workflow

    if target.attribute is None:
        return list(REGISTRY.unambiguous().values())
    if not hasattr(module, target.attribute):
        raise UsageError(
            f"{target.module} has no {target.attribute}", "a list of workflows, a workflow, or no attribute"
        )
    found = getattr(module, target.attribute)
    if isinstance(found, Workflow):
        return [found]
    if isinstance(found, Iterable) and not isinstance(found, str | bytes):
        several = list(found)
        if all(isinstance(each, Workflow) for each in several):
            return several
    raise UsageError(f"{target.text} is {found!r}", "it should be a list of workflows, or one workflow")
