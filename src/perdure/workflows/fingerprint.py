"""Fingerprint of a workflow's code: equal for equal code in every process, different after a change.

A hold records it, so that code that cannot continue a run does not try again. A fingerprint that differs without need
costs one more attempt; one that is equal after a change would leave the run held. Therefore it covers more than the
function: the functions, classes and constants that the function refers to, those that they refer to, and the other
functions of its module. Installed packages other than the workflow's own count by their names only, and so do the
bodies of steps, which a replay does not run. Constants count in the workflow's module only: elsewhere they are often
values of the process, such as the name of the host.

It is computed from the loaded code and reads no file: a deploy may have replaced the files.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import logging
import re
import sys
import typing
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from perdure.workflows.definition import Workflow
from perdure.workflows.steps import Step

LOGGER = logging.getLogger("perdure.workflow")
MAX_OBJECTS = 1_000  # functions and classes, nearest first
DIGEST_BYTES = 12
_CONSTANTS = bool | int | float | complex | str | bytes | type(...) | None | Enum
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def code_fingerprint(fn: Callable[..., Any]) -> str | None:
    """Return the fingerprint of a function and of the code that it refers to; None if it cannot be computed."""
    try:
        walk = _CodeWalk(fn.__module__)
        walk.add(fn)
        module = sys.modules.get(fn.__module__)
        for value in list(vars(module).values()) if module is not None else ():
            if isinstance(value, FunctionType | type) and value.__module__ == fn.__module__:
                walk.add(value)
        return walk.digest()
    except Exception:  # raised by objects of user code: annotations, metaclasses, representations
        LOGGER.warning("The code of %r has no fingerprint", fn, exc_info=True)
        return None


class _CodeWalk:
    """Hashes functions and classes breadth first, each once. `module` is that of the workflow."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._package = module.partition(".")[0]
        self._hash = hashlib.blake2b(f"{sys.version_info[:2]}".encode(), digest_size=DIGEST_BYTES)
        self._seen: set[int] = set()
        self._queue: deque[FunctionType | type] = deque()

    def digest(self) -> str:
        for _ in range(MAX_OBJECTS):
            if not self._queue:
                break
            value = self._queue.popleft()
            if isinstance(value, FunctionType):
                self._hash_function(value)
            else:
                self._hash_class(value)
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Hash a constant; queue the code of a function, step, workflow, class or instance."""
        if isinstance(value, _CONSTANTS):
            self._feed(repr(value))
        elif isinstance(value, tuple):
            self._add_all(value)
        elif isinstance(value, frozenset):
            self._feed(*sorted(map(repr, value)))
        elif isinstance(value, FunctionType | type):
            self._enqueue(value)
        elif isinstance(value, functools.partial):
            self._add_all((value.func, value.args, *value.keywords.items()))
        elif isinstance(value, MethodType | staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add(value.fget)
        elif isinstance(value, Step):
            self.add(value.name)
            self._add_annotations(value.fn.__annotations__)
        elif isinstance(value, Workflow):
            self._add_all((value.name, value.fn))
        else:  # other values may change while the process runs, so that only their type counts
            self._enqueue(type(value))

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _add_annotations(self, annotations: dict[str, Any]) -> None:
        for name, annotation in annotations.items():
            self._feed(name, repr(annotation))
            self._add_all(each for each in (annotation, *typing.get_args(annotation)) if isinstance(each, type))

    def _enqueue(self, value: FunctionType | type) -> None:
        self._feed(f"{value.__module__}.{value.__qualname__}")
        if id(value) not in self._seen and self._is_user_code(value.__module__):
            self._seen.add(id(value))
            self._queue.append(value)

    def _hash_function(self, fn: FunctionType) -> None:
        names = self._hash_code(fn.__code__)
        self._add_all((fn.__defaults__, *(fn.__kwdefaults__ or {}).values()))
        self._add_annotations(fn.__annotations__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._add_variable(fn, name, _content(cell), names)
        for name in names:
            if name in fn.__globals__:
                self._add_variable(fn, name, fn.__globals__[name], names)

    def _add_variable(self, fn: FunctionType, name: str, value: Any, names: list[str]) -> None:
        """Hash a variable that a function uses: of a module what the function may use of it, no counters and flags."""
        if isinstance(value, ModuleType):
            if self._is_user_code(value.__name__):
                self._add_all(vars(value)[each] for each in names if each in vars(value))
        elif not isinstance(value, _CONSTANTS) or self._is_constant(fn, name):
            self.add(value)

    def _is_constant(self, fn: FunctionType, name: str) -> bool:
        return fn.__module__ == self._module and name not in _assigned_names(fn.__code__)

    def _hash_class(self, cls: type) -> None:
        self._add_all(cls.__bases__)
        self._add_annotations(vars(cls).get("__annotations__", {}))
        for name, value in vars(cls).items():
            if not name.startswith("__") or isinstance(value, FunctionType):
                self._feed(name)
                self.add(value)

    def _hash_code(self, code: CodeType) -> list[str]:
        """Hash the instructions, names and constants of a code object; return the names, also those of inner code."""
        names = list(code.co_names)
        self._feed(code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                names += self._hash_code(constant)
            else:
                self.add(constant)
        return names

    def _feed(self, *texts: str) -> None:
        for text in texts:
            if " at 0x" in text:
                text = _ADDRESS.sub("", text)
            self._hash.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _is_user_code(self, name: str | None) -> bool:
        """Return whether a module belongs to the workflow's package, or to code that is not installed."""
        top = (name or "builtins").partition(".")[0]
        if top == self._package:
            return True
        if top == "perdure" or top in sys.stdlib_module_names:
            return False
        return _INSTALLED.search(getattr(sys.modules.get(name or ""), "__file__", None) or "") is None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _assigned_names(code: CodeType) -> set[str]:
    """Return the global and enclosing variables that the code, or code inside of it, assigns."""
    instructions = dis.get_instructions(code)
    found = {each.argval for each in instructions if each.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    return found.union(*(_assigned_names(each) for each in code.co_consts if isinstance(each, CodeType)))
