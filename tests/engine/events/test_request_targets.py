"""Requests to runs that cannot reply: unknown, ended, ending, held, cancelled; and requests by name."""

import asyncio
from typing import Any

from perdure import Context, EngineConfig, RequestRejected, RunNotFound, RunTerminated, event, workflow
from tests.engine.store_matrix import on_every_store

LONG = EngineConfig(sweep_interval=1000.0, lease=5000.0)  # nothing in these tests is found by a sweep


@event
class Ping:
    n: int


@workflow
async def target_that_ends(ctx: Context, seconds: float) -> str:
    await ctx.sleep(seconds)
    return "ended"


@workflow
async def target_that_replies(ctx: Context) -> int:
    request = await ctx.receive_request("ping")
    await request.reply(request.value)
    return 1


@workflow
async def target_that_continues(ctx: Context, generation: int = 0) -> int:
    if generation == 0:
        await ctx.sleep(5)
        await ctx.continue_as(1)
    request = await ctx.receive_request(Ping)
    await request.reply(["generation", generation, request.value.n])
    return generation


async def failure_of(h: Any, requested: Any) -> BaseException:
    [error] = await h.drive(asyncio.gather(requested, return_exceptions=True))
    return error


@on_every_store
async def test_request_to_an_unknown_run_raises_run_not_found(h):
    engine = await h.engine(target_that_ends, config=LONG)
    for sent in (Ping(1), "ping"):
        assert isinstance(await failure_of(h, engine.request("unknown", sent, 60)), RunNotFound)


@on_every_store
async def test_request_to_an_ended_run_raises_run_terminated(h):
    engine = await h.engine(target_that_ends, config=LONG)
    run = await engine.start(target_that_ends, 0)
    await h.run_to_end(run)
    for sent in (Ping(1), "ping"):
        error = await failure_of(h, engine.request(run.id, sent, 60))
        assert isinstance(error, RunTerminated)
        assert error.status == "succeeded"


@on_every_store
async def test_caller_gets_run_terminated_when_the_run_ends_without_a_response(h):
    engine = await h.engine(target_that_ends, config=LONG)
    runs = [await engine.start(target_that_ends, seconds) for seconds in (20, 5000, 5000)]
    client = await h.client()
    asked = [h.background(client.request(run.id, Ping(1))) for run in runs]
    await h.settle()
    await engine.cancel(runs[1].id)
    await engine.terminate(runs[2].id)
    errors = await h.drive(asyncio.gather(*asked, return_exceptions=True))
    assert [type(error) for error in errors] == [RunTerminated] * 3
    assert [error.status for error in errors] == ["succeeded", "cancelled", "cancelled"]


@on_every_store
async def test_timeout_of_a_request_to_a_held_run_names_the_hold(h):
    engine = await h.engine(target_that_replies, config=LONG)
    run = await engine.start(target_that_replies)
    await h.settle()
    await engine.pause(run.id)
    await h.settle()
    error = await failure_of(h, engine.request(run.id, "ping", 10, payload=7, event_id="p-1"))
    assert isinstance(error, TimeoutError)
    assert "it has the request, and is held (paused): paused" in str(error)
    await engine.resume(run.id)
    assert await h.drive(engine.request(run.id, "ping", 10, payload=7, event_id="p-1")) == 7


@on_every_store
async def test_request_by_name_gets_reply_or_rejection(h):
    @workflow
    async def target_by_name(ctx: Context) -> None:
        for _ in range(2):
            request = await ctx.receive_request("ping", accept=lambda value: value > 0)
            await request.reply(-request.value)

    engine = await h.engine(target_by_name, config=LONG)
    run = await engine.start(target_by_name)
    assert await h.drive(engine.request(run.id, "ping", 10, payload=3)) == -3
    assert isinstance(await failure_of(h, engine.request(run.id, "ping", 10, payload=0)), RequestRejected)
    assert await h.drive(engine.request(run.id, "ping", 10, payload=4)) == -4


@on_every_store
async def test_request_waits_for_the_next_generation_of_a_run_that_continues_as_new(h):
    engine = await h.engine(target_that_continues, config=LONG)
    run = await engine.start(target_that_continues)
    assert await h.drive(engine.request(run.id, Ping(3), 60)) == ["generation", 1, 3]
