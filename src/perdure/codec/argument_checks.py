"""Checks of arguments against annotations, for calls whose arguments are not recorded.

An argument fits if a payload of this annotation could hold it. It is not decoded, so two rules differ from those of a
payload. Accepted besides are instances of subclasses and of classes that no codec can encode. Refused is the encoded
form of an object (a dict for a dataclass, a value for an enum member), because the function would get that form.

Most values are accepted by msgspec, which is fast; the others are compared with the annotation part by part. This
module knows no step and no codec.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from perdure.codec.converters import _hints, _native_converter, _strip_qualifiers, _unexpected
from perdure.codec.plain_values import Mismatch, decode_model, explain, is_model, path_step, to_plain, type_name
from perdure.codec.pydantic_types import PydanticConverter, build_pydantic_converter, needs_pydantic

_encode = msgspec.msgpack.Encoder(enc_hook=to_plain).encode  # keeps nan, unlike JSON


class ArgumentCheck:
    """Checks the values of one parameter. A value whose class is `exact_type` fits; call the check for any other."""

    __slots__ = ("_annotation", "_decode", "_path", "exact_type")

    def __init__(self, name: str, annotation: Any) -> None:
        self._path = name
        self._annotation = annotation
        self.exact_type = annotation if isinstance(annotation, type) and not _has_parts(annotation) else None
        self._decode: Any = None
        if self.exact_type is None and not is_model(annotation):
            native = _native_or_none(annotation)
            if native is not None and native.comparable:
                self._decode = msgspec.msgpack.Decoder(annotation, dec_hook=decode_model).decode

    def __call__(self, value: Any) -> None:
        """Raise `Mismatch` if the value does not fit."""
        if self._decode is not None:
            try:
                decoded = self._decode(_encode(value))
                if type(decoded) is type(value) and decoded == value:
                    return
            except Exception:  # not encodable, or of another type: the comparison by parts decides
                pass
        try:
            _check(value, self._annotation, self._path)
        except RecursionError:  # the value contains itself
            return


def argument_check(name: str, annotation: Any) -> ArgumentCheck | None:
    """Return the check of a parameter, or None if every value fits."""
    annotation = _strip_qualifiers(annotation)
    if annotation is Any or getattr(annotation, "_is_protocol", False):
        return None
    if isinstance(annotation, type) or annotation is None or typing.get_origin(annotation) is not None:
        return ArgumentCheck(name, annotation)
    return None  # a TypeVar, or an annotation that is no type


def _native_or_none(annotation: Any) -> Any:
    try:
        return _native_converter(annotation)
    except Mismatch:  # a dict whose keys have several types
        return None


def _has_parts(cls: type) -> bool:
    """Return whether an instance of the class has annotated parts that need a check of their own."""
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named_tuple or typing.is_typeddict(cls) or dataclasses.is_dataclass(cls) or hasattr(cls, "__struct_fields__")


def _check(value: Any, annotation: Any, path: str) -> None:
    annotation = _strip_qualifiers(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:  # a class since Python 3.11
        return
    if origin in (typing.Union, types.UnionType):
        _check_union(value, args, annotation, path)
    elif origin is typing.Annotated:
        _check_constraints(value, annotation, args[0], path)
    elif origin is typing.Literal:
        if not any(type(value) is type(each) and value == each for each in args):
            raise Mismatch(path, f"Expected one of {', '.join(map(repr, args))}, got {value!r}")
    elif annotation is None:
        if value is not None:
            raise _unexpected("None", value, path)
    elif typing.is_typeddict(origin or annotation):
        _check_typed_dict(value, annotation, path)
    elif isinstance(origin or annotation, type):
        _check_class(value, origin or annotation, path)
        for part, item, hint in _parts(value, annotation, origin or annotation, args, path):
            _check(item, hint, path + part)


def _check_union(value: Any, members: tuple[Any, ...], annotation: Any, path: str) -> None:
    deepest: Mismatch | None = None
    for member in members:
        try:
            return _check(value, member, path)
        except Mismatch as mismatch:
            if len(mismatch.path) > len(path):  # a part does not fit, so that this is the member that was meant
                deepest = mismatch
    raise deepest or _unexpected(annotation, value, path)


def _check_constraints(value: Any, annotation: Any, plain: Any, path: str) -> None:
    """Check `Annotated[int, Meta(gt=0)]`: the type, then what msgspec or pydantic knows of the constraints."""
    _check(value, plain, path)
    if needs_pydantic(annotation):
        converter = _pydantic_converter(annotation)
        converter.convert(converter.convert(value, path, True), path, False)
        return
    try:
        msgspec.convert(value, annotation, dec_hook=decode_model)
    except msgspec.ValidationError as error:
        below, reason = explain(error)
        raise Mismatch(path + below, reason) from None


def _pydantic_converter(annotation: Any) -> PydanticConverter:
    try:
        return _cached_pydantic_converter(annotation)
    except TypeError:  # a validator that cannot be hashed
        return build_pydantic_converter(annotation)


_cached_pydantic_converter = functools.lru_cache(256)(build_pydantic_converter)


def _check_class(value: Any, cls: Any, path: str) -> None:
    if getattr(cls, "_is_protocol", False):
        return
    accepted: Any = _ALSO_ACCEPTED.get(cls, cls)
    try:
        fits = isinstance(value, accepted) and not (isinstance(value, bool) and cls in (int, float))
    except TypeError:  # a class that refuses `isinstance`
        return
    if not fits:
        raise Mismatch(path, f"Expected `{type_name(cls)}`, got `{type_name(type(value))}`")


_ALSO_ACCEPTED = {float: (float, int), bytes: (bytes, bytearray, memoryview)}


def _check_typed_dict(value: Any, annotation: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise _unexpected(annotation, value, path)
    required = (typing.get_origin(annotation) or annotation).__required_keys__
    for name, hint in _hints(annotation).items():
        if name in value:
            _check(value[name], hint, f"{path}.{name}")
        elif name in required and typing.get_origin(hint) is not typing.NotRequired:
            raise Mismatch(path, f"Object missing required field `{name}`")


def _parts(value: Any, annotation: Any, cls: type, args: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the relative path, the value and the annotation of each part of a value."""
    if isinstance(value, collections.abc.Mapping):
        if len(args) == 2:
            for key, item in value.items():
                yield f"[{key!r}]", key, args[0]
                yield path_step(key), item, args[1]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from _named(value, value._fields, annotation)
    elif issubclass(cls, tuple) and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise Mismatch(path, f"Expected {len(args)} items, got {len(value)}")
        yield from ((f"[{index}]", item, hint) for index, (item, hint) in enumerate(zip(value, args, strict=True)))
    elif isinstance(value, list | tuple | set | frozenset):
        if args:
            yield from ((f"[{index}]", item, args[0]) for index, item in enumerate(value))
    elif hasattr(type(value), "__struct_fields__"):
        yield from _named(value, type(value).__struct_fields__, annotation)
    elif dataclasses.is_dataclass(value):
        yield from _named(value, (each.name for each in dataclasses.fields(value)), annotation)


def _named(value: Any, names: Iterable[str], annotation: Any) -> Iterator[tuple[str, Any, Any]]:
    exact = type(value) is (typing.get_origin(annotation) or annotation)
    try:
        hints = _hints(annotation if exact else type(value))
    except Mismatch:  # annotations that cannot be resolved
        return
    for name in names:
        if hasattr(value, name):  # a field without a value: `init=False`
            yield f".{name}", getattr(value, name), hints.get(name, Any)
