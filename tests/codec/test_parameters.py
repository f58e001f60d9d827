"""A function's arguments as a payload: bound, encoded by name, decoded for a call, compared as values."""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, Unpack

import pytest

from perdure.codec import JSON, MSGPACK
from perdure.codec.annotations import return_type
from perdure.codec.parameters import Parameters
from perdure.errors import InvalidPayload
from tests.codec.sample_types import Foreign, Incomparable, Order, Refund

if TYPE_CHECKING:
    from nowhere import Unseen  # type: ignore[import-not-found]

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
WHAT = "payload of workflow 'checkout'"
P = ParamSpec("P")


async def checkout(ctx: Unseen, order: Order, gift: bool = False, *, note: str | None = None) -> Later:
    raise NotImplementedError


async def variadic(ctx: Any, /, first: int, *rest: Order, flag: bool = True, **extra: Decimal) -> None: ...


class Options(TypedDict, total=False):
    size: int
    paid: Order | Refund


async def unpacked(ctx: Any, **options: Unpack[Options]) -> None: ...


async def unannotated(ctx, a, b=2): ...


@dataclass
class Later:
    x: int


def encoded(fn: Any, *args: Any, **kwargs: Any) -> bytes:
    return Parameters.of(fn, 1).encode(JSON, args, kwargs, WHAT)


def through(fn: Any, codec: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = Parameters.of(fn, 1)
    return parameters.decode(codec, parameters.encode(codec, args, kwargs, WHAT), WHAT)


def refused(fn: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidPayload) as caught:
        encoded(fn, *args, **kwargs)
    return str(caught.value)


def test_payload_is_an_object_by_parameter_name_without_defaults():
    assert encoded(checkout, Order("a", 1)) == b'{"order":{"id":"a","cents":1}}'
    assert encoded(checkout, Order("a", 1), True) == b'{"order":{"id":"a","cents":1},"gift":true}'
    assert encoded(checkout, gift=True, order=Order("a", 1)) == b'{"order":{"id":"a","cents":1},"gift":true}'


@both
def test_decoded_arguments_can_be_passed_to_the_function(codec):
    order = Order("a", 1)
    assert through(checkout, codec, order) == ((order,), {})
    assert through(checkout, codec, order, True) == ((order, True), {})
    assert through(checkout, codec, order=order, note="x") == ((order,), {"note": "x"})
    assert through(unannotated, codec, 1) == ((1,), {})
    assert through(unannotated, codec, a=order) == (({"id": "a", "cents": 1},), {})


@both
def test_variadic_parameters_round_trip(codec):
    a, b = Order("a", 1), Order("b", 2)
    assert through(variadic, codec, 1) == ((1,), {})
    assert through(variadic, codec, 1, a, b, flag=False, x=Decimal("1.5")) == (
        (1, a, b),
        {"flag": False, "x": Decimal("1.5")},
    )
    options = {"size": 3, "paid": Refund("r", 1)}
    args, kwargs = through(unpacked, codec, **options)
    assert (args, kwargs) == ((), options)
    assert type(kwargs["paid"]) is Refund


@both
def test_arguments_after_a_missing_one_are_passed_by_name(codec):
    def fn(ctx, a: int = 1, b: int = 2, c: int = 3) -> None: ...

    assert through(fn, codec, 7, c=9) == ((7,), {"c": 9})
    assert through(fn, codec, b=9, c=10) == ((), {"b": 9, "c": 10})


def test_positional_only_name_can_also_be_a_keyword():
    def fn(ctx, a: int, /, **rest: int) -> None: ...

    assert through(fn, JSON, 1, a=2) == ((1,), {"a": 2})


def test_error_of_wrong_call_names_function_and_parameter():
    assert refused(checkout) == f"{WHAT}: checkout(): missing a required argument: 'order'"
    assert refused(checkout, Order("a", 1), True, "x") == f"{WHAT}: checkout(): too many positional arguments"
    assert (
        refused(checkout, Order("a", 1), color=1) == f"{WHAT}: checkout(): got an unexpected keyword argument 'color'"
    )
    assert refused(checkout, Order("a", 1), order=1) == f"{WHAT}: checkout(): multiple values for argument 'order'"


def test_path_of_wrong_value_starts_with_the_parameter():
    assert refused(checkout, Order("a", "x")) == f"{WHAT}: order.cents: Expected `int`, got `str`"  # type: ignore[arg-type]
    assert refused(checkout, Order("a", 1), 1) == f"{WHAT}: gift: Expected `bool`, got `int`"
    assert refused(checkout, Refund("a", 1)) == f"{WHAT}: order: Expected `Order`, got `Refund`"
    assert refused(variadic, 1, Order("a", "x")) == f"{WHAT}: rest[0].cents: Expected `int`, got `str`"  # type: ignore[arg-type]
    assert refused(variadic, 1, x=1) == f"{WHAT}: extra.x: Expected `decimal`, got `int`"
    assert refused(unannotated, [Foreign()]).startswith(f"{WHAT}: a[0]: an object of type `Foreign`")


def test_error_names_parameter_of_unsupported_annotation():
    def fn(ctx, order: Order, other: Foreign) -> None: ...

    assert refused(fn, Order("a", 1), 3).startswith(f"{WHAT}: other: the type `Foreign` cannot be encoded; supported")


def test_decoding_error_names_the_path():
    with pytest.raises(InvalidPayload, match=r"^input: order\.cents: Expected `int`, got `str`"):
        Parameters.of(checkout, 1).decode(JSON, b'{"order":{"id":"a","cents":"x"}}', "input")
    with pytest.raises(InvalidPayload, match=r"^input: .*missing required field `order`"):
        Parameters.of(checkout, 1).decode(JSON, b"{}", "input")


# -- annotations -----------------------------------------------------------------------------------------------------


def test_annotations_may_name_types_defined_later_or_only_for_type_checkers():
    assert return_type(checkout) is Later
    assert return_type(variadic) is type(None)
    assert return_type(unannotated) is Any
    assert through(checkout, JSON, Order("a", 1))[0] == (Order("a", 1),)


def test_annotations_may_name_local_classes():
    @dataclass
    class Local:
        n: int

    def inner() -> Any:
        @dataclass
        class Inner:
            n: int

        async def fn(ctx: Unseen, a: Local, b: Inner, c: list[Local | Inner]) -> Local:
            raise NotImplementedError

        return fn, Inner, Parameters.of(fn, 1), return_type(fn)

    fn, made, parameters, returns = inner()
    args = (Local(1), made(2), [made(3), Local(4)])
    assert parameters.decode(JSON, parameters.encode(JSON, args, {}, WHAT), WHAT) == (args, {})
    assert returns is Local
    # The frame of `inner` is gone by now, and what it knew counts as Any.
    assert Parameters.of(fn, 1).type.__annotations__["b"] is Any


def test_annotations_may_name_closure_variables():
    def make() -> Any:
        Local = Order  # noqa: N806

        async def fn(ctx: Unseen, a: Local) -> Local:  # type: ignore[valid-type]
            return Local("", 0)

        return fn

    assert through(make(), JSON, Order("a", 1)) == ((Order("a", 1),), {})


def test_wrapped_function_has_the_parameters_of_the_original():
    def decorator(fn: typing.Callable[P, Any]) -> typing.Callable[P, Any]:
        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            return fn(*args, **kwargs)

        return wrapper

    assert through(decorator(checkout), JSON, Order("a", 1)) == ((Order("a", 1),), {})

    def forwarding(ctx, *args: P.args, **kwargs: P.kwargs) -> None: ...  # type: ignore[valid-type]

    assert through(forwarding, JSON, 1, a=2) == ((1,), {"a": 2})


# -- equality --------------------------------------------------------------------------------------------------------


@both
def test_payloads_are_compared_as_values(codec):
    def fn(
        ctx, price: Decimal, order: Order | None = None, tags: frozenset[str] = frozenset(), x: float = 1
    ) -> None: ...

    parameters = Parameters.of(fn, 1)

    def make(*args: Any, **kwargs: Any) -> bytes:
        return parameters.encode(codec, args, kwargs, WHAT)

    one = make(Decimal("1.50"))
    assert parameters.equal(codec, one, one)
    assert parameters.equal(codec, one, make(Decimal("1.5")))
    assert parameters.equal(codec, one, make(Decimal("1.50"), None))
    assert parameters.equal(codec, one, make(Decimal("1.50"), tags=frozenset(), x=1.0))
    assert parameters.equal(codec, make(Decimal(1), x=2), make(Decimal(1), x=2.0))
    assert parameters.equal(
        codec, codec.encode({"price": "1", "tags": ["a", "b"]}), codec.encode({"tags": ["b", "a"], "price": "1"})
    )
    assert not parameters.equal(codec, one, make(Decimal("1.51")))
    assert not parameters.equal(codec, one, make(Decimal("1.50"), Order("a", 1)))
    assert not parameters.equal(codec, one, codec.encode({"other": 1}))


def test_objects_without_equality_are_compared_by_their_fields():
    def fn(ctx, a: Incomparable, b: int = 0) -> None: ...

    parameters = Parameters.of(fn, 1)
    assert parameters.equal(JSON, b'{"a":{"n":1}}', b'{"a":{"n":1},"b":0}')
    assert not parameters.equal(JSON, b'{"a":{"n":1}}', b'{"a":{"n":2}}')


def test_defaults_that_cannot_be_encoded_do_not_matter():
    def fn(ctx, a: int, b: Any = Foreign()) -> None: ...  # noqa: B008

    parameters = Parameters.of(fn, 1)
    assert parameters.equal(JSON, b'{"a":1}', b'{ "a": 1 }')
    assert not parameters.equal(JSON, b'{"a":1}', b'{"a":2}')
