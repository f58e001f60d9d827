"""Types that pydantic supports and msgspec does not: discriminated unions, annotated types, dataclasses of pydantic."""

import re
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pydantic.dataclasses
import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    HttpUrl,
    PlainSerializer,
    PlainValidator,
    PositiveInt,
    Tag,
    TypeAdapter,
    field_validator,
)

from perdure.codec import JSON, MSGPACK, JsonCodec
from perdure.codec.codec import MAX_UNHASHABLE_PLANS
from perdure.errors import InvalidPayload

both = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Kitten(Cat):
    pass


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: T | None = None


@dataclass
class TextPart:
    """Like a message part of an agent framework: a dataclass of the standard library with rules of pydantic."""

    text: str
    at: datetime
    kind: Literal["text"] = "text"


@dataclass
class ImagePart:
    data: bytes
    kind: Literal["image"] = "image"


@dataclass
class Prompt:
    parts: list[Annotated[TextPart | ImagePart, Discriminator("kind")]]
    details: Annotated[str | None, Field(validation_alias="vendor_details")] = None
    kind: Literal["prompt"] = "prompt"


@dataclass
class Reply:
    parts: list[Annotated[TextPart | ImagePart, Discriminator("kind")]]
    score: float = 0.0
    kind: Literal["reply"] = "reply"


Message = Annotated[Prompt | Reply, Discriminator("kind")]


@pydantic.dataclasses.dataclass
class Account:
    iban: str
    limit: int = Field(default=100, gt=0)

    @field_validator("iban")
    @classmethod
    def normalize(cls, value: str) -> str:
        return value.replace(" ", "").upper()


@pydantic.dataclasses.dataclass
class Plain:
    """A dataclass of pydantic without rules: msgspec converts it, as before."""

    data: bytes


class Fraction:
    """A class that neither library knows, without __eq__."""

    def __init__(self, top: int, bottom: int) -> None:
        self.top, self.bottom = top, bottom


Ratio = Annotated[
    Fraction,
    PlainValidator(lambda text: Fraction(*map(int, text.split("/")))),
    PlainSerializer(lambda each: f"{each.top}/{each.bottom}"),
]


@dataclass
class Holder:
    pets: dict[str, list[Pet]]
    count: PositiveInt = 1
    url: HttpUrl | None = None


class StructHolder(msgspec.Struct):
    pet: Pet
    size: Annotated[int, Field(le=10)] = 1


ENV = {"PYTHONPATH": ":".join(sys.path)}
NOW = datetime(2024, 1, 1, tzinfo=UTC)
CHAT = [
    Prompt([TextPart("hi", NOW), ImagePart(b"\xff\x00")], "x"),
    Reply([TextPart("hello", NOW)], 1),  # an int for a float
]
VALUES: list[tuple[Any, Any]] = [
    (Dog(tricks=["roll"]), Pet),
    ([Cat(), Dog()], list[Pet]),
    ({"a": (Cat(), 1)}, dict[str, tuple[Pet, int]]),
    (Dog(), Pet | None),
    (None, Pet | None),
    (CHAT, list[Message]),
    (CHAT[0], Prompt),
    (Page[Cat](items=[Cat()], next=Cat(lives=1)), Page[Cat]),
    ([Page[Pet](items=[Dog(), Cat()])], list[Page[Pet]]),
    (Account("de 12"), Account),
    ([Account("DE1", 5)], list[Account]),
    (Plain(b"\xff"), Plain),
    (3, PositiveInt),
    ([1, 2], list[Annotated[int, Field(gt=0)]]),
    (b"\xff", Annotated[bytes, Field(max_length=3)]),
    (HttpUrl("https://example.org/a"), HttpUrl),
    ({"a": HttpUrl("https://example.org/")}, dict[str, HttpUrl]),
    (Path("/tmp/x"), Path),
    (IPv4Address("10.0.0.1"), IPv4Address),
    (deque([1, 2]), deque[int]),
    (2j, complex),
    (Holder({"x": [Cat(), Dog()]}, 2, HttpUrl("https://example.org/")), Holder),
    (StructHolder(Dog(), 3), StructHolder),
]


@both
@pytest.mark.parametrize(("value", "annotation"), VALUES, ids=str)
def test_value_is_restored_with_its_class(codec, value, annotation):
    decoded = codec.decode(codec.encode(value, annotation), annotation)
    assert decoded == value
    assert type(decoded) is type(value)


@both
def test_class_without_equality_is_restored(codec):
    decoded = codec.decode(codec.encode([Fraction(1, 3)], list[Ratio]), list[Ratio])
    assert [(type(each), each.top, each.bottom) for each in decoded] == [(Fraction, 1, 3)]


@both
@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (-1, PositiveInt, "Input should be greater than 0"),
        ("5", PositiveInt, "Expected `Annotated[int, Gt(gt=0)]`, got `str`"),
        ([1, -1], list[PositiveInt], "[1]: Input should be greater than 0"),
        (Holder({}, 0), Holder, "count: Input should be greater than 0"),
        (StructHolder(Cat(), 11), StructHolder, "size: Input should be less than or equal to 10"),
        (Kitten(), Pet, "Expected `Cat`, got `Kitten`"),
        ("https://example.org", HttpUrl, "Expected `HttpUrl`, got `str`"),
        ({"kind": "cow"}, Pet, "does not match any of the expected tags"),
        ({"iban": "x", "limit": 0}, Account, "limit: Input should be greater than 0"),
    ],
    ids=str,
)
def test_value_against_the_rules_is_rejected_with_its_path(codec, value, annotation, message):
    with pytest.raises(InvalidPayload, match=re.escape(message)):
        codec.encode(value, annotation)


@both
def test_invalid_data_is_rejected_with_its_path(codec):
    data = codec.encode({"pets": {"x": [{"kind": "cat", "lives": "many"}]}})
    with pytest.raises(InvalidPayload, match=re.escape("value: pets.x[0].cat.lives: Input should be a valid integer")):
        codec.decode(data, Holder)


@both
def test_data_in_encoded_form_is_validated(codec):
    assert codec.decode(codec.encode({"iban": "de 1"}, Account), Account) == Account("DE1", 100)
    assert codec.decode(codec.encode({"kind": "dog"}, Pet), Pet) == Dog()


@both
def test_tagged_unions_that_were_stored_before_are_decoded(codec):
    stored = codec.encode([Dog(tricks=["roll"]), Cat()], list[Cat | Dog])
    assert b"$type" in stored
    assert codec.decode(stored, list[Pet]) == [Dog(tricks=["roll"]), Cat()]
    assert codec.decode(codec.encode(Cat(), Cat | Dog), Pet) == Cat()


@both
def test_callable_discriminator_and_validators_are_used(codec):
    def tag_of(value: Any) -> str:
        return "small" if (value["n"] if isinstance(value, dict) else value.n) < 10 else "large"

    @dataclass
    class Small:
        n: int

    @dataclass
    class Large:
        n: int

    either = Annotated[Annotated[Small, Tag("small")] | Annotated[Large, Tag("large")], Discriminator(tag_of)]
    assert codec.decode(codec.encode([Small(1), Large(11)], list[either]), list[either]) == [Small(1), Large(11)]
    upper = Annotated[str, AfterValidator(str.upper)]
    assert codec.decode(codec.encode("a"), upper) == "A"
    old = Annotated[Small, BeforeValidator(lambda data: {"n": data["m"]} if "m" in data else data)]
    assert codec.decode(codec.encode({"m": 3}), old) == Small(3)


class Unhashable:
    """Metadata that pydantic calls and that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]
    schemas = 0

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        Unhashable.schemas += 1
        return handler(source)


def test_converter_is_built_once_per_annotation(monkeypatch):
    built = []
    init = TypeAdapter.__init__

    def counting_init(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(args)
        init(self, *args, **kwargs)

    monkeypatch.setattr(TypeAdapter, "__init__", counting_init)
    annotation = list[Annotated[Path, Field(description="new")]]
    for _ in range(3):
        JSON.decode(JSON.encode([Path("x")], annotation), annotation)
    assert len(built) == 1
    unhashable, codec = Annotated[int, Unhashable()], JsonCodec()
    for _ in range(3):
        codec.decode(codec.encode(1, unhashable), unhashable)
    assert len(built) == 2
    for _ in range(MAX_UNHASHABLE_PLANS + 1):
        codec.encode(1, Annotated[int, Unhashable()])
    assert len(codec._unhashable_plans) <= MAX_UNHASHABLE_PLANS


def test_without_pydantic_the_error_names_annotation_and_remedy():
    program = """
import sys
sys.modules["pydantic"] = None  # as if it were not installed
from pathlib import Path
from perdure.codec import JSON
from perdure.errors import InvalidPayload
try:
    JSON.encode({"a": Path("x")}, dict[str, Path])
except InvalidPayload as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ENV)
    assert "the type `Path` cannot be encoded; supported are None" in done.stdout
    assert "pip install pydantic" in done.stdout


def test_ordinary_types_do_not_import_pydantic():
    program = """
import sys, dataclasses, typing
from perdure.codec import JSON
@dataclasses.dataclass
class Order:
    id: str
    lines: list[typing.Annotated[int, "note"]]
JSON.decode(JSON.encode(Order("a", [1]), Order), Order)
JSON.encode([Order("a", [1])], list[Order | int | str])
print("pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ENV)
    assert done.stdout.strip() == "False"
