"""Types that pydantic supports and msgspec does not: a converter over `pydantic.TypeAdapter`.

Examples are discriminated unions, annotated types (`PositiveInt`), pydantic dataclasses with validators, `HttpUrl` and
`Path`. pydantic is optional: it is imported when an annotation needs it. Models are no subject of this module: msgspec
calls them by a hook (`plain_values`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from perdure.codec.plain_values import (
    Mismatch,
    explain_validation_error,
    is_model,
    type_name,
    validation_options,
)

_PACKAGES = ("pydantic", "pydantic_core", "annotated_types")
_NOT_DATA = {"generator", "callable", "is-instance", "is-subclass", "any"}
"""Schemas of values that cannot be restored from data: `Iterator[int]`, `Callable`, an arbitrary class."""


def needs_pydantic(annotation: Any) -> bool:
    """Return whether pydantic has rules for this type that msgspec would ignore. Does not look into containers."""
    if typing.get_origin(annotation) is typing.Annotated:
        metadata = annotation.__metadata__
        return any(map(_is_pydantic_metadata, metadata)) and not any(
            isinstance(each, msgspec.Meta) for each in metadata
        )
    kind = typing.get_origin(annotation) or annotation
    return dataclasses.is_dataclass(kind) and "__is_pydantic_dataclass__" in vars(kind) and _has_rules(kind)


def _is_pydantic_metadata(each: Any) -> bool:
    kind = each if isinstance(each, type) else type(each)
    return kind.__module__.partition(".")[0] in _PACKAGES or hasattr(each, "__get_pydantic_core_schema__")


def _has_rules(kind: Any) -> bool:
    """Return whether a pydantic dataclass has more than fields and types."""
    if getattr(kind, "__pydantic_config__", None):
        return True
    decorators = kind.__pydantic_decorators__
    if any(getattr(decorators, each.name) for each in dataclasses.fields(decorators) if each.name != "computed_fields"):
        return True
    fields = kind.__pydantic_fields__.values()
    return any(each.metadata or each.alias or each.validation_alias or each.discriminator for each in fields)


def contains_pydantic(annotation: Any) -> bool:
    """Return whether an annotation or a type in it `needs_pydantic`. Fields of models do not count."""
    if sys.modules.keys().isdisjoint(_PACKAGES):
        return False
    return _search(annotation, [])


def _search(annotation: Any, seen: list[Any]) -> bool:
    if any(each is annotation for each in seen):
        return False
    seen.append(annotation)
    if needs_pydantic(annotation):
        return True
    kind = typing.get_origin(annotation) or annotation
    if kind is typing.Literal or is_model(kind):
        return False
    if hasattr(annotation, "__supertype__"):  # a NewType
        return _search(annotation.__supertype__, seen)
    if type(annotation).__name__ == "TypeAliasType":
        return _search(annotation.__value__, seen)
    parts = list(typing.get_args(annotation))[: 1 if kind is typing.Annotated else None]
    if isinstance(kind, type) and getattr(kind, "__annotations__", None):
        with contextlib.suppress(Exception):  # a name that cannot be resolved: the converter of the class reports it
            parts.extend(typing.get_type_hints(kind, include_extras=True).values())
    return any(_search(part, seen) for part in parts)


def build_pydantic_converter(annotation: Any, legacy: Callable[[], Any] | None = None) -> PydanticConverter:
    """Return the converter for an annotation. Raises `Mismatch` if pydantic is missing or does not support the type.

    `legacy` returns the converter that wrote tagged unions before pydantic converted them.
    """
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise Mismatch("", "pydantic supports more types; to use it, `pip install pydantic`") from None
    adapter: Any = None
    reason: Exception | None = None
    # A type with a configuration of its own rejects another one. Otherwise bytes are base64, as msgspec writes them.
    for options in ({"config": {"ser_json_bytes": "base64", "val_json_bytes": "base64"}}, {}):
        try:
            with _without_field_warnings():
                adapter = TypeAdapter(annotation, **typing.cast(Any, options))
            break
        except Exception as error:  # pydantic does not support the type, or a package that it needs is missing
            reason = error
    if adapter is None or adapter.core_schema["type"] in _NOT_DATA:
        text = "it is not data" if reason is None else str(reason).strip().partition("\n")[0]
        raise Mismatch("", f"pydantic does not support it either: {text}")
    return PydanticConverter(annotation, adapter, legacy)


@contextlib.contextmanager
def _without_field_warnings() -> Iterator[None]:
    """Ignore the warning that a field's alias has no effect: a field is converted apart from its class, by its name."""
    import pydantic.warnings

    category = getattr(pydantic.warnings, "UnsupportedFieldAttributeWarning", None)  # since pydantic 2.12
    with warnings.catch_warnings():
        if category is not None:
            warnings.simplefilter("ignore", category)
        yield


class PydanticConverter:
    """Converts values of one annotation with `pydantic.TypeAdapter`."""

    def __init__(self, annotation: Any, adapter: Any, legacy: Callable[[], Any] | None) -> None:
        self.kind = annotation if isinstance(annotation, type) else None
        self._annotation = annotation
        self._dump = functools.partial(adapter.dump_python, mode="json", round_trip=True)
        self._validate = functools.partial(adapter.validate_json, **validation_options())
        self._legacy = legacy

    def convert(self, value: Any, path: str, encoding: bool) -> Any:
        return self._encode(value, path) if encoding else self._decode(value, path)

    def _encode(self, value: Any, path: str) -> Any:
        try:
            return self._dump(value, warnings="error")
        except Exception as error:
            reason = error
        if isinstance(value, dict):  # in encoded form
            return self._dump(self._decode(value, path), warnings=False)
        # pydantic warns of an int for a float too: accept what is restored as an equal value.
        with contextlib.suppress(Exception):
            plain = self._dump(value, warnings=False)
            if self._decode(plain, path) == value:
                return plain
        got = type_name(type(value))
        detail = str(reason).strip().replace("\n", " ")
        raise Mismatch(path, f"Expected `{type_name(self._annotation)}`, got `{got}`: {detail}") from reason

    def _decode(self, data: Any, path: str) -> Any:
        if self._legacy is not None and isinstance(data, dict) and "$type" in data:
            with contextlib.suppress(Mismatch):
                return self._legacy().convert(data, path, False)
        try:
            return self._validate(msgspec.json.encode(data))
        except Exception as error:
            below, reason = explain_validation_error(error)
            raise Mismatch(path + below, reason) from error
