"""Engines that share a store: each takes its share, and nothing strands when one is full, paused, gone or new."""

from __future__ import annotations

import asyncio

from perdure import Context, EngineConfig, RunStatus, step, workflow
from perdure.cluster.shard_assignment import assigned_worker
from perdure.model.ids import shard_of
from tests.engine.store_matrix import on_every_store

SHARDS = EngineConfig().shards


@step
async def share_work(n: int) -> int:
    return n


@workflow
async def shared(ctx: Context, n: int) -> int:
    return await share_work(n)


@workflow
async def shared_later(ctx: Context, seconds: float) -> int:
    await ctx.sleep(seconds)
    return await share_work(1)


def ids_of(engine, everyone, count: int, name: str = "r") -> list[str]:
    """Ids of runs whose shard is assigned to this engine."""
    workers = [each.worker for each in everyone]
    found: list[str] = []
    n = 0
    while len(found) < count:
        if assigned_worker(shard_of(f"{name}{n}", SHARDS), workers) == engine.worker:
            found.append(f"{name}{n}")
        n += 1
    return found


async def two(h, *workflows, **options):
    """Two engines that know each other, and a client."""
    engines = [await h.engine(*workflows, **options) for _ in range(2)]
    await h.clock.advance(6)
    return (*engines, await h.client())


@on_every_store
async def test_each_takes_the_runs_of_its_own_shards(h):
    one, other, client = await two(h, shared)
    runs = [await client.start(shared, n, id=f"s{n}") for n in range(60)]
    await h.drive(asyncio.gather(*(run.result() for run in runs)), 3)
    workers = [one.worker, other.worker]
    expected = {f"s{n}": 1 + workers.index(assigned_worker(shard_of(f"s{n}", SHARDS), workers)) for n in range(60)}
    assert {each.run_id: each.engine for each in h.executions} == expected


@on_every_store
async def test_an_engine_by_itself_asks_for_everything_at_once(h):
    engine = await h.engine(shared)
    await h.clock.advance(10)
    client = await h.client()
    engine.faults.calls.clear()
    await h.drive((await client.start(shared, 1)).result(), 1)
    assert engine.faults.calls["workers"] == 0
    assert engine.faults.calls["claim"] <= 3


@on_every_store
async def test_what_the_assigned_engine_does_not_take_is_taken_by_another_after_two_sweeps(h):
    paused, other, client = await two(h, shared, config=EngineConfig(lease=10_000))
    mine = ids_of(paused, [paused, other], 3)
    paused.faults.pause()  # alive for all that anybody knows
    runs = [await client.start(shared, n, id=id) for n, id in enumerate(mine)]
    await h.clock.advance(9)
    assert h.executions == []
    await h.clock.advance(7)
    assert [await run.status() for run in runs] == [RunStatus.SUCCEEDED] * 3
    assert {each.engine for each in h.executions} == {2}


@on_every_store
async def test_a_full_engine_is_helped_out(h):
    gate = asyncio.Event()

    @step
    async def wait_at_gate() -> None:
        await gate.wait()

    @workflow
    async def gated_share(ctx: Context) -> None:
        await wait_at_gate()

    full, other, client = await two(h, gated_share, concurrency=1)
    runs = [await client.start(gated_share, id=id) for id in ids_of(full, [full, other], 2)]
    await h.clock.advance(20)
    assert sorted(each.engine for each in h.executions) == [1, 2]
    gate.set()
    await h.drive(asyncio.gather(*(run.result() for run in runs)), 3)


@on_every_store
async def test_a_short_nap_ends_on_time_wherever_its_shard_is(h):
    one, other, client = await two(h, shared_later)
    for engine in (one, other):
        [id] = ids_of(engine, [one, other], 1, "nap")
        await one.start(shared_later, 2.0, id=id)  # born with the first, whoever's share it is
        await h.clock.advance(2.1)
        assert await client.status(id) is RunStatus.SUCCEEDED


@on_every_store
async def test_a_long_sleep_ends_on_time_with_whoever_has_its_shard(h):
    one, other, client = await two(h, shared_later)
    ids = {engine.number: ids_of(engine, [one, other], 1, "long")[0] for engine in (one, other)}
    for id in ids.values():
        await one.start(shared_later, 33.3, id=id)
    await h.clock.advance(33.4)
    assert {each.engine: each.run_id for each in h.executions} == ids
    for id in ids.values():
        assert await client.status(id) is RunStatus.SUCCEEDED


@on_every_store
async def test_who_shuts_down_hands_its_runs_over_at_once(h):
    leaver, other, client = await two(h, shared_later)
    ids = ids_of(leaver, [leaver, other], 3)
    for id in ids:
        await client.start(shared_later, 20.0, id=id)
    await h.settle()
    await h.drive(leaver.shutdown(), 1)
    await h.clock.advance(20.5)
    assert [await client.status(id) for id in ids] == [RunStatus.SUCCEEDED] * 3
    assert {each.engine for each in h.executions} == {2}


@on_every_store
async def test_runs_given_back_by_a_shutdown_go_on_at_once(h):
    """The others still count with the leaver when the hint comes, and look around."""
    gate = asyncio.Event()

    @step
    async def linger() -> int:
        if not gate.is_set():
            await asyncio.get_running_loop().create_future()
        return 1

    @workflow
    async def lingering(ctx: Context) -> int:
        return await linger()

    leaver, other, client = await two(h, lingering)
    ids = ids_of(leaver, [leaver, other], 3)
    for id in ids:
        await client.start(lingering, id=id)
    await h.settle()
    assert {each.engine for each in h.executions} == {1}
    gate.set()
    await h.drive(leaver.shutdown(grace=0), 1)
    await h.clock.advance(0.5)
    assert [await client.status(id) for id in ids] == [RunStatus.SUCCEEDED] * 3
    assert [(await client.describe(id)).recoveries for id in ids] == [0] * 3


@on_every_store
async def test_others_take_the_share_of_who_is_still_finishing_its_steps(h):
    @step
    async def finish_slowly() -> None:
        await asyncio.get_running_loop().create_future()

    @workflow
    async def finishing(ctx: Context) -> None:
        await finish_slowly()

    leaver, other, client = await two(h, finishing, shared)
    first, *later = ids_of(leaver, [leaver, other], 4)
    await client.start(finishing, id=first)
    await h.settle()
    h.background(leaver.shutdown(grace=4))
    await h.settle()
    for id in later:
        await client.start(shared, 1, id=id)
    await h.clock.advance(1)
    assert [await client.status(id) for id in later] == [RunStatus.SUCCEEDED] * 3
    assert {each.engine for each in h.executions if each.run_id in later} == {2}


@on_every_store
async def test_a_worker_that_comes_takes_its_share(h):
    one = await h.engine(shared)
    await h.clock.advance(6)
    comer = await h.engine(shared)
    await h.clock.advance(6)
    client = await h.client()
    mine = ids_of(comer, [one, comer], 5)
    runs = [await client.start(shared, 1, id=id) for id in mine]
    await h.drive(asyncio.gather(*(run.result() for run in runs)), 3)
    assert {each.engine for each in h.executions} == {2}


@on_every_store
async def test_services_with_different_workflows_in_one_pool_both_get_their_work(h):
    @workflow
    async def of_one_service(ctx: Context) -> int:
        return await share_work(1)

    @workflow
    async def of_both_services(ctx: Context) -> int:
        return await share_work(2)

    one, other, client = await two(h, of_both_services, shared)
    third = await h.engine(of_one_service, of_both_services)
    await h.clock.advance(6)
    runs = [await client.start(wf, id=f"{wf.name}{n}") for n in range(30) for wf in (of_one_service, of_both_services)]
    await h.drive(asyncio.gather(*(run.result() for run in runs)), 3)
    executed = {(each.run_id.rstrip("0123456789"), each.engine) for each in h.executions}
    assert executed == {
        ("of_one_service", third.number),
        *(("of_both_services", engine.number) for engine in (one, other, third)),
    }


@on_every_store
async def test_a_workflow_that_nobody_has_waits_and_says_so_while_others_go_on_time(h):
    @workflow
    async def of_nobody(ctx: Context) -> int:
        return 1

    *_, client = await two(h, shared_later)
    stranded = await client.start(of_nobody)
    runs = [await client.start(shared_later, 1.5, id=f"t{n}") for n in range(8)]
    await h.drive(asyncio.gather(*(run.result() for run in runs)), 2.6)
    [reason] = (await stranded.describe()).waiting_for
    assert reason.kind == "no_worker"
