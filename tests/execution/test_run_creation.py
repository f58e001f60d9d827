"""A new run executes only after it is stored, and exactly once, whatever happens while it is being stored."""

import asyncio

import pytest

from perdure import Context, RunStatus, StoreError, step, workflow
from perdure.runner import eviction
from perdure.stores.writes import CreateRun
from tests.engine.store_matrix import on_every_store

ENTERED: list[int] = []


@pytest.fixture(autouse=True)
def clear_entered():
    ENTERED.clear()


@step
async def double(n: int) -> int:
    return 2 * n


@workflow
async def doubles(ctx: Context, n: int) -> int:
    ENTERED.append(n)  # perdure: ignore
    return await double(n)


@on_every_store
async def test_workflow_code_does_not_run_before_its_run_is_stored(h):
    engine = await h.engine(doubles)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    assert (ENTERED, h.executed(), starting.done()) == ([], [], False)
    engine.faults.unblock()
    run = await h.drive(starting)
    assert await h.run_to_end(run) == 8
    assert (ENTERED, h.executed()) == ([4], [("double", 1)])


@on_every_store
async def test_rejected_creation_leaves_no_run_in_memory_or_store(h):
    engine = await h.engine(doubles)
    before = set(eviction.LIVE)
    engine.faults.refuse(lambda write: isinstance(write, CreateRun))
    with pytest.raises(StoreError, match="planned"):
        await h.drive(engine.start(doubles, 4))
    assert (ENTERED, h.executed(), set(eviction.LIVE)) == ([], [], before)
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_run_whose_creation_result_is_lost_in_a_crash_runs_on_the_next_worker(h):
    engine = await h.engine(doubles)
    engine.faults.crash(1, "after")
    await h.drive_until_crash(engine, engine.start(doubles, 4))
    await h.crash(engine)
    assert (ENTERED, h.executed()) == ([], [])
    other = await h.engine(doubles)
    (found,) = (await h.drive(other.runs())).runs
    assert await h.drive(other.result(found.id)) == 8
    assert (ENTERED, h.executed()) == ([4], [("double", 1)])


@on_every_store
async def test_run_created_by_a_worker_that_is_fenced_meanwhile_is_claimed_like_any_other(h):
    engine = await h.engine(doubles)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    await h.store.fence_worker(engine.worker)
    engine.faults.unblock()
    run = await h.drive(starting)
    assert await h.run_to_end(run) == 8
    assert h.executed() == [("double", 1)]
    assert await run.status() is RunStatus.SUCCEEDED


@on_every_store
async def test_run_that_is_being_stored_while_its_engine_shuts_down_executes_once(h):
    engine = await h.engine(doubles)
    before = set(eviction.LIVE)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 5))
    await h.settle()
    stopping = h.background(engine.shutdown(grace=1))
    await h.settle()
    engine.faults.unblock()
    await h.drive(stopping)
    assert set(eviction.LIVE) == before
    run = await h.drive(starting)
    other = await h.engine(doubles)
    assert await h.drive(other.result(run.id)) == 10
    assert h.executed(run.id) == [("double", 1)], "by the first engine within its grace, or else by the second"


@on_every_store
async def test_run_found_in_the_store_before_its_creation_is_confirmed_is_loaded_once(h):
    engine = await h.engine(doubles)
    before = set(eviction.LIVE)
    commit, confirmed = engine.faults.commit, asyncio.Event()

    async def late(batch):
        results = await commit(batch)
        if isinstance(batch[0], CreateRun):
            await confirmed.wait()
        return results

    engine.faults.commit = late
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    engine._runtime._claimer.needs_reconcile = True  # as after a lost result: the worker reads which runs it owns
    await h.drive(engine.recover())
    await h.settle()
    confirmed.set()
    assert await h.run_to_end(await h.drive(starting)) == 8
    assert ENTERED == [4]
    assert (h.executed(), set(eviction.LIVE)) == ([("double", 1)], before)
