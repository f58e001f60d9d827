"""Indexes that a search of runs may read: pure functions of the query. `run_search` measures and reads them.

The names of indexes are those of keys, without the hash tag: the kind, a colon, and the parts of the name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from msgspec import Struct

from perdure.model.awaited import Awaited, parse_awaited
from perdure.model.filters import RUN_FIELDS, AllOf, AnyOf, Filter, Not, Term
from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.model.tags import index_tag
from perdure.stores.paging import created_between, statuses_of

HELD = "held-runs:"
INTERNAL = "internal:"
SUSPENDED = f"status:{RunStatus.SUSPENDED}"


class Candidate(Struct, frozen=True):
    """Indexes by creation time that together contain every matching run."""

    indexes: tuple[str, ...]


class Range(Struct, frozen=True):
    """The part of an index between two scores that contains every matching run, not in the order of creation."""

    index: str
    lowest: float = -math.inf
    highest: float = math.inf


class TimeBounds(Struct, frozen=True):
    """The creation times of all matching runs: from `since` on, and before or at `until`."""

    since: float | None
    until: float | None
    is_until_inclusive: bool = False

    @property
    def lowest(self) -> str:
        return "-inf" if self.since is None else repr(self.since)

    @property
    def highest(self) -> str:
        if self.until is None:
            return "+inf"
        return repr(self.until) if self.is_until_inclusive else f"({self.until!r}"


def list_candidates(query: RunQuery) -> list[Candidate | Range]:
    """Return the indexes that may be read for a query. The first one suits every query of these statuses."""
    statuses = statuses_of(query)
    names = tuple(f"status:{status}" for status in dict.fromkeys(RunStatus if statuses is None else statuses))
    found: list[Candidate | Range] = [Candidate(names)]
    if query.waiting_for is not None:
        found = [Candidate((SUSPENDED,))]
    if query.parent is not None:
        found.append(Candidate((f"children:{query.parent}",)))
    if query.workflow is not None:
        found.append(Candidate((f"workflow:{query.workflow}",)))
    if query.held is not None or (query.awaited is not None and query.awaited.kind == "held"):
        found.append(Candidate((HELD,)))
    found += (Candidate((_tag_index(key, index_tag(key, value).text),)) for key, value in (query.tags or {}).items())
    terms = list(_conjuncts(query.filter))
    found += (Candidate(indexes) for indexes in map(_indexes_of, terms) if indexes)
    return [*found, *_ranges(terms)]


def find_exact(query: RunQuery) -> Candidate | Range | None:
    """Return the indexes that contain exactly the matching runs, internal runs included, or None if none do."""
    if query.id_prefix is not None or query.tags or query.held is not None or query.waiting_for is not None:
        return None
    candidates = list_candidates(query)
    given = [query.parent is not None, query.workflow is not None, query.status is not None, query.where is not None]
    if not any(given):
        return candidates[0]
    if sum(given) > 1 or len(candidates) > 2:
        return None
    if query.where is None:
        return candidates[-1]
    exact = isinstance(query.filter, Term) and query.filter.operator == ":" and query.filter.value is not None
    exact = exact and query.filter.key not in ("id", "held", "waiting", "version", "pool")  # type: ignore[union-attr]
    return candidates[1] if exact and len(candidates) == 2 else None


def find_time_bounds(query: RunQuery) -> TimeBounds:
    """Return the creation times that a matching run may have."""
    since, until = created_between(query)
    inclusive = False
    for term in _conjuncts(query.filter):
        if isinstance(term, Term) and term.key == "created" and isinstance(term.value, int | float):
            if term.operator in (">", ">=") and (since is None or term.value > since):
                since = float(term.value)
            if term.operator in ("<", "<=") and (until is None or term.value < until):
                until, inclusive = float(term.value), True
    return TimeBounds(since, until, inclusive)


def find_awaited(query: RunQuery) -> Awaited | None:
    """Return the named event or run that all matching runs wait for."""
    terms = [term for term in _conjuncts(query.filter) if isinstance(term, Term) and term.key == "waiting"]
    waits = [query.waiting_for, *(term.value for term in terms)]
    for awaited in (parse_awaited(text) for text in waits if isinstance(text, str)):
        if awaited.name is not None and awaited.kind in ("event", "child"):
            return awaited
    return None


def _conjuncts(filter: Filter | None) -> Iterator[Filter]:
    """Yield the parts of a filter that every matching run matches."""
    if isinstance(filter, AllOf):
        for part in filter.parts:
            yield from _conjuncts(part)
    elif filter is not None:
        yield filter


def _indexes_of(filter: Filter) -> tuple[str, ...]:
    """Return indexes that together contain every run that matches, or nothing if there are none."""
    match filter:
        case Term():
            return _indexes_of_term(filter)
        case Not():
            return ()
        case AllOf():
            return next((indexes for indexes in map(_indexes_of, filter.parts) if indexes), ())
        case AnyOf():
            parts = [_indexes_of(part) for part in filter.parts]
            return tuple(dict.fromkeys(index for part in parts for index in part)) if all(parts) else ()


def _indexes_of_term(term: Term) -> tuple[str, ...]:
    if term.operator != ":":
        return ()
    if term.key == "held":
        return (HELD,)
    if term.key == "waiting":
        return (SUSPENDED,)
    if not isinstance(term.value, str):
        return ()
    kinds = {"status": "status", "workflow": "workflow", "parent": "children", "queue": "run-queue", "error": "error"}
    if term.key in kinds:
        return (f"{kinds[term.key]}:{term.value}",)
    return () if term.key in RUN_FIELDS else (_tag_index(term.key, term.value),)


def _tag_index(key: str, text: str) -> str:
    return f"tag:{key}\0{text}"


def _ranges(terms: Iterable[Filter]) -> Iterator[Range]:
    """Yield the parts of indexes with other scores than the creation time."""
    bounds: dict[str, tuple[float, float]] = {}
    for term in terms:
        if not isinstance(term, Term):
            continue
        if term.operator == ":" and term.key == "worker" and isinstance(term.value, str):
            yield Range(f"owned:{term.value}")
        if term.operator == ":" or not isinstance(term.value, int | float):
            continue
        if term.key != "ended" and term.key in RUN_FIELDS:
            continue
        index = "ended:" if term.key == "ended" else f"tag-number:{term.key}"
        lowest, highest = bounds.get(index, (-math.inf, math.inf))
        if term.operator in (">", ">="):
            bounds[index] = (max(lowest, term.value), highest)
        else:
            bounds[index] = (lowest, min(highest, term.value))
    for index, (lowest, highest) in bounds.items():
        yield Range(index, lowest, highest)
