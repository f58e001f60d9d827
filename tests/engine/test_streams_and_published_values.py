"""Streams and published values of whole workflows: once per recorded entry, live, resumable, across processes."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from perdure import (
    Break,
    Context,
    Continue,
    InvalidPayload,
    Retry,
    RunFailed,
    RunNotFound,
    RunStatus,
    WorkflowMisuse,
    current_step,
    step,
    workflow,
)
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES, another_handle, on_every_store

FAILING: set[int] = set()


@pytest.fixture(autouse=True)
def forget():
    FAILING.clear()


async def collect(client, run_id, name="log", start=0, *, details=False):
    return [item async for item in client.read_stream(run_id, name, start, details=details)]


@step(retry=Retry(max_attempts=3, initial=1, jitter=0))
async def speak(n: int) -> int:
    for word in range(3):
        current_step().write("log", f"step {n}.{word}")
        if word == 1 and n in FAILING and current_step().attempt < 2:
            raise ConnectionError("cut off")
    return n


@workflow(name="streams.mixed")
async def mixed(ctx: Context) -> int:
    log = ctx.stream("log")
    await log.write({"begin": True})
    for n in range(3):
        await log.write(f"before {n}")
        await speak(n)
        await ctx.publish("done", n)
    await ctx.sleep(10)
    await ctx.stream("other").write("aside")
    await log.write("end")
    return 3


def lines(n):
    return [f"before {n}", *(f"step {n}.{word}" for word in range(3))]


MIXED = [{"begin": True}, *lines(0), *lines(1), *lines(2), "end"]


# --- streams


@on_every_store
async def test_workflow_and_steps_write_to_one_stream_in_order(h):
    engine = await h.engine(mixed)
    run = await engine.start(mixed, id="r")
    await h.run_to_end(run)
    assert await collect(engine, "r") == MIXED
    assert await collect(engine, "r", "other") == ["aside"]
    items = await collect(engine, "r", details=True)
    assert [each.offset for each in items] == list(range(len(MIXED)))
    assert {each.location for each in items if each.attempt} == {"speak", "speak#1", "speak#2"}
    assert items[1].location == "log#1"
    assert not any(each.superseded for each in items)


@on_every_store
async def test_items_of_an_attempt_that_is_repeated_are_marked(h):
    FAILING.add(1)
    engine = await h.engine(mixed)
    await h.run_to_end(await engine.start(mixed, id="r"))
    items = await collect(engine, "r", details=True)
    assert [each.value for each in items if each.superseded] == ["step 1.0", "step 1.1"]
    assert [each.value for each in items if not each.superseded] == MIXED


@on_every_store
async def test_a_reader_follows_live_and_ends_with_the_run(h):
    engine = await h.engine(mixed)
    client = await h.client(store=another_handle(h.store, h.clock))
    await engine.start(mixed, id="r")
    here, there = h.background(collect(engine, "r")), h.background(collect(client, "r"))
    await h.clock.advance(5)
    await h.settle()
    assert not here.done()
    assert not there.done()
    await h.clock.advance(20)
    await h.settle()
    assert here.result() == there.result() == MIXED


@on_every_store
async def test_live_stream_reader_gets_all_items_before_the_end(h):
    engine = await h.engine(mixed)
    client = await h.client(store=another_handle(h.store, h.clock))
    await engine.start(mixed, id="r")
    for reader in (engine, client):
        items = reader.read_stream("r", "log")
        async with contextlib.aclosing(items):
            assert [await h.drive(anext(items), 8.0) for _ in range(13)] == MIXED[:13]


@on_every_store
async def test_reading_resumes_from_an_offset(h):
    engine = await h.engine(mixed)
    await engine.start(mixed, id="r")
    await h.settle()
    items = engine.read_stream("r", "log")
    seen = [await anext(items) for _ in range(5)]
    await items.aclose()
    rest = h.background(collect(engine, "r", start=5))
    await h.clock.advance(20)
    assert seen + rest.result() == MIXED
    assert await collect(engine, "r", start=100) == []


@on_every_store
@pytest.mark.parametrize("how", ["fail", "cancel", "terminate"])
async def test_stream_ends_with_any_outcome_of_its_run(h, how):
    @workflow(name=f"streams.ends-{how}")
    async def ends(ctx: Context) -> None:
        await ctx.stream("log").write(1)
        await ctx.sleep(10)
        await ctx.stream("log").write(2)
        raise ValueError("over")

    engine = await h.engine(ends)
    client = await h.client(store=another_handle(h.store, h.clock))
    run = await engine.start(ends, id="r")
    reading = h.background(collect(client, "r"))
    await h.clock.advance(5)
    if how == "cancel":
        await run.cancel()
    if how == "terminate":
        await engine.terminate("r")
    await h.clock.advance(30)
    await h.settle()
    assert reading.result() == ([1, 2] if how == "fail" else [1])


@on_every_store
async def test_stream_continues_across_continuations_and_loops(h):
    @workflow(name="streams.goes-on")
    async def goes_on(ctx: Context, n: int) -> None:
        async def body(ctx: Context, i: int) -> Continue[int] | Break[int]:
            await ctx.stream("log").write(f"{n}.{i}")
            return Break(i) if i == 29 else Continue(i + 1)

        await ctx.loop("pages", body, 0, prune_every=5, keep=5)
        await ctx.sleep(1)
        if n < 2:
            await ctx.continue_as(n + 1)

    engine = await h.engine(goes_on)
    await engine.start(goes_on, 0, id="r")
    assert await h.drive(collect(engine, "r")) == [f"{n}.{i}" for n in range(3) for i in range(30)]


@on_every_store
async def test_stream_items_dropped_by_a_rewind_are_marked(h):
    engine = await h.engine(mixed)
    run = await engine.start(mixed, id="r")
    await h.run_to_end(run)
    await engine.rewind("r", "speak#2")
    await h.run_to_end(run)
    items = await collect(engine, "r", details=True)
    assert [each.value for each in items if not each.superseded] == MIXED
    assert [each.value for each in items if each.superseded] == [*lines(2)[1:], "end"]


@on_every_store
async def test_fork_does_not_copy_streams(h):
    engine = await h.engine(mixed)
    await h.run_to_end(await engine.start(mixed, id="r"))
    await h.run_to_end(await engine.fork("r", "speak#2", id="f"))
    assert await collect(engine, "r") == MIXED
    assert await collect(engine, "f") == [*lines(2)[1:], "end"]


@on_every_store
async def test_unencodable_stream_item_is_refused_at_the_call(h):
    @workflow(name="streams.wrong")
    async def wrong(ctx: Context) -> list[str]:
        seen = []
        calls: tuple[Callable[[], Any], ...] = (
            lambda: ctx.stream("log").write(object()),
            lambda: ctx.stream(""),
            lambda: ctx.publish("", 1),
            lambda: ctx.publish("~reply/x", 1),
            lambda: ctx.publish("key", object()),
        )
        for call in calls:
            try:
                await call()
            except (InvalidPayload, WorkflowMisuse) as error:
                seen.append(type(error).__name__)
        return seen

    engine = await h.engine(wrong)
    seen = await h.run_to_end(await engine.start(wrong, id="r"))
    assert seen == ["InvalidPayload", "InvalidArgument", "InvalidArgument", "InvalidArgument", "InvalidPayload"]
    assert await engine.history("r") == []
    assert await collect(engine, "r") == []
    assert await engine.published("r") == {}


# --- published values


@on_every_store
async def test_last_published_value_of_each_key_is_readable(h):
    engine = await h.engine(mixed)
    client = await h.client(store=another_handle(h.store, h.clock))
    run = await engine.start(mixed, id="r")
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    assert await engine.published("r") == await client.published("r") == {"done": 2}
    assert (await client.describe("r")).published == {"done": 2}
    await h.run_to_end(run)
    assert await client.published("r") == {"done": 2}
    with pytest.raises(RunNotFound):
        await client.published("unknown")


@on_every_store
async def test_published_values_survive_continuation_and_failure(h):
    @workflow(name="streams.values")
    async def values(ctx: Context, n: int) -> None:
        await ctx.publish(f"generation {n}", {"n": n, "who": ctx.run_id})
        await ctx.publish("last", n)
        if n == 0:
            await ctx.continue_as(1)
        raise ValueError("over")

    engine = await h.engine(values)
    with pytest.raises(RunFailed):
        await h.run_to_end(await engine.start(values, 0, id="r"))
    assert await engine.published("r") == {
        "generation 0": {"n": 0, "who": "r"},
        "generation 1": {"n": 1, "who": "r"},
        "last": 1,
    }


# --- crashes


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_writes_each_item_once(kind, tmp_path):

    async def each_once(engine):
        items = await collect(engine, "crash-everywhere", details=True)
        assert [each.value for each in items if not each.superseded] == MIXED
        assert all(each.attempt for each in items if each.superseded), "only steps are ever repeated"
        assert [each.offset for each in items] == list(range(len(items)))
        assert await engine.published("crash-everywhere") == {"done": 2}

    report = crash_on(kind, tmp_path, mixed, begin=lambda: FAILING.add(1), check=each_once)
    assert report.outcome == ("returned", 3)


@on_every_store
async def test_a_reader_sees_the_same_across_a_crash_of_the_worker(h):
    engine = await h.engine(mixed)
    client = await h.client(store=another_handle(h.store, h.clock))
    engine.faults.crash(4, "after")
    run = await engine.start(mixed, id="r")
    reading = h.background(collect(client, "r", details=True))
    await h.drive_until_crash(engine, run.result())
    await h.crash(engine)
    await h.engine(mixed, store=another_handle(h.store, h.clock))
    items = await h.drive(reading)
    assert without_repetition([each.value for each in items]) == MIXED


def without_repetition(values):
    return [value for at, value in enumerate(values) if value not in values[:at]]
