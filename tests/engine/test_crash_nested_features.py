"""A crash before and after every commit of one workflow that uses everything at once, nested three deep.

A loop holds a race, the race a join, and the branches of the join wait for children, deferreds, events and timers, undo
a part of what they did, stream, publish and send; at its end the run continues as another generation of itself.
"""

from dataclasses import dataclass
from functools import partial

import pytest

from perdure import (
    Break,
    ChildFailed,
    Context,
    Continue,
    Retry,
    RunQuery,
    RunStatus,
    StepFailed,
    current_step,
    event,
    step,
    workflow,
)
from perdure.clock import sleep_on
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import SERVERS, STORES
from tests.repetitions import LONG

LOG: list[str] = []
GENERATIONS = 2
ID = "crash-everywhere"


@event
class NestedNews:
    n: int


@event(delivery="all", consume=False)
class NestedBell:
    n: int


@dataclass
class Progress:
    n: int
    rounds: int
    seen: list[str]


async def undo(what: str) -> None:
    LOG.append(f"undo {what}")


@step(compensate=undo, retry=Retry(max_attempts=3, initial=1, jitter=0))
async def do(what: str) -> str:
    LOG.append(what)
    current_step().write("log", what)
    if what.startswith("flaky") and current_step().attempt < 2:
        raise ConnectionError("not yet")
    return what


@step(retry=None)
async def collapse() -> None:
    raise OSError("collapsed")


@step
async def note(what: str) -> None:
    LOG.append(what)


@workflow(name="nested.leaf")
async def leaf(ctx: Context, what: str) -> str:
    await ctx.sleep(3)
    if what.startswith("bad"):
        raise LookupError(what)
    return await do(what)


@workflow(name="nested.branch")
async def branch(ctx: Context, what: str) -> str:
    both = await ctx.join(a=ctx.run_child(leaf, f"{what} a"), b=ctx.run_child(leaf, f"{what} b"))
    return "+".join(both.values())


async def with_children(ctx: Context, name: str) -> str:
    detached = await ctx.start_child(leaf, f"{name} detached", detached=True)
    failing = await ctx.start_child(leaf, f"bad {name}")
    family = await ctx.run_child(branch, name)
    try:
        await failing.result()
    except ChildFailed as failed:
        family += f", {failed.type}"
    return f"{family}, {(await detached.outcome()).status}"


async def with_people(ctx: Context, name: str) -> str:
    verdict = ctx.deferred(f"verdict {name}", int)
    await note(f"ask {name} {len(verdict.token) > 10}")
    news = await ctx.receive(NestedNews)
    await ctx.send(ctx.run_id, "nested.echo", {"n": news.n})
    echo = await ctx.receive("nested.echo")
    return f"{await verdict} for news {news.n}, echo {echo['n']}"


async def with_rollback(ctx: Context, name: str) -> str:
    ctx.on_rollback(undo, f"mark {name}")
    kept = await do(f"flaky {name}")
    try:
        async with ctx.rollback_scope():
            await ctx.map(do, [f"scoped {name} {i}" for i in range(2)], concurrency=2)
            await collapse()
    except StepFailed as failed:
        return f"{kept}, {failed.type}"
    raise AssertionError("it collapsed")


async def work(ctx: Context, name: str) -> dict:
    await ctx.stream("log").write(f"begin {name}")
    results = await ctx.join(
        children=with_children(ctx, name),
        people=with_people(ctx, name),
        rollback=with_rollback(ctx, name),
        bell=bell(ctx),
    )
    await ctx.publish("last", name)
    return results


async def bell(ctx: Context) -> int:
    _, rung = await ctx.race(rung=ctx.receive(NestedBell, timeout=500), late=ctx.sleep(1000))
    assert rung is not None
    return rung.n


async def body(ctx: Context, state: Progress) -> Continue[Progress] | Break[list[str]]:
    name = f"{ctx.generation}.{state.n}"
    await ctx.broadcast(NestedBell(state.n))
    winner, results = await ctx.race(work=work(ctx, name), limit=ctx.sleep(5000))
    assert results is not None
    seen = [*state.seen, f"{winner} {name}: {', '.join(str(results[key]) for key in sorted(results))}"]
    return Break(seen) if state.n == state.rounds - 1 else Continue(Progress(state.n + 1, state.rounds, seen))


@workflow(name="nested.everything")
async def everything(ctx: Context, rounds: int, so_far: list[str]) -> None:
    ctx.on_exit(note, f"exit {ctx.generation}")
    seen = await ctx.loop("rounds", body, Progress(0, rounds, so_far), prune_every=1, keep=0)
    if ctx.generation < GENERATIONS - 1:
        await ctx.continue_as(rounds, seen)
    await ctx.publish("seen", seen)
    await ctx.sleep(1)
    raise ValueError("after all that")


def names_of(rounds: int) -> list[str]:
    return [f"{generation}.{n}" for generation in range(GENERATIONS) for n in range(rounds)]


def expected(number: int, name: str) -> str:
    people = f"{number} for news {number}, echo {number}"
    children = f"{name} a+{name} b, LookupError, succeeded"
    return f"work {name}: {name[2:]}, {children}, {people}, flaky {name}, OSError"


async def the_world(engine, names: list[str]) -> None:
    """Act as external callers: send events in order, and each verdict when its generation has started."""
    for number in range(len(names)):
        await engine.send(ID, NestedNews(number), event_id=f"news {number}")
    for number, name in enumerate(names):
        while (await engine.describe(ID)).generation < int(name[0]):
            if (await engine.status(ID)).terminal:
                return
            await sleep_on(engine._session.clock, 1)
        await engine.complete(await engine.deferred_token(ID, f"verdict {name}"), number)


async def nothing_is_lost_or_doubled(engine, names: list[str]) -> None:
    items = [item async for item in engine.read_stream(ID, "log", details=True)]
    written = [item.value for item in items if not item.superseded]
    assert len(written) == len(set(written)), "each item once"
    assert {f"begin {name}" for name in names} < set(written)
    seen = [expected(number, name) for number, name in enumerate(names)]
    assert await engine.published(ID) == {"last": names[-1], "seen": seen}
    assert await engine.dead_letters() == []
    assert set(lines_undone()) >= {f"scoped {name} {i}" for name in names for i in range(2)}
    leaves = [await engine.describe(run.id) for run in await engine.runs(RunQuery(workflow="nested.leaf"))]
    assert len(leaves) == 4 * len(names)
    assert {run.status for run in leaves if run.input["what"].startswith("bad")} == {RunStatus.FAILED}


def lines_undone() -> list[str]:
    return [line.removeprefix("undo ") for line in LOG if line.startswith("undo ")]


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_nested_features_have_one_outcome_and_compensate_at_any_crash(kind, tmp_path):
    rounds = 2 if LONG and kind not in SERVERS else 1
    names = names_of(rounds)

    async def check(engine):
        await nothing_is_lost_or_doubled(engine, names)
        rolled_back = without_repetition(LOG[LOG.index(f"undo flaky {names[-1]}") :])
        by_name = [[f"undo flaky {name}", f"undo mark {name}"] for name in reversed(names)]
        assert rolled_back == [*(line for lines in by_name for line in lines), "exit 1", "exit 0"]

    report = crash_on(
        kind,
        tmp_path,
        everything,
        rounds,
        [],
        also=[branch, leaf],
        begin=LOG.clear,
        drive=partial(the_world, names=names),
        check=check,
    )
    assert report.outcome == ("failed", "ValueError", "after all that")
    assert report.commits > 35 * rounds


def without_repetition(lines: list[str]) -> list[str]:
    return [line for at, line in enumerate(lines) if line not in lines[:at]]
