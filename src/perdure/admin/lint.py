"""Find calls in workflow code that differ between an execution and its replay.

The linter reads the source of a workflow function and of the plain functions of its module that it calls. Names are
resolved in the namespace of the function, so that aliases are found and local names are not mistaken for modules. Steps
are not looked into. A line that ends with `# perdure: ignore` is skipped.

The linter knows nothing of stores and runs. What it cannot resolve statically it does not report.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import inspect
import os
import pathlib
import random
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.workflows.definition import Workflow

IGNORE = "# perdure: ignore"

_NOW = "use ctx.now()"
_RANDOM = "use ctx.random"
_STEP = "move it into a step"
_CONSTANT = "pass it as an argument of the run, or read it in a step"
_UNKNOWN = object()

_CALLS: Mapping[str, str] = {
    **{f"time.{name}": _NOW for name in ("time", "time_ns", "monotonic", "perf_counter", "localtime", "gmtime")},
    "time.sleep": "use await ctx.sleep()",
    "posix.urandom": "use ctx.random.randbytes()",
    "os.getenv": _CONSTANT,
    **dict.fromkeys(("uuid.uuid1", "uuid.uuid4"), "use ctx.uuid()"),
    **dict.fromkeys(("random.Random", "random.SystemRandom"), _RANDOM),
    **dict.fromkeys(("io.open", "_io.open", "builtins.input"), _STEP),
}
_CLOCK_METHODS = {(datetime.datetime, name) for name in ("now", "utcnow", "today")} | {(datetime.date, "today")}
_FILE_METHODS = frozenset(
    [
        "read_text",
        "read_bytes",
        "write_text",
        "write_bytes",
        "open",
        "exists",
        "is_file",
        "is_dir",
        "mkdir",
        "unlink",
        "touch",
        "iterdir",
        "glob",
        "rglob",
        "stat",
        "rename",
        "replace",
        "rmdir",
        "cwd",
        "home",
    ]
)
_EXTERNAL_MODULES = frozenset(
    [
        "socket",
        "subprocess",
        "requests",
        "httpx",
        "aiohttp",
        "urllib3",
        "urllib.request",
        "http.client",
        "smtplib",
        "ftplib",
        "shutil",
        "tempfile",
        "sqlite3",
        "asyncpg",
        "psycopg",
        "psycopg2",
        "redis",
        "boto3",
        "botocore",
        "openai",
        "anthropic",
        "secrets",
        "threading",
        "multiprocessing",
    ]
)
_MUTATING_METHODS = frozenset(
    [
        "append",
        "extend",
        "insert",
        "remove",
        "pop",
        "clear",
        "add",
        "discard",
        "update",
        "setdefault",
        "popitem",
        "appendleft",
        "popleft",
        "sort",
        "reverse",
    ]
)
_ORDERED_BY = frozenset(["sorted", "sum", "len", "min", "max", "any", "all", "set", "frozenset"])


@dataclass(frozen=True, slots=True, order=True)
class LintFinding:
    """A line of workflow code that may take another path on replay."""

    path: str
    line: int
    workflow: str
    text: str
    remedy: str


def lint(workflows: Iterable[Workflow[Any, Any]]) -> list[LintFinding]:
    """Return the findings of all workflows, ordered by file and line."""
    found: set[LintFinding] = set()
    for workflow in workflows:
        found.update(lint_workflow(workflow))
    return sorted(found)


def lint_workflow(workflow: Workflow[Any, Any]) -> Iterator[LintFinding]:
    """Yield the findings of a workflow function and of the functions of its module that it calls."""
    pending, seen = [inspect.unwrap(workflow.fn)], set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        checker = _Checker(function)
        for line, text, remedy in checker.findings():
            yield LintFinding(function.__code__.co_filename, line, workflow.name, text, remedy)
        pending += [each for each in checker.called if each.__module__ == workflow.fn.__module__]


class _Checker(ast.NodeVisitor):
    """Walks the body of one function."""

    def __init__(self, function: types.FunctionType) -> None:
        self.called: list[types.FunctionType] = []
        self._names = _namespace(function)
        self._found: list[tuple[int, str, str]] = []
        self._lines, self._tree, self._offset = _source(function)
        self._local_names = _assigned_names(self._tree)
        self._sets = _names_of_sets(self._tree)

    def findings(self) -> Iterator[tuple[int, str, str]]:
        for statement in getattr(self._tree, "body", []):
            self.visit(statement)
        for line, text, remedy in self._found:
            if not self._lines[line - 1].rstrip().endswith(IGNORE):
                yield line + self._offset, text, remedy

    # --- calls and attributes

    def visit_Call(self, node: ast.Call) -> None:
        target = self._resolve(node.func)
        if isinstance(target, types.FunctionType):
            self.called.append(target)
        remedy = self._remedy(node.func, target)
        if remedy is not None and not (target is random.Random and node.args):
            self._report(node, f"{ast.unparse(node.func)}()", remedy)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATING_METHODS:
            self._check_mutation(node, node.func.value)
        if isinstance(node.func, ast.Name) and node.func.id in _ORDERED_BY:
            self._visit_unordered(node)
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("list", "tuple", "enumerate", "iter") and node.args:
            self._check_iteration(node.args[0])
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._resolve(node) is os.environ:
            self._report(node, "os.environ", _CONSTANT)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._resolve(node) is os.environ:
            self._report(node, "os.environ", _CONSTANT)

    def _remedy(self, func: ast.expr, target: object) -> str | None:
        if isinstance(func, ast.Attribute):
            owner = self._resolve(func.value)
            if isinstance(owner, type) and any(
                issubclass(owner, each) and func.attr == name for each, name in _CLOCK_METHODS
            ):
                return _NOW
            if func.attr in _FILE_METHODS and self._is_path(func.value, owner):
                return _STEP
        if target is _UNKNOWN:
            return None
        if getattr(target, "__self__", None) is random._inst:
            return _RANDOM
        module = str(getattr(target, "__module__", ""))
        remedy = _CALLS.get(f"{module}.{getattr(target, '__name__', '')}")
        return _STEP if remedy is None and _is_external(module) else remedy

    def _is_path(self, node: ast.expr, owner: object) -> bool:
        if isinstance(owner, type):
            return issubclass(owner, pathlib.Path)
        made = self._resolve(node.func) if isinstance(node, ast.Call) else None
        return isinstance(made, type) and issubclass(made, pathlib.PurePath)

    # --- iteration over sets

    def visit_For(self, node: ast.For) -> None:
        self._check_iteration(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._check_iteration(node.iter)
        self.generic_visit(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_unordered(node)

    def _visit_unordered(self, node: ast.AST) -> None:
        """Visit an expression whose value does not depend on the order of its items."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.GeneratorExp):
                child = ast.SetComp(child.elt, child.generators)
            if isinstance(child, ast.comprehension):
                for part in (child.target, child.iter, *child.ifs):
                    self.visit(part)
            elif isinstance(child, ast.SetComp):
                self._visit_unordered(child)
            else:
                self.visit(child)

    def _check_iteration(self, node: ast.expr) -> None:
        if self._is_set(node):
            self._report(node, "iteration over a set", "iterate over sorted(...), because the order of a set varies")

    def _is_set(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Call(func=ast.Name(id="set" | "frozenset" as name)):
                return name not in self._local_names
            case ast.Name(id=name):
                return name in self._sets or (
                    name not in self._local_names and isinstance(self._names.get(name), set | frozenset)
                )
        return False

    # --- module-level state

    def visit_Global(self, node: ast.Global) -> None:
        self._report(node, f"global {', '.join(node.names)}", "keep state in local variables of the workflow")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._check_mutation(node, node.value)
        self.generic_visit(node)

    def _check_mutation(self, node: ast.expr, owner: ast.expr) -> None:
        if isinstance(owner, ast.Name) and owner.id not in self._local_names:
            value = self._names.get(owner.id)
            if isinstance(value, list | dict | set | bytearray):
                remedy = "keep state in local variables of the workflow, or change it in a step"
                self._report(node, f"change of the module-level {type(value).__name__} {owner.id}", remedy)

    # --- names

    def _resolve(self, node: ast.expr) -> Any:
        """Return the object that a dotted name refers to, without calling anything; `_UNKNOWN` if it is not known."""
        match node:
            case ast.Name(id=name):
                return _UNKNOWN if name in self._local_names else self._names.get(name, _UNKNOWN)
            case ast.Attribute(value=value, attr=name):
                owner = self._resolve(value)
                if isinstance(owner, types.ModuleType) or (isinstance(owner, type) and owner is not _UNKNOWN):
                    return getattr(owner, name, _UNKNOWN)
        return _UNKNOWN

    def _report(self, node: ast.AST, text: str, remedy: str) -> None:
        self._found.append((getattr(node, "lineno", 1), text, remedy))


def _source(function: types.FunctionType) -> tuple[list[str], ast.AST, int]:
    """Return the lines of a function, its tree, and what to add to a line number of the tree."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):  # defined in a console, or the file has changed
        return [], ast.Module([], []), 0
    return lines, tree, first - 1


def _namespace(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of the names that a function does not define itself."""
    closure = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            closure[name] = _UNKNOWN
    return {**vars(builtins), **function.__globals__, **closure}


def _assigned_names(tree: ast.AST) -> set[str]:
    """Return the parameters and assigned names of a function and of those nested in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif node is not tree and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    globals_ = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return found - globals_


def _names_of_sets(tree: ast.AST) -> set[str]:
    """Return the local names to which a set is assigned."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            made = isinstance(node.value, ast.Set | ast.SetComp) or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id in ("set", "frozenset")
            )
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(each.id for each in targets if made and isinstance(each, ast.Name))
    return found


def _is_external(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in _EXTERNAL_MODULES)
