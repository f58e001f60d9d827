"""A turn that the store can never store: the entry that caused it fails, and all other work continues."""

import asyncio

import pytest

from perdure import Context, RunFailed, RunStatus, StepFailed, StoreError, step, workflow
from perdure.stores.writes import CommitTurn, CreateRun
from tests.engine.store_matrix import on_every_store


@step
async def give(what: str) -> str:
    return what


@workflow
async def giving(ctx: Context, what: str) -> str:
    try:
        got = await give(what)
    except StepFailed as failed:
        got = f"{failed.type}/{failed.attempts}: {failed.message}"
    return f"{got} {await give('then')}"


@workflow
async def giving_together(ctx: Context) -> list[str]:
    results = await asyncio.gather(*(give(f"{n}") for n in "abxd"), return_exceptions=True)
    return [each.type if isinstance(each, StepFailed) else str(each) for each in results]


def holds(value: bytes):
    def refuses(write) -> bool:
        return isinstance(write, CommitTurn) and any(entry.value == value for entry in write.entries)

    return refuses


@on_every_store
async def test_unstorable_entry_fails_alone_and_the_batch_proceeds(h):
    engine = await h.engine(giving)
    engine.faults.refuse(holds(b'"bad"'))
    runs = [await engine.start(giving, "bad" if n == 3 else f"good{n}", id=f"g{n}") for n in range(7)]
    results = await h.drive(asyncio.gather(*(run.result() for run in runs)))
    assert results[3].startswith("InvalidPayload/1: result of step give: the store cannot take it")
    assert results[3].endswith(" then")
    assert [result for n, result in enumerate(results) if n != 3] == [f"good{n} then" for n in range(7) if n != 3]
    assert h.executed("g3") == [("give", 1), ("give#1", 1)]


@on_every_store
async def test_unstorable_input_of_a_turn_fails_alone(h):
    engine = await h.engine(giving_together)
    engine.faults.refuse(holds(b'"x"'))
    run = await engine.start(giving_together)
    assert await h.run_to_end(run) == ["a", "b", "InvalidPayload", "d"]
    assert sorted(h.executed()) == [("give", 1), ("give#1", 1), ("give#2", 1), ("give#3", 1)]


@on_every_store
async def test_unstorable_run_result_holds_the_run(h):
    @workflow
    async def ends_badly(ctx: Context) -> str:
        await give("fine")
        return "bad end"

    engine = await h.engine(ends_badly)
    engine.faults.refuse(
        lambda write: isinstance(write, CommitTurn) and write.patch is not None and write.patch.result == b'"bad end"'
    )
    run = await engine.start(ends_badly)
    await h.clock.advance(5)
    # Either way the error is visible; the run neither spins nor disappears.
    if await run.status() is RunStatus.SUSPENDED:
        (reason,) = (await run.describe()).waiting_for
        assert reason.kind == "held"
        assert "cannot take" in str(reason)
    else:
        with pytest.raises(RunFailed):
            await run.result()
    commits = engine.faults.commits
    await h.clock.advance(100)
    assert engine.faults.commits == commits


@on_every_store
async def test_a_start_that_the_store_refuses_leaves_nothing(h):
    engine = await h.engine(giving)
    engine.faults.refuse(lambda write: isinstance(write, CreateRun) and write.record.id == "no")
    starting = [h.background(engine.start(giving, "x", id=name)) for name in ("yes", "no", "also")]
    await h.settle()
    with pytest.raises(StoreError, match="cannot apply") as raised:
        await starting[1]
    assert not raised.value.retryable
    assert await engine.status("no") is None
    for name in ("yes", "also"):
        assert await h.run_to_end(engine.get(name)) == "x then"
