"""The store in a SQLite file: one machine, any number of processes.

One thread writes and one reads, each with its own connection; the file is in WAL mode, so that neither waits for the
other. What of a batch is quicker done by the thread that asks for it is done there (`sqlite_thread`).
`synchronous="full"` makes every commit durable against power loss; "normal" only against a crash of the process, "off"
not even against one of the machine's. Commits of other processes are noticed by polling `PRAGMA data_version` while the
writer has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import apsw

from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.errors import StoreError
from perdure.model.queries import RunQuery
from perdure.model.records import (
    ChangeCallback,
    DeadLetter,
    Message,
    PublishedValue,
    RunRecord,
    StreamItem,
    TopicEvent,
    WorkerRecord,
)
from perdure.stores import semantics as rules
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.protocol import Claim
from perdure.stores.results import ClaimedRun, RunPage, SigningKey, Snapshot, StoredEntry, UnfinalizedRun, WriteResult
from perdure.stores.sqlite import batch as sqlite_commit
from perdure.stores.sqlite import maintenance as sqlite_upkeep
from perdure.stores.sqlite import queries as sqlite_queries
from perdure.stores.sqlite import schema as sqlite_file
from perdure.stores.sqlite import streams as sqlite_shown
from perdure.stores.sqlite import workers as sqlite_fleet
from perdure.stores.sqlite.connection import ConnectionThread, T, Work
from perdure.stores.sqlite.run_state_cache import RunStateCache
from perdure.stores.writes import Write

POLL_INTERVAL = 0.02  # seconds between two looks for what other processes did


class SqliteStore:
    """A SQLite file behind the `Store` protocol; see there for the promises.

    Several engines may open the same object; the last `close` ends its threads. It may be opened again.
    """

    def __init__(
        self, path: str, *, clock: Clock = SYSTEM_CLOCK, synchronous: str = "full", busy_timeout: float = 5.0
    ) -> None:
        if not path or path == ":memory:":
            raise StoreError(f"{path!r} is not the path of a file; use memory:// for a store without one")
        if synchronous.lower() not in sqlite_file.SYNCHRONOUS:
            raise StoreError(f"synchronous is one of {', '.join(sqlite_file.SYNCHRONOUS)}, not {synchronous!r}")
        self._path = str(Path(path).absolute())
        self._clock = clock
        self._connect = partial(
            sqlite_file.connect, self._path, synchronous=synchronous.lower(), busy_timeout=busy_timeout
        )
        self._sole_use = sqlite_file.ExclusiveLock(self._path)
        self._hints = ChangeListeners()
        self._opened = 0
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._data_version: int | None = None
        self._memory = RunStateCache()  # touched only with the use of the writer's connection

    # opening and closing

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._writer is None:
                self._start()
            await self._write(partial(self._prepare, shards=shards))
        except BaseException:
            await self.close()
            raise

    def _start(self) -> None:
        sqlite_file.check_path(self._path)
        self._sole_use.take_if_needed()
        self._writer = ConnectionThread(
            "perdure-sqlite-writer",
            self._connect,
            poll=self._look_around,
            interval=POLL_INTERVAL,
            on_rollback=self._memory.forget,
        )
        self._reader = ConnectionThread("perdure-sqlite-reader", partial(self._connect, read_only=True))
        self._writer.start()
        self._reader.start()

    def _prepare(self, connection: apsw.Connection, shards: int) -> None:
        sqlite_file.prepare(connection, self._path, shards)
        if self._data_version is None:  # from here on: what others commit before the first look is news as well
            self._data_version = connection.execute("PRAGMA data_version").get

    async def close(self) -> None:
        if self._opened == 0:
            return
        self._opened -= 1
        if self._opened == 0:
            reader, self._reader = self._reader, None
            writer, self._writer = self._writer, None
            for thread in (reader, writer):
                if thread is not None:
                    await thread.stop()
            self._sole_use.release()

    async def now(self) -> float:
        return self._clock.now()

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._hints.subscribe(callback)

    def _look_around(self, connection: apsw.Connection) -> None:
        """Have others committed? The number changes with every commit of another connection, never with our own."""
        if not self._hints:
            return
        before, self._data_version = self._data_version, connection.execute("PRAGMA data_version").get
        if before != self._data_version:
            self._hints.notify(None)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        rules.check_batch(batch)

        def work(connection: apsw.Connection) -> tuple[list[WriteResult], frozenset[str]]:
            return sqlite_commit.write(connection, batch, self._memory)

        answers, changed = await self._thread(self._writer).transact(work, size=len(batch))
        self._tell(changed)
        return answers

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        return await self._read(lambda connection: sqlite_queries.load(connection, ids))

    async def records(self, ids: Sequence[str]) -> list[RunRecord | None]:
        return await self._read(lambda connection: sqlite_queries.records(connection, ids))

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        return await self._read(lambda connection: sqlite_queries.inbox(connection, run_id, after))

    async def history(self, run_id: str, after: int = 0) -> list[StoredEntry]:
        return await self._read(lambda connection: sqlite_queries.history(connection, run_id, after))

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        return await self._write(lambda connection: sqlite_fleet.claim(connection, claim))

    async def next_wake(self, pool: str) -> float | None:
        return await self._read(lambda connection: sqlite_fleet.next_wake(connection, pool))

    async def owned(self, worker: str) -> list[str]:
        return await self._read(lambda connection: sqlite_fleet.owned(connection, worker))

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        return await self._read(lambda connection: sqlite_fleet.mailed(connection, worker, limit))

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        def work(connection: apsw.Connection) -> int:
            woken = sqlite_fleet.wake_held(connection, workflows, kind, now)
            self._tell(woken)
            return len(woken)

        return await self._write(work)

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        return await self._write(lambda connection: sqlite_fleet.join(connection, worker))

    async def renew(self, worker: WorkerRecord) -> bool:
        return await self._write(lambda connection: sqlite_fleet.renew(connection, worker))

    async def workers(self) -> list[WorkerRecord]:
        return await self._read(sqlite_queries.workers)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        return await self._write(lambda conn: sqlite_fleet.declare_gone(conn, worker_id, unless_renewed_after))

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        def work(connection: apsw.Connection) -> list[str]:
            released = sqlite_fleet.release(connection, worker_id, now, recovered, limit)
            self._tell(frozenset(released))
            return released

        return await self._write(work)

    async def remove_worker(self, worker_id: str) -> None:
        await self._write(lambda connection: sqlite_fleet.retire(connection, worker_id))

    # queries and upkeep

    async def runs(self, query: RunQuery) -> RunPage:
        return await self._read(lambda connection: sqlite_queries.runs(connection, query))

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> int:
        return await self._write(lambda connection: sqlite_upkeep.prune(connection, now, limit, keep_ids_for))

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await self._write(lambda connection: sqlite_upkeep.keys(connection, name, now))

    async def add_key(self, name: str, now: float) -> SigningKey:
        return await self._write(lambda connection: sqlite_upkeep.add_key(connection, name, now))

    # finished runs, families, topics and what runs show

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await self._read(lambda connection: sqlite_queries.unsettled(connection, limit))

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await self._read(lambda connection: sqlite_queries.open_children(connection, run_id, limit, after))

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        return await self._read(lambda connection: sqlite_queries.unfinished(connection, limit))

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        return await self._read(lambda connection: sqlite_queries.topic(connection, name, limit, after))

    async def published(self, run_id: str) -> list[PublishedValue]:
        return await self._read(lambda connection: sqlite_shown.published(connection, run_id))

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        return await self._read(lambda connection: sqlite_shown.stream(connection, run_id, name, start, limit))

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await self._read(lambda connection: sqlite_queries.dead_letters(connection, limit, after, kind, event))

    async def dead_letter(self, letter_id: str) -> DeadLetter | None:
        return await self._read(lambda connection: sqlite_queries.dead_letter(connection, letter_id))

    async def remove_dead_letter(self, letter_id: str) -> bool:
        return await self._write(lambda connection: sqlite_upkeep.remove_dead_letter(connection, letter_id))

    # the threads

    async def _write(self, work: Work[T]) -> T:
        """Have the writer's thread do what is no batch, and may change runs behind the memory's back."""

        def forgetful(connection: apsw.Connection) -> T:
            self._memory.forget()
            return work(connection)

        return await self._thread(self._writer).call(forgetful)

    async def _read(self, work: Work[T]) -> T:
        return await self._thread(self._reader).call(work)

    def _thread(self, thread: ConnectionThread | None) -> ConnectionThread:
        if thread is None:
            raise StoreError(f"the store {self._path!r} is not open; open it first (an Engine or a Client does)")
        return thread

    def _tell(self, changed: frozenset[str]) -> None:
        if changed:
            self._hints.notify(changed)
