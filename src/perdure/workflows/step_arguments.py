"""StepArguments: bind the arguments of a step call to the parameters of its function, and check them.

A call has a shape: the number of positional arguments and the names of the others. A shape is bound once; later calls
of the same shape find the checks of their values. Values are never changed, converted or completed with defaults: the
fingerprint of a call is that of the arguments as given. This module knows no run and no codec.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import FunctionType
from typing import Any

from perdure.codec.annotations import resolve_annotations
from perdure.codec.argument_checks import ArgumentCheck, argument_check
from perdure.codec.plain_values import Mismatch
from perdure.errors import InvalidPayload


class Checks(tuple[ArgumentCheck | None, ...]):
    """One per argument: positional ones, then those by name, in the order of the call. Empty if none needs a check.

    Arguments of exactly the classes `fitting` need no check; None if there are no such classes.
    """

    fitting: tuple[type, ...] | None = None


NO_CHECKS = Checks()

Shape = int | tuple[int | str, ...]
"""The number of positional arguments, or that and the names of the others."""

MAX_SHAPES = 256  # a function with **kwargs has an unbounded number


class StepArguments:
    """The parameters of one function, without the first one if the function is bound as a method.

    `single` is the class of argument with which a call with one positional argument needs no check.
    """

    __slots__ = ("_fn", "_is_method", "_local_names", "_shapes", "_signature", "single")

    def __init__(self, fn: Callable[..., Any], local_names: Mapping[str, Any], *, is_method: bool) -> None:
        self._fn = fn
        self._local_names = local_names
        self._is_method = is_method
        self._signature: inspect.Signature | None = None
        self._shapes: dict[Shape, Checks] = {}
        self.single: type | None = None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Checks:
        """Return the checks for a call. Raises `TypeError` if the function cannot be called with these arguments."""
        shape: Shape = (len(args), *kwargs) if kwargs else len(args)
        checks = self._shapes.get(shape)
        if checks is None:
            checks = self._bind_shape(shape, args, kwargs)
        return NO_CHECKS if checks and checks.fitting == tuple(map(type, args)) else checks

    def _bind_shape(self, shape: Shape, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Checks:
        if not kwargs and self._takes_any(len(args)):
            return self._shapes.setdefault(len(args), NO_CHECKS)
        if self._signature is None:
            self._signature = self._read_signature()
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{getattr(self._fn, '__qualname__', self._fn)}(): {error}") from None
        checks = self._build_checks(self._signature, len(args), kwargs)
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes[shape] = checks
        if checks.fitting is not None and len(checks) == 1:
            [self.single] = checks.fitting
        return checks

    def _takes_any(self, count: int) -> bool:
        """Return whether a function without annotations takes this number of positional arguments.

        Reading a signature takes 10 us, which `ctx.step("name", lambda: ...)` would pay at each call.
        """
        fn = self._fn
        if not isinstance(fn, FunctionType) or fn.__annotations__ or fn.__code__.co_kwonlyargcount:
            return False
        most = fn.__code__.co_argcount
        return most - len(fn.__defaults__ or ()) <= count + self._is_method <= most

    def _read_signature(self) -> inspect.Signature:
        """Return the signature of the function itself. A wrapper may add arguments to those that it is called with."""
        try:
            signature = inspect.signature(self._fn, follow_wrapped=False)
        except (TypeError, ValueError):  # a builtin function without a signature
            return _ANY_ARGUMENTS
        parameters = list(signature.parameters.values())
        takes_self = bool(parameters) and parameters[0].kind in _POSITIONAL
        return signature.replace(parameters=parameters[1:]) if self._is_method and takes_self else signature

    def _build_checks(self, signature: inspect.Signature, count: int, kwargs: Mapping[str, Any]) -> Checks:
        hints = _resolve_hints(self._fn, self._local_names)
        positional = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
        further = [each for each in signature.parameters.values() if each.kind is Parameter.VAR_POSITIONAL]
        named = {each.name: each for each in signature.parameters.values() if each.kind in _NAMED}
        given = [(each.name, each.name) for each in positional[:count]]
        given += [(f"{each.name}[{index}]", each.name) for each in further for index in range(count - len(positional))]
        for name in kwargs:
            if name in named:
                given.append((name, name))
            else:
                others = next(each for each in signature.parameters.values() if each.kind is Parameter.VAR_KEYWORD)
                given.append((name, others.name))
        checks = Checks(argument_check(path, hints.get(parameter, Any)) for path, parameter in given)
        if not any(checks):
            return NO_CHECKS
        classes = tuple(check.exact_type for check in checks if check is not None and check.exact_type is not None)
        if len(classes) == count == len(checks):
            checks.fitting = classes
        return checks


def check_arguments(step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], checks: Checks) -> None:
    """Raise `InvalidPayload`, with the path of the field, if an argument does not fit its annotation."""
    for value, check in zip((*args, *kwargs.values()) if kwargs else args, checks, strict=True):
        if check is not None and type(value) is not check.exact_type:
            try:
                check(value)
            except Mismatch as error:
                raise InvalidPayload(f"arguments of step {step!r}: {error.path}: {error.reason}") from None


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_ANY_ARGUMENTS = inspect.Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)


def _resolve_hints(fn: Callable[..., Any], local_names: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return resolve_annotations(fn, local_names)
    except Exception:  # a callable object, a partial function or a builtin function
        return {}
