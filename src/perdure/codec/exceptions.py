"""Encode exceptions by their fields, and reconstruct them. Knows no run and no store.

The fields of an exception are its attributes and slots. A field that cannot be encoded is left out and reported, so
that an HTTP error with its response is still recorded. An argument that cannot be encoded is replaced by its text.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any, cast

from perdure.codec import Codec
from perdure.codec.annotations import resolve_annotations
from perdure.codec.parameters import build_typed_dict
from perdure.errors import InvalidPayload

ARGS, FIELDS = "args.", "fields."  # prefixes of the parts of an encoded exception
MESSAGE = "__message__"  # slot of a class that `_class_with_message` returns

_ARGUMENTS: Any = BaseException.__dict__["args"]  # not `error.args`: a class may define a property of that name
_OPAQUE = (UnicodeError, BaseExceptionGroup)  # invalid values of their attributes make Python crash, or are refused


def encode_exception(codec: Codec, error: BaseException) -> tuple[bytes, tuple[str, ...]]:
    """Return the arguments and fields of an exception as bytes, and the names of those that cannot be encoded.

    Raises `InvalidPayload` only if the limit of the codec is too small for any record.
    """
    encoder = _ExceptionEncoder(codec, error)
    try:
        data = encoder.encode()
    except InvalidPayload:
        encoder.drop_what_does_not_fit()
        data = encoder.encode()
    return data, tuple(encoder.dropped)


def decode_exception(codec: Codec, data: bytes, cls: type[BaseException]) -> BaseException:
    """Return an instance of `cls` with the recorded arguments and fields. `__init__` is not called."""
    kind: Any = cls
    raw = codec.decode(data, _ANY_EXCEPTION, what=cls.__name__)
    names = tuple(raw["parts"])
    annotation = _exception_type(kind, _count_arguments(names), names, tuple(raw.get("plain", ())))
    parts: dict[str, Any] = codec.decode(data, annotation, what=cls.__name__)["parts"]
    args = tuple(value for name, value in parts.items() if name.startswith(ARGS))
    error = _new_instance(cls, args)
    _ARGUMENTS.__set__(error, args)  # Works for frozen classes too.
    members = _members_of(kind)
    for name, value in _fields_in(parts).items():
        if name in members:
            with contextlib.suppress(TypeError, AttributeError):  # read-only, or a number in C
                members[name].__set__(error, value)
        else:
            vars(error)[name] = value
    return error


def decode_with_message(codec: Codec, data: bytes, cls: type[BaseException], message: str) -> BaseException:
    """Return an exception like `decode_exception`, of a subclass that has the name of `cls` and this text.

    For a class that derives its text from a field that is not recorded (`self.response.status_code`).
    """
    named = _class_with_message(cast(Any, cls))
    error = decode_exception(codec, data, named)
    vars(named)[MESSAGE].__set__(error, message)
    return error


def decode_fields(codec: Codec, data: bytes) -> dict[str, Any]:
    """Return the recorded fields by name, as plain data. Raises `InvalidPayload`."""
    return _fields_in(codec.decode(data, _ANY_EXCEPTION)["parts"])


def fields_of(error: BaseException) -> dict[str, Any]:
    """Return the attributes and slots of an exception by name."""
    found = {}
    for name, member in _members_of(cast(Any, type(error))).items():
        with contextlib.suppress(AttributeError):  # an empty slot
            value = member.__get__(error)
            if value is not None or member.__objclass__.__module__ != "builtins":
                found[name] = value
    return found | {name: value for name, value in vars(error).items() if not name.startswith("__")}


class _ExceptionEncoder:
    """Encodes the arguments and fields of one exception, called its parts."""

    def __init__(self, codec: Codec, error: BaseException) -> None:
        self.dropped: list[str] = []
        self._codec = codec
        self._kind = cast(Any, type(error))
        parts = {f"{ARGS}{index}": value for index, value in enumerate(_ARGUMENTS.__get__(error))}
        self._parts = parts | {f"{FIELDS}{name}": value for name, value in fields_of(error).items()}
        self._count = _count_arguments(self._parts)
        hints = _exception_hints(self._kind, self._count)
        # Annotations are not binding here: `Declined(code: int)` may pass text to Exception.
        self._plain = {
            name for name, value in self._parts.items() if name in hints and not self._matches(value, hints[name])
        }

    def encode(self) -> bytes:
        return self._encode(self._parts)

    def drop_what_does_not_fit(self) -> None:
        """Drop the parts that cannot be encoded; then the largest ones, until the others are within the limit."""
        for name, value in list(self._parts.items()):
            if self._size(name, value) is None:
                text = _text_of(value)  # the message of most exceptions is the text of their arguments
                self._drop(name, None if self._size(name, text) is None else text)
        sizes = {name: self._size(name, value) or 0 for name, value in self._parts.items()}
        for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            with contextlib.suppress(InvalidPayload):
                self.encode()
                return
            self._drop(name)

    def _drop(self, name: str, text: str | None = None) -> None:
        """Drop a field, or replace an argument by a text."""
        if name.startswith(FIELDS):
            del self._parts[name]
        else:
            self._plain.add(name)
            self._parts[name] = text
        if (public_name := name.removeprefix(FIELDS)) not in self.dropped:
            self.dropped.append(public_name)

    def _size(self, name: str, value: Any) -> int | None:
        """Return the size of a part, or None if it cannot be encoded."""
        try:
            return len(self._encode({name: value}))
        except InvalidPayload:
            return None

    def _matches(self, value: Any, annotation: Any) -> bool:
        try:
            self._codec.encode(value, annotation)
        except Exception:  # also an annotation that no codec knows
            return False
        return True

    def _encode(self, parts: dict[str, Any]) -> bytes:
        plain = tuple(name for name in parts if name in self._plain)
        record = {"parts": parts, "plain": list(plain)} if plain else {"parts": parts}
        annotation = _exception_type(self._kind, self._count, tuple(parts), plain)
        return self._codec.encode(record, annotation, what=self._kind.__name__)


def _count_arguments(parts: Iterable[str]) -> int:
    return sum(name.startswith(ARGS) for name in parts)


def _fields_in(parts: dict[str, Any]) -> dict[str, Any]:
    fields = {name.removeprefix(FIELDS): value for name, value in parts.items() if name.startswith(FIELDS)}
    return {name: value for name, value in fields.items() if not name.startswith("__")}


def _text_of(value: object) -> str:
    try:
        return str(value).encode("utf-8", "replace").decode("utf-8")
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"


def _new_instance(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an instance of the class without calling `__init__`."""
    with contextlib.suppress(Exception):  # The class has a __new__ with other parameters.
        error: object = cls.__new__(cls, *args)
        if isinstance(error, cls):
            return error
    bases = [base for base in cls.__mro__ if base.__module__ == "builtins" and issubclass(base, BaseException)]
    for base in bases[:-1]:
        with contextlib.suppress(TypeError):  # not the base that defines the layout
            return base.__new__(cls)
    return BaseException.__new__(cls)


@functools.lru_cache(maxsize=1024)
def _class_with_message(cls: type[BaseException]) -> type[BaseException]:
    """Return a subclass with the name of `cls` whose text is its slot `MESSAGE`."""
    namespace = {
        "__slots__": (MESSAGE,),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__str__": lambda error: getattr(error, MESSAGE),
    }
    return type(cls.__name__, (cls,), namespace)


@functools.lru_cache(maxsize=1024)
def _members_of(cls: type[BaseException]) -> dict[str, Any]:
    """Return the slots of a class by name; of a built-in class, its attributes that are implemented in C."""
    return {
        name: member
        for base in reversed(cls.__mro__)
        if not (base.__module__ == "builtins" and issubclass(base, _OPAQUE))
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and not name.startswith("__")
        if (base, name) != (AttributeError, "obj")  # any object, and no part of the message
    }


@functools.lru_cache(maxsize=1024)
def _exception_type(cls: type[BaseException], count: int, names: tuple[str, ...], plain: tuple[str, ...]) -> Any:
    """Return the annotation of an encoded exception that has `count` arguments, with these of its parts."""
    hints = _exception_hints(cast(Any, cls), count)
    fields = {name: Any if name in plain else hints.get(name, Any) for name in names}
    return _record_type(build_typed_dict(cls.__name__, fields))


def _record_type(parts: Any) -> Any:
    return build_typed_dict("Exception", {"parts": parts, "plain": typing.NotRequired[list[str]]})


_ANY_EXCEPTION = _record_type(dict[str, Any])


@functools.lru_cache(maxsize=1024)
def _exception_hints(cls: type[BaseException], count: int) -> dict[str, Any]:
    """Return the known types of arguments and attributes.

    Arguments have the types of the parameters of `__init__`. Attributes have the types of class annotations or of
    parameters with the same name.
    """
    init = cls.__dict__.get("__init__") or cls.__init__
    hints = resolve_annotations(init, {}) if inspect.isfunction(init) else {}
    names = list(inspect.signature(init).parameters)[1:] if inspect.isfunction(init) else []
    hints = {name: hint for name, hint in hints.items() if name in names}
    known = {f"{ARGS}{index}": hints.get(name, Any) for index, name in enumerate(names)} if len(names) == count else {}
    if issubclass(cls, UnicodeDecodeError):  # bytes without an annotation would be decoded as text
        known |= {f"{ARGS}1": bytes, f"{FIELDS}object": bytes}
    return known | {f"{FIELDS}{name}": hint for name, hint in (hints | _class_hints(cls)).items()}


def _class_hints(cls: type) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {}
