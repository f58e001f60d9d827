"""Find values that lose their class without an annotation, and name the annotation that keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perdure.codec.plain_values import field_names, type_name

_PLAIN = {type(None), bool, int, float, str, bytes}
_SAMPLE = 100  # items of a container that the advice considers


def contains_object(value: Any) -> bool:
    """Return whether a value is or contains a dataclass, Struct or model, which is decoded as a dict without a type."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if isinstance(value, dict):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return field_names(kind) is not None
    if set(map(type, items)) <= _PLAIN:  # without a Python call per item
        return False
    return any(contains_object(item) for item in items)


def advise_annotation(value: Any) -> str:
    """Return the annotation that fits a value: `list[Order | None]`."""
    match value:
        case None:
            return "None"
        case dict():
            return f"dict[{_union(value)}, {_union(value.values())}]"
        case tuple() if type(value) is tuple and 0 < len(value) <= 4:
            return f"tuple[{', '.join(map(advise_annotation, value))}]"
        case tuple() if type(value) is tuple:
            return f"tuple[{_union(value)}, ...]"
        case list() | set() | frozenset():
            return f"{type_name(type(value))}[{_union(value)}]"
    return type_name(type(value))


def _union(items: Iterable[Any]) -> str:
    sample = [item for item, _ in zip(items, range(_SAMPLE), strict=False)]
    return " | ".join(dict.fromkeys(map(advise_annotation, sample))) or "Any"
