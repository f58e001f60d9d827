"""The store in a PostgreSQL database: any number of machines, over the server that they already have.

A batch of writes is one statement (`postgres_batch`; `postgres_plainly` for most that are alone), carried out by
functions of the store's own schema, so that no lock is held while a client is awaited; every other call is one
statement too. News travel by LISTEN and NOTIFY (`postgres_news`). The time of the store is the server's. What a commit
has acknowledged is as durable as the server's `synchronous_commit` makes it: on by default, which means on its disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from perdure.stores.postgres import batch as postgres_batch
from perdure.stores.postgres import fast_path as postgres_plainly
from perdure.stores.postgres import queries as postgres_queries
from perdure.stores.postgres import schema as postgres_schema
from perdure.stores.postgres import workers as postgres_fleet
from perdure.stores.postgres.errors import translate_errors
from perdure.stores.postgres.listener import NotificationListener
from perdure.stores.postgres.pool import ConnectionPool, close_connection, sql
from perdure.stores.postgres.url import parse_url
from perdure.stores.protocol import Claim
from perdure.stores.results import (
    AlreadyEnded,
    ClaimedRun,
    IdTaken,
    RunMissing,
    RunPage,
    SigningKey,
    Snapshot,
    StoredEntry,
    UnfinalizedRun,
    WriteResult,
)
from perdure.stores.writes import CreateRun, ObserveRunEnd, Write


class PostgresStore:
    """A schema of a PostgreSQL database behind the `Store` protocol; see there for the promises.

    The URL is asyncpg's, with options of ours: schema, connections, statement_cache_size, listen, timeout. Several
    engines on one event loop may open the same object; the last `close` closes its connections. It may be opened again.
    """

    def __init__(self, url: str) -> None:
        self._target = parse_url(url)
        self._hints = ChangeListeners()
        self._opened = 0
        self._link: ConnectionPool | None = None
        self._news: NotificationListener | None = None

    # opening and closing

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._link is None:
                self._link = ConnectionPool(self._target)
            await self._prepare(self._link, shards)
            if self._news is None:
                self._news = NotificationListener(self._link, self._hints)
                await self._news.start()
        except BaseException:
            await self.close()
            raise

    async def _prepare(self, link: ConnectionPool, shards: int) -> None:
        connection = await link.connect()
        try:
            await postgres_schema.prepare(connection, self._target, shards)
        finally:
            await close_connection(connection)

    async def close(self) -> None:
        if self._opened == 0:
            return
        self._opened -= 1
        if self._opened == 0:
            news, self._news = self._news, None
            link, self._link = self._link, None
            if news is not None:
                await news.stop()
            if link is not None:
                await link.close()

    async def now(self) -> float:
        return await postgres_fleet.now(self._open)

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._hints.subscribe(callback)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        rules.check_batch(batch)
        if not batch:
            return []
        plain = postgres_plainly.call(batch[0]) if len(batch) == 1 else None
        if plain is not None and await self._open.value(sql(plain.statement, self._target), *plain.given):
            self._tell(plain.changed)
            return [plain.answer]
        with translate_errors():
            statement, given = postgres_batch.call(batch)
        found = await self._open.fetch(sql(statement, self._target), *given)
        answers = postgres_batch.answers(statement, batch, found)
        self._tell(answers.changed)
        if answers.taken:
            await self._name_those_that_exist(batch, answers.given, answers.taken)
        if answers.unobserved:
            await self._observe_those_made_before(batch, answers.given, answers.unobserved)
        return answers.given

    async def _name_those_that_exist(
        self, batch: Sequence[Write], answers: list[WriteResult], taken: Sequence[int]
    ) -> None:
        writes = {at: write for at in taken if isinstance(write := batch[at], CreateRun)}
        records = await self.records([write.record.id for write in writes.values()])
        for at, record in zip(writes, records, strict=True):
            if record is None:
                raise StoreError("a run that had the id of a new one was pruned just now; try again", retryable=True)
            answers[at] = IdTaken(record)

    async def _observe_those_made_before(
        self, batch: Sequence[Write], answers: list[WriteResult], at: Sequence[int]
    ) -> None:
        """By a commit of its own, which locks them in their order. A repeated call, so that nothing depends on it."""
        writes = [write for each in at if isinstance(write := batch[each], CreateRun)]
        observing = [
            ObserveRunEnd(run_id=write.record.id, observer=write.observer.run_id, target=write.observer.target)
            for write in writes
            if write.observer is not None
        ]
        for each, answer in zip(at, await self.commit(observing), strict=True):
            if isinstance(answer, RunMissing):
                raise StoreError("a run that was made before was pruned just now; try again", retryable=True)
            if isinstance(answer, AlreadyEnded):
                answers[each] = answer

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        return await postgres_queries.load(self._open, ids)

    async def records(self, ids: Sequence[str]) -> list[RunRecord | None]:
        return await postgres_queries.records(self._open, ids)

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        return await postgres_queries.inbox(self._open, run_id, after)

    async def history(self, run_id: str, after: int = 0) -> list[StoredEntry]:
        return await postgres_queries.history(self._open, run_id, after)

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        return await postgres_fleet.claim(self._open, claim)

    async def next_wake(self, pool: str) -> float | None:
        return await postgres_fleet.next_wake(self._open, pool)

    async def owned(self, worker: str) -> list[str]:
        return await postgres_fleet.owned(self._open, worker)

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        return await postgres_fleet.mailed(self._open, worker, limit)

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        woken = await postgres_fleet.wake_held(self._open, workflows, kind, now)
        self._tell(woken)
        return len(woken)

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        return await postgres_fleet.join(self._open, worker)

    async def renew(self, worker: WorkerRecord) -> bool:
        return await postgres_fleet.renew(self._open, worker)

    async def workers(self) -> list[WorkerRecord]:
        return await postgres_queries.workers(self._open)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        return await postgres_fleet.declare_gone(self._open, worker_id, unless_renewed_after)

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        released = await postgres_fleet.release(self._open, worker_id, now, recovered, limit)
        self._tell(frozenset(released))
        return released

    async def remove_worker(self, worker_id: str) -> None:
        await postgres_fleet.retire(self._open, worker_id)

    # queries and upkeep

    async def runs(self, query: RunQuery) -> RunPage:
        return await postgres_queries.runs(self._open, query)

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> int:
        return await postgres_fleet.prune(self._open, now, limit, keep_ids_for)

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await postgres_fleet.keys(self._open, name, now)

    async def add_key(self, name: str, now: float) -> SigningKey:
        return await postgres_fleet.add_key(self._open, name, now)

    # finished runs, families, topics and what runs show

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await postgres_queries.unsettled(self._open, limit)

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await postgres_queries.open_children(self._open, run_id, limit, after)

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        return await postgres_queries.unfinished(self._open, limit)

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        return await postgres_queries.topic(self._open, name, limit, after)

    async def published(self, run_id: str) -> list[PublishedValue]:
        return await postgres_queries.published(self._open, run_id)

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        return await postgres_queries.stream(self._open, run_id, name, start, limit)

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await postgres_queries.dead_letters(self._open, limit, after, kind, event)

    async def dead_letter(self, letter_id: str) -> DeadLetter | None:
        return await postgres_queries.dead_letter(self._open, letter_id)

    async def remove_dead_letter(self, letter_id: str) -> bool:
        return await postgres_fleet.remove_dead_letter(self._open, letter_id)

    # the server

    @property
    def _open(self) -> ConnectionPool:
        if self._link is None:
            raise StoreError(f"the store {self._target.name} is not open; open it first (an Engine or a Client does)")
        return self._link

    def _tell(self, changed: frozenset[str]) -> None:
        if changed:
            self._hints.notify(changed)
            if self._news is not None:
                self._news.notify(changed)
