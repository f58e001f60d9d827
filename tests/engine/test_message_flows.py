"""Runs and callers exchange events, requests, deferreds and results, from end to end, with rewinds."""

import asyncio
from typing import Any

import pytest

from perdure import (
    ChildFailed,
    Context,
    EngineConfig,
    RunCancelled,
    RunConflict,
    RunNotFound,
    RunStatus,
    RunTerminated,
    WorkflowMisuse,
    event,
    step,
    workflow,
)
from tests.engine.store_matrix import on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


def deaf(h):
    """A store without change notifications: an engine must notice its own changes by itself."""
    store = h.faulty()
    store.on_change = lambda hint: lambda: None
    return store


@event
class Agreed:
    by: str


@step
async def talk_charge(order: str) -> str:
    return f"receipt-{order}"


@workflow
async def talk_checkout(ctx: Context, order: str) -> str:
    agreed = await ctx.receive(Agreed, timeout=3600)
    return f"{await talk_charge(order)} by {agreed.by}"


@workflow
async def talk_double(ctx: Context, n: int) -> int:
    await ctx.sleep(1)
    if n < 0:
        raise ValueError("negative")
    return n * 2


@workflow
async def talk_sleeper(ctx: Context) -> None:
    await ctx.sleep(10_000)


# --- events and requests


@on_every_store
async def test_an_event_before_or_after_the_receive_is_received(h):
    engine = await h.engine(talk_checkout, config=LONG, store=deaf(h))
    early = await engine.start(talk_checkout, "1")
    await early.send(Agreed("ada"))
    assert await h.run_to_end(early, within=1) == "receipt-1 by ada"
    late = await engine.start(talk_checkout, "2")
    await h.settle()
    (reason,) = (await late.describe()).waiting_for
    assert (reason.kind, reason.name) == ("event", "Agreed")
    assert str(reason).startswith("event Agreed until ")
    assert await engine.broadcast(Agreed("bob")) == 1
    assert await h.run_to_end(late, within=1) == "receipt-2 by bob"


@on_every_store
async def test_a_workflow_sends_to_runs_and_topics(h):
    @workflow
    async def talk_sender(ctx: Context, to: str) -> list[Any]:
        await ctx.send(to, Agreed("the sender"))
        try:
            await ctx.send("unknown", Agreed("x"))
        except RunNotFound as error:
            return [error.run_id, await ctx.broadcast(Agreed("everyone"))]
        return []

    engine = await h.engine(talk_sender, talk_checkout, config=LONG, store=deaf(h))
    first, second = [await engine.start(talk_checkout, "1") for _ in range(2)]
    await h.settle()
    assert await h.run_to_end(await engine.start(talk_sender, first.id), within=1) == ["unknown", 1]
    assert await h.run_to_end(first, within=1) == "receipt-1 by the sender"
    assert await h.run_to_end(second, within=1) == "receipt-1 by everyone"


@on_every_store
async def test_released_event_wakes_the_next_waiter(h):
    engine = await h.engine(talk_checkout, config=LONG, store=deaf(h))
    first, second = [await engine.start(talk_checkout, "1") for _ in range(2)]
    await h.settle()
    client = await h.client(config=LONG)
    await client.send(first.id, Agreed("a friend"))
    assert await client.broadcast(Agreed("everyone")) == 1, "the oldest subscription, which does not need it"
    await engine.recover()  # it got no notification
    assert await h.run_to_end(first, within=1) == "receipt-1 by a friend"
    assert await h.run_to_end(second, within=1) == "receipt-1 by everyone"


@on_every_store
async def test_active_run_receives_a_message_delivered_by_another_engine(h):
    go = asyncio.Event()

    @step
    async def busy_for_long() -> None:
        await go.wait()

    @workflow
    async def talk_busy(ctx: Context) -> str:
        winner, _ = await ctx.race(work=busy_for_long(), word=ctx.receive("word"))
        return winner

    engine = await h.engine(talk_busy, config=LONG)
    run = await engine.start(talk_busy)
    await h.settle()
    other = await h.client(config=LONG)
    await other.send(run.id, "word", 1)
    await h.settle()
    assert await run.status() is RunStatus.SUCCEEDED
    assert await run.result() == "word"


@on_every_store
async def test_run_replies_to_requests(h):
    @workflow
    async def talk_server(ctx: Context) -> int:
        answered = 0
        while True:
            request = await ctx.receive_request("ask")
            if request.value == "stop":
                return answered
            answered += 1
            await request.reply([request.value, answered])

    engine = await h.engine(talk_server, config=LONG)
    run = await engine.start(talk_server)
    assert await h.drive(engine.request(run.id, "ask", 10, payload="a"), within=1) == ["a", 1]
    assert await h.drive(engine.request(run.id, "ask", 10, payload="b"), within=1) == ["b", 2]
    with pytest.raises(RunTerminated):
        await h.drive(engine.request(run.id, "ask", 10, payload="stop"), within=1)
    assert await engine.published(run.id) == {}


# --- what runs show


@on_every_store
async def test_deferred_is_completed_with_the_published_token(h):
    @workflow
    async def talk_reviewed(ctx: Context) -> str:
        review = ctx.deferred("review", str)
        await ctx.publish("token", review.token)
        return await review

    engine = await h.engine(talk_reviewed, config=LONG)
    run = await engine.start(talk_reviewed)
    await h.settle()
    token = (await run.describe()).published["token"]
    assert token == await engine.deferred_token(run.id, "review")
    (reason,) = (await run.describe()).waiting_for
    assert (reason.kind, reason.name) == ("deferred", "review")
    assert await engine.complete(token, "fine")
    assert await h.run_to_end(run, within=1) == "fine"
    assert not await engine.complete(token, "late")


@on_every_store
async def test_published_values_need_an_existing_run(h):
    client = await h.client()
    with pytest.raises(RunNotFound):
        await client.published("unknown")


@on_every_store
async def test_a_workflow_writes_streams_itself(h):
    @workflow
    async def talk_logger(ctx: Context) -> None:
        for n in range(3):
            await ctx.stream("log").write(n)

    engine = await h.engine(talk_logger)
    run = await engine.start(talk_logger)
    await h.run_to_end(run)
    assert [item async for item in engine.read_stream(run.id, "log")] == [0, 1, 2]


# --- families


@on_every_store
async def test_parent_is_notified_of_its_children_without_a_sweep(h):
    @workflow
    async def talk_parent(ctx: Context, n: int) -> list[Any]:
        first = await ctx.run_child(talk_double, n)
        handle = await ctx.start_child(talk_double, n + 1, id="named")
        second = await handle.result()
        try:
            await ctx.run_child(talk_double, -1)
        except ChildFailed as error:
            return [first, second, error.type]
        return []

    engine = await h.engine(talk_parent, talk_double, config=LONG, store=deaf(h))
    run = await engine.start(talk_parent, 3)
    await h.settle()
    (reason,) = (await run.describe()).waiting_for
    assert reason.kind == "child"
    assert "the end of run" in str(reason)
    assert await h.run_to_end(run, within=10) == [6, 8, "ValueError"]
    assert await h.store.unfinalized() == []


@workflow
async def talk_family(ctx: Context, names: list[str]) -> None:
    for name in names:
        await ctx.start_child(talk_sleeper, id=name)
    await ctx.sleep(5000)


@on_every_store
async def test_children_are_cancelled_or_terminated_with_their_parent(h):
    engine = await h.engine(talk_family, talk_sleeper, config=LONG, store=deaf(h))
    cancelled = await engine.start(talk_family, ["a", "b", "c"])
    terminated = await engine.start(talk_family, ["d", "e"])
    await h.settle()
    assert await engine.cancel(cancelled.id)
    assert await engine.terminate(terminated.id)
    with pytest.raises(RunCancelled):
        await h.run_to_end(cancelled, within=1)
    await h.settle()
    assert [await engine.status(name) for name in "abcde"] == [RunStatus.CANCELLED] * 5


@on_every_store
async def test_parent_on_another_engine_is_notified_of_its_childs_end(h):
    @workflow
    async def talk_far_parent(ctx: Context) -> int:
        return await ctx.run_child(talk_double, 4)

    engine = await h.engine(talk_far_parent)
    await h.engine(talk_double)
    assert await h.run_to_end(await engine.start(talk_far_parent), within=30) == 8


@on_every_store
async def test_parent_that_crashed_while_waiting_gets_the_childs_result(h):
    @workflow
    async def talk_crashing_parent(ctx: Context) -> int:
        return await ctx.run_child(talk_double, 5, id="the-child")

    first = await h.engine(talk_crashing_parent, talk_double)
    run = await first.start(talk_crashing_parent)
    await h.settle()
    await h.crash(first)
    second = await h.engine(talk_crashing_parent, talk_double)
    assert await h.drive(second.result(run.id)) == 10
    assert [each.id for each in (await second.runs())].count("the-child") == 1


# --- doing again


@workflow
async def talk_twice(ctx: Context) -> list[Any]:
    first = await talk_charge("a")
    word = await ctx.receive("go")
    return [first, word, await talk_charge("b")]


@on_every_store
async def test_rewound_run_continues_from_the_location(h):
    engine = await h.engine(talk_twice, config=LONG)
    run = await engine.start(talk_twice)
    await run.send("go", 1)
    assert await h.run_to_end(run, within=1) == ["receipt-a", 1, "receipt-b"]
    before = len(h.executed(run.id))
    await engine.rewind(run.id, "go")
    assert await h.drive(engine.result(run.id), within=1) == ["receipt-a", 1, "receipt-b"]
    assert h.executed(run.id)[before:] == [("talk_charge#1", 1)]
    assert (await run.describe()).generation == 1


@on_every_store
async def test_a_run_is_rewound_while_it_is_executed(h):
    begun = []

    @step
    async def endless() -> None:
        begun.append(1)
        await asyncio.sleep(1e9 if len(begun) == 1 else 0)

    @workflow
    async def talk_stuck(ctx: Context) -> str:
        await talk_charge("a")
        await endless()
        return "done"

    engine = await h.engine(talk_stuck, config=LONG)
    run = await engine.start(talk_stuck)
    await h.clock.advance(2)  # the step runs long enough to be recorded
    await engine.rewind(run.id, "endless")
    assert await h.drive(engine.result(run.id), within=1) == "done"
    assert engine.slots_taken == 0


@on_every_store
async def test_fork_is_independent_of_the_original(h):
    engine = await h.engine(talk_twice, config=LONG)
    run = await engine.start(talk_twice, id="original")
    await run.send("go", 1)
    await h.run_to_end(run, within=1)
    fork = await engine.fork("original", "go", id="copy")
    assert fork.created
    assert await h.run_to_end(fork, within=1) == ["receipt-a", 1, "receipt-b"]
    assert h.executed("copy") == [("talk_charge#1", 1)]
    assert (await engine.fork("original", "go")).id not in ("original", "copy")
    with pytest.raises(RunConflict):
        await engine.fork("original", "go", id="copy")


@on_every_store
async def test_invalid_rewinds_are_refused(h):
    engine = await h.engine(talk_twice)
    run = await engine.start(talk_twice)
    await h.settle()
    for call in (engine.rewind, engine.fork):
        with pytest.raises(RunNotFound):
            await call("unknown", "go")
        with pytest.raises(WorkflowMisuse, match="nowhere"):
            await call(run.id, "nowhere")


@on_every_store
async def test_a_run_that_was_cancelled_and_rewound_can_be_cancelled_again(h):
    @workflow
    async def talk_cancelled(ctx: Context) -> None:
        await talk_charge("a")
        await ctx.sleep(100)

    engine = await h.engine(talk_cancelled, config=LONG)
    run = await engine.start(talk_cancelled)
    await h.settle()
    for _ in range(2):
        assert await engine.cancel(run.id)
        with pytest.raises(RunCancelled):
            await h.run_to_end(run, within=1)
        await engine.rewind(run.id, "sleep")
        await h.settle()
        assert await run.status() is RunStatus.SUSPENDED
