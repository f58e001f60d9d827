"""What is encoded with an annotation comes back equal and of the same class."""

import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType, Optional
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.codec import JSON, MSGPACK, Codec
from tests.codec.sample_types import (
    Box,
    Branch,
    Cart,
    Colour,
    Either,
    Incomparable,
    Leaf,
    Ledger,
    Level,
    Line,
    Movie,
    Order,
    Pair,
    Payment,
    Point,
    Refund,
    Renamed,
    Tree,
)

CODECS = [JSON, MSGPACK]
both = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

UserId = NewType("UserId", int)
CART = Cart(
    [Line("tea", Decimal("1.50"), frozenset({"hot"}))],
    UUID(int=7),
    datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC),
    date(2024, 3, 1),
    Colour.BLUE,
    {1: "one"},
)
LEDGER = Ledger(
    Refund("r", 1),
    [Order("o", 2), Refund("o", 2)],
    {date(2024, 1, 1): Order("d", 3), date(2024, 1, 2): None},
    (Order("p", 4), 5),
    Decimal("1.50"),
)

SAMPLES: list[tuple[Any, Any]] = [
    (None, None),
    (None, type(None)),
    (True, bool),
    (0, int),
    (-(2**63), int),
    (2**64 - 1, int),
    (1.5, float),
    ("grüße \x00 \U0001f600", str),
    (b"\x00\xff", bytes),
    ([1, 2], list[int]),
    ((1, "a"), tuple[int, str]),
    ((1, 2, 3), tuple[int, ...]),
    ({1, 2}, set[int]),
    (frozenset({"a"}), frozenset[str]),
    ({1: "a", -2: "b"}, dict[int, str]),
    ({1.5: 1}, dict[float, int]),
    ({UUID(int=1): 1}, dict[UUID, int]),
    ({Colour.RED: 1}, dict[Colour, int]),
    ({Level.HIGH: 1}, dict[Level, int]),
    ({date(2024, 1, 1): [Order("a", 1)]}, dict[date, list[Order]]),
    (Order("a", 1), Order),
    (Order("a", 1), Optional[Order]),  # noqa: UP045
    (None, Order | None),
    (CART, Cart),
    (LEDGER, Ledger),
    (Tree(1, [Tree(2, []), Tree(3, [Tree(4, [])])]), Tree),
    (Branch(Leaf(1), Branch(Leaf(2), Leaf(3))), Branch),
    (Box(3), Box[int]),
    (Box(Order("a", 1)), Box[Order]),
    (Box(Refund("a", 1)), Box[Order | Refund]),
    (Point(1, 2.0), Point),
    ([Point(1, 2.0)], list[Point]),
    (Renamed("Ada", Refund("a", 1), "hi"), Renamed),
    (Pair(1, "a"), Pair),
    (Either(Refund("a", 1), 2), Either),
    ({"title": "x"}, Movie),
    ({"title": "x", "year": 1999}, Movie),
    ({"by": Refund("a", 1)}, Payment),
    (Colour.BLUE, Colour),
    (Level.LOW, Level),
    (Colour.RED, Literal[Colour.RED]),
    (b"x", Literal[b"x", "x"]),
    ("x", Literal[b"x", "x"]),
    ("a", Literal["a", 1, None]),
    (True, Literal[True]),
    (datetime(2024, 1, 1, 12, tzinfo=UTC), datetime),
    (datetime(2024, 1, 1, 12, tzinfo=timezone(timedelta(hours=-5))), datetime),
    (datetime(2024, 1, 1, 12), datetime),  # noqa: DTZ001
    (date(1, 1, 1), date),
    (time(1, 2, 3, 4), time),
    (time(1, 2, 3, 4, UTC), time),
    (timedelta(days=-1, microseconds=1), timedelta),
    (Decimal("-0.00"), Decimal),
    (Decimal("1E+5"), Decimal),
    (UUID(int=2**127), UUID),
    (7, UserId),
    (7, Annotated[int, "some", ["unhashable"]]),
    ([Refund("a", 1)], Annotated[list[Order | Refund], ["unhashable"]]),
    (1, int | str),
    ("1", int | str),
    (1, int | float),
    (1.0, int | float),
    ([], list[Order | Refund]),
    ({"a": {"b": [Refund("a", 1)]}}, dict[str, dict[str, list[Order | Refund]]]),
    ({frozenset({1})}, set[frozenset[int]]),
    ({"a": 1}, dict),
    ([1, "a", None], list),
]


def same(codec: Codec, value: Any, annotation: Any) -> Any:
    back = codec.decode(codec.encode(value, annotation), annotation)
    assert back == value
    assert type(back) is type(value)
    return back


@both
@pytest.mark.parametrize(("value", "annotation"), SAMPLES, ids=str)
def test_round_trip(codec, value, annotation):
    same(codec, value, annotation)


@both
def test_each_decoding_returns_a_new_object(codec):
    data = codec.encode(CART, Cart)
    one, other = codec.decode(data, Cart), codec.decode(data, Cart)
    assert one == other
    assert one is not other
    assert one.lines is not other.lines


def test_json_is_readable():
    assert JSON.encode(Order("42", 999), Order) == b'{"id":"42","cents":999}'


def test_json_supports_integers_of_any_size():
    for value in (2**64, -(2**64), 10**4000):
        same(JSON, value, int)
        same(JSON, {value: [value]}, dict[int, list[int]])
        assert JSON.decode(JSON.encode([value])) == [value]


def test_msgpack_supports_nan_and_infinity():
    assert math.isnan(MSGPACK.decode(MSGPACK.encode(math.nan, float), float))
    assert MSGPACK.decode(MSGPACK.encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    nested = MSGPACK.decode(MSGPACK.encode({"a": [math.nan, None]}, dict[str, list[float | None]]), Any)
    assert math.isnan(nested["a"][0])
    assert nested["a"][1] is None


@both
def test_int_for_a_float_becomes_a_float(codec):
    for value, annotation in ((1, float), ([1], list[float]), (Point(1, 2), Point)):
        back = codec.decode(codec.encode(value, annotation), annotation)
        assert back == value
    assert type(codec.decode(codec.encode(1, float), float)) is float


@both
def test_value_without_annotation_is_decoded_as_plain_data(codec):
    value = {"order": Order("a", 1), "pair": (1, 2), "set": {3}, "point": Point(1, 2.0), "colour": Colour.RED}
    plain = {"order": {"id": "a", "cents": 1}, "pair": [1, 2], "set": [3], "point": {"x": 1, "y": 2.0}, "colour": "red"}
    assert codec.decode(codec.encode(value)) == plain
    assert codec.decode(codec.encode(value, dict[str, Any]), dict[str, Any]) == plain
    assert codec.decode(codec.encode(value, object), object) == plain


@both
def test_field_of_type_any_accepts_any_value(codec):
    when = datetime(2024, 1, 1, tzinfo=UTC)
    back = codec.decode(codec.encode(Box([when, Order("a", 1)]), Box), Box)
    assert isinstance(back, Box)
    assert back.held[1] == {"id": "a", "cents": 1}


@both
def test_dict_in_encoded_form_is_accepted_for_an_object(codec):
    for annotation in (Order, Order | None, Order | int):
        assert codec.decode(codec.encode({"id": "a", "cents": 1}, annotation), annotation) == Order("a", 1)
    encoded = {"latest": {"id": "a", "cents": 1}, "all": [], "by_day": {}}
    back = codec.decode(codec.encode(encoded, Ledger), Ledger)
    assert back == Ledger(Order("a", 1), [], {})


@both
def test_list_and_tuple_are_interchangeable(codec):
    assert codec.decode(codec.encode((1, 2), list[int]), list[int]) == [1, 2]
    assert codec.decode(codec.encode([1, "a"], tuple[int, str]), tuple[int, str]) == (1, "a")


@both
def test_classes_without_equality_round_trip(codec):
    back = codec.decode(codec.encode([Incomparable(3)], list[Incomparable]), list[Incomparable])
    assert type(back[0]) is Incomparable
    assert back[0].n == 3


@both
def test_subclasses_of_plain_types_become_plain(codec):
    class Name(str):
        def __str__(self) -> str:
            return "something else"

    class Count(int):
        pass

    class Weight(float):
        pass

    assert codec.decode(codec.encode([Name("ada"), Count(3), Weight(1.5)])) == ["ada", 3, 1.5]
    assert codec.decode(codec.encode(Name("ada"), str), str) == "ada"


@both
def test_missing_fields_of_older_records_get_defaults(codec):
    old = codec.encode({"latest": {"id": "a", "cents": 1}, "all": [], "by_day": {}})
    ledger = codec.decode(old, Ledger)
    assert ledger.pair is None
    assert ledger.extra == []
    assert codec.decode(old, Ledger).extra is not ledger.extra


@both
def test_aware_datetime_in_a_repeated_hour_round_trips(codec):
    moment = datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    back = codec.decode(codec.encode(moment, datetime), datetime)
    assert back.astimezone(UTC) == moment.astimezone(UTC)


# -- any value -------------------------------------------------------------------------------------------------------

text = st.text()  # hypothesis leaves lone surrogates out
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text
finite = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
json_values = st.recursive(finite, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=30)
msgpack_values = st.recursive(
    scalars | st.binary(), lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=30
)
aware = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
orders = st.builds(Order, text, st.integers(-(2**63), 2**63))
refunds = st.builds(Refund, text, st.integers(-(2**63), 2**63))
decimals = st.decimals(allow_nan=False)
lines = st.builds(Line, text, decimals, st.frozensets(text))
carts = st.builds(
    Cart,
    st.lists(lines),
    st.uuids(),
    aware | st.datetimes(),
    st.none() | st.dates(),
    st.sampled_from(Colour),
    st.dictionaries(st.integers(-(2**63), 2**63), text),
)
either = orders | refunds
ledgers = st.builds(
    Ledger,
    either,
    st.lists(either),
    st.dictionaries(st.dates(), st.none() | either),
    st.none() | st.tuples(either, st.integers(0, 9)),
    text | decimals,
)
branches = st.recursive(
    st.builds(Leaf, st.integers(0, 9)), lambda inner: st.builds(Branch, inner, inner), max_leaves=20
)


@given(json_values)
def test_any_json_value_round_trips(value):
    assert JSON.decode(JSON.encode(value)) == value


@given(msgpack_values)
def test_any_msgpack_value_round_trips(value):
    assert MSGPACK.decode(MSGPACK.encode(value)) == value


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
class TestAnyTyped:
    @given(carts)
    def test_cart(self, codec, value):
        same(codec, value, Cart)

    @given(ledgers)
    def test_ledger(self, codec, value):
        back = same(codec, value, Ledger)
        assert [type(each) for each in back.all] == [type(each) for each in value.all]
        assert type(back.memo) is type(value.memo)

    @given(branches)
    def test_branch(self, codec, value):
        same(codec, value, Leaf | Branch)

    @given(st.timedeltas() | st.times() | st.dates() | st.binary() | st.uuids() | decimals | text | st.none())
    def test_union_of_many_texts(self, codec, value):
        same(codec, value, timedelta | time | date | bytes | UUID | Decimal | str | None)

    @given(st.lists(st.integers(0, 9), min_size=1) | st.lists(text, min_size=1) | st.dictionaries(text, text) | orders)
    def test_union_of_containers(self, codec, value):
        same(codec, value, list[int] | list[str] | dict[str, str] | Order)
