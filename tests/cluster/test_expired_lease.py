"""A worker that lost the store for longer than its lease starts no step that another worker may own by now."""

from __future__ import annotations

import asyncio

from perdure import Context, RunStatus, step, workflow
from tests.engine.store_matrix import on_every_store


@on_every_store
async def test_commit_result_retrieved_after_a_takeover_starts_no_step_again(h):
    """The turn was committed and its result lost; the worker retries the commit after another has continued the run."""
    done: list[str] = []

    @step
    async def first_leg() -> int:
        done.append("first")
        return 1

    @step
    async def second_leg() -> int:
        done.append("second")
        return 2

    @workflow
    async def two_legs(ctx: Context) -> int:
        return await first_leg() + await second_leg()

    cut_off = await h.engine(two_legs)
    commit = cut_off.faults.commit

    async def commit_and_lose(batch):
        results = await commit(batch)
        if any(getattr(write, "entries", ()) for write in batch):
            cut_off.faults.commit = commit
            cut_off.faults.fail_calls(10**9)  # the turn with the first leg is stored; its result is lost
            return await commit(batch)
        return results

    cut_off.faults.commit = commit_and_lose
    run = await cut_off.start(two_legs, id="legs")
    await h.settle()
    assert done == ["first"]
    other = await h.engine(two_legs)
    await h.clock.advance(30)
    assert await other.status("legs") is RunStatus.SUCCEEDED
    assert done == ["first", "second"]
    cut_off.faults.fail_calls(
        10**9, calls=("renew", "workers")
    )  # its commit gets through before it can renew its lease
    await h.clock.advance(30)
    assert done == ["first", "second"], "a recorded step ran again"
    cut_off.faults.fail_calls(0)
    assert await h.run_to_end(run) == 3


@on_every_store
async def test_single_worker_continues_after_an_outage_longer_than_its_lease(h):
    @step
    async def leg(n: int) -> int:
        return n

    @workflow
    async def four_legs(ctx: Context) -> int:
        return sum([await leg(n) for n in range(4)])

    engine, client = await h.engine(four_legs), await h.client()  # a call of the engine may raise in the outage
    commit = engine.faults.commit

    async def cut_once(batch):
        if any(getattr(write, "entries", ()) for write in batch):
            engine.faults.commit = commit
            engine.faults.fail_calls(60)
        return await commit(batch)

    engine.faults.commit = cut_once
    worker = engine.worker
    run = await engine.start(four_legs)
    assert await h.drive(client.result(run.id), 600) == 6
    assert h.executed() == [("leg", 1), ("leg#1", 1), ("leg#2", 1), ("leg#3", 1)]
    assert engine.worker == worker, "no other worker fenced it"


@on_every_store
async def test_turns_of_a_fenced_worker_are_rejected_and_counted(h):
    gate = asyncio.Event()

    @step
    async def hold_back() -> int:
        await gate.wait()
        return 1

    @workflow
    async def held_back(ctx: Context) -> int:
        return await hold_back()

    late = await h.engine(held_back)
    for n in range(3):
        await late.start(held_back, id=f"h{n}")
    await h.settle()
    await h.store.fence_worker(late.worker)
    await h.store.release_runs(late.worker, h.clock.now(), recovered=True)
    gate.set()
    await h.settle()
    assert late._runtime.coordinator.rejected_turns == 3
    await h.clock.advance(10)
    assert [await late.status(f"h{n}") for n in range(3)] == [RunStatus.SUCCEEDED] * 3


@on_every_store
async def test_delayed_renewal_does_not_restore_a_removed_worker_id(h):
    @workflow
    async def nap(ctx: Context) -> str:
        await ctx.sleep(60)
        return "rested"

    frozen = await h.engine(nap)
    run = await frozen.start(nap)
    await h.settle()
    old = frozen.worker
    frozen.faults.pause()  # its next renewal is sent while the lease is valid, and arrives after its row is removed
    other = await h.engine(nap)
    await h.clock.advance(40)
    assert [worker.id for worker in await h.store.workers()] == [other.worker]
    frozen.faults.unblock()
    await h.settle()
    assert frozen.worker != old
    assert {worker.id for worker in await h.store.workers()} == {frozen.worker, other.worker}
    assert await h.run_to_end(run) == "rested"
