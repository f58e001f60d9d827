"""PostgresStore: the store in a PostgreSQL database, shared by workers on any number of machines.

A batch of writes is one statement (`batch`; most single writes take the `fast_path`), executed by functions of the
store's own schema. So no lock is held while a client is awaited. Every other call is one statement too. Change
notifications use LISTEN and NOTIFY (`listener`). The store's time is the server's clock. A result of a commit is as
durable as the server's `synchronous_commit`: on by default, which means on the server's disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from perdure.stores import semantics
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.postgres import batch as batches
from perdure.stores.postgres import fast_path, queries, queue_reads, run_pages, schema
from perdure.stores.postgres import workers as worker_queries
from perdure.stores.postgres.errors import translate_errors
from perdure.stores.postgres.listener import NotificationListener
from perdure.stores.postgres.pool import ConnectionPool, close_connection, sql
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Claim
from perdure.stores.results import (
    AlreadyEnded,
    ClaimedRun,
    Committed,
    IdTaken,
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
from perdure.stores.writes import CreateRun, ObserveRunEnd, Write


class PostgresStore:
    """A schema of a PostgreSQL database behind the `Store` protocol, which states the guarantees.

    The URL has asyncpg's format, with options of perdure: schema, connections, statement_cache_size, listen, timeout.
    Several engines on one event loop may open the same object; the last `close` closes its connections. A closed store
    may be opened again.
    """

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self._change_listeners = ChangeListeners()
        self._opened = 0
        self._pool: ConnectionPool | None = None
        self._listener: NotificationListener | None = None

    # opening and closing

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._pool is None:
                self._pool = ConnectionPool(self._target)
            await self._prepare(self._pool, shards)
            if self._listener is None:
                self._listener = NotificationListener(self._pool, self._change_listeners)
                await self._listener.start()
        except BaseException:
            await self.close()
            raise

    async def _prepare(self, pool: ConnectionPool, shards: int) -> None:
        connection = await pool.connect()
        try:
            await schema.prepare(connection, self._target, shards)
        except BaseException:
            connection.terminate()  # without waiting: the server may not respond
            raise
        await close_connection(connection)

    async def close(self) -> None:
        if self._opened == 0:
            return
        self._opened -= 1
        if self._opened == 0:
            listener, self._listener = self._listener, None
            pool, self._pool = self._pool, None
            try:
                if listener is not None:
                    await listener.stop()
            finally:  # also if the caller stops waiting for a server that does not respond
                if pool is not None:
                    await pool.close()

    async def now(self) -> float:
        return await worker_queries.now(self._open)

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._change_listeners.subscribe(callback)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        if self._listener is None:
            return lambda: None  # the store is closed
        return self._listener.followed_runs.follow(run_id, callback)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        semantics.check_batch(batch)
        if not batch:
            return []
        fast = fast_path.call(batch[0]) if len(batch) == 1 else None
        if fast is not None and await self._open.value(sql(fast.statement, self._target), *fast.arguments):
            self._on_committed(batch, fast.changed)
            return [fast.result]
        with translate_errors():
            statement, arguments = batches.call(batch)
        found = await self._open.fetch(sql(statement, self._target), *arguments)
        outcome = batches.read_results(statement, batch, found)
        self._on_committed(batch, outcome.changed)
        if outcome.ids_taken:
            await self._load_taken_ids(batch, outcome.results, outcome.ids_taken)
        if outcome.unobserved:
            await self._observe_created_before(batch, outcome.results, outcome.unobserved)
        return outcome.results

    async def _load_taken_ids(
        self, batch: Sequence[Write], results: list[WriteResult], ids_taken: Sequence[int]
    ) -> None:
        """Fill in the results of new runs whose id belongs to another run, with that run's record."""
        writes = {at: write for at in ids_taken if isinstance(write := batch[at], CreateRun)}
        records = await self.records([write.record.id for write in writes.values()])
        for at, record in zip(writes, records, strict=True):
            if record is None:
                raise StoreError("a run with the id of a new one was pruned meanwhile; retry the write", retryable=True)
            if isinstance(record, UnreadableRun):
                raise StoreError(str(record))
            results[at] = IdTaken(record)

    async def _observe_created_before(
        self, batch: Sequence[Write], results: list[WriteResult], unobserved: Sequence[int]
    ) -> None:
        """Observe runs that an earlier, equal call created.

        This takes a commit of its own, which locks the runs in order of their ids. It is safe, because the caller
        repeats a call that fails here.
        """
        writes = [write for each in unobserved if isinstance(write := batch[each], CreateRun)]
        observing = [
            ObserveRunEnd(run_id=write.record.id, observer=write.observer.run_id, target=write.observer.target)
            for write in writes
            if write.observer is not None
        ]
        for at, result in zip(unobserved, await self.commit(observing), strict=True):
            if isinstance(result, RunMissing):
                raise StoreError("a run that was created before was pruned meanwhile; retry the write", retryable=True)
            if isinstance(result, AlreadyEnded):
                results[at] = result

    async def load(self, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
        return await queries.load(self._open, ids)

    async def records(self, ids: Sequence[str]) -> list[RunRecord | UnreadableRun | None]:
        return await queries.records(self._open, ids)

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        return await queries.inbox(self._open, run_id, after)

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        return await queries.history(self._open, run_id, after, limit)

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        return await worker_queries.claim(self._open, claim)

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        return await worker_queries.next_wake(self._open, pool, gates)

    async def owned(self, worker: str) -> list[str]:
        return await worker_queries.owned(self._open, worker)

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        return await worker_queries.owned_with_messages(self._open, worker, limit)

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        woken = await worker_queries.retry_held(self._open, workflows, kind, now)
        self._notify(woken)
        return len(woken)

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        return await worker_queries.join(self._open, worker)

    async def renew(self, worker: WorkerRecord) -> bool:
        return await worker_queries.renew(self._open, worker)

    async def workers(self) -> list[WorkerRecord]:
        return await queries.workers(self._open)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        return await worker_queries.fence_worker(self._open, worker_id, unless_renewed_after)

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        released = await worker_queries.release_runs(self._open, worker_id, now, recovered, limit)
        self._notify(frozenset(released))
        return released

    async def remove_worker(self, worker_id: str) -> None:
        await worker_queries.remove_worker(self._open, worker_id)

    # queries and maintenance

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        return await run_pages.runs(self._open, query, bare)

    async def count(self, query: RunQuery, cap: int) -> int:
        return await run_pages.count(self._open, query, cap)

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        return await worker_queries.prune(self._open, now, limit, keep_ids_for)

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        return await worker_queries.delete_run(self._open, run_id)

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await worker_queries.keys(self._open, name, now)

    async def add_key(self, name: str, now: float) -> SigningKey:
        return await worker_queries.add_key(self._open, name, now)

    # ended runs, children, topics, published values, streams and dead letters

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await queries.unfinalized(self._open, limit)

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await queries.open_children(self._open, run_id, limit, after)

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        return await queries.unfinished(self._open, limit)

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        return await queries.topic(self._open, name, limit, after)

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        return await queries.subscribed(self._open, ids)

    async def published(self, run_id: str) -> list[PublishedValue]:
        return await queries.published(self._open, run_id)

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        return await queries.stream(self._open, run_id, name, start, limit)

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        return await queries.topics(self._open, after, limit)

    async def document(self, kind: str, document_id: str) -> Document | None:
        return await queries.document(self._open, kind, document_id)

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        return await queries.documents(self._open, kind, after, limit, due_by)

    # queues

    async def queues(self) -> list[QueueSummary]:
        return await queue_reads.queues(self._open)

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        return await queue_reads.queue_view(self._open, name, now, limit)

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        return await queue_reads.places(self._open, name, partition, after, limit, held)

    async def place(self, run_id: str) -> PlaceRecord | None:
        return await queue_reads.place(self._open, run_id)

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        return await queue_reads.places_ahead(self._open, run_id, cap)

    # dead letters

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await queries.dead_letters(self._open, limit, after, kind, event)

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        return await queries.dead_letter(self._open, dead_letter_id)

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        return await worker_queries.remove_dead_letter(self._open, dead_letter_id)

    # the server

    @property
    def _open(self) -> ConnectionPool:
        if self._pool is None:
            raise StoreError(
                f"the store {self._target.name} is not open; open it first (an Engine or a Client opens its store)"
            )
        return self._pool

    def _on_committed(self, batch: Sequence[Write], changed: frozenset[str]) -> None:
        self._notify(changed)
        if self._listener is not None and self._listener.followed_runs:
            run_ids = map(semantics.run_of, batch)
            self._listener.followed_runs.on_committed(each for each in run_ids if each not in changed)

    def _notify(self, changed: frozenset[str]) -> None:
        if changed:
            self._change_listeners.notify(changed)
            if self._listener is not None:
                self._listener.notify(changed)
