"""Filter: the condition of a search over runs, as data.

`perdure.model.filter_parser` reads it from text; `str()` of a filter is that text. Each store translates it into its
own query. A filter is a tree of `AllOf`, `AnyOf`, `Not` and `Term`. Its times are absolute when a store gets it:
`resolve` replaces relative ones.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.tags import canonical_number, canonical_time

RUN_FIELDS = (
    *("status", "workflow", "version", "pool", "parent", "queue", "held", "waiting", "error", "worker", "id"),
    *("created", "updated", "ended"),
)
"""Keys that name a field of a run. Every other key names a tag."""
TIME_FIELDS = ("created", "updated", "ended")
OPERATORS = (":", ">", "<", ">=", "<=")

_PLAIN_KEY = re.compile(r'(?!-)[^\s():<>="*\\!]+')
_PLAIN_VALUE = re.compile(r'(?![:<>=])[^\s()"*\\]+')


class Relative(Struct, frozen=True, tag="relative"):
    """A time relative to now: `-2h` is 7,200 seconds before the time at which the search is executed.

    `seconds` is negative for a time in the past.
    """

    seconds: float
    text: str


class _Node(Struct, frozen=True):
    def __str__(self) -> str:
        return _format(self, nested=False)


class Term(_Node, frozen=True, tag="term"):
    """A condition on one key. `value` None with ":" means that the run has the key (`key:*`).

    The value of ":" is text, also if it looks like a number; a number or time equals its canonical text
    (`perdure.model.tags.IndexedTag`). The value of a comparison is a number; of a time, seconds since the epoch.
    The key "id" with ":" matches ids that begin with the value. `perdure.model.filter_match` defines every key.
    """

    key: str
    operator: str
    value: str | float | Relative | None


class Not(_Node, frozen=True, tag="not"):
    """The run does not match the part."""

    part: Filter


class AllOf(_Node, frozen=True, tag="all"):
    """The run matches every part; without parts every run matches."""

    parts: tuple[Filter, ...] = ()


class AnyOf(_Node, frozen=True, tag="any"):
    """The run matches at least one part."""

    parts: tuple[Filter, ...]


Filter = Term | Not | AllOf | AnyOf


def all_of(*parts: Filter) -> Filter:
    """Return a filter that matches what all parts match. Nested `AllOf` become one."""
    flat = tuple(each for part in parts for each in (part.parts if isinstance(part, AllOf) else (part,)))
    return flat[0] if len(flat) == 1 else AllOf(flat)


def any_of(*parts: Filter) -> Filter:
    """Return a filter that matches what any part matches. Nested `AnyOf` become one."""
    flat = tuple(each for part in parts for each in (part.parts if isinstance(part, AnyOf) else (part,)))
    return flat[0] if len(flat) == 1 else AnyOf(flat)


def resolve(filter: Filter, now: float) -> Filter:
    """Return the filter with relative times replaced by seconds since the epoch."""
    match filter:
        case Term():
            return replace(filter, value=now + filter.value.seconds) if isinstance(filter.value, Relative) else filter
        case Not():
            return Not(resolve(filter.part, now))
        case AllOf():
            return AllOf(tuple(resolve(part, now) for part in filter.parts))
        case AnyOf():
            return AnyOf(tuple(resolve(part, now) for part in filter.parts))


def _format(filter: _Node, *, nested: bool) -> str:
    match filter:
        case Not():
            return f"-{_format(filter.part, nested=True)}"
        case AllOf() | AnyOf():
            separator = " " if isinstance(filter, AllOf) else " OR "
            text = separator.join(_format(part, nested=True) for part in filter.parts)
            return f"({text})" if nested else text
        case Term():
            return f"{_quote(filter.key, _PLAIN_KEY)}{filter.operator}{_format_value(filter)}"
        case _:
            raise AssertionError(filter)


def _format_value(term: Term) -> str:
    match term.value:
        case None:
            return "*"
        case Relative():
            return term.value.text
        case str():
            return _quote(term.value, _PLAIN_VALUE)
        case _:
            return canonical_time(term.value) if term.key in TIME_FIELDS else canonical_number(term.value)


def _quote(text: str, plain: re.Pattern[str]) -> str:
    if plain.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
