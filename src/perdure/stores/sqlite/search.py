"""Pages and counts of runs in the SQLite store.

The most selective condition that an index can find drives the query; the others filter. A page examines at most
`SCAN_LIMIT` rows of its driver: a first statement finds the last of them, and the page ends there if too few match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apsw

from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord
from perdure.stores import sql_rows
from perdure.stores.paging import Key, check_limit, cursor_after
from perdure.stores.protocol import SCAN_LIMIT
from perdure.stores.results import RunPage, UnreadableRun
from perdure.stores.sql_filters import (
    ESTIMATE_CAP,
    SQLITE,
    CompiledQuery,
    Driver,
    Fragment,
    choose_driver,
    compile_query,
    join_all,
    where,
)

_BY_TEXT = "run_tags AS tag INDEXED BY run_tags_by_text CROSS JOIN runs ON runs.pk = tag.run_pk"
SOURCES = {
    "workflow": "runs INDEXED BY runs_by_workflow",
    "status": "runs INDEXED BY runs_by_status",
    "parent": "runs INDEXED BY runs_by_parent",
    "queue": "runs INDEXED BY runs_by_queue",
    "error": "runs INDEXED BY runs_by_error",
    "held": "runs INDEXED BY runs_held_newest",
    "worker": "runs INDEXED BY runs_owned",
    "ended": "runs INDEXED BY runs_by_end",
    "id": "runs INDEXED BY sqlite_autoindex_runs_1",
    "tag": _BY_TEXT,
    "range": _BY_TEXT.replace("text", "number"),
    "subscriptions": "runs",
    "observers": "runs",
}
NEWEST = "runs INDEXED BY runs_newest"
# Rows that a page examines before it examines `SCAN_LIMIT`: usually enough, and finding their end costs less.
FIRST_SCAN = 400

BARE_COLUMNS = ", ".join(
    {"input": "x''", "original_input": "NULL", "result": "NULL"}.get(column, f"runs.{column}")
    for column in sql_rows.RUN_COLUMNS.split(", ")
)
COLUMNS = ", ".join(f"runs.{column}" for column in sql_rows.RUN_COLUMNS.split(", "))


def runs(connection: apsw.Connection, query: RunQuery, *, bare: bool) -> RunPage:
    """Return one page of runs, newest first. `bare`: without payloads."""
    limit = min(check_limit(query.limit), SCAN_LIMIT)
    return _Page(connection, compile_query(query, SQLITE), limit, BARE_COLUMNS if bare else COLUMNS).read()


def count(connection: apsw.Connection, query: RunQuery, cap: int) -> int:
    """Return the number of matching runs, at most `cap`."""
    compiled = compile_query(query, SQLITE)
    driver, _ = find_driver(connection, compiled)
    driving = [] if driver is None else [_driving(driver)]
    created = where(CompiledQuery(conditions=(), created=compiled.created), None, *_key(driver))
    terms = join_all([*driving, created, *compiled.rest(driver)])
    sql = f"SELECT count(*) FROM (SELECT 1 FROM {source(driver)} WHERE {terms.sql} LIMIT ?)"
    return int(connection.execute(sql, (*terms.values, check_limit(cap))).get)


def find_driver(connection: apsw.Connection, query: CompiledQuery) -> tuple[Driver | None, int]:
    """Return the driver that finds the fewest runs, and how many it finds, counted up to a cap."""
    drivers = query.drivers
    if len(drivers) == 1 and drivers[0].is_ordered:
        return drivers[0], ESTIMATE_CAP
    counts = [_estimate(connection, driver) for driver in drivers]
    driver = choose_driver(drivers, counts, ESTIMATE_CAP)
    return driver, next((n for n, each in zip(counts, drivers, strict=True) if each is driver), ESTIMATE_CAP)


def _estimate(connection: apsw.Connection, driver: Driver) -> int:
    table = source(driver).split(" CROSS JOIN ")[0]
    sql = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {_driving(driver).sql} LIMIT ?)"
    return int(connection.execute(sql, (*driver.fragment.values, ESTIMATE_CAP)).get)


def source(driver: Driver | None) -> str:
    """Return the tables that a query with this driver reads, and the index."""
    return NEWEST if driver is None else SOURCES[driver.kind]


def _driving(driver: Driver) -> Fragment:
    """Return the driver's condition as its index needs it."""
    if driver.kind == "error":  # the index has only runs with an error
        return Fragment(f"runs.error IS NOT NULL AND {driver.fragment.sql}", driver.fragment.values)
    return driver.fragment


def _key(driver: Driver | None) -> tuple[str, str]:
    """Return the expressions of a run's time of creation and id."""
    return "tag.created_at" if driver is not None and driver.kind in ("tag", "range") else "runs.created_at", "runs.id"


class _Page:
    """Reads one page within a read transaction, so that all statements see the same runs."""

    def __init__(self, connection: apsw.Connection, query: CompiledQuery, limit: int, columns: str) -> None:
        self._connection = connection
        self._query = query
        self._limit = limit
        self._columns = columns

    def read(self) -> RunPage:
        self._connection.execute("BEGIN")
        try:
            return self._read()
        finally:
            self._connection.execute("ROLLBACK")

    def _read(self) -> RunPage:
        self._driver, estimate = find_driver(self._connection, self._query)
        self._created_at, self._id = _key(self._driver)
        if self._driver is not None and not self._driver.is_ordered:
            return self._finish(self._matching(None), None, min(estimate, SCAN_LIMIT))
        for size in self._sizes():
            end = self._end_of(size)
            found = self._matching(end)
            if len(found) > self._limit or end is None:
                break
        return self._finish(found, end, size)

    def _sizes(self) -> Iterator[int]:
        """Return how many rows to examine, in steps. Without other conditions every row matches."""
        first = max(FIRST_SCAN, 2 * self._limit)
        if self._query.rest(self._driver) and first < SCAN_LIMIT:
            yield first
        yield SCAN_LIMIT

    def _end_of(self, size: int) -> Key | None:
        """Return the key of the last of this many rows of the driver, or None if it has no more rows."""
        if not self._query.rest(self._driver) and self._limit < size:
            return None
        terms = self._driver_terms(None)
        sql = self._select(f"{self._created_at}, {self._id}", terms)
        last: list[Any] = self._connection.execute(f"{sql} LIMIT 2 OFFSET ?", (*terms.values, size - 1)).fetchall()
        return last[0] if len(last) == 2 else None

    def _matching(self, end: Key | None) -> list[sql_rows.Row]:
        """Return the matching rows down to this key, and one more than the page has if there are more."""
        terms = join_all([self._driver_terms(end), *self._query.rest(self._driver)])
        sql = self._select(self._columns, terms)
        return [*self._connection.execute(f"{sql} LIMIT ?", (*terms.values, self._limit + 1))]

    def _finish(self, found: list[sql_rows.Row], end: Key | None, size: int) -> RunPage:
        page = [sql_rows.run_or_mark(row) for row in found[: self._limit]]
        scanned = size
        if len(found) > self._limit:
            end = found[self._limit - 1][4], found[self._limit - 1][0]
        if not self._query.rest(self._driver):
            scanned = len(page)
        elif self._driver is None or self._driver.is_ordered:
            terms = self._driver_terms(end)
            sql = f"SELECT count(*) FROM {source(self._driver)} WHERE {terms.sql}"
            scanned = min(size, self._connection.execute(sql, terms.values).get)
        return RunPage(
            tuple(each for each in page if isinstance(each, RunRecord)),
            None if end is None else cursor_after(*end),
            tuple(each for each in page if isinstance(each, UnreadableRun)),
            scanned,
        )

    def _driver_terms(self, end: Key | None) -> Fragment:
        """Return the conditions of the driver, for the rows after the previous page down to this key."""
        query = CompiledQuery(conditions=(), created=self._query.created, after=self._query.after)
        parts = [] if self._driver is None else [_driving(self._driver)]
        parts.append(where(query, None, self._created_at, self._id))
        if end is not None:
            parts.append(Fragment(f"({self._created_at}, {self._id}) >= (?, ?)", end))
        return join_all(parts)

    def _select(self, columns: str, terms: Fragment) -> str:
        order = f"{self._created_at} DESC, {self._id} DESC"
        return f"SELECT {columns} FROM {source(self._driver)} WHERE {terms.sql} ORDER BY {order}"
