"""Filter: the condition of a search over runs, as data.

`perdure.model.filter_parser` reads it from text. Each store translates it into its own query. A filter is a tree of
`AllOf`, `AnyOf`, `Not` and `Term`. Its times are absolute when a store gets it: `resolve` replaces relative ones.
"""

from __future__ import annotations

from msgspec import Struct

RUN_FIELDS = (
    *("status", "workflow", "version", "pool", "parent", "queue", "held", "waiting", "error", "worker", "id"),
    *("created", "updated", "ended"),
)
"""Keys that name a field of a run. Every other key names a tag."""
TIME_FIELDS = ("created", "updated", "ended")
OPERATORS = (":", ">", "<", ">=", "<=")


class Relative(Struct, frozen=True, tag="relative"):
    """A time relative to now: `-2h` is 7,200 seconds before the time at which the search is executed."""

    seconds: float
    text: str


class Term(Struct, frozen=True, tag="term"):
    """A condition on one key. `value` None with ":" means that the run has the key (`key:*`).

    The value of ":" is text, also if it looks like a number; a number or time equals its canonical text
    (`perdure.model.tags.IndexedTag`). The value of a comparison is a number; of a time, seconds since the epoch.
    The key "id" with ":" matches ids that begin with the value.
    """

    key: str
    operator: str
    value: str | float | Relative | None


class Not(Struct, frozen=True, tag="not"):
    """The run does not match the part."""

    part: Filter


class AllOf(Struct, frozen=True, tag="all"):
    """The run matches every part; without parts every run matches."""

    parts: tuple[Filter, ...] = ()


class AnyOf(Struct, frozen=True, tag="any"):
    """The run matches at least one part."""

    parts: tuple[Filter, ...]


Filter = Term | Not | AllOf | AnyOf
