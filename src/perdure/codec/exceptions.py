"""Exceptions as payloads, by their fields."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from typing import Any

from perdure.codec import Codec
from perdure.codec.annotations import _annotations
from perdure.codec.parameters import _typed_dict
from perdure.errors import InvalidPayload


def encode_exception(codec: Codec, error: BaseException) -> bytes:
    """The arguments and attributes of an exception; `InvalidPayload` if one of them cannot be encoded."""
    kind: Any = type(error)
    parts = {f"args.{index}": value for index, value in enumerate(error.args)}
    parts |= {f"fields.{name}": value for name, value in vars(error).items() if not name.startswith("__")}
    hints = _exception_hints(kind, len(error.args))
    # An annotation is a hint here, not a contract: `Declined(code: int)` may well pass text on to Exception.
    plain = [name for name, value in parts.items() if name in hints and not _fits(codec, value, hints[name])]
    record = {"parts": parts, "plain": plain} if plain else {"parts": parts}
    return codec.encode(record, _exception_type(kind, tuple(parts), tuple(plain)), what=kind.__name__)


def decode_exception(codec: Codec, data: bytes, cls: type[BaseException]) -> BaseException:
    """The exception again, as an instance of `cls` with its arguments and attributes; `__init__` is not called."""
    kind: Any = cls
    raw = codec.decode(data, _exception_type(kind, None, ()), what=cls.__name__)
    annotation = _exception_type(kind, tuple(raw["parts"]), tuple(raw.get("plain", ())))
    parts: dict[str, Any] = codec.decode(data, annotation, what=cls.__name__)["parts"]
    args = tuple(value for name, value in parts.items() if name.startswith("args."))
    try:
        error = cls.__new__(cls, *args)
    except Exception:  # a __new__ of its own, which wants something else
        error = BaseException.__new__(cls)
    BaseException.__setattr__(error, "args", args)  # also where the class is frozen
    vars(error).update(
        {name.removeprefix("fields."): value for name, value in parts.items() if name.startswith("fields.")}
    )
    return error


def _fits(codec: Codec, value: Any, annotation: Any) -> bool:
    try:
        codec.encode(value, annotation)
    except InvalidPayload:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _exception_type(cls: type[BaseException], names: tuple[str, ...] | None, plain: tuple[str, ...]) -> Any:
    """A record's annotation; while its names are not known, with parts of any type."""
    parts: Any = dict[str, Any]
    if names is not None:
        hints = _exception_hints(typing.cast(Any, cls), sum(name.startswith("args.") for name in names))
        fields = {name: Any if name in plain else hints.get(name, Any) for name in names}
        parts = _typed_dict(cls.__name__, fields)
    return _typed_dict("Exception", {"parts": parts, "plain": typing.NotRequired[list[str]]})


@functools.lru_cache(maxsize=1024)
def _exception_hints(cls: type[BaseException], count: int) -> dict[str, Any]:
    """What is known of the types: arguments by the parameters of `__init__`, attributes by the class or, where
    they have a parameter's name, by that parameter."""
    init = cls.__dict__.get("__init__") or cls.__init__
    hints = _annotations(init, {}) if inspect.isfunction(init) else {}
    names = list(inspect.signature(init).parameters)[1:] if inspect.isfunction(init) else []
    hints = {name: hint for name, hint in hints.items() if name in names}
    known = {f"args.{index}": hints.get(name, Any) for index, name in enumerate(names)} if len(names) == count else {}
    return known | {f"fields.{name}": hint for name, hint in (hints | _class_hints(cls)).items()}


def _class_hints(cls: type) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {}
