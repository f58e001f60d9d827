"""The statements that a read of the SQLite store executes, and their query plans."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import apsw

from perdure.stores.sqlite.store import SqliteStore


async def plans_of(store: SqliteStore, read: Callable[[], Awaitable[Any]]) -> list[list[str]]:
    """Execute a read, and return the plan of each of its queries, in order."""
    seen: list[tuple[str, Any]] = []

    def trace(cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        if sql.lstrip().startswith("SELECT"):
            seen.append((sql, bindings))
        return True

    reader = store._thread(store._reader)
    await reader.call(lambda connection: setattr(connection, "exec_trace", trace))
    await read()
    await reader.call(lambda connection: setattr(connection, "exec_trace", None))

    def explain(connection: apsw.Connection) -> list[list[str]]:
        return [
            [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)] for sql, values in seen
        ]

    return await reader.call(explain)
