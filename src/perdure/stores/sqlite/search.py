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
)

JOIN = " CROSS JOIN runs ON runs.pk = tag.run_pk"
_BY_TEXT = f"run_tags AS tag INDEXED BY run_tags_by_text{JOIN}"
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
_ID_OF_TAG = "(SELECT id FROM runs WHERE pk = tag.run_pk)"
# Rows that a page examines before it examines `SCAN_LIMIT`: usually enough, and finding their end costs less.
FIRST_SCANS = (300, 2_000)

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
    terms = join_all([*driving, *_created(compiled, driver), *_rest(compiled, driver)])
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
    table = source(driver).split(JOIN)[0]
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


def _reads_tags(driver: Driver | None) -> bool:
    return driver is not None and driver.kind in ("tag", "range")


def _created(query: CompiledQuery, driver: Driver | None) -> list[Fragment]:
    """Return the conditions on the time of creation, on the columns of the driver."""
    column = "tag.created_at" if _reads_tags(driver) else "runs.created_at"
    return [Fragment(f"{column} {operator} ?", (seconds,)) for operator, seconds in query.created]


def _rest(query: CompiledQuery, driver: Driver | None) -> list[Fragment]:
    """Return the conditions that filter. Those on tags are checked before the row of the run is read."""
    rest = query.rest(driver)
    if not _reads_tags(driver):
        return rest
    return [Fragment(each.sql.replace("runs.pk", "tag.run_pk"), each.values) for each in rest]


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
        self._rest = _rest(self._query, self._driver)
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
        if self._rest:
            yield from (size for size in FIRST_SCANS if self._limit < size < SCAN_LIMIT)
        yield SCAN_LIMIT

    def _end_of(self, size: int) -> Key | None:
        """Return the key of the last of this many rows of the driver, or None if it has no more rows."""
        if not self._rest and self._limit < size:
            return None
        if _reads_tags(self._driver):
            return self._end_of_tags(size)
        terms = self._driver_terms(None)
        sql = self._select(
            "runs.created_at, runs.id", source(self._driver), terms, "runs.created_at DESC, runs.id DESC"
        )
        last: list[Any] = self._connection.execute(f"{sql} LIMIT 2 OFFSET ?", (*terms.values, size - 1)).fetchall()
        return last[0] if len(last) == 2 else None

    def _end_of_tags(self, size: int) -> Key | None:
        """Return the end from the index of tags alone, which has no ids: only runs of the same time are read."""
        table, terms = source(self._driver).split(JOIN)[0], self._driver_terms(None)
        sql = self._select("tag.created_at", table, terms, "tag.created_at DESC")
        last = self._connection.execute(f"{sql} LIMIT 2 OFFSET ?", (*terms.values, size - 1)).fetchall()
        if len(last) < 2:
            return None
        created_at: Any = last[0][0]
        later = join_all([terms, Fragment("tag.created_at > ?", (created_at,))])
        count = self._connection.execute(f"SELECT count(*) FROM {table} WHERE {later.sql}", later.values).get
        equal = join_all([terms, Fragment("tag.created_at = ?", (created_at,))])
        sql = self._select(_ID_OF_TAG, table, equal, "1 DESC")
        id: Any = self._connection.execute(f"{sql} LIMIT 1 OFFSET ?", (*equal.values, size - 1 - count)).get
        return created_at, id

    def _matching(self, end: Key | None) -> list[sql_rows.Row]:
        """Return the matching rows down to this key, and one more than the page has if there are more."""
        terms = join_all([self._driver_terms(end), *self._rest])
        created_at = "tag.created_at" if _reads_tags(self._driver) else "runs.created_at"
        sql = self._select(self._columns, source(self._driver), terms, f"{created_at} DESC, runs.id DESC")
        return [*self._connection.execute(f"{sql} LIMIT ?", (*terms.values, self._limit + 1))]

    def _finish(self, found: list[sql_rows.Row], end: Key | None, size: int) -> RunPage:
        page = [sql_rows.run_or_mark(row) for row in found[: self._limit]]
        if len(found) > self._limit:
            end = found[self._limit - 1][4], found[self._limit - 1][0]
        return RunPage(
            tuple(each for each in page if isinstance(each, RunRecord)),
            None if end is None else cursor_after(*end),
            tuple(each for each in page if isinstance(each, UnreadableRun)),
            self._count_scanned(len(page), end, size),
        )

    def _count_scanned(self, found: int, end: Key | None, size: int) -> int:
        """Return how many rows of the driver the page has examined."""
        if not self._rest:
            return found
        if self._driver is not None and not self._driver.is_ordered:
            return size
        terms = self._driver_terms(end)
        sql = f"SELECT count(*) FROM {source(self._driver).split(JOIN)[0]} WHERE {terms.sql}"
        return min(size, int(self._connection.execute(sql, terms.values).get))

    def _driver_terms(self, end: Key | None) -> Fragment:
        """Return the conditions of the driver, for the rows after the previous page down to this key.

        Those of an index of tags read no row of runs, except one whose time is that of a limit.
        """
        parts = [] if self._driver is None else [_driving(self._driver)]
        parts += _created(self._query, self._driver)
        limits = (("<", self._query.after), (">=", end))
        for operator, key in limits:
            if key is not None and _reads_tags(self._driver):
                strict = f"tag.created_at {operator[0]} ? OR {_ID_OF_TAG} {operator} ?"
                parts.append(Fragment(f"tag.created_at {operator[0]}= ? AND ({strict})", (key[0], *key)))
            elif key is not None:
                parts.append(Fragment(f"(runs.created_at, runs.id) {operator} (?, ?)", key))
        return join_all(parts)

    def _select(self, columns: str, table: str, terms: Fragment, order: str) -> str:
        return f"SELECT {columns} FROM {table} WHERE {terms.sql} ORDER BY {order}"
