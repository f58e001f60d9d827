"""Resolve the annotations of functions to types. Knows no codec."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def return_type(fn: Callable[..., Any], local_names: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Return the return annotation of a function, or `Any` if it is missing or cannot be resolved.

    `local_names` are the `enclosing_names` at the time when the function was decorated.
    """
    return resolve_annotations(fn, local_names).get("return", Any)


def resolve_annotations(fn: Callable[..., Any], local_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of a function as types. They are resolved separately if resolving all at once fails."""
    fn = _function_of(fn)
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:
        pass  # A name that exists only for type checkers, or in an enclosing function.
    inner: Any = inspect.unwrap(fn)
    names = {**enclosing_names(fn), **local_names, **_closure_names(inner)}
    found = {}
    for name, annotation in getattr(inner, "__annotations__", {}).items():
        with contextlib.suppress(Exception):
            found[name] = _resolve(annotation, inner, names)
    return found


def describe_missing_return(fn: Callable[..., Any], local_names: Mapping[str, Any]) -> str | None:
    """Return why the result type of a function is unknown; None if the function declares one."""
    if "return" in resolve_annotations(fn, local_names):
        return None
    given = getattr(inspect.unwrap(_function_of(fn)), "__annotations__", {}).get("return")
    if given is None:
        return "has no return annotation"
    return f"has the return annotation `{given}`, which cannot be resolved (is it imported for type checkers only?)"


def _function_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that has the annotations of a callable: that of a partial, or `__call__` of an object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    has_own = isinstance(fn, type) or hasattr(inspect.unwrap(fn), "__code__") or inspect.isroutine(fn)
    return fn if has_own else type(fn).__call__


def _resolve(annotation: Any, fn: Any, names: dict[str, Any]) -> Any:
    def holder() -> None: ...

    holder.__annotations__ = {"annotation": annotation}
    return typing.get_type_hints(holder, fn.__globals__, names, include_extras=True)["annotation"]


def _closure_names(fn: Any) -> dict[str, Any]:
    names: dict[str, Any] = {}
    if not hasattr(fn, "__code__"):
        return names
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # The cell is still empty.
            names[name] = cell.cell_contents
    return names


def enclosing_names(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the local variables of enclosing functions that postponed annotations of `fn` name.

    The enclosing functions must still be running. A class that is local to a test is not a closure variable of the
    workflow beside it, so it is read from the frame.
    """
    inner: Any = inspect.unwrap(fn)
    if "<locals>" not in getattr(inner, "__qualname__", ""):
        return {}
    postponed = " ".join(text for text in inner.__annotations__.values() if isinstance(text, str))
    wanted = set(re.findall(r"[^\W\d]\w*", postponed))
    names: dict[str, Any] = {}
    code, frame = inner.__code__, sys._getframe(1)
    while wanted and (frame := typing.cast(Any, frame).f_back) is not None:
        if code in frame.f_code.co_consts:
            code = frame.f_code
            names = {name: frame.f_locals[name] for name in wanted if name in frame.f_locals} | names
    return names
