"""Loops from outside: a bounded history, resumption in constant time, and nesting that resumes exactly where it was."""

import asyncio
import gc
import sys
from dataclasses import dataclass

import pytest

from perdure import Break, Context, Continue, EngineConfig, RunStatus, event, step, workflow
from perdure.clock import sleep_on
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import SERVERS, STORES, another_handle, on_every_store

LOG: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()


@step
async def do(what: str) -> str:
    LOG.append(what)
    return what


@dataclass
class Tally:
    n: int
    total: int = 0


@event
class LoopNews:
    n: int


async def rows_of(h, run_id):
    """Return the number of history rows of a run, which a worker loads to resume it."""
    (snapshot,) = await h.store.load([run_id])
    return len(snapshot.entries)


# --- state and value


@workflow(name="loops.sum")
async def adds_up(ctx: Context, until: int) -> int:
    async def body(ctx: Context, state: Tally) -> Continue[Tally] | Break[int]:
        await do(f"{state.n}")
        if state.n == until:
            return Break(state.total)
        return Continue(Tally(state.n + 1, state.total + state.n))

    return await ctx.loop("sum", body, Tally(0))


@on_every_store
async def test_loop_passes_its_state_and_ends_with_a_value(h):
    engine = await h.engine(adds_up)
    assert await h.run_to_end(await engine.start(adds_up, 10, id="l")) == 45
    assert [str(n) for n in range(11)] == LOG
    locations = [entry.location for entry in await engine.history("l")]
    assert {"sum", "sum/~3/do", "sum/~10"} <= set(locations)


@on_every_store
async def test_stateless_loop_runs_until_break(h):
    seen = []

    @workflow(name="loops.stateless")
    async def stateless(ctx: Context) -> str:
        async def body(ctx: Context):
            seen.append(await do("x"))
            return Break("enough") if len(seen) == 5 else None

        return await ctx.loop("again", body)

    engine = await h.engine(stateless)
    assert await h.run_to_end(await engine.start(stateless)) == "enough"


@on_every_store
async def test_tasks_that_an_iteration_leaves_behind_are_cancelled_at_its_end(h):
    @workflow(name="loops.litter")
    async def litter(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            asyncio.create_task(ctx.sleep(10_000))  # noqa: RUF006  # on purpose: not awaited
            await do(f"{n}")
            return Break(n) if n == 3 else Continue(n + 1)

        return await ctx.loop("litter", body, 0)

    engine = await h.engine(litter)
    assert await h.run_to_end(await engine.start(litter, id="l"), 60.0) == 3
    sleeps = [entry for entry in await engine.history("l") if entry.kind == "sleep"]
    assert {entry.status for entry in sleeps} == {"cancelled"}


@on_every_store
async def test_loop_state_is_durable_every_commit_every_iterations(h):
    @workflow(name="loops.sparse")
    async def sparse(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await do(f"{n}")
            return Break(n) if n == 12 else Continue(n + 1)

        return await ctx.loop("sparse", body, 0, commit_every=5)

    engine = await h.engine(sparse)
    assert await h.run_to_end(await engine.start(sparse, id="l")) == 12
    states = [entry.location for entry in await engine.history("l") if entry.kind == "iteration"]
    assert states == ["sparse/~5", "sparse/~10"]
    assert [str(n) for n in range(13)] == LOG


# --- bounded


@workflow(name="loops.long")
async def long(ctx: Context, until: int, pause_at: int = -1) -> int:
    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        if n % 1_000 == 0:
            await ctx.publish("n", n)
        if n == pause_at:
            await ctx.sleep(100)
        return Break(n) if n == until else Continue(n + 1)

    return await ctx.loop("long", body, 0)


@on_every_store
async def test_very_many_iterations_leave_a_bounded_history_and_memory(h, store_kind):
    many = 20_000 if store_kind in SERVERS else 100_000
    engine = await h.engine(long)
    run = await engine.start(long, many, many - 5, id="l")
    most, early = 0, None
    while await run.status() is not RunStatus.SUSPENDED:
        for _ in range(50):
            await asyncio.sleep(0)
        engine.faults.committed.clear()  # the harness keeps all writes
        most = max(most, await rows_of(h, "l"))
        if early is None and (await engine.published("l")).get("n", 0) >= many // 10:
            early = sys.getallocatedblocks()
    assert 20 <= most < 100, "entries of older iterations are pruned meanwhile"
    engine.faults.committed.clear()
    gc.collect()
    assert early is not None
    assert sys.getallocatedblocks() - early < 10_000, "what is in memory does not grow with the iterations"
    await h.crash(engine)
    second = await h.engine(long, store=another_handle(h.store, h.clock))
    assert await h.drive(second.get("l").result()) == many


@on_every_store
async def test_a_loop_with_a_step_resumes_in_constant_time(h, store_kind):
    many = 500 if store_kind in SERVERS else 2_000

    @workflow(name="loops.stepping")
    async def stepping(ctx: Context, until: int) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await do(f"{n}")
            if n in (100, many):
                await ctx.sleep(100)
            return Break(n) if n == until else Continue(n + 1)

        return await ctx.loop("stepping", body, 0)

    rows = []
    engine = await h.engine(stepping)
    await engine.start(stepping, many + 10, id="l")
    for _ in range(2):
        while await engine.status("l") is not RunStatus.SUSPENDED:
            await h.settle()
        rows.append(await rows_of(h, "l"))
        before = len(LOG)
        await h.crash(engine)
        engine = await h.engine(stepping, store=another_handle(h.store, h.clock))
        assert len(LOG) == before, "nothing is done again"
        await h.clock.advance(100)
    assert rows[0] == rows[1] < 200, "as much to load after many iterations as after 100"
    assert await h.drive(engine.get("l").result()) == many + 10
    assert [str(n) for n in range(many + 11)] == LOG


@on_every_store
async def test_pruned_entries_are_deleted_with_the_next_iteration(h):
    engine = await h.engine(adds_up)
    await h.run_to_end(await engine.start(adds_up, 100, id="l"))
    dropping = [
        write
        for batch in engine.faults.committed
        for write in batch
        if getattr(write, "extras", None) is not None and write.extras.dropped
    ]
    assert len(dropping) == 4
    for write in dropping:
        newest = max(int(where.rpartition("~")[2]) for where in write.extras.dropped)
        states = [entry for entry in write.entries if entry.kind == "iteration"]
        assert [entry.seq is not None for entry in states] == [True]
        assert int(states[0].name) == newest + 1 + 20, "20 iterations are kept"


# --- children of pruned iterations


@workflow(name="loops.sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "slept"


@workflow(name="loops.breeds")
async def breeds(ctx: Context, seconds: float, every: int, rounds: int) -> str:
    async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
        if n % every == 0:
            await ctx.start_child(sleeper, seconds)
        await do(f"{n}")
        await ctx.sleep(1)
        return Break(n) if n == rounds - 1 else Continue(n + 1)

    await ctx.loop("breeds", body, 0, prune_every=5, keep=5)
    await ctx.sleep(10)
    return "done"


CHILD = "breeds/~0/loops.sleeper"


async def locations(engine):
    return [entry.location for entry in await engine.history("l")]


@on_every_store
async def test_entry_of_a_running_attached_child_survives_pruning(h):
    engine = await h.engine(breeds, sleeper)
    run = await engine.start(breeds, 80, 1_000, 100, id="l")
    await h.clock.advance(40)
    await h.settle()
    assert CHILD in await locations(engine)
    assert "breeds/~10/do" not in await locations(engine), "others are pruned"
    await h.crash(engine)
    engine = await h.engine(breeds, sleeper, store=another_handle(h.store, h.clock))
    await h.clock.advance(30)
    await h.settle()
    assert CHILD in await locations(engine)
    await h.clock.advance(20)
    await h.settle()
    assert not [each for each in await locations(engine) if each.startswith(CHILD)], "it has ended"
    assert await h.drive(engine.get(run.id).result()) == "done"


@on_every_store
async def test_a_child_in_every_iteration_leaves_a_bounded_history(h):
    engine = await h.engine(breeds, sleeper)
    run = await engine.start(breeds, 3, 1, 200, id="l")
    most = 0
    for _ in range(19):
        await h.clock.advance(10)
        await h.settle()
        most = max(most, await rows_of(h, "l"))
    assert most < 150
    assert await h.run_to_end(run) == "done"


@on_every_store
async def test_failure_and_rewind_reach_children_of_pruned_iterations(h):
    engine = await h.engine(breeds, sleeper)
    run = await engine.start(breeds, 5_000, 1_000, 30, id="l")
    await h.clock.advance(25)
    await h.settle()
    child = f"l/{CHILD}"
    assert await engine.status(child) is RunStatus.SUSPENDED
    await engine.rewind("l", "breeds")
    await h.settle()
    assert await engine.status(child) is RunStatus.CANCELLED
    await h.clock.advance(25)
    await h.settle()
    assert await engine.status(f"{child}@1") is RunStatus.SUSPENDED
    await run.cancel()
    await h.clock.advance(5)
    await h.settle()
    assert await engine.status(f"{child}@1") is RunStatus.CANCELLED


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_a_loop_with_children(kind, tmp_path):

    @workflow(name="loops.breeds-and-crashes")
    async def crashes(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await ctx.start_child(sleeper, 2 if n % 2 else 100)
            await ctx.sleep(1)
            return Break(n) if n == 6 else Continue(n + 1)

        return await ctx.loop("breeds", body, 0, prune_every=1, keep=0)

    async def started_once(engine):
        assert len((await engine.runs()).runs) == 8

    report = crash_on(kind, tmp_path, crashes, also=[sleeper], check=started_once)
    assert report.outcome == ("returned", 6)


# --- nested, suspended in the middle


@workflow(name="loops.nested")
async def nested(ctx: Context) -> list[str]:
    async def inner(ctx: Context, state: list[str]) -> Continue[list[str]] | Break[list[str]]:
        both = await ctx.join(
            news=ctx.receive(LoopNews, timeout=5_000),
            raced=ctx.race(fast=in_time(ctx, len(state)), slow=ctx.sleep(10_000)),
        )
        state = [*state, f"{both['news'].n}/{both['raced'][1]}"]
        return Break(state) if len(state) % 3 == 0 else Continue(state)

    async def outer(ctx: Context, state: list[str]) -> Continue[list[str]] | Break[list[str]]:
        state = await ctx.loop("inner", inner, state)
        return Break(state) if len(state) == 9 else Continue(state)

    nothing: list[str] = []
    return await ctx.loop("outer", outer, nothing)


async def in_time(ctx: Context, n: int) -> str:
    await ctx.sleep(5)
    return await do(f"step {n}")


NESTED = [f"{n}/step {n}" for n in range(9)]


async def done_so_far(h, steps):
    """Wait until so many steps are done: the run may be in the share of an engine that has crashed for a while."""
    while len(LOG) < steps:
        await sleep_on(h.clock, 1)


@on_every_store
async def test_nested_structures_resume_on_another_engine(h):
    engine = await h.engine(nested)
    await engine.start(nested, id="l")
    for n in range(9):
        await h.settle()
        await engine.send("l", LoopNews(n))
        await h.settle()
        for _ in range(2):
            await h.crash(engine)
            engine = await h.engine(nested, store=another_handle(h.store, h.clock))
            await h.drive(done_so_far(h, n + 1))
    assert await h.drive(engine.get("l").result()) == NESTED
    assert [f"step {n}" for n in range(9)] == LOG, "each step once"


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_nested_loops(kind, tmp_path):

    async def tell(engine):
        for n in range(9):
            await engine.send("crash-everywhere", LoopNews(n), event_id=f"news {n}")

    report = crash_on(kind, tmp_path, nested, begin=LOG.clear, drive=tell)
    assert report.outcome == ("returned", NESTED)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_of_a_loop_that_prunes(kind, tmp_path):

    @workflow(name="loops.prunes")
    async def prunes(ctx: Context) -> int:
        async def body(ctx: Context, n: int) -> Continue[int] | Break[int]:
            await do(f"{n}")
            return Break(n) if n == 12 else Continue(n + 1)

        return await ctx.loop("prunes", body, 0, prune_every=2, keep=1)

    report = crash_on(kind, tmp_path, prunes, begin=LOG.clear)
    assert report.outcome == ("returned", 12)


@on_every_store
async def test_loop_continues_when_runs_are_evicted_between_turns(h):
    config = EngineConfig(resident_runs=1)
    engine = await h.engine(nested, config=config)
    for name in ("a", "b"):
        await engine.start(nested, id=name)
    for n in range(9):
        for name in ("a", "b"):
            await engine.send(name, LoopNews(n))
    for name in ("a", "b"):
        assert await h.drive(engine.get(name).result()) == NESTED
