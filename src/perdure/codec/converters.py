"""Shapes: how annotations are carried out that msgspec refuses as a whole.

A shape turns a value into what msgspec writes, and plain data that msgspec read into the value; `Native` hands a part
back to msgspec. The head of the package says how a union is recorded. This room knows no bytes and no codec.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from perdure.codec.plain_values import (
    SCALARS,
    SUPPORTED,
    Mismatch,
    check_exact,
    explain,
    is_model,
    path_step,
    revive,
    to_plain,
    type_name,
)


class Converter(Protocol):
    @property
    def kind(self) -> Any:
        """The class of its values, or None if there is no such one."""
        ...

    def convert(self, value: Any, path: str, out: bool) -> Any:
        """Out: the value as something that msgspec writes. Not out: the value from plain data that msgspec read."""
        ...


def converter_for(annotation: Any) -> Converter:
    """The shape of an annotation; `Misfit` if there is none."""
    try:
        return _find_shape(annotation)
    except TypeError:  # cannot be hashed, so it is not remembered
        return _find_shape.__wrapped__(annotation)


@functools.cache
def _find_shape(annotation: Any) -> Converter:
    annotation = _bare(annotation)
    if (native := _native(annotation)) is not None:
        return native
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    kind = origin or annotation
    if kind in (typing.Union, types.UnionType):
        return _Choice(args)
    if kind is typing.Literal:
        return _OneOf(args)
    if kind is tuple and args[-1:] != (...,):
        return _Items(tuple, tuple, tuple(map(converter_for, args)))
    if kind in _SEQUENCES and args:
        return _Items(_SEQUENCES[kind], _SEQUENCES[kind], converter_for(args[0]))
    if kind in _MAPPINGS and args:
        return _Table(converter_for(types.GenericAlias(dict, (args[0], None))), converter_for(args[1]))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make"):
        hints, names = _hints(annotation), typing.cast(Any, kind)._fields
        return _Items(kind, kind._make, tuple(converter_for(hints.get(name, Any)) for name in names))
    fields = typing.is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")
    if fields and not any(isinstance(hint, dataclasses.InitVar) for hint in _hints(annotation).values()):
        return _Fields(annotation)
    raise Mismatch("", f"the type `{type_name(annotation)}` cannot be encoded; {SUPPORTED}")


def _bare(annotation: Any) -> Any:
    """The annotation without the names and qualifiers that stand around it."""
    while True:
        if annotation in (object, typing.NoReturn, typing.Never):
            return Any
        if hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        elif typing.get_origin(annotation) in (typing.Required, typing.NotRequired, typing.Final) or (
            typing.get_origin(annotation) is typing.Annotated and _native(annotation) is None
        ):
            annotation = typing.get_args(annotation)[0]
        else:
            return annotation


def _native(annotation: Any) -> Native | None:
    """The shape that leaves all to msgspec, if msgspec takes the annotation and knows every type in it."""
    try:
        msgspec.json.Decoder(annotation, dec_hook=revive)
        nodes = list(_nodes(msgspec.inspect.type_info(annotation), set()))
    except Exception:  # TypeError for what it refuses, NameError and others for what cannot be resolved
        return None
    for node in nodes:
        if isinstance(node, msgspec.inspect.CustomType) and not is_model(node.cls):
            return None
        # A key is text in JSON, which cannot say whether "1" was an int.
        if isinstance(node, msgspec.inspect.DictType) and isinstance(node.key_type, msgspec.inspect.UnionType):
            raise Mismatch("", f"`{type_name(annotation)}` cannot be encoded: the keys of a dict must be of one type")
    kinds = {type(node) for node in nodes}
    objects = [id(node) for node in nodes if hasattr(node, "fields")]
    bounded = not kinds & _OPEN_ENDED and len(set(objects)) == len(objects)  # met twice: it may contain itself
    return Native(annotation, msgspec.inspect.DecimalType not in kinds, bounded)


_OPEN_ENDED = {msgspec.inspect.AnyType, msgspec.inspect.CustomType, msgspec.inspect.RawType}


def _nodes(node: Any, seen: set[int]) -> Iterator[Any]:
    """A msgspec type and all types in it; one that is met again is not entered again."""
    if isinstance(node, tuple):
        for each in node:
            yield from _nodes(each, seen)
    elif isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field):
        yield node
        if id(node) not in seen:
            seen.add(id(node))
            for name in node.__struct_fields__:
                yield from _nodes(getattr(node, name), seen)


@dataclasses.dataclass(frozen=True, slots=True)
class Native:
    annotation: Any
    comparable: bool
    bounded: bool

    @property
    def kind(self) -> Any:
        kind = type(None) if self.annotation is None else typing.get_origin(self.annotation) or self.annotation
        return dict if typing.is_typeddict(kind) else kind

    def convert(self, value: Any, path: str, out: bool) -> Any:
        if out:
            check_exact(value, self.annotation, path)
            return value
        try:
            return msgspec.convert(value, self.annotation, str_keys=True, dec_hook=revive)
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
    """A list, set or tuple of one shape, or a tuple or NamedTuple with a shape for each place."""

    kind: type
    make: Callable[[list[Any]], Any]
    places: Converter | tuple[Converter, ...]

    def convert(self, value: Any, path: str, out: bool) -> Any:
        alike = (set, frozenset) if self.kind in (set, frozenset) else (list, tuple)
        if not isinstance(value, alike if out else list):
            raise _unexpected(self.kind, value, path)
        places = self.places if isinstance(self.places, tuple) else (self.places,) * len(value)
        if len(value) != len(places):
            raise Mismatch(path, f"Expected {len(places)} items, got {len(value)}")
        pairs = enumerate(zip(value, places, strict=True))
        items = [place.convert(item, f"{path}[{index}]", out) for index, (item, place) in pairs]
        return items if out else self.make(items)


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A dict whose values have a shape."""

    keys: Converter
    item: Converter
    kind = dict

    def convert(self, value: Any, path: str, out: bool) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(dict, value, path)
        keys = self.keys.convert(dict.fromkeys(value), path, out)
        return {
            key: self.item.convert(item, path + path_step(key), out)
            for key, item in zip(keys, value.values(), strict=True)
        }


class _Field(typing.NamedTuple):
    name: str
    key: str
    shape: Converter
    default: Callable[[], Any] | None
    required: bool


class _Fields:
    """An object with named fields: a dataclass, Struct or TypedDict."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self.cls: Any = typing.get_origin(annotation) or annotation
        self.kind: Any = dict if typing.is_typeddict(self.cls) else self.cls

    @functools.cached_property  # on first use, so that a type may contain itself
    def fields(self) -> tuple[_Field, ...]:
        return tuple(self._declared(_hints(self.annotation)))

    def _declared(self, hints: dict[str, Any]) -> Iterator[_Field]:
        if self.kind is dict:
            for name, hint in hints.items():
                # Under postponed annotations only the hint knows that it says NotRequired.
                required = name in self.cls.__required_keys__ and typing.get_origin(hint) is not typing.NotRequired
                yield _Field(name, name, self._shape(name, hint), None, required)
            return
        struct = hasattr(self.cls, "__struct_fields__")
        for each in typing.cast(Any, msgspec.structs.fields if struct else dataclasses.fields)(self.cls):
            default = None
            if each.default is not msgspec.NODEFAULT and each.default is not dataclasses.MISSING:
                default = functools.partial(getattr, each, "default")
            elif each.default_factory is not msgspec.NODEFAULT and each.default_factory is not dataclasses.MISSING:
                default = each.default_factory
            key = each.encode_name if struct else each.name
            yield _Field(each.name, key, self._shape(each.name, hints[each.name]), default, default is None)

    def _shape(self, name: str, hint: Any) -> Converter:
        try:
            return converter_for(hint)
        except Mismatch as error:
            raise Mismatch(f".{name}{error.path}", error.reason) from None

    def convert(self, value: Any, path: str, out: bool) -> Any:
        if out and self.kind is not dict:
            made = (
                self.convert(value, path, False) if isinstance(value, dict) else value
            )  # a dict stands for the object
            if type(made) is not self.cls:
                raise _unexpected(self.cls, value, path)
            value = {field.key: getattr(made, field.name) for field in self.fields}
        elif not isinstance(value, dict):
            raise _unexpected(self.cls, value, path)
        turned = {}
        for field in self.fields:
            if field.key in value:
                item = field.shape.convert(value[field.key], f"{path}.{field.name}", out)
                turned[field.key if out else field.name] = item
            elif field.required:
                raise Mismatch(path, f"Object missing required field `{field.key}`")
            elif field.default is not None:
                turned[field.name] = field.default()
        if out or self.kind is dict:
            return turned
        try:
            return self._make(turned)
        except (TypeError, ValueError) as error:
            raise Mismatch(path, str(error)) from error

    def _make(self, values: dict[str, Any]) -> Any:
        if hasattr(self.cls, "__struct_fields__"):
            return self.cls(**values)
        made = self.cls.__new__(self.cls)  # as msgspec does it: the fields as recorded, then __post_init__
        for name, value in values.items():
            object.__setattr__(made, name, value)
        if hasattr(made, "__post_init__"):
            made.__post_init__()
        return made


class _Choice:
    """A union that msgspec refuses; the head of this file says how the member is recorded."""

    kind = None

    def __init__(self, members: tuple[Any, ...]) -> None:
        members = tuple(map(_bare, members))
        evident = tuple(member for member in members if member in SCALARS)
        tagged = tuple(member for member in members if member not in SCALARS)
        self.evident = (converter_for(typing.Union[evident]),) if evident else ()  # noqa: UP007
        self.members = dict(zip(_tags(tagged), map(converter_for, tagged), strict=True))
        self.inline = {tag for tag, member in zip(self.members, tagged, strict=True) if _has_fields(member)}
        self.text = " | ".join(map(type_name, members))

    def convert(self, value: Any, path: str, out: bool) -> Any:
        return self._write(value, path) if out else self._read(value, path)

    def _write(self, value: Any, path: str) -> Any:
        tags = [tag for tag, shape in self.members.items() if type(value) is shape.kind]
        if len(tags) == 1:  # certain; if it does not fit, the error of this member is the one that helps
            return self._tagged(tags[0], value, path)
        tries: list[Callable[[], Any]] = [functools.partial(shape.convert, value, path, True) for shape in self.evident]
        tries += [functools.partial(self._tagged, tag, value, path) for tag in tags or self.members]
        return self._first(tries, value, path)

    def _tagged(self, tag: str, value: Any, path: str) -> Any:
        body = self.members[tag].convert(value, path, True)
        if tag not in self.inline:
            return {_TAG: tag, "value": body}
        return {_TAG: tag, **msgspec.to_builtins(body, str_keys=True, enc_hook=to_plain)}

    def _read(self, data: Any, path: str) -> Any:
        if isinstance(data, dict) and isinstance(tag := data.get(_TAG), str) and tag in self.members:
            if tag in self.inline:
                body = {key: item for key, item in data.items() if key != _TAG}
                return self.members[tag].convert(body, path, False)
            if data.keys() == {_TAG, "value"}:
                return self.members[tag].convert(data["value"], path, False)
        shapes = (*self.evident, *self.members.values())
        return self._first([functools.partial(shape.convert, data, path, False) for shape in shapes], data, path)

    def _first(self, tries: list[Callable[[], Any]], value: Any, path: str) -> Any:
        """What the first member that fits makes of the value."""
        misfits = []
        for each in tries:
            try:
                return each()
            except Mismatch as error:
                misfits.append(error)
        # A member that got below the top knows better what is wrong, if it is the only one.
        below = [error for error in misfits if error.path != path]
        raise below[0] if len(below) == 1 else _unexpected(self.text, value, path)


_TAG = "$type"


def _tags(members: tuple[Any, ...]) -> list[str]:
    """A name for each member: short where that is unambiguous."""
    short = [type_name(member) for member in members]
    full = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else str(each) for each in members]
    tags = [long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True)]
    if len(set(tags)) != len(tags):
        raise Mismatch("", f"the types {', '.join(full)} must have different names to be members of one union")
    return tags


def _has_fields(member: Any) -> bool:
    """Whether a member is always encoded as an object with known fields, beside which a tag has room."""
    kind = typing.get_origin(member) or member
    if is_model(kind):
        return not kind.__pydantic_root_model__
    if hasattr(kind, "__struct_config__"):
        return not kind.__struct_config__.array_like
    return dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)


class _OneOf:
    """A Literal of enum members or bytes, which msgspec refuses."""

    kind = None

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def convert(self, value: Any, path: str, out: bool) -> Any:
        for each in self.values:
            forms = (each,) if out else (each, msgspec.to_builtins(each))
            if any(type(value) is type(form) and value == form for form in forms):
                return each
        raise _unexpected(f"Literal{list(self.values)}", value, path)


def _hints(annotation: Any) -> dict[str, Any]:
    """The annotations of a class, with a generic's parameters filled in."""
    cls = typing.get_origin(annotation) or annotation
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:
        raise Mismatch("", f"the annotations of `{type_name(cls)}` cannot be resolved: {error}") from error
    given = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))

    def filled(hint: Any) -> Any:
        if isinstance(hint, typing.TypeVar):
            return given.get(hint, Any)
        parameters = getattr(hint, "__parameters__", ())
        return hint[tuple(given.get(each, Any) for each in parameters)] if parameters else hint

    return {name: filled(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


def _unexpected(expected: Any, got: Any, path: str) -> Mismatch:
    name = expected if isinstance(expected, str) else type_name(expected)
    return Mismatch(path, f"Expected `{name}`, got `{type_name(type(got))}`")
