"""Random traces of queue writes: counts, rows and places agree after every commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from perdure.model.queries import RunQuery
from perdure.model.queue_records import COUNT_CAP, Place, PlaceRecord, QueueSettings, QueueView, Take
from perdure.model.records import RunRecord, RunStatus
from perdure.stores.protocol import Store
from perdure.stores.results import Admitted
from perdure.stores.writes import Admit, ConfigureQueue, Predecessor, RunPatch, Write
from perdure.testing.contract.builders import ContractCase, case, claim, deliver, end, load, turn
from perdure.testing.contract.queue_builders import SERVED, leave, move, queued, requeue_ended, view_of

LATE = 1e6  # after every time of a trace


async def check_counts(store: Store, names: Sequence[str]) -> None:
    """Check that places, rows of runs, views and summaries of these queues agree. All counts are computed again."""
    summaries = {each.name: each for each in await store.queues()}
    placed: dict[str, PlaceRecord] = {}
    for name in names:
        waiting, held = await store.places(name, limit=COUNT_CAP), await store.places(name, limit=COUNT_CAP, held=True)
        placed |= {place.run_id: place for place in (*waiting, *held)}
        assert [place.held for place in (*waiting, *held)] == [False] * len(waiting) + [True] * len(held)
        summary, view = summaries[name], await view_of(store, name, LATE, limit=COUNT_CAP)
        assert (summary.waiting, summary.held, view.held) == (len(waiting), len(held), len(held)), name
        _check_partitions(view, waiting, held)
        delayed = [place.eligible_at for place in waiting if place.eligible_at is not None]
        expiring = sorted((place.expires_at, place.run_id) for place in waiting if place.expires_at is not None)
        assert (view.eligible, view.expired) == (len(delayed), tuple(run_id for _, run_id in expiring))
    for record in (await store.runs(RunQuery(limit=1000, internal=True))).runs:
        _check_row(record, placed.pop(record.id, None))
    assert not placed, f"places without a run: {placed}"


def _check_partitions(view: QueueView, waiting: Sequence[PlaceRecord], held: Sequence[PlaceRecord]) -> None:
    eligible = Counter(place.partition for place in waiting if place.eligible_at is None)
    slots = Counter(place.partition for place in held)
    for each in view.partitions:
        assert (each.waiting, each.held) == (eligible[each.partition], slots[each.partition]), each
        assert each.waiting > 0
    order = [(each.turn, each.partition) for each in view.partitions]
    assert order == sorted(order)


def _check_row(record: RunRecord, place: PlaceRecord | None) -> None:
    if place is None:
        assert (record.waiting, record.gate) == (False, ""), record
        return
    assert not record.status.terminal, record
    assert (record.queue, record.partition, record.priority) == (place.queue, place.partition, place.priority)
    assert record.waiting is not place.held
    if record.waiting:
        assert (record.wake_at, record.owner, record.gate) == (None, None, ""), record


class QueueTrace:
    """Makes random writes about the last runs, two queues and three partitions; `now` increases with each."""

    QUEUES = ("q", "p")

    def __init__(self, store: Store, random: Random) -> None:
        self._store, self._random = store, random
        self.now = 200.0
        self._calls = 0
        self._ids = ["r0"]  # of the last starts

    async def next_write(self) -> Write | None:
        """Return the next write; None after a claim."""
        self.now += self._random.random()
        self._calls += 1
        id = self._random.choice(self._ids)
        (row,) = await self._store.records([id])
        known = row if isinstance(row, RunRecord) else None
        common = [self._start] * 5
        makers = [*common, self._end, self._message, self._leave, self._rewind, self._requeue, self._requeue]
        if self._random.random() < 0.25:
            return await self._admission()
        if self._random.random() < 0.05:
            return await self._settings()
        if known is not None and known.owner is not None and self._random.random() < 0.5:
            return await self._turn(known)
        if self._random.random() < 0.15:
            await self._store.claim(claim("a", self.now, gates=tuple((name, 2) for name in self.QUEUES), limit=3))
            return None
        return await self._random.choice(makers)(id, known)

    def _queue_of(self, known: RunRecord | None) -> str:
        is_known = known is not None and known.queue is not None and self._random.random() < 0.9
        return known.queue or "" if known is not None and is_known else self._random.choice(self.QUEUES)

    def _token(self) -> str:
        return f"call-{self._calls}"

    def _place(self, *, key: bool) -> Place:
        random = self._random
        delayed = random.random() < 0.3
        debounce = key and delayed and random.random() < 0.5
        return Place(
            queue=random.choice(self.QUEUES),
            partition=random.choice(("", "x", "y")),
            priority=random.choice((-1, 0, 0, 2)),
            eligible_at=self.now + random.choice((-1.0, 5.0)) if delayed else None,
            expires_at=self.now + random.choice((1.0, 50.0)) if random.random() < 0.2 else None,
            dedupe=random.choice("kl") if key and (debounce or random.random() < 0.5) else None,
            on_duplicate=random.choice(("existing", "refuse", "replace")),
            debounce=debounce,
            latest_at=self.now + 8.0 if debounce and random.random() < 0.5 else None,
        )

    async def _start(self, id: str, known: RunRecord | None) -> Write:
        place = self._place(key=True)
        fields = {name: getattr(place, name) for name in Place.__struct_fields__}
        replaces = None
        if self._random.random() < 0.7:
            id, known = f"r{self._calls}", None
            self._ids = [*self._ids[-9:], id]
        elif known is not None:
            replaces = Predecessor(known.created_by, known.generation)
        write = queued(id, **fields, created_at=self.now, created_by=self._token(), shard=self._random.randrange(16))
        return type(write)(write.record, replaces=replaces, place=write.place)

    async def _end(self, id: str, known: RunRecord | None) -> Write:
        return end(self._token(), self.now, id=id, only_if_not_started=self._random.random() < 0.3, prune_after=5.0)

    async def _message(self, id: str, known: RunRecord | None) -> Write:
        kind = self._random.choice(("event", "pause", "resume", "resume", "cancel"))
        return deliver(self._token(), id=id, now=self.now, kind=kind)

    async def _leave(self, id: str, known: RunRecord | None) -> Write:
        return leave(id, self._queue_of(known), self.now)

    async def _requeue(self, id: str, known: RunRecord | None) -> Write:
        return move(id, self._queue_of(known), self._random.choice((-1, 0, 1)))

    async def _rewind(self, id: str, known: RunRecord | None) -> Write:
        base = 0 if known is None else (await load(self._store, id)).position
        place = self._place(key=False) if self._random.random() < 0.8 else None
        return requeue_ended(base, self._token(), id=id, now=self.now, place=place)

    async def _turn(self, known: RunRecord) -> Write:
        base = (await load(self._store, known.id)).position
        patch = self._random.choice(
            (
                RunPatch(status=RunStatus.SUCCEEDED, ended_at=self.now, prune_at=self.now + 5.0),
                RunPatch(status=RunStatus.SUSPENDED, wake_at=self.now + 3.0),
                RunPatch(status=RunStatus.SUSPENDED),
            )
        )
        worker = known.owner or "a"
        return turn(base, id=known.id, worker=worker, turn_id=self._token(), now=self.now, patch=patch, seen=99)

    async def _admission(self) -> Write:
        random = self._random
        view = await view_of(self._store, random.choice(self.QUEUES), self.now)
        free = max(0, (view.declared.concurrency or 9) - view.held)
        counts = [min(random.randrange(3), max(0, free - 2 * n)) for n in range(len(view.partitions))]  # at most `free`
        takes = tuple(
            Take(
                partition=each.partition,
                count=count,
                turn=view.version,
                state=self._token().encode(),
                limit=random.choice((None, 1, 3)),
                ready_at=random.choice((None, None, self.now + 2.0)),
                keep_until=random.choice((None, self.now + 2.0)),
            )
            for each, count in zip(view.partitions, counts, strict=True)
        )
        return Admit(
            queue=view.name,
            base=view.version - (random.random() < 0.1),
            now=self.now,
            state=self._token().encode(),
            takes=takes,
            serves=SERVED,
            gate=random.random() < 0.5,
            full=random.random() < 0.05,
            promote=random.randrange(4),
            scan=random.choice((2, 200)),
        )

    async def _settings(self) -> Write:
        view = await view_of(self._store, self._random.choice(self.QUEUES), self.now)
        declared = QueueSettings(partitioned=True, concurrency=self._random.choice((None, 1, 3, 9)))
        return ConfigureQueue(name=view.name, base=view.version, declared=declared)


class QueueTraceCases(ContractCase):
    @case
    async def test_counts_equal_a_recount_after_every_write_of_a_random_trace(self, store: Store) -> None:
        for name in QueueTrace.QUEUES:
            await store.commit([ConfigureQueue(name=name, base=0, declared=QueueSettings(partitioned=True))])
        trace, admitted = QueueTrace(store, Random(13)), 0
        for n in range(300):
            write = await trace.next_write()
            if write is not None:
                (result,) = await store.commit([write])
                admitted += len(result.runs) if isinstance(result, Admitted) else 0
            if n % 40 == 39:
                await store.prune(trace.now)
            if n % 5 == 4:
                await check_counts(store, QueueTrace.QUEUES)
        assert admitted > 5, "the trace must admit runs"
