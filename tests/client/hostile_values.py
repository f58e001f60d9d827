"""Values that no public call accepts, by what a parameter expects."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any


def nested(depth: int) -> list[Any]:
    """Return a list that nests this deep. Its repr raises RecursionError."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class Unprintable:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise AttributeError("no repr")


class NoOffset(tzinfo):
    """A timezone without an offset: a datetime with it is not aware."""

    def utcoffset(self, at: datetime | None) -> timedelta | None:
        return None

    def dst(self, at: datetime | None) -> timedelta | None:
        return None

    def tzname(self, at: datetime | None) -> str | None:
        return None


NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**5000  # Python refuses the repr of HUGE
DEEP = nested(20_000)
OBJECTS: tuple[Any, ...] = (object(), Unprintable(), DEEP, cyclic(), len, int, {"a": 1}, ["a"], {"a"}, ("a",))
NUMBERS: tuple[Any, ...] = (0, -1, 1.5, True, NAN, INFINITY, HUGE, -HUGE, 1j)
UNSTORABLE = ("nul\0", "line\nbreak", "tab\t", "lone \ud800 surrogate", "not utf-8 \udcff", "\x7f")

TEXTS: tuple[Any, ...] = (*OBJECTS, *NUMBERS, b"x", b"\xff", "", *UNSTORABLE)
NAMES = (*TEXTS, "x" * 513)
LONG_TEXTS = (*TEXTS, "x" * 100_000)  # ids and locations that perdure builds may be longer than a name
SECONDS: tuple[Any, ...] = (*OBJECTS, "1h", b"1", -1, NAN, INFINITY, 10**400, -(10**400), HUGE, True, 1j)
DURATIONS = (*SECONDS, timedelta(seconds=-1), timedelta.max)
COUNTS: tuple[Any, ...] = (*OBJECTS, "1", b"1", -1, 1.5, True, NAN, INFINITY, 2**63, 2**64, HUGE, -HUGE)
POSITIVE_COUNTS = (*COUNTS, 0)
PAYLOADS: tuple[Any, ...] = (
    *(object(), Unprintable(), DEEP, nested(201), cyclic(), len, NAN, [INFINITY], HUGE, 1j),
    *("lone \ud800 surrogate", {"a": object()}, {object(): 1}, {"\ud800": 1}, [None, {"deep": DEEP}]),
)
TAGS: tuple[Any, ...] = (
    *(5, "x", b"x", ["a"], object(), DEEP, {"a": NAN}, {1: "a"}, {"": "x"}, {"a": "x" * 513}, {"x" * 513: "a"}),
    *({"a": text} for text in UNSTORABLE),
    *({text: "a"} for text in UNSTORABLE),
    *({"a": DEEP}, {"a": None}, {"a": b"x"}, {None: "a"}),
)
EVENTS: tuple[Any, ...] = (*NAMES, None, datetime, object)
ERRORS: tuple[Any, ...] = (*(each for each in OBJECTS), *NUMBERS, None, b"x", ValueError)
TIMES: tuple[Any, ...] = (
    *OBJECTS,
    *("yesterday", b"1", NAN, INFINITY, HUGE, True, 10**400, timedelta(1)),
    *(datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None), datetime(2026, 1, 1, tzinfo=NoOffset())),
)
CURSORS: tuple[Any, ...] = (
    *LONG_TEXTS,
    *("garbage", "====", "W10=", "WzFd", "bnVsbA==", "WzFlOTk5LCJ4Il0=", "WzEsIm5cdTAwMDB1bCJd", "WzEsIlx1ZDgwMCJd"),
)
STATUSES: tuple[Any, ...] = (5, 1.5, b"running", object(), DEEP, "asleep", "", ("running", "asleep"), [None], {"x": 1})
LIMITS = (*POSITIVE_COUNTS, 10**9)
FILTERS: tuple[Any, ...] = (
    *(each for each in (*OBJECTS, *NUMBERS, b"x")),
    *("nul\0", "lone \ud800 surrogate", "a:", "(", "a=1", "x" * 513, "a " * 1025, "(" * 5000, "-" * 2000, "a:1 " * 33),
)
QUERY_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "where": FILTERS,
    "internal": (*OBJECTS, 0, 1, None, "x"),
    "status": STATUSES,
    "workflow": tuple(each for each in NAMES if each != ""),
    "tags": TAGS,
    "parent": tuple(each for each in NAMES if each != ""),
    "id_prefix": tuple(each for each in NAMES if each != ""),
    "created_after": TIMES,
    "created_before": TIMES,
    "held": (False, 1, "", "unknown", b"paused", [], ["paused"], float("nan"), object()),
    "waiting_for": (
        *(each for each in NAMES if each is not None),
        *(f"event:{each}" for each in NAMES if isinstance(each, str)),
        *("no_worker", "Event:x", " event:x", "timer:x", "held:unknown", "held:", b"event:x", ["event:x"]),
    ),
    "limit": LIMITS,
    "after": CURSORS,
}


def describe(value: object) -> str:
    """Return a short text for a message of a test."""
    try:
        return repr(value)[:60]
    except Exception:
        return f"<{type(value).__name__}>"
