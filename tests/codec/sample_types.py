"""Types shared by the tests of the codec. They are at module level so that annotations can be resolved."""

import enum
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Generic, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class Refund:  # Same fields as Order.
    id: str
    cents: int


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    price: Decimal
    tags: frozenset[str] = frozenset()


@dataclass
class Cart:
    lines: list[Line]
    owner: UUID
    placed: datetime
    due: date | None = None
    colour: Colour = Colour.RED
    notes: dict[int, str] = field(default_factory=dict)


@dataclass
class Ledger:
    """Rejected by msgspec because of a field type."""

    latest: Order | Refund
    all: list[Order | Refund]
    by_day: dict[date, Order | Refund | None]
    pair: tuple[Order | Refund, int] | None = None
    memo: "str | Decimal" = "none"
    extra: list[Order | Refund] = field(default_factory=list)


@dataclass
class Leaf:
    value: int


@dataclass
class Branch:
    left: "Leaf | Branch"
    right: "Leaf | Branch"


@dataclass
class Tree:
    value: int
    children: "list[Tree]"


@dataclass
class Box(Generic[T]):
    held: T


@dataclass
class Positive:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("must not be negative")


@dataclass
class PositivePaid(Positive):
    paid: Order | Refund


@dataclass(eq=False)
class Incomparable:
    n: int


class Point(msgspec.Struct, frozen=True):
    x: int
    y: float


class Renamed(msgspec.Struct, rename="camel"):
    first_name: str
    paid_with: Order | Refund
    note_text: str = "-"


class Pair(NamedTuple):
    first: int
    second: str


class Either(NamedTuple):
    one: Order | Refund
    two: int


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Payment(TypedDict):
    by: Order | Refund
    note: NotRequired[str]


class Foreign:
    """A class that the codec does not support."""
