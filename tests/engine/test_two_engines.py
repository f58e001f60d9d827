"""Two engines on one store: each run executes on one of them, and a fenced worker changes nothing."""

import asyncio
from collections import Counter

import pytest

from perdure import Context, EngineConfig, Retry, RunStatus, current_step, step, workflow
from perdure.cluster.shard_assignment import assigned_worker
from perdure.model.ids import shard_of
from perdure.stores.results import Superseded
from perdure.stores.writes import CommitTurn
from tests.engine.store_matrix import another_handle, everything_in, on_every_store


@step
async def work(n: int) -> int:
    return n


@workflow
async def naps(ctx: Context, n: int) -> int:
    total = 0
    for i in range(n):
        total += await work(i)
        await ctx.sleep(1)
    return total


@on_every_store
async def test_no_run_is_executed_by_both(h):
    both_at_work = asyncio.Event()

    @step
    async def work_together(n: int) -> int:
        if {each.engine for each in h.executions} == {1, 2}:
            both_at_work.set()
        await both_at_work.wait()
        return n

    @workflow
    async def together(ctx: Context, n: int) -> int:
        total = 0
        for i in range(n):
            total += await work_together(i)
            await ctx.sleep(1)
        return total

    client = await h.client()
    runs = [await client.start(together, 5, id=f"n{i}") for i in range(40)]
    # A small cache, so that runs are claimed and evicted repeatedly.
    config = EngineConfig(resident_runs=8)
    for _ in range(2):
        await h.engine(together, config=config, store=another_handle(h.store, h.clock))
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == [10] * 40
    per_attempt = Counter((each.run_id, each.location, each.attempt) for each in h.executions)
    assert set(per_attempt.values()) == {1}
    assert len(per_attempt) == 200
    assert {each.engine for each in h.executions} == {1, 2}


@on_every_store
async def test_stale_cached_run_executes_nothing(h):
    """The first engine has the run cached before its second attempt, which the second engine has made."""

    @step(retry=Retry(max_attempts=3, initial=10, jitter=0))
    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ValueError("no")
        return "yes"

    @workflow
    async def trying(ctx: Context) -> str:
        word = await flaky()
        await ctx.sleep(10)
        return word

    first = await h.engine(trying)
    second = await h.engine(trying)
    workers = [first.worker, second.worker]
    run_id = next(id for id in map(str, range(99)) if assigned_worker(shard_of(id, 128), workers) == second.worker)
    await first.start(trying, id=run_id)
    await h.clock.advance(1)
    assert first.loaded_runs == [run_id]
    first.faults.pause()
    await h.clock.advance(10)  # the second engine makes the attempt, and the run sleeps
    assert h.executed() == [("flaky", 1), ("flaky", 2)]
    assert await second.status(run_id) is RunStatus.SUSPENDED
    second.faults.pause()
    first.faults.unblock()
    await h.clock.advance(30)  # until the second is fenced, and the first claims the run that it still has cached
    second.faults.unblock()
    assert await h.run_to_end(first.get(run_id)) == "yes"
    assert h.executed() == [("flaky", 1), ("flaky", 2)]


@on_every_store
async def test_fenced_worker_changes_nothing_and_rejoins_with_a_new_id(h):
    gate = asyncio.Event()

    @step
    async def hang() -> str:
        if len(h.executed()) == 1:
            await gate.wait()
            return "from the zombie"
        return "from its successor"

    @workflow
    async def stuck(ctx: Context) -> str:
        word = await hang()
        await ctx.sleep(5)
        return word

    zombie = await h.engine(stuck)
    await zombie.start(stuck, id="s")
    await h.settle()
    before = zombie.worker
    zombie.faults.fail_calls(10**9)  # cut off: it neither renews nor commits
    successor = await h.engine(stuck)
    await h.clock.advance(40)
    assert await successor.status("s") is RunStatus.SUCCEEDED
    stored = await everything_in(h.store, "s")
    gate.set()
    await h.settle()
    zombie.faults.fail_calls(0)
    await h.clock.advance(10)
    assert await everything_in(h.store, "s") == stored
    assert await successor.result("s") == "from its successor"
    assert zombie.worker != before
    workers = {worker.id for worker in await h.store.workers() if not worker.fenced}
    assert workers == {zombie.worker, successor.worker}
    await h.crash(successor)
    later = await zombie.start(stuck, id="later")  # and it works again
    assert await h.run_to_end(later) == "from its successor"
    assert h.executions[-1].engine == zombie.number


@on_every_store
async def test_a_stale_workers_commit_is_refused(h):
    """Guarantee 3, without any clock: the turn is well-formed and comes too late."""
    gate = asyncio.Event()

    @step
    async def hang() -> str:
        await gate.wait()
        return "x"

    @workflow
    async def stuck(ctx: Context) -> str:
        word = await hang()
        await work(1)
        return word

    first = await h.engine(stuck)
    await first.start(stuck, id="s")
    await h.settle()
    await h.store.fence_worker(first.worker)
    await h.store.release_runs(first.worker, h.clock.now(), recovered=True)
    before = await everything_in(h.store, "s")
    gate.set()
    await h.settle()
    refused = [write for batch in first.faults.committed for write in batch if isinstance(write, CommitTurn)]
    assert len(refused) == 1
    assert await h.store.commit(refused) == [Superseded()]
    assert await everything_in(h.store, "s") == before
    assert h.executed() == [("hang", 1)]  # the effects of a refused turn are not started
    await h.clock.advance(10)  # it joined again as a new member and finished the run
    assert await first.status("s") is RunStatus.SUCCEEDED


@on_every_store
async def test_rejoining_waits_for_an_unavailable_store(h):
    engine = await h.engine(naps)
    await h.store.fence_worker(engine.worker)
    gone = engine.worker
    engine.faults.fail_calls(3, calls=["retry_held"])
    await h.clock.advance(30)
    assert engine.worker != gone
    alive = {worker.id for worker in await h.store.workers() if not worker.fenced}
    assert engine.worker in alive
    assert await h.run_to_end(await engine.start(naps, 2)) == 1


@on_every_store
async def test_rejoining_survives_a_lost_first_renewal(h):
    engine = await h.engine(naps)
    client = await h.client()
    await h.store.fence_worker(engine.worker)
    await h.clock.advance(4.9)

    renewals = 0
    renew = engine.faults.renew

    async def flaky_renew(worker):
        nonlocal renewals
        renewals += 1
        if renewals == 2:  # the first reports that the worker is fenced, the second is by the new member
            engine.faults.fail_calls(1)
        return await renew(worker)

    engine.faults.renew = flaky_renew
    await h.clock.advance(30)
    assert renewals > 2
    assert await h.run_to_end(await client.start(naps, 2)) == 1


@on_every_store
async def test_workers_that_serve_different_workflows_share_a_store(h):
    @workflow
    async def mine(ctx: Context) -> int:
        return await work(1)

    @workflow
    async def yours(ctx: Context) -> int:
        return await work(2)

    one = await h.engine(mine)
    await h.engine(yours)
    runs = [await one.start(wf, id=f"{wf.name}-{i}") for wf in (mine, yours) for i in range(3)]
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == [1, 1, 1, 2, 2, 2]
    assert {each.engine for each in h.executions if each.run_id.startswith("mine")} == {1}
    assert {each.engine for each in h.executions if each.run_id.startswith("yours")} == {2}


@on_every_store
async def test_pools_are_separate(h):
    @workflow(pool="heavy")
    async def heavy(ctx: Context) -> int:
        return await work(1)

    light = await h.engine(heavy)
    run = await light.start(heavy)
    await h.clock.advance(30)
    if await run.status() is not RunStatus.PENDING:
        pytest.fail("a worker of the default pool executed a run of another pool")
    await h.engine(heavy, pool="heavy")
    assert await h.run_to_end(run) == 1
    assert {each.engine for each in h.executions} == {2}


@on_every_store
async def test_run_claimed_during_a_stale_load_is_loaded_again(h):
    engine = await h.engine(naps)
    await engine.start(naps, 1, id="n", delay=10)
    gate, load = asyncio.Event(), engine.faults.load

    async def slow_load(ids):
        snapshots = await load(ids)
        await gate.wait()
        return snapshots

    engine.faults.load = slow_load
    engine._runtime.coordinator.loader.load(["n"])  # as after a turn of it was refused
    await h.settle()
    await h.clock.advance(11)  # due, and claimed
    gate.set()
    assert await h.run_to_end(engine.get("n"), within=30) == 0
