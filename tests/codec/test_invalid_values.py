"""Invalid and unsupported values are rejected with the path of the field and a reason."""

import math
import threading
import typing
from dataclasses import InitVar, dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest

from perdure.codec import JSON, MSGPACK
from perdure.codec.codec import MAX_DEPTH
from perdure.errors import InvalidPayload
from tests.codec.sample_types import (
    Branch,
    Cart,
    Colour,
    Either,
    Foreign,
    Leaf,
    Ledger,
    Line,
    Movie,
    Order,
    Pair,
    Point,
    Positive,
    PositivePaid,
    Refund,
    Tree,
)

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
NOW = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass
class SpecialOrder(Order):
    discount: int = 0


@dataclass
class WithInit:
    a: int
    b: InitVar[int] = 3


def refusal(codec: Any, value: Any, annotation: Any = Any) -> str:
    with pytest.raises(InvalidPayload) as caught:
        codec.encode(value, annotation, what="result of step 'charge'")
    noun, colon, rest = str(caught.value).partition(": ")
    assert (noun, colon) == ("result of step 'charge'", ": ")
    return rest


MISFITS: list[tuple[Any, Any, str]] = [
    ("abc", int, "Expected `int`, got `str`"),
    ("1", int, "Expected `int`, got `str`"),
    (1, str, "Expected `str`, got `int`"),
    (1, bool, "Expected `bool`, got `int`"),
    (True, int, "Expected `int`, got `bool`"),
    (1.0, int, "Expected `int`, got `float`"),
    (0, None, "Expected `null`, got `int`"),
    (None, int, "Expected `int`, got `null`"),
    (UUID(int=1), str, "Expected `str`, got `uuid`"),
    (str(UUID(int=1)), UUID, "Expected `uuid`, got `str`"),
    (date(2024, 1, 1), str, "Expected `str`, got `date`"),
    ("2024-01-01", date, "Expected `date`, got `str`"),
    (NOW, date, "Expected `date`, got `datetime`"),
    (b"x", str, "Expected `str`, got `bytes`"),
    ("eA==", bytes, "Expected `bytes`, got `str`"),
    (1, Decimal, "Expected `decimal`, got `int`"),
    (Line("a", 1), Line, "price: Expected `decimal`, got `int`"),  # type: ignore[arg-type]
    ([0.5], list[Decimal], "[0]: Expected `decimal`, got `float`"),
    ("green", Colour, "Invalid enum value 'green'"),
    ("b", Literal["a"], "Invalid enum value 'b'"),
    (Colour.BLUE, Literal[Colour.RED], "Expected `Literal[<Colour.RED: 'red'>]`, got `Colour`"),
    (Order(3, "x"), Order, "id: Expected `str`, got `int`"),  # type: ignore[arg-type]
    (Order("a", "x"), Order, "cents: Expected `int`, got `str`"),  # type: ignore[arg-type]
    ([Order("a", 1), Order("a", "x")], list[Order], "[1].cents: Expected `int`, got `str`"),  # type: ignore[arg-type]
    ({"a": {"b": [Order("a", None)]}}, dict[str, dict[str, list[Order]]], "a.b[0].cents: Expected"),  # type: ignore[arg-type]
    ({"x": 1, "y": "2", "z": 3}, dict[str, int], "y: Expected `int`, got `str`"),
    ({"id": "a"}, Order, "missing required field `cents`"),
    ({"year": 1}, Movie, "missing required field `title`"),
    ((1, 2), Pair, "Expected `str`, got `int`"),
    ((1, "a", 3), tuple[int, str], "length 2"),
    (Refund("a", 1), Order, "Expected `Order`, got `Refund`"),
    ([Refund("a", 1)], list[Order], "[0]: Expected `Order`, got `Refund`"),
    (SpecialOrder("a", 1, 5), Order, "Expected `Order`, got `SpecialOrder`"),
    (Point("1", 2.0), Point, "x: Expected `int`, got `str`"),  # type: ignore[arg-type]
    (Tree(1, [Tree(2, [Tree("3", [])])]), Tree, "children[0].children[0].value: Expected `int`"),  # type: ignore[arg-type]
    # Handled by converters of perdure.
    (Ledger(Order("a", "x"), [], {}), Ledger, "latest.cents: Expected `int`, got `str`"),  # type: ignore[arg-type]
    (Ledger(Order("a", 1), [Refund("a", 1), Refund(1, 1)], {}), Ledger, "all[1].id: Expected `str`"),  # type: ignore[arg-type]
    (Ledger(Order("a", 1), [], {"x": None}), Ledger, "by_day"),  # type: ignore[dict-item]
    (Ledger(Order("a", 1), {1}, {}), Ledger, "all: Expected `list`, got `set`"),  # type: ignore[arg-type]
    (Ledger(Order("a", 1), [], {}, (Order("a", 1), "5")), Ledger, "pair[1]: Expected `int`, got `str`"),  # type: ignore[arg-type]
    (Branch(Leaf(1), Branch(Leaf("2"), Leaf(3))), Leaf | Branch, "right.left.value: Expected `int`"),  # type: ignore[arg-type]
    (Either(Refund("a", 1), "2"), Either, "[1]: Expected `int`, got `str`"),  # type: ignore[arg-type]
    (3, Order | Refund, "Expected `Order | Refund`, got `int`"),
    (None, Order | Refund, "Expected `Order | Refund`, got `NoneType`"),
    (SpecialOrder("a", 1), Order | Refund, "Expected `Order`, got `SpecialOrder`"),
    ({"id": 3}, Order | Refund, "Expected `Order | Refund`, got `dict`"),
    (1.5, str | Decimal, "Expected `str | Decimal`, got `float`"),
]


@both
@pytest.mark.parametrize(("value", "annotation", "message"), MISFITS, ids=str)
def test_value_that_does_not_match_its_annotation_is_rejected(codec, value, annotation, message):
    assert message in refusal(codec, value, annotation)


@both
def test_path_quotes_keys_that_are_not_identifiers(codec):
    assert refusal(codec, {"a b": {3: ["x", 1]}}, dict[str, dict[int, list[str]]]).startswith("['a b']")
    assert refusal(codec, {"a b": {"c": Foreign()}}).startswith("['a b'].c: an object of type")


@both
def test_error_names_unsupported_object_with_its_path(codec):
    said = refusal(codec, {"a": [1, Order("x", threading.Lock())]})  # type: ignore[arg-type]
    assert said.startswith("a[1].cents: an object of type `lock` cannot be encoded; supported are None, bool")
    assert refusal(codec, Foreign()).startswith("an object of type `Foreign` cannot be encoded")
    assert "[0]: an object of type `Foreign`" in refusal(codec, [Foreign()], list[Any])
    assert refusal(codec, Order("a", Foreign()), Order).startswith("cents: an object of type `Foreign`")  # type: ignore[arg-type]
    assert refusal(codec, ValueError("x")).startswith("an object of type `ValueError`")
    assert refusal(codec, [int]).startswith("[0]: an object of type `type`")


@both
@pytest.mark.parametrize(
    "annotation",
    [
        Foreign,
        list[Foreign],
        Foreign | int,
        dict[str, Foreign | None],
        typing.Iterator[int],
        type(threading.Lock()),
        typing.Callable[[], int],
        WithInit,
        3,
    ],
    ids=str,
)
def test_error_for_unsupported_annotation_lists_supported_types(codec, annotation):
    for call in (lambda: codec.encode(3, annotation), lambda: codec.decode(codec.encode(3), annotation)):
        with pytest.raises(InvalidPayload, match=r"^value: the type .* cannot be encoded; supported are None, bool"):
            call()


@both
def test_dict_keys_of_several_types_are_rejected(codec):
    with pytest.raises(InvalidPayload, match="the keys of a dict must have one type"):
        codec.encode({1: 1}, dict[str | int, int])


@both
def test_error_names_field_of_unsupported_type(codec):
    @dataclass
    class Holder:
        order: Order
        other: Foreign

    with pytest.raises(InvalidPayload, match="value: other: the type `Foreign` cannot be encoded"):
        codec.encode(Holder(Order("a", 1), Foreign()), Holder)


@both
def test_cyclic_values_are_rejected(codec):
    ring: list[Any] = [1]
    ring.append({"again": ring})
    assert refusal(codec, ring) == "[1].again: contains itself; a cyclic value cannot be encoded"
    tree = Tree(1, [])
    tree.children.append(tree)
    assert "children[0]: contains itself" in refusal(codec, tree, Tree)
    branch = Branch(Leaf(1), Leaf(2))
    branch.left = branch
    assert "left: contains itself" in refusal(codec, branch, Branch)


def nested(depth: int, open: Any = lambda inner: [inner]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = open(value)
    return value


@both
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 5_000, 100_000])
def test_too_deep_nesting_is_rejected_on_every_python(codec, depth):
    assert f"nests deeper than {MAX_DEPTH} levels" in refusal(codec, nested(depth))
    assert f"nests deeper than {MAX_DEPTH} levels" in refusal(codec, nested(depth, lambda inner: {"a": inner}))


@both
def test_too_deep_nesting_of_typed_values_is_rejected(codec):
    for top, annotation in (
        (nested(120, lambda inner: Tree(1, [inner] if isinstance(inner, Tree) else [])), Tree),
        (nested(300, lambda inner: Branch(Leaf(1), inner if isinstance(inner, Branch) else Leaf(1))), Branch),
        ({"a": nested(300)}, dict[str, Any]),
        ([nested(300)], list),
    ):
        assert f"nests deeper than {MAX_DEPTH} levels" in refusal(codec, top, annotation)


@both
def test_nesting_up_to_the_limit_is_accepted(codec):
    for value in (nested(MAX_DEPTH), nested(MAX_DEPTH, lambda inner: {"[": inner}), [[1], {"a": "[[[["}] * 500):
        assert codec.decode(codec.encode(value)) == value
    mixed = [{'"]': "\\"}, ["[" * 300, '{"' * 300]] * 300
    assert codec.decode(codec.encode(mixed)) == mixed


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_rejects_nan_and_infinity(number):
    assert refusal(JSON, number).startswith(f"{number} cannot be encoded as JSON")
    assert refusal(JSON, number, float).startswith(f"{number} cannot be encoded as JSON")
    assert refusal(JSON, number, float | None).startswith(f"{number} cannot be encoded as JSON")
    assert refusal(JSON, {"a": [None, 2**80, number]}).startswith(f"a[2]: {number} cannot")
    assert refusal(JSON, Point(1, number), Point).startswith(f"y: {number} cannot")


def test_json_accepts_none():
    for value in ([None, 1.5], {"a": None, "b": "null", "c": b"\xcb\x7f\xf8".hex()}, [None, b"\xcb\x7f\xf8"], "null"):
        assert JSON.encode(value)


@both
def test_lone_surrogates_are_rejected(codec):
    assert refusal(codec, {"a": ["\ud800"]}) == "a[0]: text with a lone surrogate cannot be encoded"
    assert "as a key: text with a lone surrogate" in refusal(codec, {"\udfff": 1})
    assert refusal(codec, "\ud800", str).startswith("text with a lone surrogate")


def test_integers_beyond_the_format_are_rejected():
    assert refusal(MSGPACK, {"a": 2**64}, dict[str, int]).startswith("a: cannot be encoded: ")
    assert refusal(JSON, [10**5000]).startswith("[0]: cannot be encoded: ")


def test_json_rejects_unsupported_keys():
    assert "a key of type `tuple` cannot be encoded" in refusal(JSON, {"a": {(1, 2): 3}})
    assert "a key of type `NoneType` cannot be encoded" in refusal(JSON, {None: 3})
    assert refusal(JSON, {1: "a", "1": "b"}, dict).endswith("two different keys are equal when encoded")


def test_json_rejects_utc_offset_that_it_would_round():
    odd = datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=3208)))
    assert "would be decoded as" in refusal(JSON, [odd], list[datetime])
    assert MSGPACK.decode(MSGPACK.encode(odd, datetime), datetime) == odd


@both
def test_error_of_post_init_is_reported(codec):
    bad = Positive(1)
    bad.n = -1
    assert "must not be negative" in refusal(codec, [bad], list[Positive])
    assert "must not be negative" in refusal(codec, bad, Positive | Order)
    with pytest.raises(InvalidPayload, match=r"^value: \[0\]: must not be negative"):
        codec.decode(codec.encode([{"paid": {"id": "a", "cents": 1}, "n": -1}]), list[PositivePaid])


@both
def test_decoding_error_names_the_path(codec):
    data = codec.encode(
        {"lines": [{"name": "a", "price": "x"}], "owner": str(UUID(int=1)), "placed": "2024-01-01T00:00:00"}
    )
    with pytest.raises(InvalidPayload, match=r"^input: lines\[0\]\.price: "):
        codec.decode(data, Cart, what="input")
    with pytest.raises(InvalidPayload, match=r"^value: k\.l: Expected `int`, got `str`"):
        codec.decode(codec.encode({"j": {}, "k": {"a": 1, "l": "x"}}), dict[str, dict[str, int]])
    with pytest.raises(InvalidPayload, match=r"^input: latest\.cents: Expected `int`, got `str`"):
        codec.decode(codec.encode({"latest": {"$type": "Order", "id": "a", "cents": "x"}}), Ledger, what="input")
    with pytest.raises(InvalidPayload, match="missing required field `all`"):
        codec.decode(codec.encode({"latest": {"id": "a", "cents": 1}}), Ledger)


@both
@pytest.mark.parametrize("data", [b"", b"\xff\xff", b'{"a":1'])
@pytest.mark.parametrize("annotation", [Any, Order, Order | Refund])
def test_invalid_bytes_are_rejected(codec, data, annotation):
    with pytest.raises(InvalidPayload, match=r"^input: "):
        codec.decode(data, annotation, what="input")


@both
def test_error_names_local_annotation_that_cannot_be_resolved(codec):
    @dataclass
    class Holder:
        item: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidPayload, match="annotations of `Holder` cannot be resolved: name 'Nowhere'"):
        codec.encode(Holder(1), Holder)
