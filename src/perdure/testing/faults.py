"""FaultyStore: injects planned faults, such as crashes at a write, lost results and an unavailable store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

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
from perdure.stores.protocol import Claim, Store
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
from perdure.stores.writes import PutDocument, Write
from perdure.workflows.publications import KIND

T = TypeVar("T")
Side = Literal["before", "after"]


class FaultyStore:
    """Wraps a store for one engine. Forwards every call, except for the planned faults.

    crash(n, side)   the process dies at the n-th commit from now, before or after it reaches the store: that call and
                     all later ones never return, and `crashed` is set. Then abandon the engine.
    lose_responses   commits are applied, but their callers get a retryable error
    fail_calls       calls fail with a retryable error and have no effect
    refuse           a commit with a write that matches the predicate fails with an error that is not retryable

    The writes by which a worker publishes its workflows when it opens are calls named "publish", not commits.

    It also counts calls by name (`calls`), records committed batches (`committed`) and counts open calls (`in_flight`).
    """

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.calls: Counter[str] = Counter()
        self.opened = 0  # number of opens that are not closed yet
        self.committed: list[tuple[Write, ...]] = []
        self.crashed = asyncio.Event()
        self.in_flight = 0
        self.call_returned = asyncio.Event()
        self.paused = asyncio.Event()
        self.paused.set()
        self._crash_at: tuple[int, Side] | None = None
        self._crash_call = "commit"
        self._lost = 0
        self._failures_left = 0
        self._failing_call_names: frozenset[str] | None = None
        self._refuses: Callable[[Write], bool] | None = None

    # --- the plan

    def crash(self, n: int, side: Side, *, call: str = "commit") -> None:
        """Let the process die at the n-th call of this name from now, before or after it. 1 is the next call."""
        self._crash_at = (self.calls[call] + n, side)
        self._crash_call = call

    def lose_responses(self, times: int) -> None:
        """Apply the next `times` commits, but raise a retryable error instead of returning their results."""
        self._lost = times

    def fail_calls(self, times: int, *, calls: Sequence[str] | None = None) -> None:
        """Fail the next `times` calls with a retryable error and without effect; only `calls` if given."""
        self._failures_left = times
        self._failing_call_names = None if calls is None else frozenset(calls)

    def refuse(self, predicate: Callable[[Write], bool] | None) -> None:
        """Reject commits with a write that matches the predicate, by an error that is not retryable; None resets it."""
        self._refuses = predicate

    def pause(self) -> None:
        """Block all calls until `unblock`, as if the process were frozen or the network were down."""
        self.paused.clear()

    def unblock(self) -> None:
        """Let the calls continue that `pause` blocks."""
        self.paused.set()

    @property
    def commits(self) -> int:
        return self.calls["commit"]

    # --- forwarding

    async def _forward(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.crashed.is_set():
            await _never_return()
        await self.paused.wait()
        self.calls[name] += 1
        dies = self._dies_at(name)
        if dies == "before":
            await self._die()
        if self._failures_left and (self._failing_call_names is None or name in self._failing_call_names):
            self._failures_left -= 1
            raise StoreError(f"the store is unavailable (planned, {name})", retryable=True)
        self.in_flight += 1
        try:
            result = await call()
        finally:
            self.in_flight -= 1
            self.call_returned.set()
        if dies == "after":
            await self._die()
        return result

    def _dies_at(self, name: str) -> Side | None:
        if self._crash_at is None or name != self._crash_call or self.calls[name] != self._crash_at[0]:
            return None
        return self._crash_at[1]

    async def _die(self) -> None:
        self.crashed.set()
        await _never_return()

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        async def apply() -> list[WriteResult]:
            if self._refuses is not None and any(self._refuses(write) for write in batch):
                raise StoreError("the store cannot apply this write (planned)")
            results = await self.inner.commit(batch)
            if not batch or not all(map(_is_publication, batch)):
                self.committed.append(tuple(batch))
            return results

        name = "publish" if batch and all(map(_is_publication, batch)) else "commit"
        results = await self._forward(name, apply)
        if self._lost:
            self._lost -= 1
            raise StoreError("the result was lost (planned)", retryable=True)
        return results

    # --- everything else

    async def open(self, *, shards: int) -> None:
        await self._forward("open", lambda: self.inner.open(shards=shards))
        self.opened += 1

    async def close(self) -> None:
        await self._forward("close", self.inner.close)
        self.opened -= 1

    async def now(self) -> float:
        return await self.inner.now()

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self.inner.on_change(callback)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        return self.inner.follow(run_id, callback)

    async def load(self, ids: Sequence[str]) -> Sequence[Snapshot | UnreadableRun | None]:
        return await self._forward("load", lambda: self.inner.load(ids))

    async def records(self, ids: Sequence[str]) -> Sequence[RunRecord | UnreadableRun | None]:
        return await self._forward("records", lambda: self.inner.records(ids))

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        return await self._forward("inbox", lambda: self.inner.inbox(run_id, after))

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        return await self._forward("history", lambda: self.inner.history(run_id, after, limit))

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        return await self._forward("claim", lambda: self.inner.claim(claim))

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        return await self._forward("next_wake", lambda: self.inner.next_wake(pool, gates))

    async def owned(self, worker: str) -> list[str]:
        return await self._forward("owned", lambda: self.inner.owned(worker))

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        return await self._forward("owned_with_messages", lambda: self.inner.owned_with_messages(worker, limit))

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        return await self._forward("retry_held", lambda: self.inner.retry_held(workflows, kind, now))

    async def join(self, worker: WorkerRecord) -> bool:
        return await self._forward("join", lambda: self.inner.join(worker))

    async def renew(self, worker: WorkerRecord) -> bool:
        return await self._forward("renew", lambda: self.inner.renew(worker))

    async def workers(self) -> list[WorkerRecord]:
        return await self._forward("workers", self.inner.workers)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        return await self._forward("fence_worker", lambda: self.inner.fence_worker(worker_id, unless_renewed_after))

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        return await self._forward(
            "release_runs", lambda: self.inner.release_runs(worker_id, now, recovered=recovered, limit=limit)
        )

    async def remove_worker(self, worker_id: str) -> None:
        await self._forward("remove_worker", lambda: self.inner.remove_worker(worker_id))

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        return await self._forward("runs", lambda: self.inner.runs(query, bare=bare))

    async def count(self, query: RunQuery, cap: int) -> int:
        return await self._forward("count", lambda: self.inner.count(query, cap))

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        return await self._forward("prune", lambda: self.inner.prune(now, limit, keep_ids_for=keep_ids_for))

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        return await self._forward("delete_run", lambda: self.inner.delete_run(run_id))

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await self._forward("keys", lambda: self.inner.keys(name, now))

    async def add_key(self, name: str, now: float) -> SigningKey:
        return await self._forward("add_key", lambda: self.inner.add_key(name, now))

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await self._forward("unfinalized", lambda: self.inner.unfinalized(limit))

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await self._forward("open_children", lambda: self.inner.open_children(run_id, limit, after))

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        return await self._forward("unfinished_broadcasts", lambda: self.inner.unfinished_broadcasts(limit))

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        return await self._forward("topic", lambda: self.inner.topic(name, limit, after))

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        return await self._forward("subscribed", lambda: self.inner.subscribed(ids))

    async def published(self, run_id: str) -> list[PublishedValue]:
        return await self._forward("published", lambda: self.inner.published(run_id))

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        return await self._forward("stream", lambda: self.inner.stream(run_id, name, start, limit))

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        return await self._forward("topics", lambda: self.inner.topics(after, limit))

    async def document(self, kind: str, document_id: str) -> Document | None:
        return await self._forward("document", lambda: self.inner.document(kind, document_id))

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        return await self._forward("documents", lambda: self.inner.documents(kind, after, limit, due_by=due_by))

    async def queues(self) -> list[QueueSummary]:
        return await self._forward("queues", self.inner.queues)

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        return await self._forward("queue_view", lambda: self.inner.queue_view(name, now, limit))

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        return await self._forward("places", lambda: self.inner.places(name, partition, after, limit, held=held))

    async def place(self, run_id: str) -> PlaceRecord | None:
        return await self._forward("place", lambda: self.inner.place(run_id))

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        return await self._forward("places_ahead", lambda: self.inner.places_ahead(run_id, cap))

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await self._forward(
            "dead_letters", lambda: self.inner.dead_letters(limit, after, kind=kind, event=event)
        )

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        return await self._forward("dead_letter", lambda: self.inner.dead_letter(dead_letter_id))

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        return await self._forward("remove_dead_letter", lambda: self.inner.remove_dead_letter(dead_letter_id))


async def _never_return() -> None:
    """Wait until the task is cancelled: the process that called is dead."""
    await asyncio.get_running_loop().create_future()


def _is_publication(write: Write) -> bool:
    return isinstance(write, PutDocument) and write.kind == KIND
