"""Children end to end: started once, notified once, ended with their parent, cheap to wait for."""

import asyncio
from collections import Counter

import pytest

from perdure import (
    ChildFailed,
    Context,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunQuery,
    RunStatus,
    StepFailed,
    step,
    workflow,
)
from perdure.clock import sleep_on
from perdure.stores.writes import CreateRun, DeliverMessage
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store

LOG: list[str] = []
SUCCEEDED, FAILED, CANCELLED = RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED


@pytest.fixture(autouse=True)
def forget():
    LOG.clear()


@step
async def do(what: str) -> str:
    LOG.append(what)
    return what


@step(retry=None)
async def break_down(what: str) -> None:
    LOG.append(what)
    raise LookupError(f"no {what} here")


@workflow(name="kids.doubles")
async def doubles(ctx: Context, n: int) -> int:
    await do(f"double {n}")
    return 2 * n


@workflow(name="kids.fails")
async def fails(ctx: Context, what: str) -> int:
    await break_down(what)
    return 1


@workflow(name="kids.sleeps")
async def sleeps(ctx: Context, seconds: float) -> str:
    try:
        await ctx.sleep(seconds)
    except asyncio.CancelledError:
        await do(f"{ctx.run_id} is cancelled")
        raise
    return f"slept {seconds:g}"


def created(*engines) -> Counter:
    """Count how often each run was created."""
    writes = [write for engine in engines for batch in engine.faults.committed for write in batch]
    return Counter(write.record.id for write in writes if isinstance(write, CreateRun))


async def statuses(engine, *ids):
    return [await engine.status(each) for each in ids]


# --- starting and waiting


@workflow(name="kids.parent")
async def parent(ctx: Context, n: int) -> dict:
    first = await ctx.run_child(doubles, n)
    handles = [await ctx.start_child(doubles, each) for each in range(3)]
    named = await ctx.start_child(doubles, 50, id="a name of its own")
    return {
        "first": first,
        "ids": [handle.id for handle in handles],
        "results": await asyncio.gather(*(handle.result() for handle in handles)),
        "again": await handles[1].result(),
        "outcome": (await named.outcome()).value,
        "created": named.created,
    }


@on_every_store
async def test_child_ids_derive_from_their_location_and_return_results(h):
    engine = await h.engine(parent, doubles)
    run = await engine.start(parent, 21, id="p")
    assert await h.run_to_end(run) == {
        "first": 42,
        "ids": ["p/kids.doubles#1", "p/kids.doubles#2", "p/kids.doubles#3"],
        "results": [0, 2, 4],
        "again": 2,
        "outcome": 100,
        "created": True,
    }
    page = await engine.runs(RunQuery(parent="p"))
    assert {each.id for each in page.runs} == {"p/kids.doubles", *run_ids("p", 1, 3), "a name of its own"}
    assert all(each.parent == "p" for each in page.runs)


def run_ids(parent_id, first, last):
    return [f"{parent_id}/kids.doubles#{number}" for number in range(first, last + 1)]


@on_every_store
async def test_a_child_knows_its_parent(h):
    @workflow(name="kids.knows")
    async def knows(ctx: Context) -> str | None:
        return ctx.parent

    @workflow(name="kids.asks")
    async def asks(ctx: Context) -> list:
        detached = await ctx.start_child(knows, detached=True)
        return [ctx.parent, await ctx.run_child(knows), await detached.result()]

    engine = await h.engine(knows, asks)
    assert await h.run_to_end(await engine.start(asks, id="p")) == [None, "p", "p"]


@on_every_store
async def test_parent_waiting_for_a_child_is_suspended_with_that_reason(h):
    @workflow(name="kids.waits")
    async def waits(ctx: Context) -> str:
        return await ctx.run_child(sleeps, 100)

    engine = await h.engine(waits, sleeps)
    run = await engine.start(waits, id="p")
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    [reason] = (await run.describe()).waiting_for
    assert (reason.kind, reason.name) == ("child", "p/kids.sleeps")
    assert await h.run_to_end(run) == "slept 100"


@on_every_store
async def test_the_end_of_a_child_finds_a_parent_in_another_process(h):
    @workflow(name="kids.apart")
    async def apart(ctx: Context) -> str:
        return await ctx.run_child(sleeps, 100)

    first, second = await h.engine(apart), await h.engine(sleeps, store=another_handle(h.store, h.clock))
    run = await first.start(apart, id="p")
    assert await h.run_to_end(run) == "slept 100"
    assert second.loaded_runs == []
    assert [entry.kind for entry in await first.history("p")] == ["child"]


@on_every_store
async def test_result_of_a_child_that_ended_early_is_delivered_at_once(h):
    @workflow(name="kids.late")
    async def late(ctx: Context) -> list:
        handle = await ctx.start_child(doubles, 4)
        await ctx.sleep(1000)
        return [await handle.result(), (await handle.outcome()).value]

    engine = await h.engine(late, doubles)
    assert await h.run_to_end(await engine.start(late)) == [8, 8]


# --- failures


@workflow(name="kids.catches")
async def catches(ctx: Context) -> dict:
    handle = await ctx.start_child(fails, "luck")
    try:
        await handle.result()
    except ChildFailed as failed:
        caught = {"run": failed.run_id, "type": failed.type, "message": failed.message, "location": failed.location}
    outcome = await handle.outcome()
    assert outcome.error is not None
    return {**caught, "outcome": outcome.status, "error": outcome.error.type, "value": outcome.value}


@on_every_store
async def test_child_failed_carries_the_error_of_the_child_and_outcome_does_not_raise(h):
    engine = await h.engine(catches, fails)
    seen = await h.run_to_end(await engine.start(catches, id="p"))
    assert seen == {
        "run": "p/kids.fails",
        "type": "StepFailed",
        "message": "step break_down failed after 1 attempt: LookupError: no luck here",
        "location": "break_down",
        "outcome": "failed",
        "error": "StepFailed",
        "value": None,
    }
    assert LOG == ["luck"]


@on_every_store
async def test_the_failure_of_a_child_that_is_awaited_fails_the_parent(h):
    @workflow(name="kids.trusts")
    async def trusts(ctx: Context) -> int:
        return await ctx.run_child(fails, "luck")

    engine = await h.engine(trusts, fails)
    with pytest.raises(RunFailed, match=r"ChildFailed.*no luck here"):
        await h.run_to_end(await engine.start(trusts))


@on_every_store
async def test_failed_child_that_is_not_awaited_does_not_affect_its_parent(h):
    @workflow(name="kids.careless")
    async def careless(ctx: Context) -> str:
        await ctx.start_child(fails, "luck")
        await ctx.sleep(100)
        return "fine"

    engine = await h.engine(careless, fails)
    run = await engine.start(careless, id="p")
    await h.settle()
    assert await engine.status("p/kids.fails") is FAILED
    before = await engine.history("p")
    assert await h.run_to_end(run) == "fine"
    assert [entry.kind for entry in before] == ["start_child", "sleep"]


@on_every_store
async def test_cancelled_child_raises_child_failed(h):
    @workflow(name="kids.bereaved")
    async def bereaved(ctx: Context) -> list:
        handle = await ctx.start_child(sleeps, 1000)
        try:
            await handle.result()
        except ChildFailed as failed:
            return [failed.type, (await handle.outcome()).status]
        return []

    engine = await h.engine(bereaved, sleeps)
    run = await engine.start(bereaved, id="p")
    await h.settle()
    assert await engine.cancel("p/kids.sleeps")
    assert await h.run_to_end(run) == ["RunCancelled", "cancelled"]


@on_every_store
async def test_child_with_the_id_of_another_run_is_refused_and_leaves_that_run_alone(h):
    @workflow(name="kids.thief")
    async def thief(ctx: Context) -> str:
        try:
            await ctx.start_child(doubles, 8, id="taken")
        except RunConflict as conflict:
            return str(conflict)
        return "started"

    engine = await h.engine(thief, doubles, sleeps)
    await engine.start(sleeps, 1000, id="taken")
    await h.settle()
    assert "taken" in await h.run_to_end(await engine.start(thief))
    assert await engine.status("taken") is RunStatus.SUSPENDED


# --- a run that others wait for too


@workflow(name="kids.second")
async def waits_for_the_same(ctx: Context, fail: bool = False) -> list:
    handle = await ctx.start_child(sleeps, 1000, id="shared")
    if fail:
        raise ValueError("the second parent fails")
    return [handle.created, await handle.result()]


@on_every_store
async def test_all_waiters_of_a_run_are_notified(h):
    engine = await h.engine(waits_for_the_same, sleeps)
    runs = [await engine.start(waits_for_the_same, id=f"p{number}") for number in range(3)]
    outside = h.background(engine.get("shared").result())
    results = [await h.run_to_end(run) for run in runs]
    assert sorted(created for created, _ in results) == [False, False, True]
    assert [result for _, result in results] == ["slept 1000"] * 3
    assert outside.result() == "slept 1000"
    notified = [each for batch in engine.faults.committed for each in batch if isinstance(each, DeliverMessage)]
    assert Counter(each.run_id for each in notified) == {"p0": 1, "p1": 1, "p2": 1}


@on_every_store
async def test_existing_run_is_not_attached_to_a_second_parent(h):
    engine = await h.engine(waits_for_the_same, sleeps)
    await engine.start(sleeps, 1000.0, id="shared")
    await h.settle()
    failing = await engine.start(waits_for_the_same, True, id="failing")
    with pytest.raises(RunFailed):
        await h.run_to_end(failing)
    waiting = await engine.start(waits_for_the_same, id="waiting")
    await h.settle()
    assert await engine.cancel("waiting")
    with pytest.raises(RunCancelled):
        await h.run_to_end(waiting)
    await engine.start(waits_for_the_same, id="third")
    await h.settle()
    assert await engine.terminate("third")
    await h.clock.advance(60)
    assert await engine.status("shared") is RunStatus.SUSPENDED
    assert await h.drive(engine.result("shared")) == "slept 1000"


@on_every_store
async def test_cancelled_child_of_one_parent_notifies_another_waiter(h):
    @workflow(name="kids.sees")
    async def sees(ctx: Context) -> str:
        handle = await ctx.start_child(sleeps, 1000, id="shared")
        return (await handle.outcome()).status

    engine = await h.engine(waits_for_the_same, sees, sleeps)
    await engine.start(waits_for_the_same, id="first")
    await h.settle()
    second = await engine.start(sees, id="second")
    await h.settle()
    assert await engine.cancel("first")
    assert await h.run_to_end(second) == "cancelled"


# --- taking them down


@workflow(name="kids.grandparent")
async def grandparent(ctx: Context, how: str = "wait") -> str:
    await ctx.start_child(between, id="child")
    await ctx.start_child(sleeps, 1000, id="detached", detached=True)
    await ctx.sleep(10)
    if how == "fail":
        raise ValueError("the parent fails")
    if how == "continue":
        await ctx.continue_as("return")
    if how == "wait":
        await ctx.sleep(500)
    return "done"


@workflow(name="kids.between")
async def between(ctx: Context) -> str:
    try:
        return await ctx.run_child(sleeps, 1000, id="grandchild")
    finally:
        await do("the child cleans up")


FAMILY = ("top", "child", "grandchild", "detached")


async def family(h, *args):
    engine = await h.engine(grandparent, between, sleeps)
    run = await engine.start(grandparent, *args, id="top")
    await h.clock.advance(1)
    await h.settle()
    assert await statuses(engine, *FAMILY) == [RunStatus.SUSPENDED] * 4
    return engine, run


@on_every_store
async def test_a_cancel_reaches_children_and_grandchildren(h):
    engine, run = await family(h)
    assert await engine.cancel("top")
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert await statuses(engine, *FAMILY) == [CANCELLED, CANCELLED, CANCELLED, RunStatus.SUSPENDED]
    assert LOG == ["grandchild is cancelled", "the child cleans up"] or LOG == [
        "the child cleans up",
        "grandchild is cancelled",
    ]


@on_every_store
async def test_a_run_ends_after_its_children_when_it_is_cancelled(h):
    engine, run = await family(h)
    await engine.cancel("top")
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    ended = [(await engine.describe(each)).ended_at for each in ("grandchild", "child", "top")]
    assert ended == sorted(ended)
    order = [
        write.run_id
        for batch in engine.faults.committed
        for write in batch
        if getattr(getattr(write, "patch", None), "ended_at", None) is not None
    ]
    assert order == ["grandchild", "child", "top"]


@on_every_store
async def test_terminate_ends_children_and_grandchildren_without_compensation(h):
    engine, _ = await family(h)
    assert await engine.terminate("top")
    await h.clock.advance(30)
    await h.settle()
    assert await statuses(engine, *FAMILY) == [CANCELLED, CANCELLED, CANCELLED, RunStatus.SUSPENDED]
    assert LOG == []


@on_every_store
async def test_children_are_terminated_by_another_engine_if_the_caller_is_but_a_client(h):
    await family(h)
    client = await h.client(store=another_handle(h.store, h.clock))
    assert await client.terminate("top")
    await h.clock.advance(30)
    await h.settle()
    assert await statuses(client, *FAMILY) == [CANCELLED, CANCELLED, CANCELLED, RunStatus.SUSPENDED]


@on_every_store
async def test_attached_children_are_cancelled_when_the_parent_fails(h):
    engine, run = await family(h, "fail")
    with pytest.raises(RunFailed, match="the parent fails"):
        await h.run_to_end(run)
    assert await statuses(engine, *FAMILY) == [FAILED, CANCELLED, CANCELLED, RunStatus.SUSPENDED]


@on_every_store
@pytest.mark.parametrize("how", ["return", "continue"])
async def test_children_continue_when_the_parent_succeeds_or_continues_as_new(h, how):
    engine, run = await family(h, how)
    assert await h.run_to_end(run) == "done"
    assert await statuses(engine, *FAMILY) == [SUCCEEDED, *[RunStatus.SUSPENDED] * 3]
    assert await h.drive(engine.result("child")) == "slept 1000"
    assert await h.drive(engine.result("detached")) == "slept 1000"


@on_every_store
async def test_children_of_an_earlier_generation_are_still_attached(h):
    @workflow(name="kids.goes-on")
    async def goes_on(ctx: Context, again: bool) -> None:
        if again:
            await ctx.start_child(sleeps, 1000, id="old")
            await ctx.continue_as(False)
        await ctx.sleep(100)

    engine = await h.engine(goes_on, sleeps)
    run = await engine.start(goes_on, True, id="top")
    await h.settle()
    assert await engine.status("old") is RunStatus.SUSPENDED
    await engine.cancel("top")
    with pytest.raises(RunCancelled):
        await h.run_to_end(run)
    assert await engine.status("old") is CANCELLED


@on_every_store
async def test_cancelling_run_child_cancels_the_child(h):
    @workflow(name="kids.impatient")
    async def impatient(ctx: Context) -> list:
        winner, _ = await ctx.race(child=ctx.run_child(sleeps, 1000, id="slow"), limit=ctx.sleep(5))
        handle = await ctx.start_child(sleeps, 1000, id="kept")
        second, _ = await ctx.race(child=handle.result(), limit=ctx.sleep(5))
        return [winner, second, await handle.result()]

    engine = await h.engine(impatient, sleeps)
    run = await engine.start(impatient)
    await h.clock.advance(20)
    await h.settle()
    assert await engine.status("slow") is CANCELLED
    assert await engine.status("kept") is RunStatus.SUSPENDED, "a losing wait consumes nothing"
    assert await h.run_to_end(run) == ["limit", "limit", "slept 1000"]


# --- crashes


@workflow(name="kids.all-sorts")
async def all_sorts(ctx: Context) -> dict:
    await do("begin")
    one = await ctx.run_child(doubles, 1)
    handles = [await ctx.start_child(doubles, n) for n in (2, 3)]
    failing = await ctx.start_child(fails, "luck")
    detached = await ctx.start_child(sleeps, 5, detached=True)
    nested = await ctx.run_child(between_doubles, 10)
    results = await asyncio.gather(*(handle.result() for handle in handles))
    try:
        await failing.result()
    except ChildFailed as failed:
        word = failed.type
    await do("end")
    return {"one": one, "results": results, "word": word, "nested": nested, "slept": await detached.result()}


@workflow(name="kids.between-doubles")
async def between_doubles(ctx: Context, n: int) -> int:
    return await ctx.run_child(doubles, n) + await ctx.run_child(doubles, n + 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_child_starts_and_notifies_once_at_any_crash(kind, tmp_path):

    async def started_once(engine):
        runs = (await engine.runs()).runs
        assert len(runs) == 9, [run.id for run in runs]
        assert all(run.recoveries <= 1 for run in runs)
        waits = [entry for entry in await engine.history("crash-everywhere") if entry.kind in ("child", "result")]
        assert all(entry.status != "pending" for entry in waits)

    report = crash_on(
        kind, tmp_path, all_sorts, also=[doubles, fails, sleeps, between_doubles], begin=LOG.clear, check=started_once
    )
    assert report.outcome == (
        "returned",
        {"one": 2, "results": [4, 6], "word": "StepFailed", "nested": 42, "slept": "slept 5"},
    )


@workflow(name="kids.fails-with-family")
async def fails_with_family(ctx: Context) -> None:
    await ctx.start_child(between, id="child")
    await ctx.start_child(sleeps, 500, id="other")
    await ctx.sleep(10)
    await break_down("luck")


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_failed_parent_cancels_descendants_at_any_crash(kind, tmp_path):

    async def all_cancelled(engine):
        assert await statuses(engine, "child", "grandchild", "other") == [CANCELLED] * 3

    report = crash_on(kind, tmp_path, fails_with_family, also=[between, sleeps], begin=LOG.clear, check=all_cancelled)
    assert report.outcome[:2] == ("failed", StepFailed.__name__)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_terminated_run_ends_its_children_at_any_crash(kind, tmp_path):

    async def terminate(engine):
        while await engine.status("grandchild") is None:
            await sleep_on(engine._session.clock, 1)
        await engine.terminate("crash-everywhere")

    async def all_cancelled(engine):
        assert await statuses(engine, "child", "grandchild") == [CANCELLED] * 2
        assert LOG == []

    report = crash_on(
        kind, tmp_path, only_a_family, also=[between, sleeps], begin=LOG.clear, drive=terminate, check=all_cancelled
    )
    assert report.outcome == ("cancelled",)


@workflow(name="kids.only-a-family")
async def only_a_family(ctx: Context) -> str:
    return await ctx.run_child(between, id="child")


# --- many


@workflow(name="kids.thousand")
async def thousand(ctx: Context, children: int, seconds: float) -> int:
    handles = [await ctx.start_child(sleeps, seconds) for _ in range(children)]
    results = await asyncio.gather(*(handle.result() for handle in handles))
    return len(results)


@on_every_store
async def test_a_parent_of_a_thousand_children_is_woken_without_a_thousand_replays(h):
    engine = await h.engine(thousand, sleeps)
    run = await engine.start(thousand, 1_000, 3600.0, id="p")
    await h.settle()
    assert len((await engine.runs(RunQuery(parent="p", limit=2_000))).runs) == 1_000
    await h.crash(engine)
    second = await h.engine(thousand, sleeps, store=another_handle(h.store, h.clock))
    assert await h.drive(second.get(run.id).result(), 8000.0) == 1_000
    turns = [
        write
        for batch in second.faults.committed
        for write in batch
        if getattr(write, "run_id", None) == "p" and type(write).__name__ == "CommitTurn"
    ]
    assert len(turns) < 100
    assert second.faults.calls["load"] < 100
