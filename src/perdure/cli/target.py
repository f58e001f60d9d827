"""Import of the user's code.

app.shop              a module: every workflow that is registered after its import
app.shop:workflows    an attribute of a module: a list of workflows, or one workflow
app.py, shop/app.py   a file, imported with its folder on the path; `:attribute` may follow
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import AsyncIterator, Iterable
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
    """A parsed target: `module` is a dotted name, `folder` must be on the path."""

    text: str
    module: str
    attribute: str | None
    folder: Path


def code_is_named(given: str | None) -> bool:
    """Return True if a target is given or configured in [tool.perdure]."""
    return given is not None or find_settings().app is not None


def parse_target(given: str | None) -> Target:
    """Return the given target, or the `app` of [tool.perdure]. Imports nothing."""
    folder = Path.cwd()
    if given is None:
        settings = find_settings()
        given, folder = settings.app, settings.folder or folder
    if not given:
        raise UsageError("no target is given", "use app.shop:workflows or app.py, or set `app` under [tool.perdure]")
    return _parse(given, folder)


def _parse(given: str, folder: Path) -> Target:
    path, _, attribute = given.partition(":")
    if path.endswith(".py") or "/" in path:
        file = (folder / path).resolve()
        if not file.is_file():
            raise UsageError(
                f"there is no file {file}", "use the path of a Python file, or the dotted name of a module"
            )
        return Target(given, file.stem, attribute or None, file.parent)
    return Target(given, path, attribute or None, folder)


def load(target: Target) -> list[Workflow[Any, Any]]:
    """Import the code and return its workflows."""
    module = _import(target)
    found = _workflows(target, module)
    if not found:
        raise UsageError(f"{target.text} has no workflows", "decorate an `async def` with @workflow")
    return found


def load_unambiguous(target: Target) -> list[Workflow[Any, Any]]:
    """Import the code and return its workflows. Raises `UsageError` if two have the same name and version."""
    found: dict[tuple[str, int], Workflow[Any, Any]] = {}
    for each in load(target):
        _refuse_two(found.setdefault((each.name, each.version), each), each)
    return list(found.values())


def load_lifespan(given: str | None, target: Target) -> Any:
    """Import the given lifespan, or the `lifespan` of [tool.perdure]; None if there is none.

    A name without a module is an attribute of the target's module. No attribute is used without being named: a module
    often defines the lifespan of a web application.
    """
    from perdure.errors import InvalidArgument
    from perdure.execution.lifespan import check_lifespan

    folder = Path.cwd()
    if given is None:
        settings = find_settings()
        given, folder = settings.lifespan, settings.folder or folder
    if given is None:
        return None
    named = _parse(given, folder) if ":" in given else Target(given, target.module, given, target.folder)
    module = _import(named)
    if named.attribute is None or not hasattr(module, named.attribute):
        raise UsageError(f"{named.module} has no {named.attribute}", "use --lifespan module:name of an async function")
    try:
        return _reporting_errors(check_lifespan(getattr(module, named.attribute)), given)
    except InvalidArgument as error:
        raise UsageError(f"{given}: {error}") from None


def _reporting_errors(lifespan: Any, name: str) -> Any:
    """Return the lifespan with an error that ends the command instead of a traceback through it."""
    from perdure.execution.lifespan import open_manager

    @contextlib.asynccontextmanager
    async def entered(worker: Any) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            manager = open_manager(lifespan, worker)
            try:
                state = await stack.enter_async_context(manager)
            except Exception as error:
                lines = "".join(
                    traceback.format_exception(type(error), error, _user_part(error.__traceback__))
                ).rstrip()
                raise UsageError(f"lifespan {name} failed:\n{lines}", code=FAILED) from None
            yield state

    return entered


def _refuse_two(one: Workflow[Any, Any], other: Workflow[Any, Any]) -> None:
    if one.origin != other.origin:
        origins = f"{'.'.join(one.origin)} and {'.'.join(other.origin)}"
        raise UsageError(
            f"workflow {one.name!r} version {one.version} is defined in {origins}",
            "rename one, or use a list of workflows: module:attribute",
        )


def by_name(workflows: Iterable[Workflow[Any, Any]], name: str) -> Workflow[Any, Any]:
    """Return the highest version of the workflow with this name."""
    defined = list(workflows)
    matching = [each for each in defined if each.name == name]
    if matching:
        latest = max(matching, key=lambda each: each.version)
        for each in matching:
            if each.version == latest.version:
                _refuse_two(latest, each)
        return latest
    names = ", ".join(sorted({each.name for each in defined}))
    raise UsageError(f"no workflow is named {name!r}", f"the code defines {names}", code=3)


def event_type(name: str) -> type | None:
    """Return the @event class of this name if the loaded modules have exactly one."""
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
            advice = "change to the folder from which it can be imported"
            raise UsageError(f"there is no module {target.module} in {target.folder}", advice) from None
        raise UsageError(f"{target.module} cannot be imported:\n{_format_error(error)}", code=FAILED) from None


def _format_error(error: Exception) -> str:
    return "".join(traceback.format_exception(type(error), error, _user_part(error.__traceback__))).rstrip()


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """Strip frames of this module, of importlib and of contextlib from a traceback."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, contextlib.__file__)
        or "importlib" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace


def _workflows(target: Target, module: ModuleType) -> list[Workflow[Any, Any]]:
    from perdure.workflows.definition import REGISTRY, Workflow

    if target.attribute is None:
        return REGISTRY.all()
    if not hasattr(module, target.attribute):
        raise UsageError(
            f"{target.module} has no {target.attribute}", "use a list of workflows, a workflow, or no attribute"
        )
    found = getattr(module, target.attribute)
    if isinstance(found, Workflow):
        return [found]
    if isinstance(found, Iterable) and not isinstance(found, str | bytes):
        several = list(found)
        if all(isinstance(each, Workflow) for each in several):
            return several
    raise UsageError(f"{target.text} is {found!r}", "it must be a list of workflows, or one workflow")
