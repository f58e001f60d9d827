"""The first turn of a new run is worked out while the run is being stored, and acted upon only after that."""

import asyncio

import pytest

from perdure import Context, RunFailed, RunStatus, StoreError, step, workflow
from perdure.runner import eviction as closing
from perdure.stores.protocol import CreateRun
from tests.engine.store_matrix import on_every_store

ENTERED: list[int] = []


@pytest.fixture(autouse=True)
def forget():
    ENTERED.clear()


@step
async def double(n: int) -> int:
    return 2 * n


@workflow
async def doubles(ctx: Context, n: int) -> int:
    ENTERED.append(n)
    return await double(n)


@workflow(idempotency_key=lambda n: str(n))
async def keyed(ctx: Context, n: int) -> int:
    ENTERED.append(n)
    return await double(n)


@workflow
async def fails_at_once(ctx: Context, n: int) -> int:
    ENTERED.append(n)
    raise ValueError("no")


@on_every_store
async def test_the_workflow_begins_while_its_run_is_being_stored_and_its_step_does_not(h):
    engine = await h.engine(doubles)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    assert ENTERED == [4]
    assert (h.executed(), starting.done()) == ([], False)
    engine.faults.go_on()
    run = await h.drive(starting)
    assert await h.run_to_end(run) == 8
    assert ENTERED == [4], "it is worked out once"
    assert h.executed() == [("double", 1)]


@on_every_store
async def test_an_id_that_may_be_taken_is_waited_for(h):
    """Somebody else may have it: then this is not the run, and its code has no business here."""
    engine = await h.engine(doubles, keyed)
    await h.run_to_end(await engine.start(doubles, 4, id="taken"))
    engine.faults.pause()
    again = h.background(engine.start(doubles, 4, id="taken"))
    by_key = h.background(engine.start(keyed, 5))
    await h.settle()
    assert ENTERED == [4]
    engine.faults.go_on()
    assert not (await h.drive(again)).created
    assert await h.run_to_end(await h.drive(by_key)) == 10
    assert ENTERED == [4, 5]


@on_every_store
async def test_who_has_other_runs_to_go_on_with_waits(h):
    engine = await h.engine(doubles)
    engine.faults.pause()
    starting = [h.background(engine.start(doubles, n)) for n in (1, 2, 3)]
    await h.settle()
    assert ENTERED == [1]
    engine.faults.go_on()
    assert [await h.run_to_end(await h.drive(each)) for each in starting] == [2, 4, 6]
    assert sorted(ENTERED) == [1, 2, 3]


@on_every_store
async def test_a_run_that_fails_at_once_is_stored_first(h):
    engine = await h.engine(fails_at_once)
    engine.faults.pause()
    starting = h.background(engine.start(fails_at_once, 1))
    await h.settle()
    assert ENTERED == [1]
    engine.faults.go_on()
    run = await h.drive(starting)
    with pytest.raises(RunFailed, match="no"):
        await h.run_to_end(run)
    assert ENTERED == [1]


@on_every_store
async def test_nothing_is_left_of_a_run_that_the_store_refuses(h):
    engine = await h.engine(doubles)
    before = set(closing.LIVE)
    engine.faults.refuse(lambda write: isinstance(write, CreateRun))
    with pytest.raises(StoreError, match="planned"):
        await h.drive(engine.start(doubles, 4))
    assert ENTERED == [4]
    assert (h.executed(), set(closing.LIVE)) == ([], before)
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_nothing_is_left_of_a_run_whose_creation_has_no_answer(h):
    """The process stops, as in a crash, before it hears whether the run is stored; whoever comes goes on with it."""
    engine = await h.engine(doubles)
    before = set(closing.LIVE)
    engine.faults.crash(1, "after")
    await h.drive_until_crash(engine, engine.start(doubles, 4))
    assert ENTERED == [4]
    await h.crash(engine)
    assert (h.executed(), set(closing.LIVE)) == ([], before)
    other = await h.engine(doubles)
    (found,) = (await h.drive(other.runs())).runs
    assert await h.drive(other.result(found.id)) == 8
    assert ENTERED == [4, 4]
    assert h.executed() == [("double", 1)]


@on_every_store
async def test_a_worker_that_is_declared_gone_meanwhile_does_not_act(h):
    """Its run is stored, and nobody owns it: it is claimed like any other."""
    engine = await h.engine(doubles)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    await h.store.declare_gone(engine.worker)
    engine.faults.go_on()
    run = await h.drive(starting)
    assert await h.run_to_end(run) == 8
    assert h.executed() == [("double", 1)]
    assert await run.status() is RunStatus.SUCCEEDED


@on_every_store
async def test_it_stops_with_its_engine(h):
    engine = await h.engine(doubles)
    before = set(closing.LIVE)
    engine.faults.pause()
    starting = h.background(engine.start(doubles, 5))
    await h.settle()
    stopping = h.background(engine.shutdown(grace=1))
    await h.settle()
    engine.faults.go_on()
    await h.drive(stopping)
    assert set(closing.LIVE) == before
    run = await h.drive(starting)
    other = await h.engine(doubles)
    assert await h.drive(other.result(run.id)) == 10
    assert h.executed(run.id) == [("double", 1)], "by the one within its grace, or else by the other"


@on_every_store
async def test_a_run_that_is_found_before_its_creation_is_answered_is_there_once(h):
    engine = await h.engine(doubles)
    before = set(closing.LIVE)
    commit, answered = engine.faults.commit, asyncio.Event()

    async def late(batch):
        answers = await commit(batch)
        if isinstance(batch[0], CreateRun):
            await answered.wait()
        return answers

    engine.faults.commit = late
    starting = h.background(engine.start(doubles, 4))
    await h.settle()
    engine._core._due.unsure = (
        True  # as after an answer that was lost: it looks for runs that it has and knows nothing of
    )
    await h.drive(engine.recover())
    await h.settle()
    answered.set()
    assert await h.run_to_end(await h.drive(starting)) == 8
    assert ENTERED == [4, 4]
    assert (h.executed(), set(closing.LIVE)) == ([("double", 1)], before)
