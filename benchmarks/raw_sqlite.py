"""The same rows without the engine: what a store's own limit is.

A recording of a real run is given to a SQLite store again, whose statements are traced: the rows that it writes, in
the transactions in which it writes them. Those are then written by apsw alone to a new file with the same schema,
indexes and settings, with nothing to decide or to read.
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
from perdure.stores.sqlite import schema as sqlite_file
from perdure.stores.sqlite.store import SqliteStore

Transaction = list[tuple[str, list[Any]]]
"""Statements in order, each with the rows that it is carried out with."""
_WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE")
_SHARDS = EngineConfig().shards


async def through_the_store(recording: Recording, path: Path) -> list[float]:
    """Commit the batches of a recording with no engine around; the seconds that each took."""
    store = SqliteStore(str(path))
    await store.open(shards=_SHARDS)
    assert recording.worker is not None
    await store.join(recording.worker)
    seconds = []
    for batch in recording.batches:
        began = perf_counter()
        await store.commit(batch)
        seconds.append(perf_counter() - began)
    await store.close()
    return seconds


async def rows_of(recording: Recording, path: Path) -> list[Transaction]:
    """What the SQLite store writes for a recording, a transaction per batch."""
    with traced() as statements:
        await through_the_store(recording, path)
    transactions = list(_transactions(statements))
    return transactions[-len(recording.batches) :]  # before them, the file was made and the worker became a member


async def write_raw(transactions: Sequence[Transaction], path: Path) -> list[float]:
    """Write the rows to a new file; the seconds that each transaction took."""
    store = SqliteStore(str(path))
    await store.open(shards=_SHARDS)
    await store.close()
    connection = sqlite_file.connect(str(path), synchronous="full", busy_timeout=5.0)
    connection.execute("PRAGMA wal_autocheckpoint = 4000")  # as seldom as the store does it
    seconds = []
    for transaction in transactions:
        began = perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        for sql, rows in transaction:
            connection.executemany(sql, rows)
        connection.execute("COMMIT")
        seconds.append(perf_counter() - began)
    connection.close()
    return seconds


@contextlib.contextmanager
def traced() -> Iterator[list[tuple[str, Any]]]:
    """Every statement, with its values, of the connections that are opened meanwhile."""
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
