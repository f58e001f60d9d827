"""Queues in Redis: the fast path declines for their runs, several partitions refuse them, ended runs leave nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from perdure.errors import StoreError
from perdure.model.queue_records import RateLimit, Take
from perdure.stores.protocol import Claim
from perdure.stores.redis import fast_path
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Admitted, Committed, Created, NotQueued, QueueMissing, Superseded
from perdure.stores.writes import Write
from perdure.testing.contract.builders import claim, end, entry, finalize, run, succeeded, turn, worker
from perdure.testing.contract.queue_builders import admit, configure, leave, move, queued, requeue_ended, take, view_of
from tests.servers.redis import prefix_of_its_own
from tests.stores.redis.test_fast_path import apply, read_all_keys

HOLDS_SLOT: Sequence[Write | Claim] = (
    configure(),
    queued("q1", tags={"n": 1}, partition="p"),
    queued("q2", partition="p"),
    admit(1, take("p")),
    claim(now=400.0),
)
SCENARIOS: dict[str, tuple[Sequence[Write | Claim], Write, list[str]]] = {
    "a step of a run that holds a slot": (HOLDS_SLOT, turn(0, entry(), id="q1"), ["fast_turn"]),
    "the end of a run that holds a slot": (
        HOLDS_SLOT,
        turn(0, entry(), id="q1", patch=succeeded(prune_at=900.0)),
        ["fast_turn", "commit"],
    ),
    "the end of a run that has given up its slot": (
        (*HOLDS_SLOT, leave("q1", "q", 410.0)),
        turn(0, entry(), id="q1", patch=succeeded()),
        ["fast_turn"],
    ),
    "the end of a run beside a queue": (HOLDS_SLOT, turn(0, entry(), patch=succeeded()), ["fast_turn"]),
    "a new run beside a queue": (HOLDS_SLOT, run("new", owner="a"), ["fast_create"]),
    "a new run in a queue": ((configure(),), queued("new", owner="a"), ["commit"]),
}


def with_store(test: Callable[[RedisStore], Awaitable[None]], partitions: int = 1) -> None:
    with_two_stores(lambda store, _: test(store), partitions)


def with_two_stores(test: Callable[[RedisStore, RedisStore], Awaitable[None]], partitions: int = 1) -> None:
    async def scenario(url: str) -> None:
        store, other = RedisStore(url), RedisStore(url)
        await store.open(shards=16)
        await other.open(shards=16)
        try:
            await store.join(worker("a"))
            await test(store, other)
        finally:
            await store.close()
            await other.close()

    with prefix_of_its_own(partitions=partitions) as url:
        asyncio.run(scenario(url))


@pytest.mark.parametrize("what", SCENARIOS)
def test_fast_path_leaves_the_same_keys_as_the_general_path_with_queues(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write, scripts = SCENARIOS[what]
    fast = apply(before, write)
    assert fast[2] == scripts
    monkeypatch.setattr(fast_path, "build_call", lambda *_: None)
    general = apply(before, write)
    assert fast[:2] == general[:2]


def test_queue_is_refused_on_two_partitions() -> None:
    async def scenario(store: RedisStore) -> None:
        with pytest.raises(
            StoreError, match=r"has no queues on several partitions .* 'q' cannot be declared"
        ) as caught:
            await store.commit([run("r"), configure()])
        assert not caught.value.retryable
        assert await store.records(["r"]) == [None], "a write of a refused batch was stored"
        assert await store.commit([queued("w"), admit(1, 1), run("r")]) == [
            QueueMissing(),
            QueueMissing(),
            Created(owned=False),
        ]
        assert await store.commit([move("r", "q", 1), leave("r", "q", 200.0)]) == [NotQueued(), NotQueued()]
        assert await store.queues() == []
        assert await store.queue_view("q", 200.0) is None
        assert await store.places("q") == []
        assert await store.place("r") is None
        assert await store.places_ahead("r") == 0
        assert [each.id for each in await store.claim(claim(gates=(("q", 5),)))] == ["r"]

    with_store(scenario, partitions=2)


def test_two_admitters_never_exceed_the_limit() -> None:
    """Each plans from its own view, and runs end meanwhile. A slot is held from the admission to the end."""
    limit, runs = 3, 30
    held: list[int] = []
    ended: set[str] = set()
    superseded: list[object] = []

    async def admit_and_end(store: RedisStore) -> None:
        while len(ended) < runs:
            view = await view_of(store)
            (result,) = await store.commit([admit(view.version, limit - view.held)])
            if isinstance(result, Superseded):
                superseded.append(result)
            places = await store.places("q", held=True)
            held.append(len(places))
            for place in places[:2]:
                await store.commit([end(id=place.run_id)])
                ended.add(place.run_id)

    async def scenario(store: RedisStore, other: RedisStore) -> None:
        await store.commit([configure(concurrency=limit), *(queued(f"r{n:02}") for n in range(runs))])
        await asyncio.gather(*map(admit_and_end, (store, other, store, other)))
        assert max(held) == limit
        assert superseded
        assert ended == {f"r{n:02}" for n in range(runs)}

    with_two_stores(scenario)


def test_ended_runs_leave_only_the_settings_of_their_queue() -> None:
    async def scenario(store: RedisStore) -> None:
        options: dict[str, Any] = {"dedupe": "k", "expires_at": 900.0}
        await store.commit(
            [configure(), queued("held", partition="p", **options), queued("delayed", eligible_at=500.0)]
        )
        await store.commit(
            [queued("waiting", priority=-3), queued("left"), admit(1, take("p", state=b"s", keep_until=300.0))]
        )
        await store.commit(
            [queued("again", partition="p", on_duplicate="replace", **options), leave("left", "q", 205.0)]
        )
        names = ("held", "delayed", "waiting", "left", "again")
        await store.commit([end(id=id, prune_after=0.0) for id in names])
        await store.commit([requeue_ended(1, id="held"), end("end again", id="held", prune_after=0.0)])
        await store.commit([finalize(id, orphaned_children=True) for id in names])
        assert sorted(await store.prune(1_000.0)) == sorted(names)
        left = {name.decode().split(":")[1] for name in await read_all_keys(store)}
        assert left == {"meta", "workers", "leases", "alive", "queues", "queue", "last-place-number"}

    with_store(scenario)


def test_waiting_run_whose_row_is_missing_does_not_block_its_queue() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([configure(), *(queued(id) for id in ("first", "second", "third"))])
        await store._partitions.command(0, "DEL", "run:first")
        await store._partitions.command(0, "DEL", "place:second")
        (result,) = await store.commit([admit(1, 2)])
        assert isinstance(result, Admitted)
        assert result.runs == ("third",)
        view = await view_of(store)
        assert (view.held, [each.waiting for each in view.partitions]) == (1, [])

    with_store(scenario)


def test_priority_that_does_not_fit_is_refused() -> None:
    async def scenario(store: RedisStore) -> None:
        await store.commit([configure(), queued("r", priority=-255), queued("last", priority=255)])
        for write in (queued("w", priority=256), move("r", "q", -256)):
            with pytest.raises(StoreError, match="priority must be between -255 and 255"):
                await store.commit([write])
        assert [(each.run_id, each.priority) for each in await store.places("q")] == [("r", -255), ("last", 255)]

    with_store(scenario)


def test_equal_settings_of_other_number_types_change_nothing() -> None:
    async def scenario(store: RedisStore) -> None:
        assert await store.commit([configure(rate=RateLimit(5, 60))]) == [Committed(version=1)]
        assert await store.commit([configure(rate=RateLimit(5, 60.0))]) == [Committed(version=1)]

    with_store(scenario)


def test_partition_is_pruned_only_when_its_state_is_not_needed() -> None:
    async def scenario(store: RedisStore) -> None:
        takes = (
            Take(partition="kept", count=0, state=b"s"),
            Take(partition="later", count=0, state=b"s", keep_until=500.0),
        )
        await store.commit([configure(), admit(1, *takes, Take(partition="empty", count=0))])
        for now, expected in ((499.0, [b"kept", b"later"]), (500.0, [b"kept"])):
            await store.prune(now)
            assert await store._partitions.command(0, "ZRANGE", "queue-partitions:q", 0, -1) == expected

    with_store(scenario)
