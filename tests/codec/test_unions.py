"""Unions that msgspec refuses: how they are written, and what an older or hand-written form is read as."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from perdure.codec import JSON, MSGPACK
from perdure.errors import InvalidPayload
from tests.codec.sample_types import Colour, Movie, Order, Point, Refund, T

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


class Row(msgspec.Struct, array_like=True):
    a: int


class Tagged(msgspec.Struct, tag=True):
    a: int


class AlsoTagged(msgspec.Struct, tag=True):
    a: int


def written(value: Any, annotation: Any) -> Any:
    return JSON.decode(JSON.encode(value, annotation))


def test_object_is_encoded_with_its_type_name_beside_its_fields():
    assert JSON.encode(Refund("a", 1), Order | Refund) == b'{"$type":"Refund","id":"a","cents":1}'


def test_member_that_is_not_an_object_is_wrapped():
    assert written(Decimal("1.50"), str | Decimal) == {"$type": "Decimal", "value": "1.50"}
    assert written([1], list[int] | list[str]) == {"$type": "list[int]", "value": [1]}
    assert written(["a"], list[int] | list[str]) == {"$type": "list[str]", "value": ["a"]}
    assert written(Row(1), Row | list[str]) == {"$type": "Row", "value": [1]}


def test_scalars_are_encoded_without_a_tag():
    annotation = str | Decimal | int | bool | None | Order
    for value in ("text", 3, True, None):
        assert written(value, annotation) == value


def test_unions_that_msgspec_supports_are_encoded_without_a_tag():
    assert written(Order("a", 1), Order | None) == {"id": "a", "cents": 1}
    assert written(AlsoTagged(1), Tagged | AlsoTagged) == {"type": "AlsoTagged", "a": 1}


@both
def test_dict_that_looks_like_a_tagged_value_is_preserved(codec):
    annotation = dict[str, Any] | Order
    for value in ({"$type": "Order", "id": "a", "cents": 1}, {"$type": "Order", "value": 1}, {}):
        assert codec.decode(codec.encode(value, annotation), annotation) == value


@both
def test_record_from_before_the_union_is_decoded_as_first_matching_member(codec):
    old = codec.encode(Order("a", 1), Order)
    assert codec.decode(old, Order | Refund) == Order("a", 1)
    assert codec.decode(codec.encode("1.5"), Decimal | str) == "1.5"
    assert codec.decode(codec.encode("1.5"), Decimal | bytes) == Decimal("1.5")


@both
def test_record_of_a_union_can_be_decoded_as_its_member(codec):
    assert codec.decode(codec.encode(Refund("a", 1), Order | Refund), Refund) == Refund("a", 1)


@both
def test_union_members_can_be_reordered(codec):
    for value in (Order("a", 1), Refund("a", 1)):
        back = codec.decode(codec.encode(value, Order | Refund | None), None | Refund | Order)
        assert back == value


@both
def test_classes_with_the_same_name_are_distinguished(codec):
    def make(module: str) -> Any:
        @dataclass
        class Same:
            a: int

        Same.__module__ = module
        return Same

    one, other = make("shop.one"), make("shop.other")
    for value in (one(1), other(1)):
        assert type(codec.decode(codec.encode(value, one | other), one | other)) is type(value)
    again = make("shop.one")
    with pytest.raises(InvalidPayload, match="must have different names"):
        codec.encode(one(1), one | again)


@both
def test_mixed_members_round_trip(codec):
    annotation = Movie | Order | Point | Colour | tuple[int, int] | list[Refund] | None | bytes
    values = [{"title": "x"}, Order("a", 1), Point(1, 2.0), Colour.RED, (1, 2), [Refund("a", 1)], None, b"x"]
    for value in values:
        back = codec.decode(codec.encode(value, annotation), annotation)
        assert back == value
        assert type(back) is type(value)
    assert codec.decode(codec.encode(values, list[annotation]), list[annotation]) == values


@both
def test_unbound_type_variable_accepts_any_value(codec):
    assert codec.decode(codec.encode([1, "a"], list[T]), list[T]) == [1, "a"]  # type: ignore[valid-type]


@both
def test_error_names_the_type_of_an_unknown_member(codec):
    data = codec.encode({"$type": "Gone", "x": 1})
    with pytest.raises(InvalidPayload, match=r"Expected `Order \| Refund`"):
        codec.decode(data, Order | Refund)
