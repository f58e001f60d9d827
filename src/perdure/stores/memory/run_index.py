"""Index of runs by fields and tags, so that a search examines only the runs that one of its conditions selects.

Each indexed value has its runs in the order of (created_at, id). A number is also in a list by value. The index changes
with the rows of the runs; it decides nothing: every run that it returns is checked against the whole query.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf, nextafter
from typing import TypeVar

from perdure.model.filters import RUN_FIELDS, AllOf, AnyOf, Filter, Term
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord
from perdure.model.tags import index_tags
from perdure.stores import semantics as rules
from perdure.stores.paging import Key, created_between

SORT_LIMIT = 5_000
"""Runs of a range, a prefix or several values are sorted by age for a page only up to this number."""

Value = tuple[str, str, str | None]
"""An indexed value: "run" or "tag", the key and the text; None: any text."""
INDEXED_FIELDS = ("workflow", "parent", "queue", "error")
LAST_CHARACTER = "\U0010ffff"

T = TypeVar("T", str, Key, tuple[float, float, str])


class RunIndex:
    """The lists of runs by age, by id, by value and by number."""

    def __init__(self, created_at: Callable[[str], float]) -> None:
        self._created_at = created_at
        self.by_age: list[Key] = []
        self._ids: list[str] = []
        self._values: dict[Value, list[Key]] = {}
        self._numbers: dict[str, list[tuple[float, float, str]]] = {}  # by tag: number, created_at and id

    # changing

    def add(self, record: RunRecord) -> None:
        """Add a run."""
        insort(self.by_age, _key(record))
        insort(self._ids, record.id)
        self._add_values(record)

    def remove(self, record: RunRecord) -> None:
        """Remove a run; `record` is its row when it was last added or replaced."""
        _remove(self.by_age, _key(record))
        _remove(self._ids, record.id)
        self._remove_values(record)

    def replace(self, before: RunRecord, after: RunRecord) -> None:
        """Replace the row of a run. Costs nothing if no indexed field has changed."""
        if (
            before.tags is after.tags
            and before.error is after.error
            and before.workflow is after.workflow
            and before.queue is after.queue
        ):
            return
        if set(_values_of(before)) != set(_values_of(after)) or not rules.same_tags(before.tags, after.tags):
            self._remove_values(before)
            self._add_values(after)

    def _add_values(self, record: RunRecord) -> None:
        key = _key(record)
        for value in _values_of(record):
            insort(self._values.setdefault(value, []), key)
        for tag in index_tags(record.tags):
            if tag.number is not None:
                insort(self._numbers.setdefault(tag.key, []), (tag.number, *key))

    def _remove_values(self, record: RunRecord) -> None:
        key = _key(record)
        for value in _values_of(record):
            _remove(self._values[value], key)
            if not self._values[value]:
                del self._values[value]
        for tag in index_tags(record.tags):
            if tag.number is not None:
                _remove(self._numbers[tag.key], (tag.number, *key))
                if not self._numbers[tag.key]:
                    del self._numbers[tag.key]

    # reading

    def newest_first(
        self, query: RunQuery, last: Key | None, candidates: Iterable[Collection[str]] = ()
    ) -> Iterator[str]:
        """Return the ids of runs that may match, newest first, after the run `last`.

        `candidates` are further sets of ids, each of which has all matching runs.
        """
        keys = self._select(query)
        ids = min(candidates, key=len, default=None)
        if ids is not None and len(ids) < min(len(keys), SORT_LIMIT):
            keys = self.keys_of(ids)
        since, until = _created_between(query)
        begin, end = bisect_left(keys, (since, "")), bisect_left(keys, (until, ""))
        if last is not None:
            end = min(end, bisect_left(keys, last))
        return (keys[i][1] for i in range(end - 1, begin - 1, -1))

    def _select(self, query: RunQuery) -> list[Key]:
        """Return the shortest list that has all runs which match the query, by age."""
        selected = [self.by_age]
        selected += [self._values.get(value, []) for value in _required_values(query)]
        if query.id_prefix:
            selected.append(self._with_prefix(query.id_prefix))
        selected += [self._select_part(part) for part in _conjuncts(query.filter)]
        return min(selected, key=len)

    def _select_part(self, part: Filter) -> list[Key]:
        """Return the runs that match one condition, by age; all runs if no index selects them."""
        match part:
            case Term(key=key, operator=":", value=value) if value is None or isinstance(value, str):
                if key == "id" and value is not None:
                    return self._with_prefix(value)
                field = _field_value(key, value)
                return self.by_age if field is None else self._values.get(field, [])
            case Term(key=key, operator=operator, value=float(number)) if key in self._numbers:
                return self._in_range(key, operator, number)
            case AnyOf(parts=parts):
                lists = [self._select_part(each) for each in parts]
                if sum(map(len, lists)) <= SORT_LIMIT:
                    return sorted({key for keys in lists for key in keys})
        return self.by_age

    def _in_range(self, tag: str, operator: str, number: float) -> list[Key]:
        numbers = self._numbers[tag]
        find = bisect_right if operator in (">", "<=") else bisect_left
        at = find(numbers, number, key=lambda each: each[0])
        begin, end = (at, len(numbers)) if operator.startswith(">") else (0, at)
        if end - begin > SORT_LIMIT:
            return self.by_age
        return sorted((created_at, id) for _, created_at, id in numbers[begin:end])

    def _with_prefix(self, prefix: str) -> list[Key]:
        begin, end = bisect_left(self._ids, prefix), bisect_left(self._ids, prefix + LAST_CHARACTER)
        return self.by_age if end - begin > SORT_LIMIT else self.keys_of(self._ids[begin:end])

    def keys_of(self, ids: Iterable[str]) -> list[Key]:
        """Return the keys of these runs, oldest first."""
        return sorted((self._created_at(id), id) for id in ids)


def _key(record: RunRecord) -> Key:
    return record.created_at, record.id


def _remove(items: list[T], item: T) -> None:
    del items[bisect_left(items, item)]


def _values_of(record: RunRecord) -> Iterator[Value]:
    """Return the values under which a run is indexed."""
    yield "run", "workflow", record.workflow
    error = None if record.error is None else record.error.type
    for key, text in (("parent", record.parent), ("queue", record.queue), ("error", error)):
        if text is not None:
            yield "run", key, text
            yield "run", key, None
    for tag in index_tags(record.tags):
        yield "tag", tag.key, tag.text
        yield "tag", tag.key, None


def _field_value(key: str, text: str | None) -> Value | None:
    """Return the indexed value of `key:text`, or None if the key is not indexed."""
    if key not in RUN_FIELDS:
        return "tag", key, text
    return ("run", key, text) if key in INDEXED_FIELDS and (text is not None or key != "workflow") else None


def _required_values(query: RunQuery) -> Iterator[Value]:
    """Return the indexed values that every matching run has, by the plain fields of the query."""
    if query.workflow is not None:
        yield "run", "workflow", query.workflow
    if query.parent is not None:
        yield "run", "parent", query.parent
    for tag in index_tags(query.tags or {}):
        yield "tag", tag.key, tag.text


def _conjuncts(filter: Filter | None) -> tuple[Filter, ...]:
    """Return the conditions that every matching run satisfies."""
    if filter is None:
        return ()
    return filter.parts if isinstance(filter, AllOf) else (filter,)


def _created_between(query: RunQuery) -> tuple[float, float]:
    """Return a range of creation times, start inclusive and end exclusive, that has all matching runs."""
    since, until = created_between(query)
    least, most = (-inf if since is None else since), (inf if until is None else until)
    for part in _conjuncts(query.filter):
        match part:
            case Term(key="created", operator=">" | ">=", value=float(time)):
                least = max(least, time)
            case Term(key="created", operator="<" | "<=", value=float(time)):
                most = min(most, nextafter(time, inf))
    return least, most
