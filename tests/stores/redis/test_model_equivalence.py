"""The memory store and the Redis store return the same results for any sequence of calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import WriteResult
from perdure.stores.writes import CommitTurn, Write
from perdure.testing.contract.builders import receive, run, worker
from tests.repetitions import repetitions
from tests.servers.redis import prefix_of_its_own
from tests.stores.test_model_equivalence import RUNS, ObservedRuns, StoreCall, _sorted, _state, calls


@pytest.mark.long
@pytest.mark.parametrize("partitions", [1, 4])
@settings(max_examples=repetitions(30, 200))
@given(script=st.lists(calls, max_size=12))
def test_memory_and_redis_agree(partitions: int, script: list[StoreCall]) -> None:
    with prefix_of_its_own(partitions=partitions) as url:
        asyncio.run(_agree(url, script))


async def _agree(url: str, script: list[StoreCall]) -> None:
    memory, redis = MemoryStore(), RedisStore(url)
    try:
        for store in (memory, redis):
            await store.open(shards=4)
            await store.join(worker("a"))
            await store.join(worker("b"))
            await store.commit([run(id, owner="a") for id in RUNS])
            await store.commit([receive(0, "t", id="s", turn_id="w0"), receive(0, "t", id="v", turn_id="w0")])
        observed = ObservedRuns()
        for step in script:
            snapshots = await memory.load(RUNS)
            observed.update(snapshots)
            lasts = {each.record.id: each.record.last_message_no for each in snapshots if each is not None}
            expected = await step(PossibleTurns(memory, lasts), observed)  # type: ignore[arg-type]
            got = await step(PossibleTurns(redis, lasts), observed)  # type: ignore[arg-type]
            assert _sorted(got) == _sorted(expected), step.__qualname__
            assert await _state(redis) == await _state(memory), step.__qualname__
    finally:
        await redis.close()


class PossibleTurns:
    """A store that gets only turns that are possible: they have seen and consumed only messages that exist."""

    def __init__(self, store: Store, lasts: dict[str, int]) -> None:
        self._store = store
        self._lasts = lasts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, batch: list[Write]) -> list[WriteResult]:
        return await self._store.commit([self._limit(write) for write in batch])

    def _limit(self, write: Write) -> Write:
        if not isinstance(write, CommitTurn):
            return write
        last = self._lasts.get(write.run_id, 0)
        consumed = tuple(number for number in write.consumed if number <= last)
        return replace(write, seen=min(write.seen, last), consumed=consumed)
