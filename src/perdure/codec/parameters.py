"""What functions take and raise, as payloads: parameters by name, exceptions by their fields.

A workflow's payload is encoded as one object by parameter name, `{"order": {...}, "gift": true}`: readable in a
database, and independent of the order of the parameters. Defaults are not recorded: a parameter that was not given
gets the default of the code that runs.

This room knows annotations and codecs; it knows no workflow, step, run or store.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from perdure.codec import Codec
from perdure.codec.annotations import _annotations, enclosing_names
from perdure.errors import InvalidPayload


class Parameters:
    """How the arguments of one function are encoded; built once per definition."""

    @classmethod
    def of(cls, fn: Callable[..., Any], skip: int) -> Parameters:
        """The parameters of a function after the first `skip`. Annotations are resolved on first use, so that they
        may name what is defined later; one that cannot be resolved counts as `Any`."""
        signature = inspect.signature(fn)
        kept = list(signature.parameters.values())[skip:]
        return cls(fn, signature.replace(parameters=kept))

    def __init__(self, fn: Callable[..., Any], signature: inspect.Signature) -> None:
        self._fn = fn
        self._nearby = enclosing_names(fn)
        self._signature = signature
        self._parameters = tuple(signature.parameters.values())
        self._names = tuple(signature.parameters)
        self._simple = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in self._parameters)
        self._required = sum(each.default is Parameter.empty for each in self._parameters)

    @functools.cached_property
    def type(self) -> Any:
        """The payload as one annotation: a TypedDict, in which parameters with a default may be missing."""
        hints = _annotations(self._fn, self._nearby)
        fields = {each.name: _field(each, hints.get(each.name, Any)) for each in self._parameters}
        return _typed_dict(getattr(self._fn, "__name__", "payload"), fields)

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The annotation of each parameter, in order."""
        known = _annotations(self._fn, self._nearby)
        return {each.name: known.get(each.name, Any) for each in self._parameters}

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> bytes:
        """The arguments as bytes; `InvalidPayload` if they do not fit the parameters or their annotations."""
        if self._simple and not kwargs and self._required <= len(args) <= len(self._names):
            return codec.encode(dict(zip(self._names, args, strict=False)), self.type, what=what)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidPayload(f"{what}: {getattr(self._fn, '__name__', self._fn)}(): {error}") from None
        return codec.encode(bound.arguments, self.type, what=what)

    def decode(self, codec: Codec, data: bytes, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, ready for a call: positional ones up to the first that was not given, the others by name."""
        given = codec.decode(data, self.type, what=what)
        if self._simple and len(given) == len(self._names):
            return tuple(given[name] for name in self._names), {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        gap = False
        for each in self._parameters:
            if each.name not in given:
                gap = True
            elif each.kind is Parameter.VAR_POSITIONAL:
                args.extend(given[each.name])
            elif each.kind is Parameter.VAR_KEYWORD:
                kwargs.update(given[each.name])
            elif gap or each.kind is Parameter.KEYWORD_ONLY:
                kwargs[each.name] = given[each.name]
            else:
                args.append(given[each.name])
        return tuple(args), kwargs

    def equal(self, codec: Codec, a: bytes, b: bytes) -> bool:
        """Whether two payloads are the same arguments for today's code, defaults included."""
        if a == b:
            return True
        try:
            one, other = self._with_defaults(codec, a), self._with_defaults(codec, b)
            # Equality knows that 1.0 and 1.00 are one Decimal, encoding knows objects that do not define equality.
            return bool(one == other) or codec.canonical(one) == codec.canonical(other)
        except Exception:
            return False  # what cannot be read today is not what was asked for today

    def _with_defaults(self, codec: Codec, data: bytes) -> dict[str, Any]:
        given = codec.decode(data, self.type)
        bound = inspect.BoundArguments(self._signature, given)
        bound.apply_defaults()
        return dict(bound.arguments)


def _field(parameter: Parameter, annotation: Any) -> Any:
    """One parameter's place in the payload."""
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


def _typed_dict(name: str, fields: dict[str, Any]) -> Any:
    return typing.cast(Any, typing.TypedDict)(name, fields)
