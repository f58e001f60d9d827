"""Values beside their annotations: what msgspec cannot write or read by itself, what fits, and where it does not.

This room knows msgspec and pydantic; it knows neither bytes nor shapes.
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
    """A value that does not fit, at a path below the one being encoded or decoded."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


def to_plain(value: Any) -> Any:
    """For what msgspec does not write itself: a model as its dump, a subclass of str, int or float as plain value."""
    if is_model(type(value)):
        return value.model_dump(mode="json", round_trip=True, warnings=False)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise NotImplementedError


def revive(kind: type, data: Any) -> Any:
    """For what msgspec does not read itself: models, which are the only custom types that a plan lets through."""
    try:
        # Read as JSON, because strict models take text for a datetime only there.
        return typing.cast(Any, kind).model_validate_json(msgspec.json.encode(data), **_by_name())
    except ValueError as error:
        details = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
        raise ValueError(f"{details['msg']} - at `${path}`") from error


def is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic.main")  # never imported from here: who has a model has imported it
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


@functools.cache
def _by_name() -> dict[str, bool]:
    """A model is dumped by field name, so it must also validate by name; pydantic can be told so since 2.11."""
    major, minor = sys.modules["pydantic"].VERSION.split(".")[:2]
    return {"by_alias": True, "by_name": True} if (int(major), int(minor)) >= (2, 11) else {}


def check_exact(value: Any, annotation: Any, path: str) -> None:
    """Raise unless each part is of its annotated type before encoding too: JSON has one text for UUID and str."""
    try:
        data = msgspec.to_builtins(value, builtin_types=_EXACT, enc_hook=to_plain)
        msgspec.convert(data, annotation, builtin_types=_EXACT, dec_hook=revive)
    except msgspec.ValidationError as error:
        below, reason = explain(error)
        raise Mismatch(path + below, reason) from None


def check_same(value: Any, back: Any, path: str) -> None:
    """Raise if a value comes back as another class or changed. Plain data in its place was asked for, by `Any`."""
    if (names := _field_names(type(value))) is not None:
        if isinstance(back, dict) or type(back) in (list, tuple):
            return
        if type(back) is not type(value):
            raise Mismatch(path, f"Expected `{type_name(type(back))}`, got `{type_name(type(value))}`")
        for name in names:
            check_same(getattr(value, name, None), getattr(back, name, None), f"{path}.{name}")
    elif isinstance(value, dict) and isinstance(back, dict):
        if len(value) != len(back):
            raise Mismatch(path, "two different keys are the same when encoded")
        for key, item, other in zip(value, value.values(), back.values(), strict=True):
            check_same(item, other, path + path_step(key))
    elif isinstance(value, list | tuple) and isinstance(back, list | tuple):
        for index, (item, other) in enumerate(zip(value, back, strict=True)):
            check_same(item, other, f"{path}[{index}]")
    elif type(value) is type(back) and value != back and value == value and _instant(value) != _instant(back):
        raise Mismatch(path, f"`{type_name(type(value))}` {value!r} would come back as {back!r}")


def _instant(value: Any) -> Any:
    """Two datetimes in a repeated hour are never equal across zones, even if they are the same moment."""
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


def _field_names(kind: type) -> tuple[str, ...] | None:
    if hasattr(kind, "__struct_fields__"):
        return typing.cast("tuple[str, ...]", kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if is_model(kind):
        return tuple(typing.cast(Any, kind).model_fields)
    return None


def children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with its step in the path."""
    if is_model(type(value)):
        value = to_plain(value)
    if isinstance(value, dict):
        yield from ((path_step(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", getattr(value, name, None)) for name in _field_names(type(value)) or ())


def explain(error: Exception) -> tuple[str, str]:
    """The path and the reason of an error; msgspec's own reads "reason - at `$.items[0]`", the outermost path last."""
    if isinstance(error, Mismatch):
        return error.path, error.reason
    reason, *places = re.split(r" - at (?=`(?:key` in `)?\$)", str(error) or type(error).__name__)
    path = "".join(place.split("$", 1)[1].rstrip("`") + ("[key]" if "`key`" in place else "") for place in places[::-1])
    return path, reason if isinstance(error, msgspec.MsgspecError | ValueError) else f"{type(error).__name__}: {reason}"


def path_step(key: Any) -> str:
    """A dict's key as a step in a path: as a field's name where it could be one."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def type_name(kind: Any) -> str:
    if typing.get_origin(kind) is None and isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")
