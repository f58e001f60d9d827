"""The store in Redis or Valkey: any number of machines, a single server or a cluster.

Everything that is decided is decided in Lua on the server (`lua/`), where nothing comes in between: a batch is one
call for each slice that it touches, and a call checks a write before it changes anything; most writes that are alone
have a script of their own (`redis_plainly`). `redis_slices` says what a slice is, how one gets news to another, and why
nothing is lost when a process dies in the middle. `docs/redis.md` says which settings of the server keep what it has
acknowledged.

Moments come from the engine, as for every store, except `now()`, which is the server's clock unless one is given.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perdure.clock import Clock
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
from perdure.stores.paging import check_limit
from perdure.stores.protocol import Claim
from perdure.stores.redis import encoding as rows
from perdure.stores.redis import fast_path as redis_plainly
from perdure.stores.redis import queries
from perdure.stores.redis.listener import Listener
from perdure.stores.redis.partitions import Partitions, gathered, refusing_bad_text
from perdure.stores.redis.server import RedisServer, address_of
from perdure.stores.redis.write_encoding import Array, answer_of, array_of, name_of, reaches_topics, sent_as
from perdure.stores.results import (
    ClaimedRun,
    Committed,
    DeadLetterMissing,
    RunPage,
    SigningKey,
    Snapshot,
    StoredEntry,
    UnfinalizedRun,
    WriteResult,
)
from perdure.stores.writes import CommitTurn, ReplayDeadLetter, Write


class RedisStore:
    """Redis behind the `Store` protocol; see there for the promises.

    Several engines may open the same object; the last `close` disconnects. It may be opened again.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._clock = clock
        self._hints = ChangeListeners()
        self._server = RedisServer(address_of(url))
        self._slices = Partitions(self._server, secrets.token_hex(8), self._hints.notify)
        self._listener = Listener(self._server, self._hints)
        self._opened = 0
        self._announced: set[str] = set()

    # opening and closing

    async def open(self, *, shards: int) -> None:
        self._opened += 1
        try:
            if self._opened == 1:
                await self._server.connect()
            await self._slices.initialize(shards)
            await self._listener.start(self._slices.me)
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
        return self._hints.subscribe(callback)

    # commit and load

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        rules.check_batch(batch)
        if len(batch) == 1 and (answer := await self._commit_plainly(batch[0])) is not None:
            return [answer]
        with refusing_bad_text():  # all of it is turned into bytes before any of it is sent
            arrays = [array_of(write, self._slices.of) for write in batch]
            homes = [self._slices.of(name_of(write)) for write in batch] if self._slices.count > 1 else []
        if homes:
            return await self._commit_in_slices(batch, arrays, homes)
        return [answer_of(given) for given in await self._slices.write(0, arrays)] if arrays else []

    async def _commit_plainly(self, write: Write) -> WriteResult | None:
        """None if nothing has happened: this write goes the way of all others."""
        with refusing_bad_text():
            plain = redis_plainly.call(write, self._slices.me)
            if plain is None or not await self._slices.call_fast_path(plain.script, plain.run_id, plain.given):
                return None
        if plain.changed:
            self._hints.notify(plain.changed)
        return plain.answer

    async def _commit_in_slices(
        self, batch: Sequence[Write], arrays: Sequence[Array], homes: Sequence[int]
    ) -> list[WriteResult]:
        answers: dict[int, WriteResult] = {}
        for part in _parts(batch):
            if len(part) == 1 and isinstance(replay := batch[part[0]], ReplayDeadLetter):
                answers[part[0]] = await self._replay(replay, arrays[part[0]])
                continue
            by_slice: dict[int, list[int]] = {}
            for place in part:
                by_slice.setdefault(homes[place], []).append(place)
            calls = (self._slices.write(number, [arrays[place] for place in by_slice[number]]) for number in by_slice)
            for places, given in zip(by_slice.values(), await gathered(calls), strict=True):
                answers.update(zip(places, map(answer_of, given), strict=True))
            await self._look_for_finds(batch, part, answers)
        return [answers[place] for place in range(len(batch))]

    async def _replay(self, write: ReplayDeadLetter, array: Array) -> WriteResult:
        """A letter is where its run is, or was sent to before; what it is sent to may be in another slice."""
        target = self._slices.of(name_of(write))
        answer = await self._send_letter(write, array, target)
        if answer is None:  # on its way since an earlier try, perhaps
            await self._slices.sweep()
            answer = await self._send_letter(write, array, target)
        return DeadLetterMissing() if answer is None else answer

    async def _send_letter(self, write: ReplayDeadLetter, array: Array, target: int) -> WriteResult | None:
        """What became of it; None if the letter is nowhere, and was not sent by this call."""
        found = await self._slices.ask_all("HEXISTS", "letters:", write.letter_id)
        for home in [number for number, is_there in enumerate(found) if is_there] or [target]:
            (given,) = await self._slices.write(home, [array])
            if given not in ([b"gone"], [b"sent"]):
                return answer_of(given)
        told = await self._slices.read(target, "sent", sent_as(write))
        return answer_of(told) if told else None

    async def _look_for_finds(self, batch: Sequence[Write], part: list[int], answers: dict[int, WriteResult]) -> None:
        """What a subscription found in another slice came after its turn was answered."""
        for place in part:
            write = batch[place]
            if isinstance(write, CommitTurn) and write.extras is not None and answers[place] == Committed():
                unread = await self.inbox(write.run_id, write.seen)
                answers[place] = Committed(has_messages=bool(unread))

    async def load(self, ids: Sequence[str]) -> list[Snapshot | None]:
        by_slice: dict[int, list[str]] = {}
        for id in dict.fromkeys(ids):
            by_slice.setdefault(self._slices.of(id), []).append(id)
        pages = await gathered(self._slices.read(number, "load", wanted) for number, wanted in by_slice.items())
        found: dict[str, Snapshot | None] = {}
        for wanted, page in zip(by_slice.values(), pages, strict=True):
            found.update(zip(wanted, map(_snapshot, page), strict=True))
        return [found[id] for id in ids]

    async def records(self, ids: Sequence[str]) -> list[RunRecord | None]:
        return await queries.records(self._slices, list(ids))

    async def inbox(self, run_id: str, after: int = 0) -> list[Message]:
        found = await self._slices.ask(self._slices.of(run_id), "HGETALL", f"mail:{run_id}")
        return rows.inbox_of(queries.flat(found), after)

    async def history(self, run_id: str, after: int = 0) -> list[StoredEntry]:
        found = await self._slices.read(self._slices.of(run_id), "history", run_id, after)
        return [StoredEntry(position, entry) for position, entry in rows.history_of(found) if position > after]

    # due and claim

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        pairs = [_pair(pair) for pair in set(claim.workflows)]
        shards = False if claim.shards is None else sorted(claim.shards)
        wanted = (rows.moment(claim.now if claim.due_by is None else claim.due_by), pairs, claim.pool, shards)
        claimer = (claim.worker, rows.moment(claim.now))
        shares = {0: claim.limit} if self._slices.count == 1 else await self._shares(wanted, claim.limit)
        pages = await gathered(
            self._slices.change(number, "claim", *claimer, *wanted, share) for number, share in shares.items()
        )
        taken = [(float(at), ClaimedRun(id.decode(), last, at_)) for page in pages for id, last, at_, at in page]
        return [run for _, run in sorted(taken, key=lambda each: (each[0], each[1].id))]

    async def _shares(self, wanted: tuple[Any, ...], limit: int) -> dict[int, int]:
        """How many of the runs that are due first are in which slice."""
        pages = await self._slices.read_all("due", *wanted, limit)
        due = sorted((float(at), id, number) for number, page in enumerate(pages) for id, at in page)[:limit]
        return Counter(number for _, _, number in due)

    async def next_wake(self, pool: str) -> float | None:
        return min((float(at) for at in await self._slices.read_all("next_wake", pool) if at), default=None)

    async def owned(self, worker: str) -> list[str]:
        pages = await self._slices.ask_all("ZRANGE", f"owned:{worker}", 0, -1)
        return sorted(id.decode() for page in pages for id in page)

    async def owned_with_messages(self, worker: str, limit: int = 100) -> list[str]:
        pages = await self._slices.ask_all("ZRANGE", f"mailed:{worker}", 0, limit - 1)
        return sorted(id.decode() for page in pages for id in page)[:limit]

    async def retry_held(self, workflows: Sequence[tuple[str, int]], kind: str, now: float) -> int:
        pairs = [_pair(pair) for pair in dict.fromkeys(workflows)]
        return sum(await self._slices.change_all("wake_held", pairs, kind, rows.moment(now)))

    # workers

    async def join(self, worker: WorkerRecord) -> bool:
        if not await self._signed("join", worker):
            return False
        await self._announce(worker.id, new=True)
        return True

    async def renew(self, worker: WorkerRecord) -> bool:
        if not await self._signed("renew", worker):
            return False
        if worker.id not in self._announced:
            await self._announce(worker.id, new=False)
        return True

    async def _signed(self, call: str, worker: WorkerRecord) -> bool:
        blob = rows.raw(rows.encode(worker))
        return bool(await self._slices.change(0, call, worker.id, blob, rows.moment(worker.lease_until)))

    async def _announce(self, worker_id: str, *, new: bool) -> None:
        await self._slices.change_others("announce", worker_id, new)
        self._announced.add(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        found = queries.flat(await self._slices.ask(0, "HGETALL", "workers:"))
        gone = set(await self._slices.ask(0, "ZRANGE", "gone:", 0, -1))
        known = [rows.worker_of(blob, id in gone) for id, blob in rows.pairs_of(found)]
        return sorted(known, key=lambda worker: worker.id)

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        """The first slice decides; the others are fenced off before anyone is told."""
        if not await self._slices.change(0, "declare_gone", worker_id, rows.moment(unless_renewed_after)):
            return False
        await self._slices.change_others("fence", worker_id)
        return True

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        gone = self._slices.count > 1 and await self._slices.ask(0, "ZSCORE", "gone:", worker_id) is not None
        released: list[str] = []
        for number in range(self._slices.count):
            room = limit - len(released)
            if room:
                page = await self._slices.change(number, "release", worker_id, rows.moment(now), recovered, room, gone)
                released += [id.decode() for id in page]
        return released

    async def remove_worker(self, worker_id: str) -> None:
        """Forget the worker; one that still owns runs is declared gone instead, or its runs would be lost."""
        if any(await self._slices.ask_all("EXISTS", f"owned:{worker_id}")):
            await self.fence_worker(worker_id)
            return
        await self._slices.change_others("retire", worker_id)
        await self._slices.change(0, "retire", worker_id)

    # queries and upkeep

    async def runs(self, query: RunQuery) -> RunPage:
        return await queries.runs(self._slices, query)

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> int:
        moments = (rows.moment(now), rows.moment(now - keep_ids_for))
        slices = self._slices
        await gathered(slices.forget(number, "forget_expired", *moments, limit) for number in range(slices.count))
        return await queries.prune_runs(self._slices, now, limit)

    async def keys(self, name: str, now: float) -> list[SigningKey]:
        return await self._add_key(name, now, only_if_none=True)

    async def add_key(self, name: str, now: float) -> SigningKey:
        return (await self._add_key(name, now, only_if_none=False))[-1]

    async def _add_key(self, name: str, now: float, *, only_if_none: bool) -> list[SigningKey]:
        blob = rows.key_blob(now, secrets.token_bytes(32))
        kept = await self._slices.change(0, "add_key", name, blob, only_if_none)
        return [rows.key_of(number, blob) for number, blob in enumerate(kept, 1)]

    # finished runs, families, topics and what runs show

    async def unfinalized(self, limit: int = 100) -> list[UnfinalizedRun]:
        return await queries.unsettled(self._slices, limit)

    async def open_children(self, run_id: str, limit: int = 500, after: str | None = None) -> list[str]:
        return await queries.open_children(self._slices, run_id, limit, after)

    async def unfinished_broadcasts(self, limit: int = 100) -> list[TopicEvent]:
        """Also hands over what processes that died have left on its way from one slice to another."""
        await self._slices.sweep()
        found = [rows.event_of(event) for page in await self._slices.read_all("unfinished", limit) for event in page]
        return sorted(found, key=lambda event: (event.topic, event.offset))[:limit]

    async def topic(self, name: str, limit: int = 100, after: int = 0) -> list[TopicEvent]:
        found = await self._slices.read(self._slices.of(name), "topic", name, after, check_limit(limit))
        return [rows.event_of(event) for event in found]

    async def published(self, run_id: str) -> list[PublishedValue]:
        found = await self._slices.ask(self._slices.of(run_id), "HVALS", f"published:{run_id}")
        return sorted((rows.value_of(blob) for blob in found), key=lambda value: value.key)

    async def stream(self, run_id: str, name: str, start: int = 0, limit: int = 500) -> list[StreamItem]:
        found = await self._slices.read(self._slices.of(run_id), "stream", run_id, name, start, check_limit(limit))
        return [rows.item_of(start + n, blob, bool(superseded)) for n, (blob, superseded) in enumerate(found)]

    async def dead_letters(
        self, limit: int = 100, after: str | None = None, *, kind: str | None = None, event: str | None = None
    ) -> list[DeadLetter]:
        return await queries.dead_letters(self._slices, limit, after, kind, event)

    async def dead_letter(self, letter_id: str) -> DeadLetter | None:
        found = [blob for blob in await self._slices.ask_all("HGET", "letters:", letter_id) if blob is not None]
        return rows.letter_of(found[0]) if found else None

    async def remove_dead_letter(self, letter_id: str) -> bool:
        return any(await self._slices.change_all("remove_letter", letter_id))


def _parts(batch: Sequence[Write]) -> Iterator[list[int]]:
    """The places in a batch, cut where a write must find what the one before it did in another slice."""
    part: list[int] = []
    for place, write in enumerate(batch):
        if reaches_topics(write):
            if part:
                yield part
            yield [place]
            part = []
        else:
            part.append(place)
    if part:
        yield part


def _snapshot(found: Any) -> Snapshot | None:
    if not found:
        return None
    run, entries, mail = found
    history = tuple(entry for _, entry in rows.history_of(entries))
    return Snapshot(rows.run_of(run), rows.position_of(run, entries), history, tuple(rows.inbox_of(mail)))


def _pair(pair: tuple[str, int]) -> str:
    """A workflow and its version as the name of a queue has them."""
    return f"{pair[0]}\0{pair[1]}"
