"""JSON schemas of payloads: what the codec accepts matches, and what does not match is named by its path."""

import dataclasses
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest

from perdure.codec import JSON
from perdure.codec.parameters import Parameters
from perdure.codec.payload_schema import find_schema_mismatch, payload_schema


class Color(Enum):
    RED = "red"


@dataclasses.dataclass
class Node:
    name: str
    children: list["Node"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Cat:
    name: str


@dataclasses.dataclass
class Dog:
    name: str


def takes(
    ctx: Any,
    node: Node,
    number: float,
    color: Color = Color.RED,
    pair: tuple[int, str] = (1, "a"),
    by_id: dict[int, str] | None = None,
    price: Decimal | None = None,
    at: datetime | None = None,
    wait: timedelta | None = None,
    id: UUID | None = None,
    raw: bytes = b"",
    kind: Literal["a", 1] = "a",
    rating: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1,
    word: Annotated[str, msgspec.Meta(min_length=2, pattern="^[a-z]+$")] = "ab",
    some: Annotated[list[int], msgspec.Meta(max_length=2)] = [],  # noqa: B006
    pet: Cat | Dog | None = None,
    anything: Any = None,
) -> None: ...


PARAMETERS = Parameters.of(takes, skip=1)
SCHEMA = payload_schema(PARAMETERS)
GOOD: dict[str, Any] = {"node": {"name": "a", "children": [{"name": "b"}]}, "number": 1}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"number": 1.5, "color": "red", "pair": [1, "x"], "by_id": {"1": "x"}},
        {"price": "1.5", "at": "2026-01-01T00:00:00Z", "wait": "PT1S", "id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8"},
        {"price": 1.5, "raw": "AAE=", "kind": 1, "rating": 5, "word": "abc", "some": [1, 2]},
        {"price": None, "at": None, "by_id": None, "anything": {"x": [1]}},
        {"pet": {"$type": "Cat", "name": "x"}},
    ],
)
def test_what_the_codec_accepts_matches(more):
    payload = {**GOOD, **more}
    JSON.decode(JSON.encode(payload), PARAMETERS.type)
    assert find_schema_mismatch(SCHEMA, payload) is None


@pytest.mark.parametrize(
    ("more", "path", "words"),
    [
        (
            {"node": {"name": "a", "children": [{"name": "b"}, {"name": 2}]}},
            ".node.children[1].name",
            "a string, not 2",
        ),
        ({"node": {"children": []}}, ".node", "'name' is missing"),
        ({"number": "1"}, ".number", "a number"),
        ({"number": True}, ".number", "a number"),
        ({"color": "blue"}, ".color", "one of 'red'"),
        ({"pair": [1]}, ".pair", "at least 2 items"),
        ({"pair": ["x", 1]}, ".pair[0]", "a whole number"),
        ({"by_id": {"1": 5}}, ".by_id.1", "a string"),
        ({"kind": "b"}, ".kind", "one of"),
        ({"rating": 6}, ".rating", "at most 5"),
        ({"rating": 0}, ".rating", "at least 1"),
        ({"word": "a"}, ".word", "at least 2 characters"),
        ({"word": "A1"}, ".word", "must match"),
        ({"some": [1, 2, 3]}, ".some", "at most 2 items"),
        ({"unknown": 1}, ".unknown", "is unknown"),
    ],
)
def test_what_does_not_match_is_named_by_its_path(more, path, words):
    payload = {**GOOD, **more}
    found = find_schema_mismatch(SCHEMA, payload)
    assert found is not None
    assert found[0] == path
    assert words in found[1]


def test_a_type_that_only_perdure_converts_has_no_schema():
    assert SCHEMA["properties"]["pet"] == {}


def test_the_schema_is_plain_data():
    assert msgspec.json.decode(msgspec.json.encode(SCHEMA)) == SCHEMA


def test_two_types_of_one_name_have_no_common_schema():
    def first() -> Any:
        @dataclasses.dataclass
        class Same:
            a: int

        return Same

    def second() -> Any:
        @dataclasses.dataclass
        class Same:
            b: str

        return Same

    def function(ctx: Any, a: Any, b: Any) -> None: ...

    function.__annotations__ = {"a": first(), "b": second()}
    schema = payload_schema(Parameters.of(function, skip=1))
    assert find_schema_mismatch(schema, {"a": {"a": 1}, "b": {"b": "x"}}) is None
    assert find_schema_mismatch(schema, {"a": {"a": "x"}, "b": {"b": "x"}}) == (
        ".a.a",
        "must be a whole number, not 'x'",
    )


def test_data_that_nests_without_end_is_checked_to_a_limit():
    nested: dict[str, Any] = {"name": "a"}
    for _ in range(1000):
        nested = {"name": "a", "children": [nested]}
    assert find_schema_mismatch(SCHEMA, {"node": nested, "number": 1}) is None
