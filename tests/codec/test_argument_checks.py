"""Arguments that fit their annotations, and the path and reason for those that do not."""

import collections.abc
import enum
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Protocol, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from annotated_types import Gt

from perdure.codec.argument_checks import argument_check
from perdure.codec.plain_values import Mismatch

T = TypeVar("T")
UserId = NewType("UserId", int)


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Item:
    name: str
    price: Decimal = Decimal(1)


@dataclass
class SpecialItem(Item):
    colour: Colour = Colour.RED


@dataclass
class Order:
    id: str
    items: list[Item] = field(default_factory=list)
    next: "Order | None" = None


@dataclass
class Box(Generic[T]):
    content: T


class Point(NamedTuple):
    x: int
    y: float


class Meta(TypedDict):
    id: int
    note: NotRequired[str]


class Packed(msgspec.Struct):
    id: int
    tags: dict[str, int] = {}


class Model(pydantic.BaseModel):
    id: int


class Sized(Protocol):
    def __len__(self) -> int: ...


class Opaque:
    pass


def cyclic() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


FITS = [
    (1, int),
    (1, float),
    (math.nan, float),
    (math.inf, list[float] | float),
    (2**70, int),
    ([2**70], list[int]),
    ("x", str | None),
    (None, str | None),
    (None, None),
    (b"x", bytes),
    (bytearray(b"x"), bytes),
    (datetime.now(UTC), datetime),
    (datetime.now(UTC), date),
    (UUID(int=1), UUID),
    (Decimal("1.0"), Decimal),
    ([Decimal(1)], list[Decimal]),
    (UserId(3), UserId),
    (Colour.RED, Colour),
    ("a", Literal["a", "b"]),
    (3, Annotated[int, msgspec.Meta(gt=0)]),
    ([1, 2], list[int]),
    ((1, 2), collections.abc.Sequence[int]),
    ({1}, collections.abc.Collection[int]),
    (iter([1]), collections.abc.Iterator[int]),
    ((1, "x"), tuple[int, str]),
    ((1, 2, 3), tuple[int, ...]),
    ({"a": [1]}, dict[str, list[int]]),
    ({1: 2, "a": 3}, dict[int | str, int]),
    ({"id": 1}, Meta),
    (Point(1, 2), Point),
    (Order("1", [Item("a"), SpecialItem("b")], Order("2")), Order),
    (SpecialItem("b"), Item),
    (Box(3), Box[int]),
    (Packed(1, {"a": 2}), Packed),
    (Model(id=1), Model),
    ([Model(id=1)], list[Model]),
    (Opaque(), Opaque),
    ([Opaque()], list[Opaque]),
    ("x", Sized),
    (3, Sized),
    (len, collections.abc.Callable[..., int]),
    (Opaque(), Any),
    (Order(1), Any),  # type: ignore[arg-type]
    ([Order(1)], list[Any]),  # type: ignore[arg-type]
    (Opaque(), object),
    (Opaque(), T),
    (cyclic(), list[Any]),
    (cyclic(), collections.abc.Sequence[object]),
    (int, type[int]),
]

MISFITS = [
    ("1", int, "v", "Expected `int`, got `str`"),
    (True, int, "v", "Expected `int`, got `bool`"),
    (1.5, int, "v", "Expected `int`, got `float`"),
    ("x", float, "v", "Expected `float`, got `str`"),
    (None, str, "v", "Expected `str`, got `NoneType`"),
    (3, str | None, "v", "got `int`"),
    (3, None, "v", "Expected `None`, got `int`"),
    ("2020-01-01", datetime, "v", "Expected `datetime`, got `str`"),
    ("red", Colour, "v", "Expected `Colour`, got `str`"),
    ("c", Literal["a", "b"], "v", "Expected one of 'a', 'b', got 'c'"),
    (0, Annotated[int, msgspec.Meta(gt=0)], "v", "Expected `int` >= 1"),
    ([1, "2"], list[int], "v[1]", "Expected `int`, got `str`"),
    ("12", list[str], "v", "Expected `list`, got `str`"),
    ((1,), tuple[int, str], "v", "Expected 2 items, got 1"),
    ((1, 2), tuple[int, str], "v[1]", "Expected `str`, got `int`"),
    ({"a": ["x"]}, dict[str, list[int]], "v.a[0]", "Expected `int`, got `str`"),
    ({1: 1}, dict[str, int], "v[1]", "Expected `str`, got `int`"),
    ({}, Meta, "v", "Object missing required field `id`"),
    ({"id": "1"}, Meta, "v.id", "Expected `int`, got `str`"),
    ({"id": "1"}, Order, "v", "Expected `Order`, got `dict`"),
    (Order("1", [Item("a", "dear")]), Order, "v.items[0].price", "Expected `Decimal`, got `str`"),  # type: ignore[arg-type]
    (Order("1", [], Order(2)), Order | None, "v.next.id", "Expected `str`, got `int`"),  # type: ignore[arg-type]
    (Box("x"), Box[int], "v.content", "Expected `int`, got `str`"),
    (Point("1", 2), Point, "v.x", "Expected `int`, got `str`"),  # type: ignore[arg-type]
    (Packed("1"), Packed, "v.id", "Expected `int`, got `str`"),  # type: ignore[arg-type]
    ({"id": 1}, Model, "v", "Expected `Model`, got `dict`"),
    (3, Opaque, "v", "Expected `Opaque`, got `int`"),
    ([3], list[Opaque], "v[0]", "Expected `Opaque`, got `int`"),
    (3, collections.abc.Callable[..., int], "v", "got `int`"),
]


@pytest.mark.parametrize(("value", "annotation"), FITS)
def test_value_fits(value, annotation):
    check = argument_check("v", annotation)
    if check is not None and type(value) is not check.exact_type:
        check(value)


@pytest.mark.parametrize(("value", "annotation", "path", "reason"), MISFITS)
def test_value_does_not_fit(value, annotation, path, reason):
    check = argument_check("v", annotation)
    assert check is not None
    assert type(value) is not check.exact_type
    with pytest.raises(Mismatch) as refused:
        check(value)
    assert refused.value.path == path
    assert reason in refused.value.reason


def test_value_is_not_changed_or_consumed():
    numbers = iter([1, 2])
    check = argument_check("v", collections.abc.Iterator[int])
    assert check is not None
    check(numbers)
    assert list(numbers) == [1, 2]


def test_rules_of_pydantic_are_checked():
    check = argument_check("n", pydantic.PositiveInt)
    assert check is not None
    check(1)
    with pytest.raises(Mismatch, match="greater than 0"):
        check(0)
    nested = argument_check("ns", list[Annotated[int, Gt(5)]])
    assert nested is not None
    nested([6])
    with pytest.raises(Mismatch, match=r"ns\[0\]"):
        nested([5])
