"""What a store holds, as the crash tests see it from outside: SQLite and PostgreSQL are read with plain SQL.

So what is checked does not come from the code under test. Redis keeps no tables: it is asked through its store.
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
PATIENCE = 60.0  # seconds
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
    unsettled: bool
    result: str | None
    error: str | None


@dataclass(frozen=True)
class WorkerRow:
    id: str
    pid: int
    lease_until: float
    gone: bool


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


class Book(Protocol):
    """All is empty as long as the store was not made."""

    url: str

    def runs(self) -> list[RunRow]: ...

    def workers(self) -> list[WorkerRow]: ...

    def history(self) -> list[Recorded]:
        """Entry rows of all runs, each run's in order."""

    def unread_events(self) -> list[str]: ...

    def everything_about(self, run_id: str) -> Any:
        """Something that is equal to itself as long as nothing about the run changes."""

    def can_write(self) -> bool:
        """Whether nobody keeps others from writing right now."""


class TablesBook:
    """What has tables; `_rows` says how they are asked."""

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def runs(self) -> list[RunRow]:
        rows = [RunRow(*row) for row in self._rows(RUNS)]
        return [
            replace(row, unsettled=bool(row.unsettled), result=_text(row.result), error=_text(row.error))
            for row in rows
        ]

    def workers(self) -> list[WorkerRow]:
        rows = [WorkerRow(*row) for row in self._rows(WORKERS)]
        return [replace(row, gone=bool(row.gone)) for row in rows]

    def history(self) -> list[Recorded]:
        rows = [Recorded(*row) for row in self._rows(HISTORY)]
        return [replace(row, value=_text(row.value)) for row in rows]

    def unread_events(self) -> list[str]:
        return [row[0] for row in self._rows(UNREAD)]

    def everything_about(self, run_id: str) -> Any:
        rows = self._rows(f"SELECT * FROM history WHERE run = '{run_id}' ORDER BY position")
        return rows, self._rows(f"SELECT * FROM runs WHERE id = '{run_id}'")


class SqliteBook(TablesBook):
    def __init__(self, folder: Path) -> None:
        self._file = folder / "store.db"
        self.url = f"sqlite:///{self._file}"

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        if not self._file.exists():
            return []
        with self._connected() as connection:
            connection.set_busy_timeout(int(PATIENCE * 1000))
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'history'").get:
                return []  # the process was killed before it created the tables
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
        """Open the file without a checkpoint on close, so that the log stays as the dead process left it."""
        connection = apsw.Connection(str(self._file))
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            yield connection
        finally:
            connection.close()


class PostgresBook(TablesBook):
    def __init__(self, url: str, side: Sideline) -> None:
        self.url = url
        self._target = parse_url(url)
        self._side = side
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._side.run(lambda: self._fetch(sql))

    async def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            settings = {"search_path": self._target.quoted}
            self._connection = await asyncpg.connect(self._target.dsn, server_settings=settings)
        if await self._connection.fetchval("SELECT to_regclass('history')") is None:
            return []  # killed before the schema was made
        return [tuple(row) for row in await self._connection.fetch(sql)]

    def can_write(self) -> bool:
        return True  # a statement is a transaction: nothing is locked while a client sleeps

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class RedisBook:
    def __init__(self, url: str, side: Sideline) -> None:
        self.url = url
        self._side = side
        self._store: RedisStore | None = None

    def runs(self) -> list[RunRow]:
        owing = {each.record.id for each in self._ask(lambda store: store.unfinalized(10_000))}
        found = [each.record for each in self._snapshots()]
        return [
            RunRow(
                id=each.id,
                status=each.status,
                owner=each.owner,
                wake_at=each.wake_at,
                ended_at=each.ended_at,
                recoveries=each.recoveries,
                unsettled=each.id in owing,
                result=_text(each.result),
                error=_words(each.error),
            )
            for each in found
        ]

    def workers(self) -> list[WorkerRow]:
        found = self._ask(lambda store: store.workers())
        return [WorkerRow(each.id, each.pid, each.lease_until, each.fenced) for each in found]

    def history(self) -> list[Recorded]:
        return [
            Recorded(each.record.id, row.location, row.kind, row.status, row.attempts, row.due_at, _text(row.value))
            for each in self._snapshots()
            for row in each.entries
        ]

    def unread_events(self) -> list[str]:
        return [mail.id for each in self._snapshots() for mail in each.inbox if mail.kind == "event"]

    def everything_about(self, run_id: str) -> Any:
        return self._ask(lambda store: store.load([run_id]))

    def can_write(self) -> bool:
        return True

    def _snapshots(self) -> list[Snapshot]:
        async def all_of(store: RedisStore) -> list[Snapshot | None]:
            page = await store.runs(RunQuery(limit=1000))
            assert page.next is None
            return await store.load(sorted(record.id for record in page.runs))

        return [each for each in self._ask(all_of) if each is not None]

    def _ask(self, question: Callable[[RedisStore], Awaitable[T]]) -> T:
        async def asked() -> T:
            if self._store is None:
                self._store = RedisStore(self.url)
                await self._store.open(shards=EngineConfig().shards)
            return await question(self._store)

        return self._side.run(asked)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


class Sideline:
    """An event loop in a thread, for tests that have none and ask again and again."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(main(), self._loop).result(PATIENCE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def book_of(kind: str, folder: Path) -> Iterator[Book]:
    """An empty store of this kind, to be made by whoever opens it first."""
    if kind == "sqlite":
        yield SqliteBook(folder)
        return
    side = Sideline()
    try:
        with schema_of_its_own() if kind == "postgres" else prefix_of_its_own() as url:
            book = PostgresBook(url, side) if kind == "postgres" else RedisBook(url, side)
            try:
                yield book
            finally:
                side.run(book.close)
    finally:
        side.close()


def _text(value: bytes | str | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _words(error: ErrorRecord | None) -> str | None:
    return None if error is None else f"{error.type}: {error.message}"
