"""Annotations of functions, resolved to types."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def returns_of(fn: Callable[..., Any], nearby: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """The return annotation of a function; `Any` where there is none or it cannot be resolved.

    `nearby` are the `enclosing_names` at the time when it was decorated.
    """
    return _annotations(fn, nearby).get("return", Any)


def _annotations(fn: Callable[..., Any], nearby: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a function as types, each resolved on its own if they cannot be resolved together."""
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:
        pass  # a name that only the type checker sees, or one of an enclosing function
    inner: Any = inspect.unwrap(fn)
    names = {**enclosing_names(fn), **nearby, **_closure(inner)}
    found = {}
    for name, annotation in inner.__annotations__.items():
        with contextlib.suppress(Exception):
            found[name] = _resolved(annotation, inner, names)
    return found


def _resolved(annotation: Any, fn: Any, names: dict[str, Any]) -> Any:
    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    return typing.get_type_hints(holder, fn.__globals__, names, include_extras=True)["it"]


def _closure(fn: Any) -> dict[str, Any]:
    names = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # still empty
            names[name] = cell.cell_contents
    return names


def enclosing_names(fn: Callable[..., Any]) -> dict[str, Any]:
    """What postponed annotations name in the functions around `fn`, as long as these are still running.

    A class that is local to a test is no closure variable of the workflow beside it; only the frame knows it.
    """
    inner: Any = inspect.unwrap(fn)
    if "<locals>" not in getattr(inner, "__qualname__", ""):
        return {}
    texts = " ".join(text for text in inner.__annotations__.values() if isinstance(text, str))
    wanted = set(re.findall(r"[^\W\d]\w*", texts))
    names: dict[str, Any] = {}
    code, frame = inner.__code__, sys._getframe(1)
    while wanted and (frame := typing.cast(Any, frame).f_back) is not None:
        if code in frame.f_code.co_consts:
            code = frame.f_code
            names = {name: frame.f_locals[name] for name in wanted if name in frame.f_locals} | names
    return names
