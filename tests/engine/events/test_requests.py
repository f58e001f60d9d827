"""Requests: a run replies to an event, and no restart loses the reply."""

import asyncio
from typing import Any

import pytest

from perdure import Context, EngineConfig, RunNotFound, RunStatus, RunTerminated, WorkflowMisuse, event, step, workflow
from tests.engine.store_matrix import on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


@event
class Question:
    text: str


@event
class Order:
    n: int


@step
async def request_think(text: str) -> str:
    return text.upper()


@workflow
async def request_server(ctx: Context, answers: int, pause: float = 0.0) -> int:
    """Replies to `n` requests, each after a pause, and ends after the last."""
    for _ in range(answers):
        asked = await ctx.receive_request(Question)
        await ctx.sleep(pause)
        await asked.reply({"said": await request_think(asked.value.text)})
    return answers


@workflow
async def request_deaf(ctx: Context) -> str:
    """Receives a request and never replies."""
    asked: Question = await ctx.receive(Question)
    await ctx.sleep(10)
    return asked.text


# --- replies


@on_every_store
async def test_concurrent_requests_get_their_own_replies(h):
    engine = await h.engine(request_server, config=LONG)
    run = await engine.start(request_server, 3)
    client = await h.client()
    asked = [
        h.background(each.request(run.id, Question(text), 60))
        for each, text in ((engine, "a"), (client, "b"), (engine, "c"))
    ]
    answers = await h.drive(asyncio.gather(*asked))
    assert answers == [{"said": "A"}, {"said": "B"}, {"said": "C"}]
    assert await run.result() == 3


@on_every_store
async def test_a_request_of_any_type_is_received_with_its_value(h):
    @workflow
    async def request_any(ctx: Context) -> None:
        for _ in range(2):
            asked = await ctx.receive_request(Order, "plain")
            await asked.reply([type(asked.value).__name__, asked.event_id != ""])

    engine = await h.engine(request_any, config=LONG)
    run = await engine.start(request_any)
    assert await h.drive(engine.request(run.id, Order(1), 10)) == ["Order", True]
    assert await h.drive(engine.request(run.id, "plain", 10, payload={"n": 1})) == ["dict", True]


@on_every_store
async def test_plain_receive_does_not_reply_to_a_request(h):
    engine = await h.engine(request_deaf, config=LONG)
    run = await engine.start(request_deaf)
    with pytest.raises(TimeoutError):
        await h.drive(engine.request(run.id, Question("x"), 5))
    with pytest.raises(RunTerminated):
        await h.drive(engine.request(run.id, Question("y"), 600))
    assert await run.result() == "x"


@on_every_store
async def test_reply_to_a_plain_event_is_discarded(h):
    engine = await h.engine(request_server, config=LONG)
    run = await engine.start(request_server, 1)
    await run.send(Question("unawaited"))
    assert await h.run_to_end(run) == 1
    assert await h.store.published(run.id) == []


@on_every_store
async def test_receive_request_times_out_like_receive(h):
    @workflow
    async def request_timed(ctx: Context) -> str:
        try:
            await ctx.receive_request(Question, timeout=5)
        except TimeoutError:
            return "no request"
        return "asked"

    engine = await h.engine(request_timed, config=LONG)
    assert await h.run_to_end(await engine.start(request_timed), within=6) == "no request"


# --- restarts


@on_every_store
async def test_reply_reaches_the_caller_although_the_runs_engine_dies(h):
    client = await h.client()
    first = await h.engine(request_server)
    run = await first.start(request_server, 1, 20.0)
    asking = h.background(client.request(run.id, Question("again"), 600))
    await h.clock.advance(5)  # the run has received the request and sleeps
    await h.crash(first)
    await h.engine(request_server)
    assert await h.drive(asking) == {"said": "AGAIN"}


@on_every_store
async def test_repeated_request_with_the_same_id_gets_the_same_reply(h):
    engine = await h.engine(request_server)
    run = await engine.start(request_server, 2, 20.0)
    first = await h.client()
    asking = h.background(first.request(run.id, Question("once"), 600, event_id="q-1"))
    await h.clock.advance(5)
    asking.cancel()  # its process is dead
    await h.clock.advance(60)  # the reply is stored
    second = await h.client()
    assert await h.drive(second.request(run.id, Question("once"), 600, event_id="q-1"), within=10) == {"said": "ONCE"}
    assert await run.status() is RunStatus.SUSPENDED  # it received one request, and waits for the second
    assert await h.drive(second.request(run.id, Question("twice"), 600)) == {"said": "TWICE"}
    assert await h.drive(second.request(run.id, Question("once"), 600, event_id="q-1"), within=10) == {"said": "ONCE"}
    assert await run.status() is RunStatus.SUCCEEDED


@on_every_store
async def test_both_sides_restart(h):
    client = await h.client()
    first = await h.engine(request_server)
    run = await first.start(request_server, 1, 20.0)
    asking = h.background(client.request(run.id, Question("both"), 600, event_id="q"))
    await h.clock.advance(5)
    asking.cancel()
    await h.crash(first)
    await h.engine(request_server)
    other = await h.client()
    assert await h.drive(other.request(run.id, Question("both"), 600, event_id="q")) == {"said": "BOTH"}


@on_every_store
async def test_reply_is_sent_once_at_any_crash(h):
    """A crash before and after each commit of the replying engine: the caller gets one reply."""
    for n in range(1, 8):
        for side in ("before", "after"):
            client = await h.client()
            dying = await h.engine(request_server)
            run = await dying.start(request_server, 1, 1.0)
            dying.faults.crash(n, side)
            asking = h.background(client.request(run.id, Question(f"{n} {side}"), 600))
            await h.drive_until_crash(dying, asyncio.wait([asking]))
            await h.crash(dying)
            other = await h.engine(request_server)
            assert await h.drive(asking) == {"said": f"{n} {side}".upper()}
            assert await h.drive(client.result(run.id)) == 1
            await h.drive(other.shutdown())


# --- no reply


@on_every_store
async def test_request_to_a_run_that_ends_without_a_reply_raises_at_once(h):
    engine = await h.engine(request_deaf, config=LONG)
    run = await engine.start(request_deaf)
    asking = h.background(engine.request(run.id, Question("x"), 600))
    await h.clock.advance(11)
    with pytest.raises(RunTerminated) as raised:
        asking.result()
    assert raised.value.status is RunStatus.SUCCEEDED


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@on_every_store
async def test_request_to_a_terminated_run_raises(h, how):
    engine = await h.engine(request_deaf, config=LONG)
    run = await engine.start(request_deaf)
    asking = h.background(engine.request(run.id, Question("x")))
    await h.settle()
    assert await getattr(engine, how)(run.id)
    with pytest.raises(RunTerminated) as raised:
        await h.drive(asking, within=5)
    assert raised.value.status is RunStatus.CANCELLED


@on_every_store
async def test_a_request_follows_the_rules_of_send(h):
    engine = await h.engine(request_deaf, config=LONG)
    with pytest.raises(RunNotFound):
        await engine.request("unknown", Question("x"), 1)
    with pytest.raises(WorkflowMisuse):
        await engine.request("unknown", object(), 1)
    run = await engine.start(request_deaf)
    await run.send(Question("x"))
    await h.run_to_end(run)
    with pytest.raises(RunTerminated):
        await engine.request(run.id, Question("y"), 1)


@on_every_store
async def test_reply_that_cannot_be_encoded_is_refused_in_the_workflow(h):
    @workflow
    async def request_wrong(ctx: Context) -> Any:
        asked = await ctx.receive_request("ask")
        try:
            await asked.reply(object())
        except Exception as error:
            await asked.reply(type(error).__name__)
        return None

    engine = await h.engine(request_wrong, config=LONG)
    run = await engine.start(request_wrong)
    assert await h.drive(engine.request(run.id, "ask", 5)) == "InvalidPayload"
