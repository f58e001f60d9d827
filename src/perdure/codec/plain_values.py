"""Plain values: conversions that msgspec lacks, checks of values against annotations, and paths in error messages.

This module knows msgspec and pydantic; it knows neither encoded bytes nor converters.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

SUPPORTED = (
    "supported are None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, dataclasses without InitVar, "
    "msgspec Structs, pydantic models, TypedDict, NamedTuple, enums, datetime, date, time, timedelta, Decimal, UUID, "
    "Literal and unions of these"
)

SCALARS = (str, int, float, bool, None, type(None))
_EXACT = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)


class Mismatch(Exception):
    """A value does not match its annotation. `path` is relative to the value that is encoded or decoded."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


def to_plain(value: Any) -> Any:
    """Encode hook of msgspec: return a model as its dump, and a subclass of str, int or float as plain value."""
    if is_model(type(value)):
        return value.model_dump(mode="json", round_trip=True, warnings=False)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise NotImplementedError


def decode_model(kind: type, data: Any) -> Any:
    """Decode hook of msgspec: return a pydantic model. Other custom types are rejected before."""
    try:
        # Validated as JSON, because strict models accept text for a datetime only in JSON.
        return typing.cast(Any, kind).model_validate_json(msgspec.json.encode(data), **validation_options())
    except ValueError as error:
        path, reason = explain_validation_error(error)
        raise ValueError(f"{reason} - at `${path}`") from error


def explain_validation_error(error: Exception) -> tuple[str, str]:
    """Return path and reason of an error of pydantic, or of a validator in it."""
    unknown = {"loc": (), "msg": str(error) or type(error).__name__}
    details: dict[str, Any] = error.errors()[0] if hasattr(error, "errors") else unknown
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    return path, str(details["msg"])


def is_model(kind: Any) -> bool:
    """Return True for a pydantic model. pydantic is not imported: without it there are no models."""
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


@functools.cache
def validation_options() -> dict[str, bool]:
    """Return the options to validate a model by field name, as it is dumped. They exist since pydantic 2.11."""
    major, minor = sys.modules["pydantic"].VERSION.split(".")[:2]
    return {"by_alias": True, "by_name": True} if (int(major), int(minor)) >= (2, 11) else {}


def check_exact(value: Any, annotation: Any, path: str) -> None:
    """Raise `Mismatch` unless each part has its annotated type before encoding: in JSON, UUID and str look alike."""
    try:
        data = msgspec.to_builtins(value, builtin_types=_EXACT, enc_hook=to_plain)
        msgspec.convert(data, annotation, builtin_types=_EXACT, dec_hook=decode_model)
    except msgspec.ValidationError as error:
        below, reason = explain(error)
        raise Mismatch(path + below, reason) from None


def check_same(value: Any, decoded: Any, path: str) -> None:
    """Raise `Mismatch` if a value is decoded with another class or content. Plain data is accepted: `Any` yields it."""
    if (names := field_names(type(value))) is not None:
        if isinstance(decoded, dict) or type(decoded) in (list, tuple):
            return
        if not isinstance(decoded, type(value)):  # A validator of pydantic may return a more specific class.
            raise Mismatch(path, f"Expected `{type_name(type(decoded))}`, got `{type_name(type(value))}`")
        for name in names:
            check_same(getattr(value, name, None), getattr(decoded, name, None), f"{path}.{name}")
    elif isinstance(value, dict) and isinstance(decoded, dict):
        if len(value) != len(decoded):
            raise Mismatch(path, "two different keys are equal when encoded")
        for key, item, other in zip(value, value.values(), decoded.values(), strict=True):
            check_same(item, other, path + path_step(key))
    elif isinstance(value, list | tuple) and isinstance(decoded, list | tuple):
        for index, (item, other) in enumerate(zip(value, decoded, strict=True)):
            check_same(item, other, f"{path}[{index}]")
    elif type(value) is not type(decoded) or not _defines_equality(type(value)):
        return
    elif value != decoded and value == value and _to_utc(value) != _to_utc(decoded):
        raise Mismatch(path, f"`{type_name(type(value))}` {value!r} would be decoded as {decoded!r}")


def _defines_equality(kind: Any) -> bool:
    """Return whether values of a class can be compared. Those of other classes are restored by pydantic only."""
    return kind.__eq__ is not object.__eq__


def _to_utc(value: Any) -> Any:
    """Return a datetime in UTC. In a repeated hour, equal times of different zones do not compare as equal."""
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass, Struct or model; None for other classes."""
    if hasattr(kind, "__struct_fields__"):
        return typing.cast("tuple[str, ...]", kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if is_model(kind):
        return tuple(typing.cast(Any, kind).model_fields)
    return None


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its path step."""
    if is_model(type(value)):
        value = to_plain(value)
    if isinstance(value, dict):
        yield from ((path_step(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", getattr(value, name, None)) for name in field_names(type(value)) or ())


def explain(error: Exception) -> tuple[str, str]:
    """Return path and reason of an error. msgspec writes "reason - at `$.items[0]`", the outermost path last."""
    if isinstance(error, Mismatch):
        return error.path, error.reason
    reason, *paths = re.split(r" - at (?=`(?:key` in `)?\$)", str(error) or type(error).__name__)
    path = "".join(each.split("$", 1)[1].rstrip("`") + ("[key]" if "`key`" in each else "") for each in paths[::-1])
    return path, reason if isinstance(error, msgspec.MsgspecError | ValueError) else f"{type(error).__name__}: {reason}"


def path_step(key: Any) -> str:
    """Return a dict key as a path step: like a field name if it is an identifier."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def type_name(kind: Any) -> str:
    """Return the name of a type for error messages."""
    if typing.get_origin(kind) is None and isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")
