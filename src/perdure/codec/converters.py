"""Converters for annotations that msgspec rejects.

A converter turns a value into data that msgspec can encode, and decoded plain data into the value. `Native` delegates
to msgspec. The docstring of `codec.py` describes how a union is encoded. This module knows no bytes and no codec.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from perdure.codec.plain_values import (
    SCALARS,
    SUPPORTED,
    Mismatch,
    check_exact,
    decode_model,
    explain,
    is_model,
    path_step,
    to_plain,
    type_name,
)
from perdure.codec.pydantic_types import build_pydantic_converter, contains_pydantic, needs_pydantic


class Converter(Protocol):
    """Converts values of one annotation."""

    @property
    def kind(self) -> Any:
        """The class of all values, or None if there are several."""
        ...

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        """Return data that msgspec can encode if `encoding`, else the value for decoded plain data."""
        ...


def converter_for(annotation: Any) -> Converter:
    """Return the converter for an annotation. Raises `Mismatch` if the type is not supported."""
    try:
        return _find_converter(annotation)
    except TypeError:  # The annotation cannot be hashed, so the cache cannot hold it.
        return _find_converter.__wrapped__(annotation)


@functools.cache
def _find_converter(annotation: Any) -> Converter:
    annotation = _strip_qualifiers(annotation)
    if needs_pydantic(annotation):
        with contextlib.suppress(Mismatch):  # pydantic is missing, or the type is a Struct
            return build_pydantic_converter(annotation, functools.partial(_legacy_converter, annotation))
        annotation = _without_metadata(annotation)
    if (native := _native_converter(annotation)) is not None:
        return native
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    kind = origin or annotation
    if kind in (typing.Union, types.UnionType):
        return _Union(args)
    if kind is typing.Literal:
        return _Literal(args)
    if kind is tuple and args[-1:] != (...,):
        return _Items(tuple, tuple, tuple(map(converter_for, args)))
    if kind in _SEQUENCES and args:
        return _Items(_SEQUENCES[kind], _SEQUENCES[kind], converter_for(args[0]))
    if kind in _MAPPINGS and args:
        return _Mapping(converter_for(types.GenericAlias(dict, (args[0], None))), converter_for(args[1]))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make"):
        hints, names = _hints(annotation), typing.cast(Any, kind)._fields
        return _Items(kind, kind._make, tuple(converter_for(hints.get(name, Any)) for name in names))
    fields = typing.is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")
    if not fields:
        return _build_last_converter(annotation)
    if any(isinstance(hint, dataclasses.InitVar) for hint in _hints(annotation).values()):
        raise Mismatch("", f"the type `{type_name(annotation)}` cannot be encoded; {SUPPORTED}")
    return _Fields(annotation)


def _build_last_converter(annotation: Any) -> Converter:
    """Return the converter of pydantic for a type that has no other one."""
    try:
        return build_pydantic_converter(annotation)
    except Mismatch as error:
        unsupported = f"the type `{type_name(annotation)}` cannot be encoded; {SUPPORTED}. {error.reason}"
        raise Mismatch("", unsupported) from None


def _legacy_converter(annotation: Any) -> Converter:
    """Return the converter of a union before pydantic converted it."""
    return converter_for(_without_metadata(annotation))


def _without_metadata(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _strip_qualifiers(annotation: Any) -> Any:
    """Return an annotation without NewType, type alias and qualifiers."""
    while True:
        if annotation in (object, typing.NoReturn, typing.Never):
            return Any
        if hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif typing.get_origin(annotation) in (typing.Required, typing.NotRequired, typing.Final) or (
            typing.get_origin(annotation) is typing.Annotated
            and not needs_pydantic(annotation)
            and _native_converter(annotation) is None
        ):
            annotation = typing.get_args(annotation)[0]
        else:
            return annotation


def _native_converter(annotation: Any) -> Native | None:
    """Return the converter that delegates to msgspec, or None if msgspec does not support every type in it."""
    try:
        msgspec.json.Decoder(annotation, dec_hook=decode_model)
        nodes = list(_iterate_types(msgspec.inspect.type_info(annotation), set()))
    except Exception:  # TypeError for unsupported types, NameError and others for unresolved ones.
        return None
    if contains_pydantic(annotation):
        return None
    for node in nodes:
        if isinstance(node, msgspec.inspect.CustomType) and not is_model(node.cls):
            return None
        # A key is text in JSON, so the type of "1" would be ambiguous.
        if isinstance(node, msgspec.inspect.DictType) and isinstance(node.key_type, msgspec.inspect.UnionType):
            raise Mismatch("", f"`{type_name(annotation)}` cannot be encoded: the keys of a dict must have one type")
    kinds = {type(node) for node in nodes}
    objects = [id(node) for node in nodes if hasattr(node, "fields")]
    bounded = not kinds & _UNBOUNDED and len(set(objects)) == len(
        objects
    )  # Visited twice: the type may contain itself.
    return Native(annotation, msgspec.inspect.DecimalType not in kinds, bounded)


_UNBOUNDED = {msgspec.inspect.AnyType, msgspec.inspect.CustomType, msgspec.inspect.RawType}


def _iterate_types(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a msgspec type and all types in it. A type that occurs again is not entered again."""
    if isinstance(node, tuple):
        for each in node:
            yield from _iterate_types(each, seen)
    elif isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        yield node
        if id(node) not in seen:
            seen.add(id(node))
            for name in node.__struct_fields__:
                yield from _iterate_types(getattr(node, name), seen)


@dataclasses.dataclass(frozen=True, slots=True)
class Native:
    """Converter that delegates to msgspec."""

    annotation: Any
    comparable: bool
    bounded: bool

    @property
    def kind(self) -> Any:
        kind = type(None) if self.annotation is None else typing.get_origin(self.annotation) or self.annotation
        return dict if typing.is_typeddict(kind) else kind

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        if encoding:
            check_exact(value, self.annotation, path)
            return value
        try:
            return msgspec.convert(value, self.annotation, str_keys=True, dec_hook=decode_model)
        except Exception as error:
            below, reason = explain(error)
            raise Mismatch(path + below, reason) from error


_SEQUENCES: dict[Any, type] = {
    **dict.fromkeys(
        (list, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection), list
    ),
    **dict.fromkeys((set, collections.abc.Set, collections.abc.MutableSet), set),
    tuple: tuple,
    frozenset: frozenset,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclasses.dataclass(frozen=True, slots=True)
class _Items:
    """A list, set or tuple with one converter, or a tuple or NamedTuple with one converter per item."""

    kind: type
    build: Callable[[list[Any]], Any]
    converters: Converter | tuple[Converter, ...]

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        accepted = (set, frozenset) if self.kind in (set, frozenset) else (list, tuple)
        if not isinstance(value, accepted if encoding else list):
            raise _unexpected(self.kind, value, path)
        converters = self.converters if isinstance(self.converters, tuple) else (self.converters,) * len(value)
        if len(value) != len(converters):
            raise Mismatch(path, f"Expected {len(converters)} items, got {len(value)}")
        pairs = enumerate(zip(value, converters, strict=True))
        items = [converter.convert(item, f"{path}[{index}]", encoding) for index, (item, converter) in pairs]
        return items if encoding else self.build(items)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    """A dict with converters for keys and values."""

    keys: Converter
    item: Converter
    kind = dict

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(dict, value, path)
        keys = self.keys.convert(dict.fromkeys(value), path, encoding)
        return {
            key: self.item.convert(item, path + path_step(key), encoding)
            for key, item in zip(keys, value.values(), strict=True)
        }


class _Field(typing.NamedTuple):
    name: str
    key: str
    converter: Converter
    default: Callable[[], Any] | None
    required: bool


class _Fields:
    """An object with named fields: a dataclass, Struct or TypedDict."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self.cls: Any = typing.get_origin(annotation) or annotation
        self.kind: Any = dict if typing.is_typeddict(self.cls) else self.cls

    @functools.cached_property  # On first use, so that a type may contain itself.
    def fields(self) -> tuple[_Field, ...]:
        return tuple(self._declared(_hints(self.annotation)))

    def _declared(self, hints: dict[str, Any]) -> Iterator[_Field]:
        if self.kind is dict:
            for name, hint in hints.items():
                # With postponed annotations, only the resolved hint shows NotRequired.
                required = name in self.cls.__required_keys__ and typing.get_origin(hint) is not typing.NotRequired
                yield _Field(name, name, self._field_converter(name, hint), None, required)
            return
        struct = hasattr(self.cls, "__struct_fields__")
        for each in typing.cast(Any, msgspec.structs.fields if struct else dataclasses.fields)(self.cls):
            default = None
            if each.default is not msgspec.NODEFAULT and each.default is not dataclasses.MISSING:
                default = functools.partial(getattr, each, "default")
            elif each.default_factory is not msgspec.NODEFAULT and each.default_factory is not dataclasses.MISSING:
                default = each.default_factory
            key = each.encode_name if struct else each.name
            yield _Field(each.name, key, self._field_converter(each.name, hints[each.name]), default, default is None)

    def _field_converter(self, name: str, hint: Any) -> Converter:
        try:
            return converter_for(hint)
        except Mismatch as error:
            raise Mismatch(f".{name}{error.path}", error.reason) from None

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        if encoding and self.kind is not dict:
            # A dict in encoded form is accepted for the object.
            instance = self.convert(value, path, False) if isinstance(value, dict) else value
            if type(instance) is not self.cls:
                raise _unexpected(self.cls, value, path)
            value = {field.key: getattr(instance, field.name) for field in self.fields}
        elif not isinstance(value, dict):
            raise _unexpected(self.cls, value, path)
        converted = {}
        for field in self.fields:
            if field.key in value:
                item = field.converter.convert(value[field.key], f"{path}.{field.name}", encoding)
                converted[field.key if encoding else field.name] = item
            elif field.required:
                raise Mismatch(path, f"Object missing required field `{field.key}`")
            elif field.default is not None:
                converted[field.name] = field.default()
        if encoding or self.kind is dict:
            return converted
        try:
            return self._build(converted)
        except (TypeError, ValueError) as error:
            raise Mismatch(path, str(error)) from error

    def _build(self, values: dict[str, Any]) -> Any:
        if hasattr(self.cls, "__struct_fields__"):
            return self.cls(**values)
        instance = self.cls.__new__(self.cls)  # Like msgspec: set the recorded fields, then call __post_init__.
        for name, value in values.items():
            object.__setattr__(instance, name, value)
        if hasattr(instance, "__post_init__"):
            instance.__post_init__()
        return instance


class _Union:
    """A union that msgspec rejects. The docstring of `codec.py` describes its encoding."""

    kind = None

    def __init__(self, members: tuple[Any, ...]) -> None:
        members = tuple(map(_strip_qualifiers, members))
        untagged = tuple(member for member in members if member in SCALARS)
        tagged = tuple(member for member in members if member not in SCALARS)
        self.untagged = (converter_for(typing.Union[untagged]),) if untagged else ()  # noqa: UP007
        self.members = dict(zip(_tags(tagged), map(converter_for, tagged), strict=True))
        self.inline = {tag for tag, member in zip(self.members, tagged, strict=True) if _has_fields(member)}
        self.text = " | ".join(map(type_name, members))

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        return self._encode(value, path) if encoding else self._decode(value, path)

    def _encode(self, value: Any, path: str) -> Any:
        tags = [tag for tag, converter in self.members.items() if type(value) is converter.kind]
        if len(tags) == 1:  # Unambiguous: if the value does not match, the error of this member is the useful one.
            return self._tagged(tags[0], value, path)
        attempts: list[Callable[[], Any]] = [
            functools.partial(converter.convert, value, path, True) for converter in self.untagged
        ]
        attempts += [functools.partial(self._tagged, tag, value, path) for tag in tags or self.members]
        return self._first_match(attempts, value, path)

    def _tagged(self, tag: str, value: Any, path: str) -> Any:
        body = self.members[tag].convert(value, path, True)
        if tag not in self.inline:
            return {_TAG: tag, "value": body}
        return {_TAG: tag, **msgspec.to_builtins(body, str_keys=True, enc_hook=to_plain)}

    def _decode(self, data: Any, path: str) -> Any:
        if isinstance(data, dict) and isinstance(tag := data.get(_TAG), str) and tag in self.members:
            if tag in self.inline:
                body = {key: item for key, item in data.items() if key != _TAG}
                return self.members[tag].convert(body, path, False)
            if data.keys() == {_TAG, "value"}:
                return self.members[tag].convert(data["value"], path, False)
        converters = (*self.untagged, *self.members.values())
        attempts = [functools.partial(converter.convert, data, path, False) for converter in converters]
        return self._first_match(attempts, data, path)

    def _first_match(self, attempts: Sequence[Callable[[], Any]], value: Any, path: str) -> Any:
        """Return the result of the first attempt that does not raise `Mismatch`."""
        mismatches = []
        for attempt in attempts:
            try:
                return attempt()
            except Mismatch as error:
                mismatches.append(error)
        # If only one member failed below the top level, its error is the most specific.
        below = [error for error in mismatches if error.path != path]
        raise below[0] if len(below) == 1 else _unexpected(self.text, value, path)


_TAG = "$type"


def _tags(members: tuple[Any, ...]) -> list[str]:
    """Return a tag for each member: its short name if unambiguous, else its qualified name."""
    short = [type_name(member) for member in members]
    full = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else str(each) for each in members]
    tags = [long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True)]
    if len(set(tags)) != len(tags):
        raise Mismatch("", f"the types {', '.join(full)} must have different names to be members of one union")
    return tags


def _has_fields(member: Any) -> bool:
    """Return True if a member is always encoded as an object with known fields, to which a tag can be added."""
    kind = typing.get_origin(member) or member
    if is_model(kind):
        return not kind.__pydantic_root_model__
    if hasattr(kind, "__struct_config__"):
        return not kind.__struct_config__.array_like
    return dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)


class _Literal:
    """A Literal of enum members or bytes, which msgspec rejects."""

    kind = None

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        for each in self.values:
            forms = (each,) if encoding else (each, msgspec.to_builtins(each))
            if any(type(value) is type(form) and value == form for form in forms):
                return each
        raise _unexpected(f"Literal{list(self.values)}", value, path)


def _hints(annotation: Any) -> dict[str, Any]:
    """Return the annotations of a class, with the type parameters of a generic substituted."""
    cls = typing.get_origin(annotation) or annotation
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:
        raise Mismatch("", f"the annotations of `{type_name(cls)}` cannot be resolved: {error}") from error
    given = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))

    def substitute(hint: Any) -> Any:
        if isinstance(hint, typing.TypeVar):
            return given.get(hint, Any)
        parameters = getattr(hint, "__parameters__", ())
        return hint[tuple(given.get(each, Any) for each in parameters)] if parameters else hint

    return {name: substitute(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


def _unexpected(expected: Any, got: Any, path: str) -> Mismatch:
    name = expected if isinstance(expected, str) else type_name(expected)
    return Mismatch(path, f"Expected `{name}`, got `{type_name(type(got))}`")
