"""The SQLite store: one file on one machine, shared by any number of processes.

A writer thread and a reader thread have a connection each. The file is in WAL mode, so neither waits for the other. The
caller's thread may write the rows of a batch; `connection.py` says which thread commits. The store notices commits of
other processes by their datagrams (`peer_sockets.py`), and in any case by polling `PRAGMA data_version`.

`synchronous="full"` makes every commit durable against power loss, "normal" only against a crash of the process.
"off" may lose commits, or the file, in a crash of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import apsw

from perdure.clock import WALL_CLOCK, Clock
from perdure.errors import StoreError
from perdure.model.documents import Document
from perdure.model.queries import RunQuery
from perdure.model.queue_records import PlaceCursor, PlaceRecord, QueueSummary, QueueView
from perdure.model.records import (
    ChangeCallback,
    DeadLetter,
    Message,
    ProgressCallback,
    PublishedValue,
    RunRecord,
    SigningKey,
    StreamItem,
    TopicEvent,
    WorkerRecord,
)
from perdure.stores import semantics as rules
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.followed_runs import FollowedRuns, decode_message, encode_change_hint
from perdure.stores.protocol import Claim
from perdure.stores.results import (
    ClaimedRun,
    Committed,
    RunMissing,
    RunPage,
    RunRetained,
    Snapshot,
    StoredEntry,
    TopicSummary,
    UnfinalizedRun,
    UnreadableRun,
    WriteResult,
)
from perdure.stores.sqlite import batch as batch_writer
from perdure.stores.sqlite import documents, maintenance, queries, queue_reads, schema, search, streams, workers
from perdure.stores.sqlite.connection import ConnectionThread, Job, T, close_cleanly
from perdure.stores.sqlite.peer_sockets import MAX_DATAGRAM_BYTES, PeerSockets
from perdure.stores.sqlite.run_state_cache import RunStateCache
from perdure.stores.writes import CommitTurn, Write

POLL_INTERVAL_SECONDS = 0.02  # between two checks for commits of other processes


class SqliteStore:
    """Implements the `Store` protocol on a SQLite file.

    Several engines may open the same object; the last `close` ends its threads. It may be opened again.
    `commit_on_loop` allows commits, which wait for the disk, on the caller's event loop. Set it only if perdure owns
    that loop (ADR 11).
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock = WALL_CLOCK,
        synchronous: str = "full",
        busy_timeout: float = 5.0,
        commit_on_loop: bool = False,
    ) -> None:
        if not path or path == ":memory:":
            raise StoreError(f"{path!r} is not the path of a file; use memory:// for a store in memory")
        if synchronous.lower() not in schema.SYNCHRONOUS:
            raise StoreError(f"synchronous must be one of {', '.join(schema.SYNCHRONOUS)}, not {synchronous!r}")
        self._path = str(Path(path).absolute())
        self._clock = clock
        self._connect = partial(schema.connect, self._path, synchronous=synchronous.lower(), busy_timeout=busy_timeout)
        self._commit_on_loop = commit_on_loop
        self._exclusive_lock = schema.ExclusiveLock(self._path)
        self._file: schema.FileIdentity | None = None  # while the store is open
        self._listeners = ChangeListeners()
        self._sockets = PeerSockets(self._path, self._on_datagram)
        self._followed_runs = FollowedRuns(self._sockets.name, self._send_messages, self._sockets.has_peers)
        self._opened = 0
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._data_version: int | None = None
        self._run_states = RunStateCache()  # used only by the thread that uses the writer's connection

    # lifecycle

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._writer is None:
                self._start()
            await self._write(partial(self._prepare, shards=shards))
            self._sockets.open()
            self._followed_runs.join()
        except BaseException:
            await self.close()
            raise

    def _start(self) -> None:
        schema.check_path(self._path)
        self._exclusive_lock.take_if_needed()
        self._file = schema.FileIdentity(self._path)
        self._writer = ConnectionThread(
            "perdure-sqlite-writer",
            self._connect,
            poll=self._poll,
            interval=POLL_INTERVAL_SECONDS,
            on_rollback=self._run_states.clear,
            commit_on_loop=self._commit_on_loop,
            close=self._close_connection,
        )
        self._reader = ConnectionThread(
            "perdure-sqlite-reader", partial(self._connect, read_only=True), close=self._close_connection
        )
        self._writer.start()
        self._reader.start()

    def _prepare(self, connection: apsw.Connection, shards: int) -> None:
        schema.prepare(connection, self._path, shards)
        if self._data_version is None:  # a commit of another process before the first poll counts as a change
            self._data_version = connection.execute("PRAGMA data_version").get

    async def close(self) -> None:
        if self._opened == 0:
            return
        self._opened -= 1
        if self._opened == 0:
            self._followed_runs.close()
            self._sockets.close()
            reader, self._reader = self._reader, None
            writer, self._writer = self._writer, None
            for thread in (reader, writer):
                if thread is not None:
                    await thread.stop()
            self._exclusive_lock.release()

    def _close_connection(self, connection: apsw.Connection) -> None:
        """Close a connection. If the file is lost, leave the log alone: it may belong to the file that is there now."""
        if self._file is None or self._file.is_lost():
            connection.close(force=True)
        else:
            close_cleanly(connection)

    async def now(self) -> float:
        return self._clock.now()

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._listeners.subscribe(callback)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        return self._followed_runs.follow(run_id, callback)

    def _poll(self, connection: apsw.Connection) -> None:
        """Notify listeners if another connection has committed. Its commits change `data_version`, own ones do not.

        Also check whether the file is lost, for turns, which do not check it themselves.
        """
        if not self._listeners or (self._file is not None and self._file.is_lost()):
            return
        before, self._data_version = self._data_version, connection.execute("PRAGMA data_version").get
        if before != self._data_version:
            self._listeners.notify(None)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        rules.check_batch(batch)

        def job(connection: apsw.Connection) -> tuple[list[WriteResult], frozenset[str]]:
            return batch_writer.write(connection, batch, self._run_states, self._clock)

        # A single turn is the hot path, where `stat` would cost 2 % of a step. There `_poll` notices the loss.
        if len(batch) != 1 or type(batch[0]) is not CommitTurn or (self._file is not None and self._file.loss):
            self._check_file()
        results, changed = await self._thread(self._writer).transact(job, size=len(batch))
        self._notify(changed)
        if self._followed_runs:
            self._followed_runs.on_committed(map(rules.run_of, batch))
        return results

    async def load(self, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
        return await self._read(lambda connection: queries.load(connection, ids))

    async def records(self, ids: Sequence[str]) -> list[RunRecord | UnreadableRun | None]:
        return await self._read(lambda connection: queries.records(connection, ids))

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        return await self._read(lambda connection: queries.inbox(connection, run_id, after))

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        return await self._read(lambda connection: queries.history(connection, run_id, after, limit))

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        def claim_if_few(connection: apsw.Connection) -> list[ClaimedRun] | None:
            claimed = workers.claim_if_few(connection, claim)
            if claimed:
                self._run_states.clear()
            return claimed

        self._check_file()
        claimed = self._thread(self._writer).call_here(claim_if_few)
        if claimed is not None:
            return claimed
        return await self._write(lambda connection: workers.claim(connection, claim))

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        return await self._read(lambda connection: workers.next_wake(connection, pool, gates))

    async def owned(self, worker: str) -> list[str]:
        return await self._read(lambda connection: workers.owned(connection, worker))

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        return await self._read(lambda connection: workers.owned_with_messages(connection, worker, limit))

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        def job(connection: apsw.Connection) -> int:
            woken = workers.retry_held(connection, workflows, kind, now)
            self._notify(woken)
            return len(woken)

        return await self._write(job)

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        return await self._write(lambda connection: workers.join(connection, worker))

    async def renew(self, worker: WorkerRecord) -> bool:
        return await self._write(lambda connection: workers.renew(connection, worker))

    async def workers(self) -> list[WorkerRecord]:
        return await self._read(queries.workers)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        return await self._write(lambda conn: workers.fence_worker(conn, worker_id, unless_renewed_after))

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        def job(connection: apsw.Connection) -> list[str]:
            released = workers.release_runs(connection, worker_id, now, recovered, limit)
            self._notify(frozenset(released))
            return released

        return await self._write(job)

    async def remove_worker(self, worker_id: str) -> None:
        await self._write(lambda connection: workers.remove_worker(connection, worker_id))

    # queries and maintenance

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        return await self._read(lambda connection: search.runs(connection, query, bare=bare))

    async def count(self, query: RunQuery, cap: int) -> int:
        return await self._read(lambda connection: search.count(connection, query, cap))

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        return await self._write(lambda connection: maintenance.prune(connection, now, limit, keep_ids_for))

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        return await self._write(lambda connection: maintenance.delete_run(connection, run_id))

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await self._write(lambda connection: maintenance.keys(connection, name, now))

    async def add_key(self, name: str, now: float) -> SigningKey:
        return await self._write(lambda connection: maintenance.add_key(connection, name, now))

    # ended runs, children, topics, published values and streams

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await self._read(lambda connection: queries.unfinalized(connection, limit))

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await self._read(lambda connection: queries.open_children(connection, run_id, limit, after))

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        return await self._read(lambda connection: queries.unfinished_broadcasts(connection, limit))

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        return await self._read(lambda connection: queries.topic(connection, name, limit, after))

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        return await self._read(lambda connection: queries.subscribed(connection, ids))

    async def published(self, run_id: str) -> list[PublishedValue]:
        return await self._read(lambda connection: streams.published(connection, run_id))

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        return await self._read(lambda connection: streams.stream(connection, run_id, name, start, limit))

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        return await self._read(lambda connection: queries.topics(connection, after, limit))

    async def document(self, kind: str, document_id: str) -> Document | None:
        return await self._read(lambda connection: documents.document(connection, kind, document_id))

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        return await self._read(lambda connection: documents.documents(connection, kind, after, limit, due_by))

    # queues

    async def queues(self) -> list[QueueSummary]:
        return await self._read(queue_reads.queues)

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        return await self._read(lambda connection: queue_reads.queue_view(connection, name, now, limit))

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        return await self._read(
            lambda connection: queue_reads.places(connection, name, partition, after, limit, held=held)
        )

    async def place(self, run_id: str) -> PlaceRecord | None:
        return await self._read(lambda connection: queue_reads.place(connection, run_id))

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        return await self._read(lambda connection: queue_reads.places_ahead(connection, run_id, cap))

    # dead letters

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await self._read(lambda connection: queries.dead_letters(connection, limit, after, kind, event))

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        return await self._read(lambda connection: queries.dead_letter(connection, dead_letter_id))

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        return await self._write(lambda connection: maintenance.remove_dead_letter(connection, dead_letter_id))

    # the threads

    async def _write(self, job: Job[T]) -> T:
        """Execute a job that is no batch in the writer thread. It may change runs, so the cache is cleared."""

        def clear_and_execute(connection: apsw.Connection) -> T:
            self._run_states.clear()
            return job(connection)

        self._check_file()
        return await self._thread(self._writer).call(clear_and_execute)

    async def _read(self, job: Job[T]) -> T:
        self._check_file()
        return await self._thread(self._reader).call(job)

    def _check_file(self) -> None:
        """Raise `StoreError` if the file was deleted or replaced: writes would be lost, or go to another file's log."""
        if self._file is not None and self._file.is_lost():
            raise StoreError(self._file.loss)

    def _thread(self, thread: ConnectionThread | None) -> ConnectionThread:
        if thread is None:
            raise StoreError(f"the store {self._path!r} is not open; open it first (an Engine or a Client does)")
        return thread

    def _notify(self, changed: frozenset[str]) -> None:
        if changed:
            self._listeners.notify(changed)
            if self._sockets.has_peers():
                self._sockets.send(encode_change_hint(self._sockets.name, changed, MAX_DATAGRAM_BYTES))

    # other processes

    def _send_messages(self) -> None:
        for message in self._followed_runs.take_messages(MAX_DATAGRAM_BYTES):
            self._sockets.send(message)

    def _on_datagram(self, datagram: bytes) -> None:
        message = decode_message(datagram)
        if message is None:
            return
        self._sockets.add_peer(message.sender)
        if message.kind == "changed":
            self._listeners.notify(None if message.run_ids is None else frozenset(message.run_ids))
        else:
            self._followed_runs.on_message(message)
