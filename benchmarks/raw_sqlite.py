"""The rows of a recorded run, written to SQLite without the engine: the limit that the database sets.

A SQLite store commits a recording of a real run again while its statements are traced. apsw alone then writes the same
rows, in the same transactions, to a new file with the same schema, indexes and settings. It checks and reads nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import apsw

from benchmarks.recording_stores import Recording
from perdure import EngineConfig
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.connection import CHECKPOINT_PAGES
from perdure.stores.sqlite.store import SqliteStore

Transaction = list[tuple[str, list[Any]]]
"""Statements in order, each with its rows."""
_WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE")
_SHARDS = EngineConfig().shards


async def commit_recording(recording: Recording, path: Path) -> list[float]:
    """Commit the batches of a recording through a store, without an engine. Return the seconds per batch."""
    store = SqliteStore(str(path))
    await store.open(shards=_SHARDS)
    assert recording.worker is not None
    await store.join(recording.worker)
    seconds = []
    for batch in recording.batches:
        started_at = perf_counter()
        await store.commit(batch)
        seconds.append(perf_counter() - started_at)
    await store.close()
    return seconds


async def trace_rows(recording: Recording, path: Path) -> list[Transaction]:
    """Return the rows that the SQLite store writes for a recording, one transaction per batch."""
    with trace_statements() as statements:
        await commit_recording(recording, path)
    transactions = list(_transactions(statements))
    return transactions[-len(recording.batches) :]  # earlier ones create the file and register the worker


async def write_raw(transactions: Sequence[Transaction], path: Path) -> list[float]:
    """Write the rows to a new file. Return the seconds per transaction."""
    store = SqliteStore(str(path))
    await store.open(shards=_SHARDS)
    await store.close()
    connection = schema.connect(str(path), synchronous="full", busy_timeout=5.0)
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")  # as often as the store
    seconds = []
    for transaction in transactions:
        started_at = perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        for sql, rows in transaction:
            connection.executemany(sql, rows)
        connection.execute("COMMIT")
        seconds.append(perf_counter() - started_at)
    connection.close()
    return seconds


@contextlib.contextmanager
def trace_statements() -> Iterator[list[tuple[str, Any]]]:
    """Yield a list that collects every statement, with its values, of connections opened inside the block."""
    statements: list[tuple[str, Any]] = []

    def trace(cursor: apsw.Cursor, sql: str, values: Any) -> bool:
        statements.append((sql, values))
        return True

    def hook(connection: apsw.Connection) -> None:
        connection.exec_trace = trace

    apsw.connection_hooks.append(hook)
    try:
        yield statements
    finally:
        apsw.connection_hooks.remove(hook)


def _transactions(statements: Sequence[tuple[str, Any]]) -> Iterator[Transaction]:
    transaction: Transaction = []
    for sql, values in statements:
        verb = sql.split(maxsplit=1)[0].upper()
        if verb == "BEGIN":
            transaction = []
        elif verb == "COMMIT":
            yield transaction
        elif verb in _WRITES:
            if not transaction or transaction[-1][0] != sql:
                transaction.append((sql, []))
            transaction[-1][1].append(values)
