"""Workers whose clocks stand still, jump or run at a wrong rate: timers are late by one lease renewal at most.

The workers do not fence each other in turn.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from perdure import Client, Context, Engine, EngineConfig, RunStatus, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK, StoreClock
from perdure.testing import VirtualClock
from tests.cluster.machine_clock import MachineClock
from tests.engine.store_matrix import on_every_store

LEASE = 15.0
RENEWAL = LEASE / 3
MINUTE = 60.0
SLACK = 0.1  # for the pauses of the claimer


@step
async def count(n: int) -> int:
    return n + 1


@workflow
async def naps(ctx: Context, seconds: float, times: int = 1) -> int:
    n = 0
    for _ in range(times):
        await ctx.sleep(seconds)
        n = await count(n)
    return n


@step
async def hang() -> str:
    await asyncio.get_running_loop().create_future()
    return "never"


@workflow
async def gives_up(ctx: Context, seconds: float) -> str:
    winner, _ = await ctx.race(work=hang(), limit=ctx.sleep(seconds))
    return winner


async def engine_on(h, clock: MachineClock) -> Engine:
    engine = Engine(h.faulty(), [naps, gives_up], h.config, clock=clock)
    h._open.append(engine)
    await h.drive(engine.open())
    return engine


def worker_of(engine: Engine) -> str:
    assert engine._runtime is not None
    return engine._runtime.coordinator.worker


@on_every_store
async def test_timer_is_not_delayed_beyond_one_renewal_after_a_clock_stood_still(h):
    clock = MachineClock(h.clock)
    engine = await engine_on(h, clock)
    await engine.start(naps, 30.0, id="n")
    await h.settle()
    clock.run_at(0)
    await h.clock.advance(MINUTE)
    assert await engine.status("n") is RunStatus.SUSPENDED, "nothing happens while the clock stands still"
    clock.run_at(1)
    await h.clock.advance(RENEWAL + SLACK)
    assert await engine.status("n") is RunStatus.SUCCEEDED


@on_every_store
async def test_timer_is_not_delayed_beyond_one_renewal_after_a_suspension_that_the_clock_counts(h):
    clock = MachineClock(h.clock)
    engine = await engine_on(h, clock)
    await engine.start(gives_up, 30.0, id="n")
    await h.settle()
    clock.delay_timers(MINUTE)
    await h.clock.advance(MINUTE + RENEWAL + SLACK)
    assert await engine.status("n") is RunStatus.SUCCEEDED


@on_every_store
@pytest.mark.parametrize("rate", [1.5, 0.5])
async def test_timer_is_off_by_one_renewal_at_most_when_the_clock_has_a_wrong_rate(h, rate: float):
    engine = await engine_on(h, MachineClock(h.clock, rate))
    started = h.clock.now()
    run = await engine.start(naps, 300.0)
    await h.run_to_end(run)
    assert h.clock.now() - started == pytest.approx(300.0, abs=RENEWAL / min(rate, 1.0) + SLACK)


@on_every_store
async def test_worker_whose_clock_stood_still_is_fenced_once_and_fences_no_other_worker(h):
    clock = MachineClock(h.clock)
    still = await engine_on(h, clock)
    other = await h.engine(naps, gives_up)
    before = worker_of(other)
    run = await still.start(naps, 10.0, 12, id="n")
    clock.run_at(0)
    await h.clock.advance(MINUTE)
    clock.run_at(1)
    await h.clock.advance(2 * RENEWAL)
    members = {worker.id for worker in await h.store.workers()}
    assert members == {worker_of(still), before}
    await h.clock.advance(5 * MINUTE)
    assert {worker.id for worker in await h.store.workers()} == members, "they fenced each other in turn"
    assert await h.run_to_end(run) == 12


@on_every_store
@pytest.mark.parametrize("rate", [1.5, 0.5])
async def test_workers_with_different_rates_do_not_fence_each_other(h, rate: float):
    wrong, right = await engine_on(h, MachineClock(h.clock, rate)), await h.engine(naps, gives_up)
    members = {worker_of(wrong), worker_of(right)}
    runs = [await wrong.start(naps, 20.0, 12, id=f"n{n}") for n in range(4)]
    for _ in range(10):
        await h.clock.advance(MINUTE / 2)
        assert {worker.id for worker in await h.store.workers()} == members
    assert [await h.run_to_end(run) for run in runs] == [12] * 4
    assert [(await right.describe(run.id)).recoveries for run in runs] == [0] * 4


@on_every_store
@pytest.mark.parametrize("seconds", [MINUTE, -MINUTE])
async def test_worker_whose_clock_is_set_is_not_fenced_and_its_timers_are_on_time(h, seconds: float):
    clock = MachineClock(h.clock)
    stepped, right = await engine_on(h, clock), await h.engine(naps, gives_up)
    members = {worker_of(stepped), worker_of(right)}
    for n in range(8):
        await stepped.start(naps, 30.0, id=f"n{n}")
    await h.settle()
    clock.step(seconds)
    for _ in range(6):
        await h.clock.advance(RENEWAL)
        assert {worker.id for worker in await h.store.workers()} == members
    await h.clock.advance(RENEWAL + SLACK)
    assert [await right.status(f"n{n}") for n in range(8)] == [RunStatus.SUCCEEDED] * 8


@on_every_store
async def test_workers_that_were_suspended_together_do_not_fence_each_other(h):
    clocks = [MachineClock(h.clock) for _ in range(3)]
    engines = [await engine_on(h, clock) for clock in clocks]
    members = [worker_of(engine) for engine in engines]
    run = await engines[0].start(naps, 100.0, id="n")
    for clock in clocks:
        clock.run_at(0)
    await h.clock.advance(MINUTE)
    for clock in clocks:
        clock.run_at(1)
    await h.clock.advance(MINUTE)
    assert [worker_of(engine) for engine in engines] == members
    assert await h.run_to_end(run) == 1
    assert (await engines[0].describe("n")).recoveries == 0


@on_every_store
async def test_client_follows_the_time_of_the_store(h):
    clock = MachineClock(h.clock)
    client = Client(h.faulty(), config=EngineConfig(), clock=clock)
    h._open.append(client)
    await h.drive(client.open())
    clock.run_at(0)
    await h.clock.advance(MINUTE)
    clock.run_at(1)
    await h.clock.advance(LEASE)
    run = await client.start(naps, 1.0)
    assert (await run.describe()).created_at.timestamp() == pytest.approx(h.clock.now(), abs=SLACK)


def test_synchronizing_fires_the_timers_that_a_suspension_has_delayed():
    """The timers of an event loop do not count a suspension of the machine, but its clock does."""
    fired: list[str] = []

    async def test() -> None:
        truth = VirtualClock()
        machine = MachineClock(truth)

        async def read_store_time() -> float:
            return truth.now()

        clock = StoreClock(machine, read_store_time)
        await clock.synchronize()
        clock.call_at(truth.now() + 30, lambda: fired.append("due"))
        clock.call_at(truth.now() + 3600, lambda: fired.append("not due"))
        clock.call_at(truth.now() + 30, lambda: fired.append("cancelled")).cancel()
        machine.delay_timers(MINUTE)
        await truth.advance(MINUTE)
        assert fired == []
        await clock.synchronize()
        await truth.settle()

    asyncio.run(test())
    assert fired == ["due"]


def test_slow_call_does_not_change_a_clock_that_may_be_right():
    async def test() -> None:
        truth = VirtualClock()

        async def read_slowly() -> float:
            await truth.advance(10)
            seen = truth.now()
            await truth.advance(20)
            return seen

        clock = StoreClock(truth, read_slowly)
        clock.synchronized_at = truth.now()
        await clock.synchronize()
        assert clock.now() == truth.now()

    asyncio.run(test())


def test_sqlite_store_follows_the_clock_of_the_machine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Processes that started before and after the machine's clock was set agree on the time."""

    async def test() -> None:
        store = open_store(f"sqlite:///{tmp_path}/runs.db", SYSTEM_CLOCK)
        set_to = time.time() + 1000
        monkeypatch.setattr(time, "time", lambda: set_to)
        assert await store.now() == set_to

    asyncio.run(test())
