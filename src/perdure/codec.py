"""Values to bytes and back, by their annotations; data only, never pickle.

    value ──encode(annotation)──▶ bytes ──decode(annotation)──▶ an equal value of the same class

`JSON` is readable in a database, `MSGPACK` is smaller. What is encoded was checked against its annotation, so what a
store holds can be read back. Without an annotation (or with `Any`) plain data comes out: a dataclass comes back as a
dict, a tuple or set as a list, a datetime as text. A dict in encoded form may stand for an object, and an
enum's value for its member; nothing else is coerced, except an int where a float is asked for.

msgspec does the work wherever it can. What it refuses (`Card | Cash`, `str | Decimal`, `Literal[Colour.RED]`, and
whatever holds one of these) goes through the shapes in the lower half. In such a union every member but None, bool,
int, float and str is written with the name of its type, so that the right class comes back even if two have equal
fields:

    Card | Cash      {"$type": "Card", "number": "42"}         an object, with the name beside its fields
    str | Decimal    {"$type": "Decimal", "value": "1.50"}     anything else, wrapped

An object without "$type" (written before the annotation became a union) is read as the first member that fits.

This room knows errors and bytes; it knows no run, step or store. pydantic is used where it is already imported.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import hashlib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Protocol
from uuid import UUID

import msgspec

from perdure.errors import InvalidPayload

MAX_DEPTH = 200
"""How deep a value may nest: far below what every supported Python can read, so that a history moves between them."""

SUPPORTED = (
    "supported are None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, dataclasses without InitVar, "
    "msgspec Structs, pydantic models, TypedDict, NamedTuple, enums, datetime, date, time, timedelta, Decimal, UUID, "
    "Literal and unions of these"
)


class Codec(Protocol):
    """How values become bytes; a wrapper (compression, encryption) holds another codec and hands over to it."""

    @property
    def name(self) -> str: ...

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        """The value as bytes; `InvalidPayload` with the field's path if it does not fit or cannot be encoded."""
        ...

    def decode(self, data: bytes, annotation: Any = Any, *, what: str = "value") -> Any:
        """A new value; `InvalidPayload` with the field's path if the bytes do not fit the annotation."""
        ...

    def canonical(self, value: Any) -> bytes:
        """The same bytes for equal data, whatever the order of dicts and sets; for comparing, never decoded."""
        ...


def fingerprint(codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
    """Eight bytes that change with the arguments; None if these cannot be encoded."""
    try:
        return hashlib.blake2b(codec.canonical((args, kwargs)), digest_size=8).digest()
    except Exception:
        return None


class _MsgspecCodec:
    """What both codecs share; a subclass says how to build readers and what its format cannot hold."""

    name = ""

    def __init__(self, encoder: Any, canonical: Any) -> None:
        self._write: Callable[[Any], bytes] = encoder.encode
        self.canonical: Callable[[Any], bytes] = canonical.encode
        self._plans: dict[Any, _Plan] = {}

    def encode(self, value: Any, annotation: Any = Any, *, what: str = "value") -> bytes:
        try:
            plan = self._plans[annotation]
        except (KeyError, TypeError):
            plan = self._plan(annotation, what)
        try:
            data = self._write(value if plan.shape is None else plan.shape.turn(value, "", True))
            if b"null" in data or (len(data) > MAX_DEPTH and not plan.bounded):
                self._inspect(value, data)
            if plan.unchecked or type(value) is plan.certain:
                return data
            back = plan.read(data)
            # Equality is quick proof; it says nothing about Decimals, which equal ints and floats.
            if type(back) is type(value) and plan.comparable and back == value:
                return data
            if plan.shape is None:
                _check_exact(value, annotation, "")
            _check_same(value, back, "")
        except Exception as error:
            raise self._refusal(error, value, annotation, what) from error
        return data

    def decode(self, data: bytes, annotation: Any = Any, *, what: str = "value") -> Any:
        try:
            plan = self._plans[annotation]
        except (KeyError, TypeError):
            plan = self._plan(annotation, what)
        try:
            return plan.read(data)
        except Exception as error:
            path, reason = _explanation(error)
            raise InvalidPayload(_sentence(what, self._name_keys(path, data, annotation), reason)) from error

    def _plan(self, annotation: Any, what: str) -> _Plan:
        try:
            plan = self._make_plan(annotation)
        except _Misfit as error:
            raise InvalidPayload(_sentence(what, error.path, error.reason)) from None
        with contextlib.suppress(TypeError):  # an annotation that cannot be hashed is planned each time
            self._plans[annotation] = plan
        return plan

    def _make_plan(self, annotation: Any) -> _Plan:
        shape = _shape_of(annotation)
        if isinstance(shape, _Native):
            return _Plan(
                read=self._reader(shape.annotation),
                unchecked=shape.annotation is Any,
                certain=shape.kind if shape.annotation in _SCALARS else None,
                comparable=shape.comparable,
                bounded=shape.bounded,
            )
        read = self._reader(Any)
        return _Plan(read=lambda data: shape.turn(read(data), "", False), shape=shape)

    def _refusal(self, error: Exception, value: Any, annotation: Any, what: str) -> InvalidPayload:
        with contextlib.suppress(Exception):
            if isinstance(error, msgspec.ValidationError):
                try:
                    _check_exact(value, annotation, "")  # speaks of Python's types, where the reader spoke of texts
                except _Misfit as misfit:
                    error = misfit
            if isinstance(error, _Misfit):
                path = self._name_keys(error.path, self._write(value), annotation)
                return InvalidPayload(_sentence(what, path, error.reason))
        path, reason = _explanation(error)
        if not isinstance(error, _Misfit | msgspec.ValidationError):
            path, reason = next(self._faults(value, "", ()), (path, reason))
        return InvalidPayload(_sentence(what, path, reason))

    def _name_keys(self, path: str, data: bytes, annotation: Any) -> str:
        """msgspec says `[...]` for any key of a dict. Leave one key at a time in: the guilty one fails alone."""

        def failing() -> str:
            try:
                msgspec.convert(raw, annotation, str_keys=True, dec_hook=_revive)
            except Exception as error:
                return _explanation(error)[0]
            return ""

        if "[...]" not in path:
            return path
        named = ""
        try:
            node = raw = self._reader(Any)(data)
            for part in re.findall(r"\.[^.\[]+|\[[^\]]*\]", path):
                key: Any = part[1:] if part[0] == "." else part[1:-1]
                if part == "[...]":
                    for key, item in list(node.items()):
                        node.clear()
                        node[key] = item
                        if failing() == path:
                            break
                    part = _step(key)
                elif part[0] == "[":
                    key = int(key)
                named, node = named + part, node[key]
        except Exception:
            return path
        return named

    def _faults(self, value: Any, path: str, parents: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """Where in a value that could not be written the trouble is, and what it is."""
        if id(value) in parents:
            yield path, "contains itself; a cyclic value cannot be encoded"
        elif len(parents) > MAX_DEPTH:
            yield path, f"nests deeper than {MAX_DEPTH} levels"
        else:
            try:
                children = list(_children(value))
            except Exception as error:
                yield path, f"`{_name(type(value))}` cannot be encoded: {error}"
                return
            for part, child in children:
                yield from self._faults(child, path + part, (*parents, id(value)))
            if isinstance(value, dict):
                for key in value:
                    if fault := self._leaf_fault({key: None}):
                        yield path + _step(key), f"as a key: {fault}"
            elif not children and (fault := self._leaf_fault(value)):
                yield path, fault

    def _leaf_fault(self, value: Any) -> str | None:
        try:
            self._write(value)
        except UnicodeEncodeError:
            return "text with a lone surrogate cannot be encoded"
        except (OverflowError, ValueError) as error:
            return f"cannot be encoded: {error}"
        except Exception:
            if isinstance(value, dict):
                return f"a key of type `{_name(type(next(iter(value))))}` cannot be encoded"
            return f"an object of type `{_name(type(value))}` cannot be encoded; {SUPPORTED}"
        return None

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        raise NotImplementedError

    def _inspect(self, value: Any, data: bytes) -> None:
        raise NotImplementedError


class JsonCodec(_MsgspecCodec):
    """JSON text: readable where it is stored. Has no nan and no infinity; integers up to 4,300 digits."""

    name = "json"

    def __init__(self) -> None:
        super().__init__(
            msgspec.json.Encoder(enc_hook=_plain), msgspec.json.Encoder(enc_hook=_plain, order="deterministic")
        )

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.json.Decoder(annotation, dec_hook=_revive).decode

    def _inspect(self, value: Any, data: bytes) -> None:
        # msgspec writes nan and inf as null. MessagePack writes them as they are, which is quick to search.
        if value is not None and b"null" in data and _holds_non_finite(value):
            raise ValueError("nan and infinity cannot be written as JSON")
        if len(data) > 2 * MAX_DEPTH and _too_deep(data):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")

    def _leaf_fault(self, value: Any) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} cannot be written as JSON; send None or text instead, or use the MessagePack codec"
        return super()._leaf_fault(value)


class MsgpackCodec(_MsgspecCodec):
    """MessagePack: smaller than JSON, holds nan and infinity; integers of at most 64 bits."""

    name = "msgpack"

    def __init__(self) -> None:
        super().__init__(
            msgspec.msgpack.Encoder(enc_hook=_plain), msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
        )

    def _reader(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.msgpack.Decoder(annotation, dec_hook=_revive).decode

    def _inspect(self, value: Any, data: bytes) -> None:
        if len(data) > MAX_DEPTH and _too_deep(msgspec.json.encode(value, enc_hook=_plain)):
            raise RecursionError(f"nests deeper than {MAX_DEPTH} levels")


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What one codec does for one annotation."""

    read: Callable[[bytes], Any]
    unchecked: bool = False
    """Whatever can be encoded fits."""
    certain: type | None = None
    """A value of exactly this class fits."""
    comparable: bool = True
    """A value that comes back equal has come back whole."""
    bounded: bool = False
    """No value that fits can nest without end."""
    shape: _Shape | None = None


_SCALARS = (str, int, float, bool, None, type(None))
_EXACT = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)


class _Misfit(Exception):
    """A value that does not fit, at a path below the one being encoded or decoded."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


def _plain(value: Any) -> Any:
    """For what msgspec does not write itself: a model as its dump, a subclass of str, int or float as plain value."""
    if _is_model(type(value)):
        return value.model_dump(mode="json", round_trip=True, warnings=False)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise NotImplementedError


def _revive(kind: type, data: Any) -> Any:
    """For what msgspec does not read itself: models, which are the only custom types that a plan lets through."""
    try:
        # Read as JSON, because strict models take text for a datetime only there.
        return typing.cast(Any, kind).model_validate_json(msgspec.json.encode(data), **_by_name())
    except ValueError as error:
        details = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        raise ValueError(f"{details['msg']} - at `${path}`") from error


def _is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic.main")  # never imported from here: who has a model has imported it
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


@functools.cache
def _by_name() -> dict[str, bool]:
    """A model is dumped by field name, so it must also validate by name; pydantic can be told so since 2.11."""
    major, minor = sys.modules["pydantic"].VERSION.split(".")[:2]
    return {"by_alias": True, "by_name": True} if (int(major), int(minor)) >= (2, 11) else {}


def _check_exact(value: Any, annotation: Any, path: str) -> None:
    """Raise unless each part is of its annotated type before encoding too: JSON has one text for UUID and str."""
    try:
        data = msgspec.to_builtins(value, builtin_types=_EXACT, enc_hook=_plain)
        msgspec.convert(data, annotation, builtin_types=_EXACT, dec_hook=_revive)
    except msgspec.ValidationError as error:
        below, reason = _explanation(error)
        raise _Misfit(path + below, reason) from None


def _check_same(value: Any, back: Any, path: str) -> None:
    """Raise if a value comes back as another class or changed. Plain data in its place was asked for, by `Any`."""
    if (names := _field_names(type(value))) is not None:
        if isinstance(back, dict) or type(back) in (list, tuple):
            return
        if type(back) is not type(value):
            raise _Misfit(path, f"Expected `{_name(type(back))}`, got `{_name(type(value))}`")
        for name in names:
            _check_same(getattr(value, name, None), getattr(back, name, None), f"{path}.{name}")
    elif isinstance(value, dict) and isinstance(back, dict):
        if len(value) != len(back):
            raise _Misfit(path, "two different keys are the same when encoded")
        for key, item, other in zip(value, value.values(), back.values(), strict=True):
            _check_same(item, other, path + _step(key))
    elif isinstance(value, list | tuple) and isinstance(back, list | tuple):
        for index, (item, other) in enumerate(zip(value, back, strict=True)):
            _check_same(item, other, f"{path}[{index}]")
    elif type(value) is type(back) and value != back and value == value and _instant(value) != _instant(back):
        raise _Misfit(path, f"`{_name(type(value))}` {value!r} would come back as {back!r}")


def _instant(value: Any) -> Any:
    """Two datetimes in a repeated hour are never equal across zones, even if they are the same moment."""
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


def _field_names(kind: type) -> tuple[str, ...] | None:
    if hasattr(kind, "__struct_fields__"):
        return typing.cast("tuple[str, ...]", kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if _is_model(kind):
        return tuple(typing.cast(Any, kind).model_fields)
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with its step in the path."""
    if _is_model(type(value)):
        value = _plain(value)
    if isinstance(value, dict):
        yield from ((_step(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", getattr(value, name, None)) for name in _field_names(type(value)) or ())


_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


def _holds_non_finite(value: Any) -> bool:
    try:
        return _NON_FINITE.search(msgspec.msgpack.encode(value, enc_hook=_plain)) is not None and _non_finite(value)
    except OverflowError:
        return _non_finite(value)


def _non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return any(_non_finite(child) for _, child in _children(value))


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _too_deep(text: bytes) -> bool:
    """Whether JSON nests too deep; the innermost brackets are taken away, level by level."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _TEXT.sub(b"", text).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _explanation(error: Exception) -> tuple[str, str]:
    """The path and the reason of an error; msgspec's own reads "reason - at `$.items[0]`", the outermost path last."""
    if isinstance(error, _Misfit):
        return error.path, error.reason
    reason, *places = re.split(r" - at (?=`(?:key` in `)?\$)", str(error) or type(error).__name__)
    path = "".join(place.split("$", 1)[1].rstrip("`") + ("[key]" if "`key`" in place else "") for place in places[::-1])
    return path, reason if isinstance(error, msgspec.MsgspecError | ValueError) else f"{type(error).__name__}: {reason}"


def _sentence(what: str, path: str, reason: str) -> str:
    return f"{what}: {path.lstrip('.')}: {reason}" if path else f"{what}: {reason}"


def _step(key: Any) -> str:
    """A dict's key as a step in a path: as a field's name where it could be one."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is None and isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")


# Shapes carry out the annotations that msgspec refuses as a whole; `_Native` hands a part back to msgspec.


class _Shape(Protocol):
    @property
    def kind(self) -> Any:
        """The class of its values, or None if there is no such one."""
        ...

    def turn(self, value: Any, path: str, out: bool) -> Any:
        """Out: the value as something that msgspec writes. Not out: the value from plain data that msgspec read."""
        ...


def _shape_of(annotation: Any) -> _Shape:
    """The shape of an annotation; `_Misfit` if there is none."""
    try:
        return _find_shape(annotation)
    except TypeError:  # cannot be hashed, so it is not remembered
        return _find_shape.__wrapped__(annotation)


@functools.cache
def _find_shape(annotation: Any) -> _Shape:
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
        return _Items(tuple, tuple, tuple(map(_shape_of, args)))
    if kind in _SEQUENCES and args:
        return _Items(_SEQUENCES[kind], _SEQUENCES[kind], _shape_of(args[0]))
    if kind in _MAPPINGS and args:
        return _Table(_shape_of(types.GenericAlias(dict, (args[0], None))), _shape_of(args[1]))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make"):
        hints, names = _hints(annotation), typing.cast(Any, kind)._fields
        return _Items(kind, kind._make, tuple(_shape_of(hints.get(name, Any)) for name in names))
    fields = typing.is_typeddict(kind) or dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")
    if fields and not any(isinstance(hint, dataclasses.InitVar) for hint in _hints(annotation).values()):
        return _Fields(annotation)
    raise _Misfit("", f"the type `{_name(annotation)}` cannot be encoded; {SUPPORTED}")


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


def _native(annotation: Any) -> _Native | None:
    """The shape that leaves all to msgspec, if msgspec takes the annotation and knows every type in it."""
    try:
        msgspec.json.Decoder(annotation, dec_hook=_revive)
        nodes = list(_nodes(msgspec.inspect.type_info(annotation), set()))
    except Exception:  # TypeError for what it refuses, NameError and others for what cannot be resolved
        return None
    for node in nodes:
        if isinstance(node, msgspec.inspect.CustomType) and not _is_model(node.cls):
            return None
        # A key is text in JSON, which cannot say whether "1" was an int.
        if isinstance(node, msgspec.inspect.DictType) and isinstance(node.key_type, msgspec.inspect.UnionType):
            raise _Misfit("", f"`{_name(annotation)}` cannot be encoded: the keys of a dict must be of one type")
    kinds = {type(node) for node in nodes}
    objects = [id(node) for node in nodes if hasattr(node, "fields")]
    bounded = not kinds & _OPEN_ENDED and len(set(objects)) == len(objects)  # met twice: it may contain itself
    return _Native(annotation, msgspec.inspect.DecimalType not in kinds, bounded)


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
class _Native:
    annotation: Any
    comparable: bool
    bounded: bool

    @property
    def kind(self) -> Any:
        kind = type(None) if self.annotation is None else typing.get_origin(self.annotation) or self.annotation
        return dict if typing.is_typeddict(kind) else kind

    def turn(self, value: Any, path: str, out: bool) -> Any:
        if out:
            _check_exact(value, self.annotation, path)
            return value
        try:
            return msgspec.convert(value, self.annotation, str_keys=True, dec_hook=_revive)
        except Exception as error:
            below, reason = _explanation(error)
            raise _Misfit(path + below, reason) from error


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
    places: _Shape | tuple[_Shape, ...]

    def turn(self, value: Any, path: str, out: bool) -> Any:
        alike = (set, frozenset) if self.kind in (set, frozenset) else (list, tuple)
        if not isinstance(value, alike if out else list):
            raise _unexpected(self.kind, value, path)
        places = self.places if isinstance(self.places, tuple) else (self.places,) * len(value)
        if len(value) != len(places):
            raise _Misfit(path, f"Expected {len(places)} items, got {len(value)}")
        pairs = enumerate(zip(value, places, strict=True))
        items = [place.turn(item, f"{path}[{index}]", out) for index, (item, place) in pairs]
        return items if out else self.make(items)


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A dict whose values have a shape."""

    keys: _Shape
    item: _Shape
    kind = dict

    def turn(self, value: Any, path: str, out: bool) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(dict, value, path)
        keys = self.keys.turn(dict.fromkeys(value), path, out)
        return {
            key: self.item.turn(item, path + _step(key), out) for key, item in zip(keys, value.values(), strict=True)
        }


class _Field(typing.NamedTuple):
    name: str
    key: str
    shape: _Shape
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

    def _shape(self, name: str, hint: Any) -> _Shape:
        try:
            return _shape_of(hint)
        except _Misfit as error:
            raise _Misfit(f".{name}{error.path}", error.reason) from None

    def turn(self, value: Any, path: str, out: bool) -> Any:
        if out and self.kind is not dict:
            made = self.turn(value, path, False) if isinstance(value, dict) else value  # a dict stands for the object
            if type(made) is not self.cls:
                raise _unexpected(self.cls, value, path)
            value = {field.key: getattr(made, field.name) for field in self.fields}
        elif not isinstance(value, dict):
            raise _unexpected(self.cls, value, path)
        turned = {}
        for field in self.fields:
            if field.key in value:
                item = field.shape.turn(value[field.key], f"{path}.{field.name}", out)
                turned[field.key if out else field.name] = item
            elif field.required:
                raise _Misfit(path, f"Object missing required field `{field.key}`")
            elif field.default is not None:
                turned[field.name] = field.default()
        if out or self.kind is dict:
            return turned
        try:
            return self._make(turned)
        except (TypeError, ValueError) as error:
            raise _Misfit(path, str(error)) from error

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
        evident = tuple(member for member in members if member in _SCALARS)
        tagged = tuple(member for member in members if member not in _SCALARS)
        self.evident = (_shape_of(typing.Union[evident]),) if evident else ()  # noqa: UP007
        self.members = dict(zip(_tags(tagged), map(_shape_of, tagged), strict=True))
        self.inline = {tag for tag, member in zip(self.members, tagged, strict=True) if _has_fields(member)}
        self.text = " | ".join(map(_name, members))

    def turn(self, value: Any, path: str, out: bool) -> Any:
        return self._write(value, path) if out else self._read(value, path)

    def _write(self, value: Any, path: str) -> Any:
        tags = [tag for tag, shape in self.members.items() if type(value) is shape.kind]
        if len(tags) == 1:  # certain; if it does not fit, the error of this member is the one that helps
            return self._tagged(tags[0], value, path)
        tries: list[Callable[[], Any]] = [functools.partial(shape.turn, value, path, True) for shape in self.evident]
        tries += [functools.partial(self._tagged, tag, value, path) for tag in tags or self.members]
        return self._first(tries, value, path)

    def _tagged(self, tag: str, value: Any, path: str) -> Any:
        body = self.members[tag].turn(value, path, True)
        if tag not in self.inline:
            return {_TAG: tag, "value": body}
        return {_TAG: tag, **msgspec.to_builtins(body, str_keys=True, enc_hook=_plain)}

    def _read(self, data: Any, path: str) -> Any:
        if isinstance(data, dict) and isinstance(tag := data.get(_TAG), str) and tag in self.members:
            if tag in self.inline:
                body = {key: item for key, item in data.items() if key != _TAG}
                return self.members[tag].turn(body, path, False)
            if data.keys() == {_TAG, "value"}:
                return self.members[tag].turn(data["value"], path, False)
        shapes = (*self.evident, *self.members.values())
        return self._first([functools.partial(shape.turn, data, path, False) for shape in shapes], data, path)

    def _first(self, tries: list[Callable[[], Any]], value: Any, path: str) -> Any:
        """What the first member that fits makes of the value."""
        misfits = []
        for each in tries:
            try:
                return each()
            except _Misfit as error:
                misfits.append(error)
        # A member that got below the top knows better what is wrong, if it is the only one.
        below = [error for error in misfits if error.path != path]
        raise below[0] if len(below) == 1 else _unexpected(self.text, value, path)


_TAG = "$type"


def _tags(members: tuple[Any, ...]) -> list[str]:
    """A name for each member: short where that is unambiguous."""
    short = [_name(member) for member in members]
    full = [f"{each.__module__}.{each.__qualname__}" if isinstance(each, type) else str(each) for each in members]
    tags = [long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True)]
    if len(set(tags)) != len(tags):
        raise _Misfit("", f"the types {', '.join(full)} must have different names to be members of one union")
    return tags


def _has_fields(member: Any) -> bool:
    """Whether a member is always encoded as an object with known fields, beside which a tag has room."""
    kind = typing.get_origin(member) or member
    if _is_model(kind):
        return not kind.__pydantic_root_model__
    if hasattr(kind, "__struct_config__"):
        return not kind.__struct_config__.array_like
    return dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)


class _OneOf:
    """A Literal of enum members or bytes, which msgspec refuses."""

    kind = None

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def turn(self, value: Any, path: str, out: bool) -> Any:
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
        raise _Misfit("", f"the annotations of `{_name(cls)}` cannot be resolved: {error}") from error
    given = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))

    def filled(hint: Any) -> Any:
        if isinstance(hint, typing.TypeVar):
            return given.get(hint, Any)
        parameters = getattr(hint, "__parameters__", ())
        return hint[tuple(given.get(each, Any) for each in parameters)] if parameters else hint

    return {name: filled(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


def _unexpected(expected: Any, got: Any, path: str) -> _Misfit:
    name = expected if isinstance(expected, str) else _name(expected)
    return _Misfit(path, f"Expected `{name}`, got `{_name(type(got))}`")


JSON = JsonCodec()
MSGPACK = MsgpackCodec()
