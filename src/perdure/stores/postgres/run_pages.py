"""Pages and counts of runs of the PostgreSQL store.

`perdure.stores.sql_filters` translates a query. If several indexes could find its runs, a statement counts up to a cap
what each finds, and the smallest is read: newest first, in pieces of growing size, of which the server returns the runs
that meet all other conditions. Each piece is one statement and begins behind the last run that the piece before has
examined. So pages have no gaps while runs change.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from perdure.model.awaited import Awaited, parse_awaited
from perdure.model.queries import RunQuery
from perdure.model.records import RunRecord
from perdure.stores import sql_rows as rows
from perdure.stores.paging import Key, check_limit, cursor_after, required_terms
from perdure.stores.postgres.pool import ConnectionPool
from perdure.stores.protocol import SCAN_LIMIT
from perdure.stores.results import RunPage, UnreadableRun
from perdure.stores.sql_filters import (
    ESTIMATE_CAP,
    POSTGRES,
    CompiledQuery,
    Driver,
    Fragment,
    choose_driver,
    compile_query,
    join_all,
    numbered,
)

FIRST_PIECE = 200  # runs that the first statement of a search examines; each following one examines four times as many
PAYLOADS = {"input": "''::bytea", "original_input": "NULL::bytea", "result": "NULL::bytea"}
_COLUMNS = rows.RUN_COLUMNS.split(", ")
_FULL = ", ".join(f"r.{column}" for column in _COLUMNS)
_BARE = ", ".join(f"{PAYLOADS.get(column, f'r.{column}')} AS {column}" for column in _COLUMNS)

RUNS = Fragment("{schema}.runs r")
# Runs that may wait for an event, or for the end of a run. The planner must read the runs by these keys, not search all
# suspended runs for them: OFFSET 0 keeps it from moving other conditions in here.
SUBSCRIBED_TO = """
    (SELECT * FROM {schema}.runs WHERE pk = ANY (ARRAY(
        SELECT s.run_pk FROM {schema}.subscriptions s JOIN {schema}.topics t ON t.pk = s.topic_pk
        WHERE t.name = ?)) OFFSET 0) r"""
OBSERVES = """
    (SELECT * FROM {schema}.runs WHERE id = ANY (ARRAY(
        SELECT o.observer FROM {schema}.observers o
        WHERE o.run_pk = (SELECT child.pk FROM {schema}.runs child WHERE child.id = ?))) OFFSET 0) r"""
# Looks up each run separately: a hash join would read all runs.
TAGGED = """{schema}.run_tags tag
    CROSS JOIN LATERAL (SELECT * FROM {schema}.runs x WHERE x.pk = tag.run_pk OFFSET 0) r"""

_HELD = Driver("held", Fragment("r.held_kind IS NOT NULL AND r.status = 'suspended'"))  # as in the index


class Search(Struct, frozen=True):
    """How the runs of a query are found: in `source`, by `driver` if there is one."""

    query: CompiledQuery
    source: Fragment
    driver: Driver | None

    @property
    def created_at(self) -> str:
        return "tag.created_at" if self._reads_tags else "r.created_at"

    @property
    def rest(self) -> Fragment:
        """The condition that the driver does not imply."""
        return join_all(self.query.rest(self.driver))

    @property
    def from_(self) -> Fragment:
        return Fragment(TAGGED) if self._reads_tags else self.source

    @property
    def _reads_tags(self) -> bool:
        return self.driver is not None and self.driver.kind in ("tag", "range")

    def selected(self, after: Key | None) -> Fragment:
        """Return the condition on runs that are examined, after this key."""
        parts = [] if self.driver is None else [self.driver.fragment]
        parts += [Fragment(f"{self.created_at} {operator} ?", (time,)) for operator, time in self.query.created]
        if after is not None:
            parts.append(Fragment(f"{self.created_at} <= ?", after[:1]))
            parts.append(Fragment(f"({self.created_at}, r.id) < (?, ?)", after))
        return join_all(parts)


# --- pages ----------------------------------------------------------------------------------------------------------


async def runs(pool: ConnectionPool, query: RunQuery, bare: bool) -> RunPage:
    """Return a page of runs. It searches for one run more than the page has, to find out whether there are more."""
    limit = min(check_limit(query.limit), SCAN_LIMIT)
    search = await plan(pool, query)
    last = search.query.after
    size = limit + 1 if not _is_selective(search) else max(limit + 1, FIRST_PIECE)
    found: list[rows.Row] = []
    scanned = 0
    while True:
        size = min(size, SCAN_LIMIT - scanned)
        piece = await _fetch(pool, piece_of_page(search, last, size, limit + 1 - len(found), bare))
        matching = [row for row in piece if row[3] is not None]
        if len(found) + len(matching) > limit:
            extra = matching[limit - len(found)]
            found += matching[: limit - len(found)]
            return _page(found, (found[-1][8], found[-1][4]), scanned + extra[3] - 1)
        found += matching
        examined = piece[0][0] if piece else 0
        scanned += examined
        if examined < size:
            return _page(found, None, scanned)
        last = (piece[0][1], piece[0][2])
        if scanned >= SCAN_LIMIT:
            return _page(found, last, scanned)
        size = max(size * 4, FIRST_PIECE)


def piece_of_page(search: Search, after: Key | None, size: int, limit: int, bare: bool) -> Fragment:
    """Return the statement that examines the next `size` runs and returns up to `limit` of them that match.

    Its columns are: the number of examined runs, the key of the last one, the number of the matching run (NULL: none
    matches), and the columns of the run.
    """
    selected, rest = search.selected(after), search.rest
    created_at = search.created_at
    text = f"""
        WITH examined AS MATERIALIZED (
            SELECT x.pk, x.at, x.id, row_number() OVER (ORDER BY x.at DESC, x.id DESC) AS nth
            FROM (
                SELECT r.pk, {created_at} AS at, r.id FROM {search.from_.sql} WHERE {selected.sql}
                ORDER BY {created_at} DESC, r.id DESC LIMIT ?
            ) AS x
        ), last AS (
            SELECT e.nth, e.at, e.id FROM examined e ORDER BY e.nth DESC LIMIT 1
        )
        SELECT last.nth, last.at, last.id, matching.*
        FROM last LEFT JOIN LATERAL (
            SELECT e.nth, {_BARE if bare else _FULL}
            FROM (SELECT * FROM examined ORDER BY nth) AS e
            CROSS JOIN LATERAL (SELECT * FROM {{schema}}.runs x WHERE x.pk = e.pk OFFSET 0) AS r
            WHERE {rest.sql} ORDER BY e.nth LIMIT ?
        ) AS matching ON true"""
    return Fragment(text, (*search.from_.values, *selected.values, size, *rest.values, limit))


def _is_selective(search: Search) -> bool:
    """Return whether runs that the driver finds have to meet conditions that few of them may meet."""
    return len(search.query.rest(search.driver)) > 1


def _page(found: list[rows.Row], after: Key | None, scanned: int) -> RunPage:
    decoded = [rows.run_or_mark(row[4:]) for row in found]
    return RunPage(
        tuple(each for each in decoded if isinstance(each, RunRecord)),
        None if after is None else cursor_after(*after),
        tuple(each for each in decoded if isinstance(each, UnreadableRun)),
        scanned,
    )


async def count(pool: ConnectionPool, query: RunQuery, cap: int) -> int:
    """Return the number of runs that match a query, at most `cap`."""
    search = await plan(pool, query)
    matching = join_all([search.selected(None), search.rest])
    text = f"SELECT count(*) FROM (SELECT 1 FROM {search.from_.sql} WHERE {matching.sql} LIMIT ?) AS x"
    found = await _fetch(pool, Fragment(text, (*search.from_.values, *matching.values, check_limit(cap))))
    number: int = found[0][0]
    return number


# --- what is read ---------------------------------------------------------------------------------------------------


async def plan(pool: ConnectionPool, query: RunQuery) -> Search:
    """Return how to find the runs of a query."""
    compiled = compile_query(query, POSTGRES)
    source = next((found for each in _awaited(query) if (found := _runs_that_wait(each)) is not None), None)
    if source is not None:
        return Search(compiled, source, None)
    drivers = [_HELD if each.kind == "held" else each for each in compiled.drivers]
    return Search(compiled, RUNS, await _choose(pool, drivers))


async def _choose(pool: ConnectionPool, drivers: list[Driver]) -> Driver | None:
    if not drivers or (len(drivers) == 1 and drivers[0].is_ordered):
        return drivers[0] if drivers else None
    counted = (
        f"(SELECT count(*) FROM (SELECT 1 FROM {_table(each)} WHERE {each.fragment.sql} LIMIT {ESTIMATE_CAP}) AS x)"
        for each in drivers
    )
    values = tuple(value for each in drivers for value in each.fragment.values)
    return choose_driver(drivers, (await _fetch(pool, Fragment(f"SELECT {', '.join(counted)}", values)))[0])


def _table(driver: Driver) -> str:
    return "{schema}.run_tags tag" if driver.kind in ("tag", "range") else "{schema}.runs r"


def _awaited(query: RunQuery) -> list[Awaited]:
    """Return what all matching runs wait for."""
    named = [] if query.awaited is None else [query.awaited]
    terms = (term for term in required_terms(query.filter) if term.key == "waiting" and term.value is not None)
    return [*named, *(parse_awaited(term.value) for term in terms)]


def _runs_that_wait(awaited: Awaited) -> Fragment | None:
    """Return the source of the runs that may wait for this, if an index finds them."""
    if awaited.name is None or awaited.kind not in ("event", "child"):
        return None
    return Fragment(SUBSCRIBED_TO if awaited.kind == "event" else OBSERVES, (awaited.name,))


async def _fetch(pool: ConnectionPool, statement: Fragment) -> list[rows.Row]:
    """Execute a statement. Its text is not cached with its schema, because there may be very many."""
    text = numbered(statement.sql).format(schema=pool.target.quoted)
    values: tuple[Any, ...] = statement.values
    return await pool.fetch(text, *values)
