"""Decoded exceptions have their class, arguments and typed attributes; decoding runs no user code."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from perdure.codec import JSON, MSGPACK
from perdure.codec.exceptions import decode_exception, encode_exception
from perdure.errors import InvalidPayload
from tests.codec.sample_types import Foreign, Order, Refund

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


class Declined(Exception):
    amount: Decimal
    order: Order | Refund

    def __init__(self, amount: Decimal, order: Order | Refund, code: int) -> None:
        super().__init__(f"declined {amount}")
        self.amount = amount
        self.order = order
        self.code = code
        self.free = {"x": 1}


class Priced(Exception):
    def __init__(self, price: Decimal, order: Order) -> None:
        super().__init__(price, order)
        self.price = price


class Sloppy(Exception):
    when: int

    def __init__(self, reason: Decimal) -> None:
        super().__init__(str(reason))  # Text, although the parameter is a Decimal.
        self.when = "soon"  # type: ignore[assignment]


@dataclass
class Structured(Exception):
    order: Order
    price: Decimal


@dataclass(frozen=True)
class Frozen(Exception):
    price: Decimal


class Counting(Exception):
    made = 0

    def __init__(self, message: str) -> None:
        type(self).made += 1
        super().__init__(message)


class Odd(Exception):
    def __new__(cls, *, only: int) -> Any:
        return super().__new__(cls)

    def __init__(self, *, only: int) -> None:
        super().__init__("odd", only)
        self.only = only


def through(codec: Any, error: BaseException) -> Any:
    data, dropped = encode_exception(codec, error)
    assert dropped == ()
    back = decode_exception(codec, data, type(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    return back


@both
def test_decoded_exception_has_typed_attributes(codec):
    back = through(codec, Declined(Decimal("1.50"), Refund("a", 1), 7))
    assert back.amount == Decimal("1.50")
    assert type(back.order) is Refund
    assert (back.code, back.free) == (7, {"x": 1})
    assert back.args == ("declined 1.50",)


@both
def test_decoded_exception_has_typed_arguments_if_they_match_init(codec):
    back = through(codec, Priced(Decimal("2"), Order("a", 1)))
    assert back.args == (Decimal("2"), Order("a", 1))
    assert back.price == Decimal("2")


@both
def test_value_that_violates_its_annotation_is_still_encoded(codec):
    back = through(codec, Sloppy(Decimal("1.5")))
    assert back.args == ("1.5",)
    assert back.when == "soon"


@both
@pytest.mark.parametrize("cls", [Structured, Frozen])
def test_dataclass_exceptions_round_trip(codec, cls):
    error = Structured(Order("a", 1), Decimal("1")) if cls is Structured else Frozen(Decimal("1"))
    back = through(codec, error)
    assert vars(back) == vars(error)
    assert back.args == error.args
    assert back == error


@both
@pytest.mark.parametrize(
    "error",
    [ValueError("x"), ValueError(), KeyError("k"), OSError(2, "no such file"), RuntimeError("a", 1, None), Odd(only=3)],
    ids=repr,
)
def test_ordinary_exceptions_round_trip(codec, error):
    back = through(codec, error)
    assert back.args == error.args
    assert vars(back) == vars(error)
    assert getattr(back, "errno", None) == getattr(error, "errno", None)


@both
def test_decoding_does_not_call_init(codec):
    error = Counting("x")
    before = Counting.made
    assert through(codec, error).args == ("x",)
    assert Counting.made == before


@both
def test_notes_and_causes_are_not_encoded(codec):
    error = ValueError("x")
    error.add_note("a note")
    error.__cause__ = KeyError("k")
    back = through(codec, error)
    assert not hasattr(back, "__notes__")
    assert back.__cause__ is None


@both
def test_unsupported_field_is_dropped_and_reported(codec):
    error = ValueError("x")
    error.lock = Foreign()  # type: ignore[attr-defined]
    error.code = 7  # type: ignore[attr-defined]
    data, dropped = encode_exception(codec, error)
    assert dropped == ("lock",)
    assert vars(decode_exception(codec, data, ValueError)) == {"code": 7}


@both
def test_record_that_does_not_match_the_class_is_rejected(codec):
    data, _ = encode_exception(codec, Priced(Decimal("2"), Order("a", 1)))

    class Changed(Exception):
        price: list[int]

    with pytest.raises(InvalidPayload, match="price"):
        decode_exception(codec, data, Changed)
    with pytest.raises(InvalidPayload):
        decode_exception(codec, codec.encode([1]), ValueError)
    with pytest.raises(InvalidPayload):
        decode_exception(codec, b"\xff", ValueError)
