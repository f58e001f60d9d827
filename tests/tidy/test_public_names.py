"""`from perdure import` offers exactly what SPEC.md lists under "Public names"."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import perdure
from tests.tidy.sources import PACKAGE

PUBLIC = {
    *("Schedule", "Calendar", "ScheduleConflict", "ScheduleNotFound"),
    # what one writes and calls
    "workflow",
    "step",
    "event",
    "Context",
    "Engine",
    "EngineConfig",
    "Client",
    "Worker",
    "Run",
    "RunStatus",
    "RunQuery",
    "Retry",
    "WorkQueue",
    "Rate",
    "Debounce",
    "Break",
    "Continue",
    "Complete",
    "Suspended",
    "current_step",
    "current_context",
    "run",
    # errors
    "PerdureError",
    "WorkflowMisuse",
    "InvalidArgument",
    "InvalidPayload",
    "RunNotFound",
    "QueueNotFound",
    "RunTerminated",
    "RunConflict",
    "RunFailed",
    "RunCancelled",
    "RunHeld",
    "RequestRejected",
    "StepFailed",
    "StepInterrupted",
    "CriticalError",
    "RollbackError",
    "JoinError",
    "RaceError",
    "ChildFailed",
    "HistoryDiverged",
    "InvalidToken",
    "QueueFull",
    "StoreError",
}


def test_all_is_exactly_the_public_names():
    assert sorted(perdure.__all__) == sorted(PUBLIC)


def test_type_checkers_see_every_export_in_its_module():
    """The names imported under TYPE_CHECKING, for editors, are those of the table that `__getattr__` uses."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == perdure._EXPORTS


def test_every_public_name_is_there():
    assert [name for name in sorted(PUBLIC) if not hasattr(perdure, name)] == []


def test_no_public_name_is_hidden_by_a_module():
    """A module called `run` or `step` would replace the function of that name once it is imported."""
    for name in _submodules():
        importlib.import_module(f"perdure.{name}")
    assert [name for name in sorted(PUBLIC) if isinstance(getattr(perdure, name, None), ModuleType)] == []


def test_package_exposes_only_public_names_and_modules():
    shown = {name for name in vars(perdure) if not name.startswith("_")}
    assert shown - PUBLIC - _submodules() == set()


def test_importing_perdure_needs_neither_extras_nor_the_command():
    """In a fresh interpreter: what is optional is loaded when it is used, and a script does not pay for a terminal."""
    optional = {"asyncpg", "redis", "starlette", "uvicorn", "opentelemetry", "uvloop", "pydantic", "typer", "rich"}
    code = "import perdure, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, check=True, capture_output=True, text=True
    ).stdout.split()
    assert optional & set(loaded) == set()


def _submodules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
