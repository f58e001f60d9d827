"""Store readers: read what a store contains, independently of the code under test.

SQLite and PostgreSQL are read with SQL of the tests. Redis has no tables and is read through its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import apsw
import asyncpg

from perdure.config import EngineConfig
from perdure.model.queries import RunQuery
from perdure.model.records import ErrorRecord
from perdure.stores.postgres.url import parse_url
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Snapshot
from tests.servers.postgres import schema_of_its_own
from tests.servers.redis import prefix_of_its_own

T = TypeVar("T")
TIMEOUT_SECONDS = 60.0
RUNS = "SELECT id, status, owner, wake_at, ended_at, recoveries, unfinalized, result, error FROM runs ORDER BY id"
WORKERS = "SELECT id, pid, lease_until, fenced FROM workers ORDER BY id"
HISTORY = "SELECT run, location, kind, status, attempts, due_at, value FROM history ORDER BY run, position"
UNREAD = "SELECT id FROM inbox WHERE kind = 'event' AND consumed_at IS NULL"


@dataclass(frozen=True)
class RunRow:
    id: str
    status: str
    owner: str | None
    wake_at: float | None
    ended_at: float | None
    recoveries: int
    unfinalized: bool
    result: str | None
    error: str | None


@dataclass(frozen=True)
class WorkerRow:
    id: str
    pid: int
    lease_until: float
    fenced: bool


@dataclass(frozen=True)
class Recorded:
    """A row of a history."""

    run: str
    location: str
    kind: str
    status: str
    attempts: int
    due_at: float | None
    value: str | None


class StoreReader(Protocol):
    """Reads a store. All methods return nothing until the store is created."""

    url: str

    def runs(self) -> list[RunRow]: ...

    def workers(self) -> list[WorkerRow]: ...

    def history(self) -> list[Recorded]:
        """Return the entry rows of all runs, ordered by run and position."""

    def unread_events(self) -> list[str]: ...

    def everything_about(self, run_id: str) -> Any:
        """Return a value that changes only if the run changes."""

    def can_write(self) -> bool:
        """Whether no process blocks other writers now."""


class SqlReader:
    """Reads a store with tables; `_rows` executes a query."""

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def runs(self) -> list[RunRow]:
        rows = [RunRow(*row) for row in self._rows(RUNS)]
        return [
            replace(row, unfinalized=bool(row.unfinalized), result=_text(row.result), error=_text(row.error))
            for row in rows
        ]

    def workers(self) -> list[WorkerRow]:
        rows = [WorkerRow(*row) for row in self._rows(WORKERS)]
        return [replace(row, fenced=bool(row.fenced)) for row in rows]

    def history(self) -> list[Recorded]:
        rows = [Recorded(*row) for row in self._rows(HISTORY)]
        return [replace(row, value=_text(row.value)) for row in rows]

    def unread_events(self) -> list[str]:
        return [row[0] for row in self._rows(UNREAD)]

    def everything_about(self, run_id: str) -> Any:
        rows = self._rows(f"SELECT * FROM history WHERE run = '{run_id}' ORDER BY position")
        return rows, self._rows(f"SELECT * FROM runs WHERE id = '{run_id}'")


class SqliteReader(SqlReader):
    def __init__(self, folder: Path) -> None:
        self._file = folder / "store.db"
        self.url = f"sqlite:///{self._file}"

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        if not self._file.exists():
            return []
        with self._connected() as connection:
            connection.set_busy_timeout(int(TIMEOUT_SECONDS * 1000))
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'history'").get:
                return []  # killed before the file was created
            return connection.execute(sql).fetchall()

    def can_write(self) -> bool:
        try:
            with self._connected() as connection:
                connection.execute("BEGIN IMMEDIATE; ROLLBACK")
            return True
        except apsw.BusyError:
            return False

    @contextlib.contextmanager
    def _connected(self) -> Iterator[apsw.Connection]:
        """Yield a connection that does not checkpoint the write-ahead log when it closes, like a killed process."""
        connection = apsw.Connection(str(self._file))
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            yield connection
        finally:
            connection.close()


class PostgresReader(SqlReader):
    def __init__(self, url: str, loop_thread: LoopThread) -> None:
        self.url = url
        self._target = parse_url(url)
        self._loop_thread = loop_thread
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._loop_thread.run(lambda: self._fetch(sql))

    async def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            settings = {"search_path": self._target.quoted}
            self._connection = await asyncpg.connect(self._target.dsn, server_settings=settings)
        if await self._connection.fetchval("SELECT to_regclass('history')") is None:
            return []  # killed before the schema was created
        return [tuple(row) for row in await self._connection.fetch(sql)]

    def can_write(self) -> bool:
        return True  # a statement is a transaction: a suspended client holds no lock

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class RedisReader:
    def __init__(self, url: str, loop_thread: LoopThread) -> None:
        self.url = url
        self._loop_thread = loop_thread
        self._store: RedisStore | None = None

    def runs(self) -> list[RunRow]:
        unfinalized = {each.record.id for each in self._read(lambda store: store.unfinalized(10_000))}
        found = [each.record for each in self._snapshots()]
        return [
            RunRow(
                id=each.id,
                status=each.status,
                owner=each.owner,
                wake_at=each.wake_at,
                ended_at=each.ended_at,
                recoveries=each.recoveries,
                unfinalized=each.id in unfinalized,
                result=_text(each.result),
                error=_error_text(each.error),
            )
            for each in found
        ]

    def workers(self) -> list[WorkerRow]:
        found = self._read(lambda store: store.workers())
        return [WorkerRow(each.id, each.pid, each.lease_until, each.fenced) for each in found]

    def history(self) -> list[Recorded]:
        return [
            Recorded(each.record.id, row.location, row.kind, row.status, row.attempts, row.due_at, _text(row.value))
            for each in self._snapshots()
            for row in each.entries
        ]

    def unread_events(self) -> list[str]:
        return [message.id for each in self._snapshots() for message in each.inbox if message.kind == "event"]

    def everything_about(self, run_id: str) -> Any:
        return self._read(lambda store: store.load([run_id]))

    def can_write(self) -> bool:
        return True

    def _snapshots(self) -> list[Snapshot]:
        async def all_of(store: RedisStore) -> list[Snapshot]:
            page = await store.runs(RunQuery(limit=1000))
            assert page.next is None
            found = await store.load(sorted(record.id for record in page.runs))
            return [each for each in found if isinstance(each, Snapshot)]

        return list(self._read(all_of))

    def _read(self, call: Callable[[RedisStore], Awaitable[T]]) -> T:
        async def main() -> T:
            if self._store is None:
                self._store = RedisStore(self.url)
                await self._store.open(shards=EngineConfig().shards)
            return await call(self._store)

        return self._loop_thread.run(main)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


class LoopThread:
    """An event loop in a thread, for tests without one that read repeatedly."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(main(), self._loop).result(TIMEOUT_SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def reader_of(kind: str, folder: Path) -> Iterator[StoreReader]:
    """Yield a reader of a store of this kind, which the first process that opens it creates."""
    if kind == "sqlite":
        yield SqliteReader(folder)
        return
    loop_thread = LoopThread()
    try:
        with schema_of_its_own() if kind == "postgres" else prefix_of_its_own() as url:
            reader = PostgresReader(url, loop_thread) if kind == "postgres" else RedisReader(url, loop_thread)
            try:
                yield reader
            finally:
                loop_thread.run(reader.close)
    finally:
        loop_thread.close()


def _text(value: bytes | str | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _error_text(error: ErrorRecord | None) -> str | None:
    return None if error is None else f"{error.type}: {error.message}"
