"""A store that fails for a while delays runs, and neither fails nor duplicates them (guarantee 9)."""

import asyncio
import random
from collections import Counter

import pytest

from perdure import Client, Context, EngineConfig, Retry, RunStatus, StoreError, Worker, current_step, step, workflow
from perdure.stores.memory.store import MemoryStore
from tests.engine.store_matrix import everything_in, on_every_store

EFFECTS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def forget():
    EFFECTS.clear()


@step(retry=Retry(initial=1, jitter=0))
async def effect(n: int) -> int:
    me = current_step()
    EFFECTS[f"{me.run_id} {me.location} {me.attempt}"] += 1
    if n == 3 and me.attempt == 1:
        raise ValueError("once")
    return n


@workflow
async def busy(ctx: Context, n: int) -> int:
    total = 0
    for i in range(n):
        total += await effect(i)
        if i % 2:
            await ctx.sleep(1)
    return total + sum(await asyncio.gather(effect(10), effect(20)))


async def assert_all_went_well(h, engine, runs) -> None:
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == [45] * len(runs)
    assert set(EFFECTS.values()) == {1}
    assert len(EFFECTS) == len(runs) * 9


@on_every_store
async def test_simulation_loses_every_response_once(h):
    engine = await h.engine(busy)
    commit = engine.faults.commit
    tries = 0

    async def answers_get_lost(batch):
        nonlocal tries
        tries += 1
        engine.faults.lose_responses(tries % 2)
        return await commit(batch)

    engine.faults.commit = answers_get_lost
    runs = await h.drive(asyncio.gather(*(engine.start(busy, 6, id=f"b{i}") for i in range(3))))
    await assert_all_went_well(h, engine, runs)
    assert tries > 20


@on_every_store
async def test_runs_survive_a_store_outage_of_minutes(h):
    engine = await h.engine(busy)
    runs = [await engine.start(busy, 6, id=f"b{i}") for i in range(3)]
    await h.clock.advance(1.5)
    engine.faults.fail_calls(10**9)
    await h.clock.advance(300)
    statuses = {record.status for record in await h.store.records([run.id for run in runs])}
    assert not any(status.terminal for status in statuses)
    engine.faults.fail_calls(0)
    await assert_all_went_well(h, engine, runs)


@on_every_store
async def test_simulation_fails_every_kind_of_call(h):
    engine = await h.engine(busy, config=EngineConfig(resident_runs=2))
    through = engine.faults._forward
    chance = random.Random(7)

    async def flaky(name, call):
        if chance.random() < 0.3:
            raise StoreError(f"away for a moment ({name})", retryable=True)
        return await through(name, call)

    engine.faults._forward = flaky
    runs = [await h.drive(engine.start(busy, 6, id=f"b{i}")) for i in range(10)]
    await assert_all_went_well(h, engine, runs)


@on_every_store
async def test_claim_with_a_lost_response_is_noticed(h):
    client = await h.client()
    run = await client.start(busy, 6, id="b")
    engine = await h.engine(busy, config=EngineConfig(resident_runs=1))
    claim = engine.faults.claim
    lost = 0

    async def lossy(given):
        nonlocal lost
        answer = await claim(given)
        if answer and lost < 3:
            lost += 1
            raise StoreError("the result was lost", retryable=True)
        return answer

    engine.faults.claim = lossy
    other = await client.start(busy, 6, id="c")
    await assert_all_went_well(h, engine, [run, other])
    assert lost


@on_every_store
async def test_run_executes_although_its_caller_stopped_waiting(h):
    """All results of `start` are lost until the caller gets an error. The run exists and must be executed."""
    engine = await h.engine(busy, config=EngineConfig(store_retry=Retry(max_attempts=3, initial=0.1)))
    engine.faults.lose_responses(3)
    with pytest.raises(StoreError) as raised:
        await h.drive(engine.start(busy, 6, id="b"))
    assert raised.value.retryable
    assert await h.drive(engine.result("b"), within=60) == 45
    again = await engine.start(busy, 6, id="b")
    assert not again.created
    assert set(EFFECTS.values()) == {1}


@on_every_store
async def test_caller_gets_the_error_when_the_store_stays_unavailable(h):
    engine = await h.engine(busy)
    engine.faults.fail_calls(10**9)
    with pytest.raises(StoreError, match="unavailable"):
        await h.drive(engine.start(busy, 6, id="b"))
    with pytest.raises(StoreError, match="unavailable"):
        await h.drive(engine.status("b"))
    engine.faults.fail_calls(0)
    assert await engine.status("b") is None


@on_every_store
async def test_opening_waits_for_the_store(h):
    faulty = h.faulty()
    faulty.fail_calls(3, calls=["open"])
    engine = await h.engine(busy, store=faulty)
    assert await h.run_to_end(await engine.start(busy, 6)) == 45


@on_every_store
async def test_commit_with_a_lost_response_is_not_committed_twice(h):
    engine = await h.engine(busy)
    run = await engine.start(busy, 6, id="b")
    await h.run_to_end(run)
    clean = (await everything_in(h.store, "b"))[0]
    engine.faults.commit, commit = None, engine.faults.commit

    async def lossy(batch):
        engine.faults.lose_responses(1 - tries.pop(str(batch), 0))
        tries[str(batch)] = 1
        return await commit(batch)

    tries: dict[str, int] = {}
    engine.faults.commit = lossy
    again = await h.drive(engine.start(busy, 6, id="c"))
    await h.run_to_end(again)
    lossy_run = (await everything_in(h.store, "c"))[0]
    assert [entry.location for entry in lossy_run.entries] == [entry.location for entry in clean.entries]
    assert lossy_run.position == clean.position
    assert lossy_run.record.status is RunStatus.SUCCEEDED


@on_every_store
async def test_worker_retries_to_open_its_store_after_a_client_gives_up(h):
    config = EngineConfig(store_retry=Retry(max_attempts=2, initial=0.1, jitter=0))
    faulty = h.faulty()
    faulty.fail_calls(10, calls=["open"])
    with pytest.raises(StoreError):
        await h.drive(Client(faulty, config=config, clock=h.clock).open())
    worker = Worker(faulty, [busy], config=config, clock=h.clock)
    await h.drive(worker.__aenter__())
    client = await h.client()
    run = await h.drive(client.start(busy, 1))
    assert await h.run_to_end(run) == 30
    await h.drive(worker.__aexit__(None, None, None))


@on_every_store
async def test_lease_survives_a_short_store_outage(h):
    engine = await h.engine(busy)
    worker = engine.worker
    await h.clock.advance(4)
    engine.faults.fail_calls(2, calls=["renew"])
    await h.clock.advance(60)
    assert engine.worker == worker


class Timeless(MemoryStore):
    opened = 0

    async def open(self, *, shards: int) -> None:
        await super().open(shards=shards)
        self.opened += 1

    async def close(self) -> None:
        await super().close()
        self.opened -= 1

    async def now(self) -> float:
        raise StoreError("the store does not know the time")


def test_store_that_cannot_be_opened_is_closed():
    store = Timeless()

    async def main() -> None:
        async with Client(store):
            pass

    with pytest.raises(StoreError, match="does not know the time"):
        asyncio.run(main())
    assert store.opened == 0
