"""JSON schemas of payloads: build one from the parameters of a function, and check plain data against one.

A process that has not imported a workflow checks the payload of a start with the schema that the workflow's workers
have published. The schema is that of msgspec. A parameter whose type only perdure's own converters support has no
schema, and the worker checks it. The check knows the keywords that msgspec writes and ignores others.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import msgspec

from perdure.codec.converters import Native, converter_for
from perdure.codec.parameters import Parameters

Schema = Mapping[str, Any]
MAX_CHECKED_DEPTH = 200

_REF_TEMPLATE = "#/$defs/{name}"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}
_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("more than", operator.gt),
    "maximum": ("at most", operator.le),
    "exclusiveMaximum": ("less than", operator.lt),
}
_SIZES: tuple[tuple[type, str, str], ...] = (
    (str, "Length", "characters"),
    (list, "Items", "items"),
    (dict, "Properties", "keys"),
)


def payload_schema(parameters: Parameters) -> dict[str, Any]:
    """Return the JSON schema of a payload: an object by parameter name."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    required: list[str] = []
    for each in parameters.each():
        if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):  # one value with all of them
            properties[each.name] = {"type": "array" if each.kind is Parameter.VAR_POSITIONAL else "object"}
            continue
        schema, used = _schema_of(parameters.hints[each.name])
        properties[each.name] = schema if _agrees(used, definitions) else {}
        definitions.update(used if _agrees(used, definitions) else {})
        if each.default is Parameter.empty:
            required.append(each.name)
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    found["additionalProperties"] = False
    return {**found, "$defs": definitions} if definitions else found


def _schema_of(annotation: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a type and the definitions that it uses; an empty one if msgspec has none."""
    try:
        converter = converter_for(annotation)
        if not isinstance(converter, Native):
            return {}, {}
        (schema,), used = msgspec.json.schema_components([converter.annotation], ref_template=_REF_TEMPLATE)
        return schema, used
    except Exception:  # an annotation may be any object
        return {}, {}


def _agrees(used: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether no name means two types."""
    return all(known.get(name, schema) == schema for name, schema in used.items())


def find_schema_mismatch(schema: Schema, value: Any) -> tuple[str, str] | None:
    """Return path and reason of the first part of plain data that does not match, or None."""
    return _SchemaChecker(schema.get("$defs", {})).check(schema, value, "", 0)


class _SchemaChecker:
    """Checks data against one schema and its definitions."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def check(self, schema: Any, value: Any, path: str, depth: int) -> tuple[str, str] | None:
        if not isinstance(schema, Mapping) or depth > MAX_CHECKED_DEPTH:
            return None
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            return self.check(self._definitions.get(name), value, path, depth + 1)
        if "anyOf" in schema:
            return self._check_any(schema["anyOf"], value, path, depth)
        if "enum" in schema and value not in schema["enum"]:
            return path, f"must be one of {', '.join(map(repr, schema['enum']))}, not {_shown(value)}"
        if "const" in schema and value != schema["const"]:
            return path, f"must be {schema['const']!r}, not {_shown(value)}"
        wrong = _check_type(schema, value) or _check_bounds(schema, value)
        if wrong is not None:
            return path, wrong
        if isinstance(value, dict):
            return self._check_object(schema, value, path, depth)
        if isinstance(value, list):
            return self._check_items(schema, value, path, depth)
        return None

    def _check_any(self, choices: Sequence[Any], value: Any, path: str, depth: int) -> tuple[str, str] | None:
        found = [self.check(choice, value, path, depth + 1) for choice in choices]
        if not found or None in found:
            return None
        deepest = max((each for each in found if each is not None), key=lambda each: len(each[0]))
        return deepest if deepest[0] != path else (path, f"matches none of its types: {_shown(value)}")

    def _check_object(self, schema: Schema, value: dict[str, Any], path: str, depth: int) -> tuple[str, str] | None:
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name in schema.get("required", ()):
            if name not in value:
                return path, f"{name!r} is missing"
        for name, item in value.items():
            step = f"{path}.{name}"
            if name not in properties and extra is False:
                return step, f"is unknown; known are {', '.join(map(repr, properties)) or 'none'}"
            wrong = self.check(properties.get(name, extra), item, step, depth + 1)
            if wrong is not None:
                return wrong
        return None

    def _check_items(self, schema: Schema, value: list[Any], path: str, depth: int) -> tuple[str, str] | None:
        first = schema.get("prefixItems", ())
        for number, item in enumerate(value):
            expected = first[number] if number < len(first) else schema.get("items")
            wrong = self.check(expected, item, f"{path}[{number}]", depth + 1)
            if wrong is not None:
                return wrong
        return None


def _check_type(schema: Schema, value: Any) -> str | None:
    name = schema.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        return None
    if "format" in schema and isinstance(value, int | float) and not isinstance(value, bool):
        return None  # msgspec also reads some of these types from numbers, such as Decimal
    matches = isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
    return None if matches else f"must be {_article(name)}, not {_shown(value)}"


def _check_bounds(schema: Schema, value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for keyword, (text, fits) in _BOUNDS.items():
            if keyword in schema and not fits(value, schema[keyword]):
                return f"must be {text} {schema[keyword]}, not {value}"
    for sized, kind, unit in _SIZES:
        size = len(value) if isinstance(value, str | list | dict) and isinstance(value, sized) else None
        if size is None:
            continue
        least, most = schema.get(f"min{kind}"), schema.get(f"max{kind}")
        if (least is not None and size < least) or (most is not None and size > most):
            bounds = f"at least {least}" if least is not None and size < least else f"at most {most}"
            return f"must have {bounds} {unit}, not {size}"
    if isinstance(value, str) and "pattern" in schema and re.search(schema["pattern"], value) is None:
        return f"must match {schema['pattern']!r}, not {_shown(value)}"
    return None


def _article(name: str) -> str:
    return {"object": "an object", "array": "a list", "integer": "a whole number", "null": "null"}.get(
        name, f"a {name}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
