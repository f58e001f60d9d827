"""Translate the conditions of a `RunQuery` into SQL, for the stores with SQL tables.

Only parameters carry values. The texts here contain a "?" for each; `numbered` replaces them by "$1", "$2", ... A
condition is never NULL where that changes a result: a negated part is written as `IS NOT TRUE`.

A condition that an index can find has a `Driver`. A store counts what its drivers find, up to a cap, and reads the runs
of one of them (`choose_driver`); the other conditions filter. This module knows no index and executes nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from perdure.errors import StoreError
from perdure.model.awaited import Awaited, parse_awaited
from perdure.model.filters import RUN_FIELDS, TIME_FIELDS, AllOf, AnyOf, Filter, Not, Relative, Term
from perdure.model.queries import RunQuery
from perdure.model.records import RunStatus
from perdure.model.tags import index_tag
from perdure.stores.paging import Key, created_between, key_of, statuses_of
from perdure.stores.sql_rows import as_text

ESTIMATE_CAP = 1_000  # rows that an estimate counts
INTERNAL_PREFIX = "~"


class Fragment(Struct, frozen=True):
    """A part of a statement, and the values of its "?"."""

    sql: str
    values: tuple[Any, ...] = ()


TRUE, FALSE = Fragment("TRUE"), Fragment("FALSE")


class Driver(Struct, frozen=True):
    """A condition by which an index finds runs: at least the runs that meet the condition of its owner.

    `kind` is what it selects by. "workflow", "status", "parent", "queue", "error", "held" and "tag" find runs in the
    order of their creation; the kinds in `UNORDERED` find them in another order. The fragment is about the table of
    runs, or of tags (kinds "tag" and "range") under the alias `tag`. `exact`: all that it finds meet the condition.
    """

    kind: str
    fragment: Fragment
    exact: bool = True

    @property
    def is_ordered(self) -> bool:
        return self.kind not in UNORDERED


UNORDERED = ("range", "id", "worker", "ended", "subscriptions", "observers")


class Condition(Struct, frozen=True):
    """A condition about a row of the table of runs, and the drivers that find the runs that meet it."""

    fragment: Fragment
    drivers: tuple[Driver, ...] = ()


class Dialect(Struct, frozen=True, kw_only=True):
    """What differs between the databases.

    `runs` is the name or alias of the table of runs in a statement, `tags` the table of indexed tags. `error_type` and
    `hold_kind` are expressions. `waits` translates what a suspended run waits for; it need not check the status.
    """

    runs: str
    tags: str
    error_type: str
    hold_kind: str
    waits: Callable[[Awaited], Condition]


class CompiledQuery(Struct, frozen=True, kw_only=True):
    """The conditions of a query; a run has to meet all of them.

    `created` are conditions on the time of creation, which every driver can apply: operator and seconds. `after` is the
    key of the last run of the previous page.
    """

    conditions: tuple[Condition, ...]
    created: tuple[tuple[str, float], ...] = ()
    after: Key | None = None

    @property
    def drivers(self) -> list[Driver]:
        """The drivers of all conditions, those first that usually find fewer runs."""
        found = [driver for condition in self.conditions for driver in condition.drivers]
        return sorted(found, key=lambda driver: driver.kind in ("status", "workflow"))

    def rest(self, driver: Driver | None) -> list[Fragment]:
        """Return the conditions that this driver does not imply, without those on the time of creation."""
        return [each.fragment for each in self.conditions if not _implies(driver, each)]


def _implies(driver: Driver | None, condition: Condition) -> bool:
    return driver is not None and driver.exact and any(each is driver for each in condition.drivers)


def compile_query(query: RunQuery, dialect: Dialect) -> CompiledQuery:
    """Return the conditions of a query. The times in `query.where` must be absolute."""
    conditions = [_condition(term, dialect) for term in _terms_of_fields(query)]
    for key, value in (query.tags or {}).items():
        tag = index_tag(key, value)
        typed = (tag.key, tag.text, tag.kind)
        conditions.append(_tag_condition("tag", "key = ? AND {0}text = ? AND {0}kind = ?", typed, dialect))
    created = _created(query)
    for part in _parts(query.filter):
        if isinstance(part, Term) and part.key == "created" and part.operator != ":":
            created.append((part.operator, _number(part)))
        else:
            conditions.append(_condition(part, dialect))
    statuses = statuses_of(query)
    if statuses is not None and len(statuses) != 1:
        marks = ",".join("?" * len(statuses))
        conditions.append(Condition(Fragment(f"{dialect.runs}.status IN ({marks})", statuses) if statuses else FALSE))
    if not query.internal:
        conditions.append(Condition(Fragment(f"substr({dialect.runs}.workflow, 1, 1) <> ?", (INTERNAL_PREFIX,))))
    after = None if query.after is None else key_of(query.after)
    return CompiledQuery(conditions=tuple(conditions), created=tuple(created), after=after)


def compile_filter(part: Filter, dialect: Dialect) -> Fragment:
    """Return a filter as a condition about a row of the table of runs."""
    match part:
        case Term():
            return _condition(part, dialect).fragment
        case Not(part=inner):
            found = compile_filter(inner, dialect)
            return Fragment(f"({found.sql}) IS NOT TRUE", found.values)
        case AllOf(parts=parts):
            return join_all(compile_filter(each, dialect) for each in parts)
        case AnyOf(parts=parts):
            return join_any([compile_filter(each, dialect) for each in parts])


def where(query: CompiledQuery, driver: Driver | None, created_at: str, run_id: str) -> Fragment:
    """Return all conditions of a page, for these expressions of a run's key. Those of the driver come first."""
    parts = [] if driver is None else [driver.fragment]
    parts += [Fragment(f"{created_at} {operator} ?", (seconds,)) for operator, seconds in query.created]
    if query.after is not None:
        parts.append(Fragment(f"({created_at}, {run_id}) < (?, ?)", query.after))
    return join_all([*parts, *query.rest(driver)])


def choose_driver(drivers: Sequence[Driver], counts: Sequence[int], cap: int = ESTIMATE_CAP) -> Driver | None:
    """Return the driver that finds the fewest runs, given counts up to `cap`; None: read all runs, newest first.

    A driver that finds runs in another order is used only if it finds fewer than `cap`, because all its runs have to be
    read and sorted.
    """
    usable = [(n, i) for i, n in enumerate(counts) if n < cap or drivers[i].is_ordered]
    return drivers[min(usable)[1]] if usable else None


def numbered(sql: str) -> str:
    """Return a statement with "$1", "$2", ... in place of each "?"."""
    parts = sql.split("?")
    return parts[0] + "".join(f"${n}{part}" for n, part in enumerate(parts[1:], 1))


def join_all(fragments: Iterable[Fragment]) -> Fragment:
    """Return the condition that all of these hold."""
    given = [each for each in fragments if each is not TRUE]
    if not given:
        return TRUE
    return Fragment(" AND ".join(f"({each.sql})" for each in given), _values(given))


def join_any(fragments: Sequence[Fragment]) -> Fragment:
    """Return the condition that one of these holds."""
    if not fragments:
        return FALSE
    return Fragment(" OR ".join(f"({each.sql})" for each in fragments), _values(fragments))


def _values(fragments: Iterable[Fragment]) -> tuple[Any, ...]:
    return tuple(value for each in fragments for value in each.values)


# --- parts of a query -----------------------------------------------------------------------------------------------


def _terms_of_fields(query: RunQuery) -> list[Term]:
    """Return the fields of a query that are terms of a filter, too."""
    terms = [("workflow", query.workflow), ("parent", query.parent), ("id", query.id_prefix or None)]
    terms.append(("waiting", query.waiting_for))
    found = [Term(key, ":", value) for key, value in terms if value is not None]
    if query.held is not None:
        found.append(Term("held", ":", None if query.held is True else str(query.held)))
    statuses = statuses_of(query)
    if statuses is not None and len(statuses) == 1:
        found.append(Term("status", ":", statuses[0].value))
    return found


def _created(query: RunQuery) -> list[tuple[str, float]]:
    since, until = created_between(query)
    return [(operator, time) for operator, time in ((">=", since), ("<", until)) if time is not None]


def _parts(part: Filter | None) -> list[Filter]:
    """Return the parts of a filter that all have to match."""
    if part is None:
        return []
    if isinstance(part, AllOf):
        return [each for inner in part.parts for each in _parts(inner)]
    if isinstance(part, AnyOf) and len(part.parts) == 1:
        return _parts(part.parts[0])
    return [part]


def _condition(part: Filter, dialect: Dialect) -> Condition:
    if not isinstance(part, Term):
        return Condition(compile_filter(part, dialect))
    if part.key not in RUN_FIELDS:
        return _condition_of_tag(part, dialect)
    if part.key in ("version", *TIME_FIELDS):
        return _condition_of_number(part, dialect)
    if part.operator != ":":
        return Condition(FALSE)  # text has no order
    return _condition_of_text(part, dialect)


# --- terms ----------------------------------------------------------------------------------------------------------

_NUMBER_COLUMNS = {"version": "version", "created": "created_at", "updated": "updated_at", "ended": "ended_at"}
_DRIVERS = ("status", "workflow", "parent", "queue", "error", "worker")


def _condition_of_text(term: Term, dialect: Dialect) -> Condition:
    value, runs = term.value, dialect.runs
    match term.key:
        case "waiting":
            return _condition_of_wait(term, dialect)
        case "held":
            return _condition_of_hold(None if value is None else str(value), dialect)
        case "id" if value is None:
            return Condition(TRUE)
        case "id":
            prefix = Fragment(f"{runs}.id >= ? AND {runs}.id < ?", (value, f"{value}{chr(sys.maxunicode)}"))
            return Condition(prefix, (Driver("id", prefix),))
        case "error":
            column = dialect.error_type
        case "worker":
            column = f"{runs}.owner"
        case _:
            column = f"{runs}.{term.key}"
    if value is None:
        return Condition(Fragment(f"{column} IS NOT NULL"))
    found = Fragment(f"{column} = ?", (value,))
    return Condition(found, (Driver(term.key, found),) if term.key in _DRIVERS else ())


def _condition_of_hold(kind: str | None, dialect: Dialect) -> Condition:
    held = Fragment(f"{dialect.runs}.held IS NOT NULL AND {dialect.runs}.status = 'suspended'")
    if kind is None:
        return Condition(held, (Driver("held", held),))
    return Condition(join_all([held, Fragment(f"{dialect.hold_kind} = ?", (kind,))]), (Driver("held", held, False),))


def _condition_of_wait(term: Term, dialect: Dialect) -> Condition:
    suspended = Fragment(f"{dialect.runs}.status = ?", (RunStatus.SUSPENDED.value,))
    if term.value is None:
        return Condition(suspended, (Driver("status", suspended),))
    awaited = parse_awaited(term.value)
    if awaited.kind == "held":
        return _condition_of_hold(awaited.name, dialect)
    waits = dialect.waits(awaited)
    return Condition(join_all([suspended, waits.fragment]), (*waits.drivers, Driver("status", suspended, False)))


def _condition_of_number(term: Term, dialect: Dialect) -> Condition:
    """Return the condition on a version or a time. Equality compares the canonical text of a version."""
    column = f"{dialect.runs}.{_NUMBER_COLUMNS[term.key]}"
    if term.operator == ":":
        if term.value is None:
            return Condition(Fragment(f"{column} IS NOT NULL"))
        if term.key == "version":
            version = _canonical_integer(term.value)
            return Condition(FALSE if version is None else Fragment(f"{column} = ?", (version,)))
        return Condition(Fragment(f"{column} = ?", (term.value,)) if isinstance(term.value, float) else FALSE)
    found = Fragment(f"{column} {term.operator} CAST(? AS double precision)", (_number(term),))
    return Condition(found, (Driver("ended", found),) if term.key == "ended" else ())


def _canonical_integer(value: object) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else None


def _condition_of_tag(term: Term, dialect: Dialect) -> Condition:
    if term.operator == ":":
        if term.value is None:
            return _tag_condition("key", "key = ?", (term.key,), dialect)
        return _tag_condition("tag", "key = ? AND {0}text = ?", (term.key, str(term.value)), dialect)
    comparison = f"key = ? AND {{0}}number {term.operator} ?"
    return _tag_condition("range", comparison, (term.key, _number(term)), dialect)


def _tag_condition(kind: str, condition: str, values: tuple[Any, ...], dialect: Dialect) -> Condition:
    """Return the condition that the run has such a tag. `{0}` in its text is the alias of the table of tags."""
    # The plus sign keeps SQLite from reading all tags of the range instead of the tag of the run.
    of_run = condition.format("t.").replace("t.number", "+t.number")
    own = f"EXISTS (SELECT 1 FROM {dialect.tags} t WHERE t.run_pk = {dialect.runs}.pk AND t.{of_run})"
    driver = Driver(kind, Fragment(f"tag.{condition.format('tag.')}", values))
    return Condition(Fragment(own, values), () if kind == "key" else (driver,))


def _number(term: Term) -> float:
    if isinstance(term.value, bool) or not isinstance(term.value, int | float):
        problem = "is relative; resolve it first" if isinstance(term.value, Relative) else "must be a number"
        raise StoreError(f"the value of {term.key}{term.operator} in a filter {problem}: {term.value!r}")
    return float(term.value)


# --- what runs wait for ---------------------------------------------------------------------------------------------


def _sqlite_waits(awaited: Awaited) -> Condition:
    """Translate a wait for SQLite. A run whose waits are damaged may wait for anything, so that it is found."""
    terms, values = ["value ->> '$.kind' = ?"], [awaited.kind]
    if awaited.name is not None:
        is_list = _is_list(awaited)
        terms.append("instr(',' || (value ->> '$.name') || ',', ?) > 0" if is_list else "value ->> '$.name' = ?")
        values.append(f",{awaited.name}," if is_list else awaited.name)
    waits = "json_each(CASE WHEN json_valid(runs.waits) THEN runs.waits END)"
    found = f"EXISTS (SELECT 1 FROM {waits} WHERE {' AND '.join(terms)}) OR NOT json_valid(runs.waits)"
    return Condition(Fragment(found, tuple(values)), _sqlite_wait_drivers(awaited))


def _sqlite_wait_drivers(awaited: Awaited) -> tuple[Driver, ...]:
    if awaited.name is None or awaited.kind not in ("event", "child"):
        return ()
    if awaited.kind == "event":
        subscribed = "runs.pk IN (SELECT run_pk FROM subscriptions WHERE topic = ?)"
        return (Driver("subscriptions", Fragment(subscribed, (awaited.name,)), False),)
    observing = (
        "runs.id IN (SELECT observer FROM observers WHERE run_pk = (SELECT child.pk FROM runs child WHERE id = ?))"
    )
    return (Driver("observers", Fragment(observing, (awaited.name,)), False),)


def _postgres_waits(awaited: Awaited) -> Condition:
    """Translate a wait for PostgreSQL, whose jsonb cannot contain every name: match the text of the JSON.

    Quotes within a name are escaped, so the pattern matches only a wait, not a part of a name.
    """
    pattern = re.escape(f'{{"kind":{as_text(awaited.kind)}')
    if awaited.name is not None:
        rest = r'(?:[^"\\]|\\.)*'
        name = re.escape(as_text(awaited.name)[1:-1])
        name = f"(?:{rest},)?{name}(?:,{rest})?" if _is_list(awaited) else name
        pattern += f'(?:,"location":"{rest}")?,"name":"{name}"'
    return Condition(Fragment("r.waits ~ ?", (pattern,)))


def _is_list(awaited: Awaited) -> bool:
    """Return whether the name may be one of several: the wait of a receive names all its events."""
    return awaited.kind == "event" and "," not in (awaited.name or "")


_SQLITE_HOLD = "CASE WHEN json_valid(runs.held) THEN runs.held ->> '$.kind' END"
SQLITE_ERROR_TYPE = "CASE WHEN json_valid(error) THEN error ->> '$.type' END"  # as in the index on it
SQLITE = Dialect(
    runs="runs",
    tags="run_tags",
    error_type=SQLITE_ERROR_TYPE,
    hold_kind=_SQLITE_HOLD,
    waits=_sqlite_waits,
)
POSTGRES = Dialect(
    runs="r",
    tags="{schema}.run_tags",
    error_type="{schema}.error_type(r.error)",
    hold_kind="r.held_kind",
    waits=_postgres_waits,
)
