"""The number of runs in memory, and the eviction and reload of the others."""

import asyncio
import gc
import weakref

from perdure import Context, EngineConfig, RunQuery, RunStatus, step, workflow
from tests.engine.store_matrix import on_every_store


@step
async def work(n: int) -> int:
    return n


class Heavy:
    """An object in a local variable of a workflow."""


@on_every_store
async def test_suspended_runs_beyond_the_limit_are_evicted_and_all_finish(h):
    alive: list[weakref.ref] = []

    @workflow
    async def sleeper(ctx: Context, n: int) -> int:
        held = Heavy()
        alive.append(weakref.ref(held))
        got = await work(n)
        await ctx.sleep(100)
        del held
        return got + await work(1)

    engine = await h.engine(sleeper, config=EngineConfig(resident_runs=5))
    runs = [await engine.start(sleeper, n, id=f"s{n}") for n in range(50)]
    await h.clock.advance(50)
    suspended = await engine.runs(RunQuery(status=RunStatus.SUSPENDED, limit=1000))
    assert len(suspended.runs) == 50
    assert len(engine.loaded_runs) <= 5
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 5
    results = await h.drive(asyncio.gather(*(run.result() for run in runs)))
    assert results == [n + 1 for n in range(50)]
    assert sorted(h.executed()) == sorted([("work", 1)] * 50 + [("work#1", 1)] * 50)


@on_every_store
async def test_due_run_is_claimed_when_a_slot_is_freed_without_waiting_for_a_sweep(h):
    @workflow
    async def sleeper(ctx: Context) -> None:
        await ctx.sleep(10)
        await work(1)

    engine = await h.engine(sleeper, config=EngineConfig(resident_runs=2, sweep_interval=1000))
    runs = [await engine.start(sleeper, id=f"s{n}") for n in range(30)]
    started = h.clock.now()
    await h.drive(asyncio.gather(*(run.result() for run in runs)))
    assert h.clock.now() - started < 30


@on_every_store
async def test_concurrency_limits_the_active_runs_of_a_worker(h):
    inside: set[str] = set()
    most = 0
    gates = [asyncio.Event() for _ in range(6)]

    @step
    async def hold(n: int) -> None:
        nonlocal most
        inside.add(str(n))
        most = max(most, len(inside))
        await gates[n].wait()
        inside.discard(str(n))

    @workflow
    async def holding(ctx: Context, n: int) -> None:
        await hold(n)

    engine = await h.engine(holding, concurrency=2, config=EngineConfig(sweep_interval=1000))
    client = await h.client()
    runs = [await client.start(holding, n, id=f"h{n}") for n in range(6)]
    await h.settle()
    assert len(inside) == 2
    for gate in gates:
        gate.set()
    await h.drive(asyncio.gather(*(run.result() for run in runs)), within=100)
    assert most == 2
    assert engine.slots_taken == 0


@on_every_store
async def test_evicted_run_is_closed_and_finishes_after_reload(h):
    closed: list[str] = []

    @workflow
    async def tidy(ctx: Context, n: int) -> int:
        try:
            await ctx.sleep(100)
        finally:
            closed.append(ctx.run_id)
        return n

    engine = await h.engine(tidy, config=EngineConfig(resident_runs=1))
    runs = [await engine.start(tidy, n, id=f"t{n}") for n in range(3)]
    await h.settle()
    assert len(closed) == 2
    assert engine.loaded_runs == [f"t{n}" for n in range(3) if f"t{n}" not in closed]
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == [0, 1, 2]


@on_every_store
async def test_cached_run_continues_without_a_load(h):
    @workflow
    async def sleeper(ctx: Context) -> int:
        for _ in range(5):
            await work(1)
            await ctx.sleep(10)
        return 5

    engine = await h.engine(sleeper)
    assert await h.run_to_end(await engine.start(sleeper)) == 5
    assert engine.faults.calls["load"] == 0


@on_every_store
async def test_replay_of_a_run_is_one_load(h):
    @workflow
    async def long(ctx: Context) -> int:
        total = 0
        for _ in range(100):
            total += await work(1)
        await ctx.sleep(10)
        return total

    first = await h.engine(long)
    await first.start(long, id="l")
    await h.clock.advance(1)
    await h.drive(first.shutdown())
    second = await h.engine(long)
    assert await h.run_to_end(second.get("l")) == 100
    assert second.faults.calls["load"] == 1
    assert len(h.executed()) == 100
