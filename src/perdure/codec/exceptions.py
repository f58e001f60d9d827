"""Encode exceptions by their fields, and reconstruct them. Knows no run and no store."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from typing import Any

from perdure.codec import Codec
from perdure.codec.annotations import resolve_annotations
from perdure.codec.parameters import build_typed_dict
from perdure.errors import InvalidPayload


def encode_exception(codec: Codec, error: BaseException) -> bytes:
    """Return the arguments and attributes of an exception as bytes. Raises `InvalidPayload`."""
    kind: Any = type(error)
    parts = {f"args.{index}": value for index, value in enumerate(error.args)}
    parts |= {f"fields.{name}": value for name, value in vars(error).items() if not name.startswith("__")}
    hints = _exception_hints(kind, len(error.args))
    # Annotations are not binding here: `Declined(code: int)` may pass text to Exception.
    plain = [name for name, value in parts.items() if name in hints and not _can_encode(codec, value, hints[name])]
    record = {"parts": parts, "plain": plain} if plain else {"parts": parts}
    return codec.encode(record, _exception_type(kind, tuple(parts), tuple(plain)), what=kind.__name__)


def decode_exception(codec: Codec, data: bytes, cls: type[BaseException]) -> BaseException:
    """Return an instance of `cls` with the recorded arguments and attributes. `__init__` is not called."""
    kind: Any = cls
    raw = codec.decode(data, _exception_type(kind, None, ()), what=cls.__name__)
    annotation = _exception_type(kind, tuple(raw["parts"]), tuple(raw.get("plain", ())))
    parts: dict[str, Any] = codec.decode(data, annotation, what=cls.__name__)["parts"]
    args = tuple(value for name, value in parts.items() if name.startswith("args."))
    try:
        error = cls.__new__(cls, *args)
    except Exception:  # The class has a __new__ with other parameters.
        error = BaseException.__new__(cls)
    BaseException.__setattr__(error, "args", args)  # Works for frozen classes too.
    fields = {name.removeprefix("fields."): value for name, value in parts.items() if name.startswith("fields.")}
    vars(error).update({name: value for name, value in fields.items() if not name.startswith("__")})
    return error


def _can_encode(codec: Codec, value: Any, annotation: Any) -> bool:
    try:
        codec.encode(value, annotation)
    except InvalidPayload:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _exception_type(cls: type[BaseException], names: tuple[str, ...] | None, plain: tuple[str, ...]) -> Any:
    """Return the annotation of an encoded exception. With `names=None`, all parts have the type Any."""
    parts: Any = dict[str, Any]
    if names is not None:
        hints = _exception_hints(typing.cast(Any, cls), sum(name.startswith("args.") for name in names))
        fields = {name: Any if name in plain else hints.get(name, Any) for name in names}
        parts = build_typed_dict(cls.__name__, fields)
    return build_typed_dict("Exception", {"parts": parts, "plain": typing.NotRequired[list[str]]})


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
    known = {f"args.{index}": hints.get(name, Any) for index, name in enumerate(names)} if len(names) == count else {}
    return known | {f"fields.{name}": hint for name, hint in (hints | _class_hints(cls)).items()}


def _class_hints(cls: type) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {}
