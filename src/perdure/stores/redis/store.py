"""Store in Redis or Valkey for any number of machines: a single server or a cluster.

All decisions are made in Lua on the server (`lua/`), where a call is atomic. A batch is one call per partition that it
touches, and a call checks a write completely before it changes anything. Most batches with a single write have a small
script of their own (`fast_path.py`). `partitions.py` explains partitions, messages between them, and why nothing is
lost when a process dies in the middle. `docs/redis.md` says which server settings make acknowledged commits durable.

Times come from the engine, as for every store, except `now()`, which is the server's clock unless a clock is given.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perdure.clock import Clock
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
from perdure.stores.paging import check_limit
from perdure.stores.protocol import Claim
from perdure.stores.redis import encoding, fast_path, queries, queue_queries, run_search
from perdure.stores.redis.listener import Listener
from perdure.stores.redis.partitions import Partitions, gather_calls, refuse_invalid_text
from perdure.stores.redis.server import RedisServer, parse_url
from perdure.stores.redis.write_encoding import (
    Array,
    decode_result,
    encode_write,
    has_effects_elsewhere,
    replay_name,
)
from perdure.stores.results import (
    ClaimedRun,
    Committed,
    DeadLetterMissing,
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
from perdure.stores.writes import Admit, CommitTurn, ConfigureQueue, ReplayDeadLetter, Write, subject_of


class RedisStore:
    """Implementation of the `Store` protocol on Redis; the protocol states the guarantees.

    Several engines may open the same object; the last `close` disconnects. It may be opened again.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._clock = clock
        self._change_listeners = ChangeListeners()
        self._server = RedisServer(parse_url(url))
        self._partitions = Partitions(self._server, secrets.token_hex(8), self._change_listeners.notify)
        self._listener = Listener(self._server, self._change_listeners)
        self._opened = 0
        self._announced: set[str] = set()

    # opening and closing

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._opened == 1:
                await self._server.connect()
            await self._partitions.initialize(shards)
            await self._listener.start(self._partitions.publisher)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._opened == 0:
            return
        self._opened -= 1
        if self._opened == 0:
            self._announced.clear()
            await self._listener.stop()
            await self._server.close()

    async def now(self) -> float:
        return await self._server.now() if self._clock is None else self._clock.now()

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._change_listeners.subscribe(callback)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        return self._listener.followed_runs.follow(run_id, callback)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        results = await self._commit(batch)
        if self._listener.followed_runs:
            self._listener.followed_runs.on_committed(map(semantics.run_of, batch))
        return results

    async def _commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        semantics.check_batch(batch)
        if len(batch) == 1 and (result := await self._commit_on_fast_path(batch[0])) is not None:
            return [result]
        with refuse_invalid_text():  # everything is encoded before anything is sent
            arrays = [self._encode_write(write) for write in batch]
            is_split = self._partitions.count > 1
            numbers = [self._partitions.of(subject_of(write)) for write in batch] if is_split else []
        if numbers:
            return await self._commit_in_partitions(batch, arrays, numbers)
        return [decode_result(given) for given in await self._partitions.write(0, arrays)] if arrays else []

    def _encode_write(self, write: Write) -> Array:
        array = encode_write(write, self._partitions.of)
        if isinstance(write, Admit):
            return (*array, "" if self._clock is None else encoding.encode_time(self._clock.now()))
        if isinstance(write, ConfigureQueue) and (self._partitions.count > 1 or self._server.is_cluster):
            raise StoreError(
                f"{self._server.name} has no queues on several partitions or a cluster, so queue {write.name!r} cannot "
                "be declared; use a single server with partitions=1, or another store"
            )
        return array

    async def _commit_on_fast_path(self, write: Write) -> WriteResult | None:
        """Return the result, or None without any change if the write must take the general path."""
        with refuse_invalid_text():
            call = fast_path.build_call(write, self._partitions.publisher)
            if call is None or not await self._partitions.call_fast_path(call.script, call.run_id, call.arguments):
                return None
        if call.changed:
            self._change_listeners.notify(call.changed)
        return call.result

    async def _commit_in_partitions(
        self, batch: Sequence[Write], arrays: Sequence[Array], numbers: Sequence[int]
    ) -> list[WriteResult]:
        results: dict[int, WriteResult] = {}
        for part in _split_batch(batch):
            if len(part) == 1 and isinstance(replay := batch[part[0]], ReplayDeadLetter):
                results[part[0]] = await self._replay_dead_letter(replay, arrays[part[0]])
                continue
            by_partition: dict[int, list[int]] = {}
            for index in part:
                by_partition.setdefault(numbers[index], []).append(index)
            calls = (
                self._partitions.write(number, [arrays[index] for index in by_partition[number]])
                for number in by_partition
            )
            for indexes, given in zip(by_partition.values(), await gather_calls(calls), strict=True):
                results.update(zip(indexes, map(decode_result, given), strict=True))
            await self._check_for_assignments(batch, part, results)
        return [results[index] for index in range(len(batch))]

    async def _replay_dead_letter(self, write: ReplayDeadLetter, array: Array) -> WriteResult:
        """Replay a dead letter, which may be in another partition than the run or topic that its event is sent to."""
        target = self._partitions.of(subject_of(write))
        result = await self._send_dead_letter(write, array, target)
        if result is None:  # an earlier attempt may have left it in an outbox
            await self._partitions.sweep()
            result = await self._send_dead_letter(write, array, target)
        return DeadLetterMissing() if result is None else result

    async def _send_dead_letter(self, write: ReplayDeadLetter, array: Array, target: int) -> WriteResult | None:
        """Return the result, or None if no partition has the dead letter and this replay was not applied before."""
        found = await self._partitions.command_all("HEXISTS", "dead-letters:", write.dead_letter_id)
        for number in [number for number, exists in enumerate(found) if exists] or [target]:
            (given,) = await self._partitions.write(number, [array])
            if given not in ([b"dead_letter_missing"], [b"sent"]):
                return decode_result(given)
        sent = await self._partitions.read(target, "sent", replay_name(write))
        return decode_result(sent) if sent else None

    async def _check_for_assignments(
        self, batch: Sequence[Write], part: list[int], results: dict[int, WriteResult]
    ) -> None:
        """Add messages to the results of turns: a new subscription may have found an event in another partition."""
        for index in part:
            write = batch[index]
            if isinstance(write, CommitTurn) and write.extras is not None and results[index] == Committed():
                unread = await self.inbox(write.run_id, write.seen)
                results[index] = Committed(has_messages=bool(unread))

    async def load(self, ids: Sequence[str]) -> list[Snapshot | UnreadableRun | None]:
        by_partition: dict[int, list[str]] = {}
        for id in dict.fromkeys(ids):
            by_partition.setdefault(self._partitions.of(id), []).append(id)
        pages = await gather_calls(
            self._partitions.read(number, "load", wanted) for number, wanted in by_partition.items()
        )
        found: dict[str, Snapshot | UnreadableRun | None] = {}
        for wanted, page in zip(by_partition.values(), pages, strict=True):
            found.update(zip(wanted, map(_snapshot_or_mark, wanted, page), strict=True))
        return [found[id] for id in ids]

    async def records(self, ids: Sequence[str]) -> list[RunRecord | UnreadableRun | None]:
        return await queries.records(self._partitions, list(ids))

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        found = await self._partitions.command(self._partitions.of(run_id), "HGETALL", f"inbox:{run_id}")
        try:
            return encoding.decode_inbox(queries.flatten(found), after)
        except Exception as error:
            damage = encoding.describe_error(error)
            raise StoreError(f"a message of run {run_id!r} cannot be read ({damage}); see `perdure doctor`") from error

    async def history(self, run_id: str, after: int = 0, limit: int | None = None) -> list[StoredEntry]:
        query = ("history", run_id, after) if limit is None else ("history_page", run_id, after, check_limit(limit))
        found = await self._partitions.read(self._partitions.of(run_id), *query)
        try:
            entries = encoding.decode_history(found)
        except Exception as error:
            damage = encoding.describe_error(error)
            raise StoreError(f"an entry of run {run_id!r} cannot be read ({damage}); see `perdure doctor`") from error
        return [StoredEntry(position, entry) for position, entry in entries if position > after]

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        pairs = [_encode_pair(pair) for pair in set(claim.workflows)]
        shards = False if claim.shards is None else sorted(claim.shards)
        wanted = (encoding.encode_time(claim.now if claim.due_by is None else claim.due_by), pairs, claim.pool, shards)
        claimer = (claim.worker, encoding.encode_time(claim.now))
        is_split = self._partitions.count > 1
        shares = await self._split_claim(wanted, claim) if is_split else {0: claim.limit}
        pages = await gather_calls(
            self._partitions.execute(number, "claim", *claimer, *wanted, share, claim.gates)
            for number, share in shares.items()
        )
        claimed = [
            (float(wake_at), ClaimedRun(id.decode(), last_message_no, position))
            for page in pages
            for id, last_message_no, position, wake_at in page
        ]
        return [run for _, run in sorted(claimed, key=lambda each: (each[0], each[1].id))]

    async def _split_claim(self, wanted: tuple[Any, ...], claim: Claim) -> dict[int, int]:
        """Return how many of the earliest due runs, up to the claim's limit, each partition has."""
        pages = await self._partitions.read_all("due", *wanted, claim.limit, claim.gates)
        due = sorted((float(at), id, number) for number, page in enumerate(pages) for id, at in page)[: claim.limit]
        return Counter(number for _, _, number in due)

    async def next_wake(self, pool: str, gates: Sequence[str] | None = None) -> float | None:
        found = await self._partitions.read_all("next_wake", pool, False if gates is None else list(gates))
        return min((float(at) for at in found if at), default=None)

    async def owned(self, worker: str) -> list[str]:
        pages = await self._partitions.command_all("ZRANGE", f"owned:{worker}", 0, -1)
        return sorted(id.decode() for page in pages for id in page)

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        pages = await self._partitions.command_all("ZRANGE", f"owned-with-messages:{worker}", 0, limit - 1)
        return sorted(id.decode() for page in pages for id in page)[:limit]

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        pairs = [_encode_pair(pair) for pair in dict.fromkeys(workflows)]
        return sum(await self._partitions.execute_on_all("retry_held", pairs, kind, encoding.encode_time(now)))

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        if not await self._write_lease("join", worker):
            return False
        await self._announce(worker.id, new=True)
        return True

    async def renew(self, worker: WorkerRecord) -> bool:
        if not await self._write_lease("renew", worker):
            return False
        if worker.id not in self._announced:
            await self._announce(worker.id, new=False)
        return True

    async def _write_lease(self, command: str, worker: WorkerRecord) -> bool:
        blob = encoding.as_lua_string(encoding.encode(worker))
        return bool(
            await self._partitions.execute(0, command, worker.id, blob, encoding.encode_time(worker.lease_until))
        )

    async def _announce(self, worker_id: str, *, new: bool) -> None:
        await self._partitions.execute_on_others("announce", worker_id, new)
        self._announced.add(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        found = queries.flatten(await self._partitions.command(0, "HGETALL", "workers:"))
        fenced = set(await self._partitions.command(0, "ZRANGE", "fenced:", 0, -1))
        known = [encoding.decode_worker(id, blob, id in fenced) for id, blob in encoding.iter_pairs(found)]
        return sorted(known, key=lambda worker: worker.id)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        """Fence the worker: partition 0 decides, and all others are fenced before this returns."""
        if not await self._partitions.execute(0, "fence_worker", worker_id, encoding.encode_time(unless_renewed_after)):
            return False
        await self._partitions.execute_on_others("fence_in_partition", worker_id)
        return True

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        fenced = (
            self._partitions.count > 1 and await self._partitions.command(0, "ZSCORE", "fenced:", worker_id) is not None
        )
        released: list[str] = []
        for number in range(self._partitions.count):
            remaining = limit - len(released)
            if remaining:
                page = await self._partitions.execute(
                    number, "release_runs", worker_id, encoding.encode_time(now), recovered, remaining, fenced
                )
                released += [id.decode() for id in page]
        return released

    async def remove_worker(self, worker_id: str) -> None:
        """Remove the worker. A worker that still owns runs is fenced instead, so that its runs are taken over."""
        if any(await self._partitions.command_all("EXISTS", f"owned:{worker_id}")):
            await self.fence_worker(worker_id)
            return
        await self._partitions.execute_on_others("remove_worker", worker_id)
        await self._partitions.execute(0, "remove_worker", worker_id)

    # queries and maintenance

    async def runs(self, query: RunQuery, *, bare: bool = False) -> RunPage:
        return await run_search.runs(self._partitions, query, bare=bare)

    async def count(self, query: RunQuery, cap: int) -> int:
        return await run_search.count(self._partitions, query, cap)

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        times = (encoding.encode_time(now), encoding.encode_time(now - keep_ids_for))
        partitions = self._partitions
        await gather_calls(
            partitions.maintain(number, "delete_expired", *times, limit) for number in range(partitions.count)
        )
        return await queries.prune_runs(self._partitions, now, limit)

    async def delete_run(self, run_id: str) -> Committed | RunMissing | RunRetained:
        return await queries.delete_run(self._partitions, run_id)

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await self._add_key(name, now, only_if_none=True)

    async def add_key(self, name: str, now: float) -> SigningKey:
        return (await self._add_key(name, now, only_if_none=False))[-1]

    async def _add_key(self, name: str, now: float, *, only_if_none: bool) -> list[SigningKey]:
        blob = encoding.encode_signing_key(now, secrets.token_bytes(32))
        keys = await self._partitions.execute(0, "add_key", name, blob, only_if_none)
        try:
            return [encoding.decode_signing_key(number, blob) for number, blob in enumerate(keys, 1)]
        except ValueError as error:
            raise StoreError(f"a signing key of {name!r} cannot be read ({error}); restore it from a backup") from error

    # ended runs, children, topics and outputs

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await queries.unfinalized(self._partitions, limit)

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await queries.open_children(self._partitions, run_id, limit, after)

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        """Also deliver messages between partitions that processes left in outboxes when they died."""
        await self._partitions.sweep()
        pages = await self._partitions.read_all("unfinished_broadcasts", limit)
        found = encoding.decode_readable("event", encoding.decode_event, (event for page in pages for event in page))
        return sorted(found, key=lambda event: (event.topic, event.offset))[:limit]

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        found = await self._partitions.read(self._partitions.of(name), "topic", name, after, check_limit(limit))
        return encoding.decode_readable("event", encoding.decode_event, found)

    async def subscribed(self, ids: Sequence[str]) -> list[frozenset[str]]:
        return await queries.subscribed(self._partitions, ids)

    async def published(self, run_id: str) -> list[PublishedValue]:
        found = await self._partitions.command(self._partitions.of(run_id), "HVALS", f"published:{run_id}")
        return sorted((encoding.decode_published_value(blob) for blob in found), key=lambda value: value.key)

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        found = await self._partitions.read(
            self._partitions.of(run_id), "stream", run_id, name, start, check_limit(limit)
        )
        return [
            encoding.decode_stream_item(start + n, blob, bool(superseded)) for n, (blob, superseded) in enumerate(found)
        ]

    async def topics(self, after: str | None = None, limit: int = 100) -> list[TopicSummary]:
        return await queries.topics(self._partitions, after, limit)

    async def document(self, kind: str, document_id: str) -> Document | None:
        return await queries.document(self._partitions, kind, document_id)

    async def documents(
        self, kind: str, after: str | None = None, limit: int = 100, *, due_by: float | None = None
    ) -> list[Document]:
        return await queries.documents(self._partitions, kind, after, limit, due_by)

    async def queues(self) -> list[QueueSummary]:
        return await queue_queries.queues(self._partitions)

    async def queue_view(self, name: str, now: float, limit: int = 100) -> QueueView | None:
        return await queue_queries.queue_view(self._partitions, name, now, limit)

    async def places(
        self,
        name: str,
        partition: str | None = None,
        after: PlaceCursor | None = None,
        limit: int = 100,
        *,
        held: bool = False,
    ) -> list[PlaceRecord]:
        return await queue_queries.places(self._partitions, name, partition, after, limit, held=held)

    async def place(self, run_id: str) -> PlaceRecord | None:
        return await queue_queries.place(self._partitions, run_id)

    async def places_ahead(self, run_id: str, cap: int = 1000) -> int:
        return await queue_queries.places_ahead(self._partitions, run_id, cap)

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await queries.dead_letters(self._partitions, limit, after, kind, event)

    async def dead_letter(self, dead_letter_id: str) -> DeadLetter | None:
        blobs = await self._partitions.command_all("HGET", "dead-letters:", dead_letter_id)
        return next((encoding.decode_dead_letter(blob) for blob in blobs if blob is not None), None)

    async def remove_dead_letter(self, dead_letter_id: str) -> bool:
        return any(await self._partitions.execute_on_all("remove_dead_letter", dead_letter_id))


def _split_batch(batch: Sequence[Write]) -> Iterator[list[int]]:
    """Yield the indexes of a batch in parts whose partitions can be written at the same time.

    A write with effects in other partitions is a part of its own, because later writes must see those effects.
    """
    part: list[int] = []
    for index, write in enumerate(batch):
        if has_effects_elsewhere(write):
            if part:
                yield part
            yield [index]
            part = []
        else:
            part.append(index)
    if part:
        yield part


def _snapshot_or_mark(id: str, found: Any) -> Snapshot | UnreadableRun | None:
    """Return a run, or a mark if it cannot be decoded."""
    if not found:
        return None
    run, entries, inbox = found
    try:
        return _decode_snapshot(run, entries, inbox)
    except Exception as error:
        damage = encoding.find_damaged_field(run) or encoding.describe_error(error)
    try:
        return UnreadableRun(id, damage, encoding.decode_position(run, entries))
    except ValueError:
        return UnreadableRun(id, damage)


def _decode_snapshot(run: list[bytes], entries: list[bytes], inbox: list[bytes]) -> Snapshot:
    history = tuple(entry for _, entry in encoding.decode_history(entries))
    return Snapshot(
        encoding.decode_run(run), encoding.decode_position(run, entries), history, tuple(encoding.decode_inbox(inbox))
    )


def _encode_pair(pair: tuple[str, int]) -> str:
    """Encode a workflow and its version as in the name of a due queue."""
    return f"{pair[0]}\0{pair[1]}"
