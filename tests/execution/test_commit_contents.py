"""The contents, the order and the number of commits."""

import asyncio

from perdure import Context, Retry, RunStatus, current_step, step, workflow
from perdure.stores.writes import CommitTurn, CreateRun
from tests.engine.store_matrix import everything_in, on_every_store


@step
async def add(a: int, b: int) -> int:
    return a + b


@workflow
async def sums(ctx: Context, n: int) -> int:
    total = 0
    for i in range(n):
        total = await add(total, i)
    return total


def turns(engine) -> list[CommitTurn]:
    return [write for batch in engine.faults.committed for write in batch if isinstance(write, CommitTurn)]


@on_every_store
async def test_run_of_ten_steps_takes_eleven_commits(h):
    engine = await h.engine(sums)
    run = await engine.start(sums, 10)
    assert await h.run_to_end(run) == 45
    assert engine.faults.commits == 11
    assert isinstance(engine.faults.committed[0][0], CreateRun)


@on_every_store
async def test_last_step_result_and_end_of_the_run_are_one_commit(h):
    engine = await h.engine(sums)
    await h.run_to_end(await engine.start(sums, 3))
    last = turns(engine)[-1]
    assert [entry.location for entry in last.entries] == ["add#2"]
    assert last.patch is not None
    assert last.patch.status is RunStatus.SUCCEEDED


@on_every_store
async def test_step_without_at_most_once_writes_one_entry_and_not_the_run_row(h):
    engine = await h.engine(sums)
    run = await engine.start(sums, 4)
    await h.run_to_end(run)
    written = turns(engine)
    assert [len(turn.entries) for turn in written] == [1, 1, 1, 1]
    assert [turn.patch is not None for turn in written] == [False, False, False, True]
    assert len(await h.store.history(run.id)) == 4


@on_every_store
async def test_turns_of_many_runs_share_commits(h):
    engine = await h.engine(sums)
    runs = await asyncio.gather(*(engine.start(sums, 10, id=f"run-{i}") for i in range(100)))
    assert await h.drive(asyncio.gather(*(run.result() for run in runs))) == [45] * 100
    writes = sum(len(batch) for batch in engine.faults.committed)
    assert writes == 100 + 100 * 10
    assert engine.faults.commits < writes / 10


@on_every_store
async def test_step_result_is_durable_before_the_next_step_starts(h):
    seen: list[tuple[str, list[str]]] = []

    @step
    async def look(ctx_id: str) -> None:
        rows = await h.store.history(ctx_id)
        seen.append((current_step().location, [row.entry.location for row in rows if row.entry.seq]))

    @workflow
    async def looking(ctx: Context) -> None:
        await look(ctx.run_id)
        await look(ctx.run_id)
        await look(ctx.run_id)

    engine = await h.engine(looking)
    await h.run_to_end(await engine.start(looking))
    assert seen == [("look", []), ("look#1", ["look"]), ("look#2", ["look", "look#1"])]


@on_every_store
async def test_start_returns_after_the_run_is_durable(h):
    engine = await h.engine(sums)
    engine.faults.fail_calls(3, calls=["commit"])
    starting = h.background(engine.start(sums, 1, id="slow"))
    await h.settle()
    assert not starting.done()
    assert await h.store.records(["slow"]) == [None]
    run = await h.drive(starting)
    assert (await h.store.records([run.id]))[0] is not None


@on_every_store
async def test_effects_start_after_the_commit_of_their_turn(h):
    """An at-most-once attempt is recorded before its body starts, however long the commit takes."""
    started: list[str] = []

    @step(at_most_once=True)
    async def pay() -> None:
        started.append(current_step().location)

    @workflow
    async def paying(ctx: Context) -> None:
        await add(1, 2)
        await pay()

    engine = await h.engine(paying)
    engine.faults.crash(2, "before")
    await h.drive_until_crash(engine, engine.execute(paying, id="p"))
    assert started == []
    await h.crash(engine)
    assert [row.entry.location for row in await h.store.history("p")] == []


@on_every_store
async def test_replay_writes_nothing_and_executes_nothing(h):
    """Guarantee 7: loading a run without new inputs does not change the store."""

    @workflow
    async def waiting(ctx: Context) -> str:
        ctx.version("gate", latest=3)
        await asyncio.gather(add(1, 2), add(3, 4))
        await ctx.sleep(300)
        return "done"

    first = await h.engine(waiting)
    run = await first.start(waiting, id="w")
    await h.settle()
    await h.drive(first.shutdown())
    second = await h.engine(waiting)
    before = await everything_in(h.store, "w")
    executed = h.executed()
    await second.recover()
    await h.clock.advance(60)
    assert second.faults.commits == 0
    assert await everything_in(h.store, "w") == before
    assert h.executed() == executed
    assert await h.run_to_end(second.get(run.id)) == "done"


@on_every_store
async def test_takeover_during_a_step_writes_only_the_entry_of_that_step(h):
    gate = asyncio.Event()

    @step
    async def long() -> int:
        await gate.wait()
        return 7

    @workflow
    async def stuck(ctx: Context) -> int:
        await add(1, 1)
        return await long()

    first = await h.engine(stuck)
    await first.start(stuck, id="s")
    await h.settle()
    await h.crash(first)
    rows = await h.store.history("s")
    second = await h.engine(stuck)
    await h.clock.advance(0.5)
    h.executions.clear()
    await h.clock.advance(23)  # past the lease: taken over and replayed, the step executes again
    assert h.executed() == [("long", 1)]
    recorded = [row.entry.location for row in (await h.store.history("s"))[len(rows) :]]
    assert recorded == ["long"]
    gate.set()
    assert await h.run_to_end(second.get("s")) == 7


@on_every_store
async def test_retries_take_one_commit_per_failed_attempt(h):
    @step(retry=Retry(max_attempts=3, initial=1, jitter=0))
    async def flaky() -> int:
        if current_step().attempt < 3:
            raise ValueError("not yet")
        return 5

    @workflow
    async def trying(ctx: Context) -> int:
        return await flaky()

    engine = await h.engine(trying)
    assert await h.run_to_end(await engine.start(trying)) == 5
    assert engine.faults.commits == 1 + 3
