"""Parameters: encode the arguments of a function as one payload, by parameter name.

A payload is one object, `{"order": {...}, "gift": true}`: readable in a database, and independent of the order of the
parameters. Defaults are not recorded: a missing argument gets the default of the executing code.

This module knows annotations and codecs; it knows no workflow, step, run or store.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any

from perdure.codec import Codec
from perdure.codec.annotations import enclosing_names, resolve_annotations
from perdure.errors import InvalidPayload


class Parameters:
    """Encodes and decodes the arguments of one function. Built once per definition."""

    @classmethod
    def of(cls, fn: Callable[..., Any], skip: int) -> Parameters:
        """Return the parameters of a function after the first `skip`.

        Annotations are resolved on first use, so that they may name types that are defined later. An annotation that
        cannot be resolved counts as `Any`.
        """
        signature = inspect.signature(fn)
        remaining = list(signature.parameters.values())[skip:]
        return cls(fn, signature.replace(parameters=remaining))

    def __init__(self, fn: Callable[..., Any], signature: inspect.Signature) -> None:
        self._fn = fn
        self._enclosing_names = enclosing_names(fn)
        self._signature = signature
        self._parameters = tuple(signature.parameters.values())
        self._names = tuple(signature.parameters)
        self._simple = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in self._parameters)
        self._required = sum(each.default is Parameter.empty for each in self._parameters)

    @functools.cached_property
    def type(self) -> Any:
        """The type of the payload: a TypedDict in which parameters with a default are optional."""
        hints = resolve_annotations(self._fn, self._enclosing_names)
        fields = {each.name: _field_annotation(each, hints.get(each.name, Any)) for each in self._parameters}
        return build_typed_dict(getattr(self._fn, "__name__", "payload"), fields)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The annotation of each parameter, in order."""
        known = resolve_annotations(self._fn, self._enclosing_names)
        return {each.name: known.get(each.name, Any) for each in self._parameters}

    @property
    def required(self) -> list[str]:
        """The names of the parameters without a default."""
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return [each.name for each in self._parameters if each.default is Parameter.empty and each.kind not in variable]

    def each(self) -> tuple[Parameter, ...]:
        """Return the parameters in order."""
        return self._parameters

    def find_unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that no parameter takes, sorted."""
        if any(each.kind is Parameter.VAR_KEYWORD for each in self._parameters):
            return []
        return sorted(set(names).difference(self._names))

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> bytes:
        """Return the arguments as bytes. Raises `InvalidPayload` if they do not match the parameters."""
        if self._simple and not kwargs and self._required <= len(args) <= len(self._names):
            return codec.encode(dict(zip(self._names, args, strict=False)), self.type, what=what)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidPayload(f"{what}: {getattr(self._fn, '__name__', self._fn)}(): {error}") from None
        return codec.encode(bound.arguments, self.type, what=what)

    def decode(self, codec: Codec, data: bytes, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a call: positional up to the first missing one, the others by name."""
        given = codec.decode(data, self.type, what=what)
        if self._simple and len(given) == len(self._names):
            return tuple(given[name] for name in self._names), {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        has_gap = False
        for each in self._parameters:
            if each.name not in given:
                has_gap = True
            elif each.kind is Parameter.VAR_POSITIONAL:
                args.extend(given[each.name])
            elif each.kind is Parameter.VAR_KEYWORD:
                kwargs.update(given[each.name])
            elif has_gap or each.kind is Parameter.KEYWORD_ONLY:
                kwargs[each.name] = given[each.name]
            else:
                args.append(given[each.name])
        return tuple(args), kwargs

    def equal(self, codec: Codec, a: bytes, b: bytes) -> bool:
        """Return True if two payloads are equal arguments for the current code, defaults included."""
        if a == b:
            return True
        try:
            first, second = self._with_defaults(codec, a), self._with_defaults(codec, b)
            # Equality treats Decimals 1.0 and 1.00 as equal; the encoding compares objects without __eq__.
            return bool(first == second) or codec.canonical(first) == codec.canonical(second)
        except Exception:
            return False  # A payload that the current code cannot decode is not equal.

    def _with_defaults(self, codec: Codec, data: bytes) -> dict[str, Any]:
        given = codec.decode(data, self.type)
        bound = inspect.BoundArguments(self._signature, given)
        bound.apply_defaults()
        return dict(bound.arguments)


def _field_annotation(parameter: Parameter, annotation: Any) -> Any:
    """Return the annotation of one parameter in the payload type."""
    if isinstance(annotation, typing.ParamSpecArgs | typing.ParamSpecKwargs):
        annotation = Any
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return typing.NotRequired[typing.cast(Any, tuple)[annotation, ...]]
    if parameter.kind is Parameter.VAR_KEYWORD:
        unpacked = typing.get_origin(annotation) is typing.Unpack
        return typing.NotRequired[
            typing.get_args(annotation)[0] if unpacked else typing.cast(Any, dict)[str, annotation]
        ]
    return annotation if parameter.default is Parameter.empty else typing.NotRequired[annotation]


def build_typed_dict(name: str, fields: dict[str, Any]) -> Any:
    """Return a TypedDict type with these fields."""
    return typing.cast(Any, typing.TypedDict)(name, fields)
