"""Store in memory: the reference model of every store, and the store that tests run on.

Its data outlives engines: several may open the same object, and closing keeps the data, so that a test can crash an
engine and continue with another. No method awaits, which makes each call atomic. A batch is checked before its first
change, so that a batch which raises changes nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.errors import StoreError
from perdure.model.awaited import parse_awaited
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
    RunStatus,
    SigningKey,
    StreamItem,
    TopicEvent,
    WorkerRecord,
)
from perdure.stores import semantics as rules
from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.followed_runs import FollowedRuns
from perdure.stores.memory.state import MemoryState
from perdure.stores.memory.writes import apply
from perdure.stores.paging import (
    Key,
    check_document_page,
    check_limit,
    cursor_after,
    key_of,
    matches_query,
    required_terms,
    without_payloads,
)
from perdure.stores.protocol import SCAN_LIMIT, Claim
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
    WriteResult,
)
from perdure.stores.writes import Write


class MemoryStore:
    """Implements the `Store` protocol with dictionaries."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._listeners = ChangeListeners()
        self._followed_runs = FollowedRuns("memory")  # no other process has this store
        self._opened = 0
        self._shards: int | None = None
        self._state = MemoryState(clock)
        self._runs = self._state.runs
        self._workers = self._state.workers
        self._keys: dict[str, list[SigningKey]] = {}

    # lifecycle

    async def open(self, *, shards: int) -> None:
        with self._lock:
            if self._shards not in (None, shards):
                raise StoreError(
                    f"this store has {self._shards} shards, not {shards}; open it with shards={self._shards}"
                )
            self._shards = shards
            self._opened += 1

    async def close(self) -> None:
        with self._lock:
            self._opened = max(0, self._opened - 1)

    async def now(self) -> float:
        return self._clock.now()

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._listeners.subscribe(callback)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        return self._followed_runs.follow(run_id, callback)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        rules.check_batch(batch)
        with self._lock:
            results = [apply(self._state, write) for write in batch]
            changed = self._runs.take_changed() | self._state.documents.take_hints()
        self._notify(changed)
        if self._followed_runs:
            self._followed_runs.on_committed(map(rules.run_of, batch))
        return results

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        with self._lock:
            return [self._runs.snapshot(id) for id in ids]

    async def records(self, ids: Sequence[str]) -> list[RunRecord | None]:
        with self._lock:
            return [run.record if (run := self._runs.get(id)) else None for id in ids]

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        with self._lock:
            run = self._runs.get(run_id)
            return [message for number, message in run.inbox.items() if number > after] if run else []

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        with self._lock:
            return self._runs.history(run_id, after, None if limit is None else check_limit(limit))

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        with self._lock:
            worker = self._workers.get(claim.worker)
            if worker is None or worker.fenced:
                return []
            claimed = self._runs.take_due(claim)
            for id in claimed:
                run = self._runs[id]
                first_executed_at = claim.now if run.record.first_executed_at is None else run.record.first_executed_at
                self._runs.put(
                    run,
                    replace(
                        run.record,
                        owner=claim.worker,
                        status=RunStatus.RUNNING,
                        wake_at=None,
                        first_executed_at=first_executed_at,
                        updated_at=claim.now,
                    ),
                )
            return [ClaimedRun(id, self._runs[id].record.last_message_no, self._runs[id].position) for id in claimed]

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        with self._lock:
            return self._runs.next_wake(pool, gates)

    async def owned(self, worker: str) -> list[str]:
        with self._lock:
            return sorted(self._runs.owned.get(worker, ()))

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        with self._lock:
            return sorted(self._runs.owned_with_messages.get(worker, ()))[:limit]

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        with self._lock:
            woken = [
                run for run in self._runs.held_for(kind, frozenset(workflows)) if _is_later(run.record.wake_at, now)
            ]
            for run in woken:
                self._runs.put(run, replace(run.record, wake_at=now))
        self._notify({run.record.id for run in woken})
        return len(woken)

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        with self._lock:
            if worker.id in self._workers:
                return False
            self._workers[worker.id] = replace(worker, fenced=False)
            return True

    async def renew(self, worker: WorkerRecord) -> bool:
        with self._lock:
            known = self._workers.get(worker.id)
            if known is None or known.fenced:
                return False
            self._workers[worker.id] = replace(worker, fenced=False)
            return True

    async def workers(self) -> list[WorkerRecord]:
        with self._lock:
            return sorted(self._workers.values(), key=lambda worker: worker.id)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is None:
                return False
            if not worker.fenced and unless_renewed_after is not None and worker.lease_until > unless_renewed_after:
                return False
            self._workers[worker_id] = replace(worker, fenced=True)
            return True

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        with self._lock:
            released = sorted(self._runs.owned.get(worker_id, ()))[:limit]
            for id in released:
                self._runs.release(self._runs[id], now, recovered=recovered)
        self._notify(set(released))
        return released

    async def remove_worker(self, worker_id: str) -> None:
        with self._lock:
            worker = self._workers.get(worker_id)
            if worker is not None and self._runs.owned.get(worker_id):
                self._workers[worker_id] = replace(worker, fenced=True)  # removing it would lose its runs
            else:
                self._workers.pop(worker_id, None)

    # queries and maintenance

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        limit = check_limit(query.limit)
        last = key_of(query.after) if query.after is not None else None
        with self._lock:
            page: list[RunRecord] = []
            examined = None
            scanned = 0
            for record in self._newest_first(query, last):
                found = matches_query(query, record)
                if examined is not None and (scanned == SCAN_LIMIT or (found and len(page) == limit)):
                    return RunPage(tuple(page), cursor_after(examined.created_at, examined.id), scanned=scanned)
                if found:
                    page.append(without_payloads(record) if bare else record)
                examined = record
                scanned += 1
            return RunPage(tuple(page), scanned=scanned)

    async def count(self, query: RunQuery, cap: int) -> int:
        check_limit(cap)
        with self._lock:
            matching = (record for record in self._newest_first(query, None) if matches_query(query, record))
            return sum(1 for _ in islice(matching, cap))

    def _newest_first(self, query: RunQuery, last: Key | None) -> Iterator[RunRecord]:
        ids = self._runs.index.newest_first(query, last, self._candidates(query))
        return (self._runs[id].record for id in ids)

    def _candidates(self, query: RunQuery) -> Iterator[Collection[str]]:
        """Return sets of ids, each of which has all runs that match the query."""
        awaited = [query.awaited] if query.awaited is not None else []
        for term in required_terms(query.filter):
            if term.key == "worker" and isinstance(term.value, str):
                yield self._runs.owned.get(term.value, ())
            if term.key == "waiting" and term.value is not None:
                awaited.append(parse_awaited(term.value))
        for each in awaited:
            if each.kind == "event" and each.name is not None:
                yield self._state.topics.subscribers(each.name)

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        with self._lock:
            self._state.documents.prune(now)
            self._runs.delete_expired_values(now)
            self._runs.delete_consumed_ids(now - keep_ids_for)
            self._state.topics.prune(now, keep_ids_for)
            self._state.queues.prune(now)
            return self._runs.prune(now, limit)

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        with self._lock:
            return self._runs.delete(run_id)

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        with self._lock:
            if name not in self._keys:
                self._add_key(name, now)
            return list(self._keys[name])

    async def add_key(self, name: str, now: float) -> SigningKey:
        with self._lock:
            return self._add_key(name, now)

    def _add_key(self, name: str, now: float) -> SigningKey:
        keys = self._keys.setdefault(name, [])
        keys.append(SigningKey(len(keys) + 1, now, secrets.token_bytes(32)))
        return keys[-1]

    # ended runs, topics, output

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        with self._lock:
            return self._runs.unfinalized(check_limit(limit))

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        with self._lock:
            return self._runs.open_children(run_id, check_limit(limit), after)

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        with self._lock:
            return self._state.topics.unfinished(check_limit(limit))

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        with self._lock:
            return self._state.topics.events(name, check_limit(limit), after)

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        with self._lock:
            return [frozenset(run.subscriptions) if (run := self._runs.get(id)) else frozenset() for id in ids]

    async def published(self, run_id: str) -> list[PublishedValue]:
        with self._lock:
            run = self._runs.get(run_id)
            return run.outputs.values() if run is not None else []

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        with self._lock:
            run = self._runs.get(run_id)
            return run.outputs.stream(name, start, check_limit(limit)) if run is not None else []

    # queues

    async def queues(self) -> list[QueueSummary]:
        with self._lock:
            return self._state.queues.summaries()

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        with self._lock:
            return self._state.queues.view(name, now, check_limit(limit))

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        with self._lock:
            return self._state.queues.places(name, partition, after, check_limit(limit), held=held)

    async def place(self, run_id: str) -> PlaceRecord | None:
        with self._lock:
            place = self._state.queues.place(run_id)
            return None if place is None else place.row

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        with self._lock:
            return self._state.queues.places_ahead(run_id, cap)

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        with self._lock:
            return self._state.topics.summaries(after, check_limit(limit))

    # documents

    async def document(self, kind: str, document_id: str) -> Document | None:
        with self._lock:
            return self._state.documents.get(kind, document_id)

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        limit = check_document_page(after, limit, due_by)
        with self._lock:
            if due_by is not None:
                return self._state.documents.due(kind, due_by, limit)
            return self._state.documents.page(kind, after, limit)

    # dead letters

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        with self._lock:
            return self._state.dead_letters_after(after, limit, kind, event)

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        with self._lock:
            return self._state.dead_letters.get(dead_letter_id)

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        with self._lock:
            return self._state.dead_letters.pop(dead_letter_id, None) is not None

    def _notify(self, changed: set[str]) -> None:
        if changed:
            self._listeners.notify(frozenset(changed))


def _is_later(wake_at: float | None, now: float) -> bool:
    return wake_at is None or wake_at > now
