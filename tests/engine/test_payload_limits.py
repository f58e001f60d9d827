"""Every value that enters the store is bounded in size and in depth; nothing is stored or stranded by a larger one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from perdure import Context, EngineConfig, Retry, RunFailed, StepFailed, current_step, event, step, workflow
from perdure.admin.run_import import import_run
from perdure.errors import InvalidPayload
from perdure.testing import Harness
from tests.client.hostile_values import nested
from tests.engine.store_matrix import on_every_store

LIMIT = 1_000
SMALL, LARGE, DEEP = "x" * (LIMIT - 200), "x" * LIMIT, nested(201)
TOO_LARGE = r"has 1,0\d\d bytes when encoded; EngineConfig.max_payload_bytes is 1,000"
TOO_DEEP = "nests deeper than 200 levels"
CONFIG = EngineConfig(max_payload_bytes=LIMIT)


@event
class Sent:
    value: Any


@workflow(name="limits.waits")
async def waits(ctx: Context, value: Any = None) -> Any:
    verdict = ctx.deferred("verdict")
    received = await ctx.receive(Sent)
    return [received.value is not None, await verdict is not None]


@workflow(name="limits.child")
async def child(ctx: Context, value: Any) -> Any:
    return value is not None


@step
async def returns(value: Any) -> Any:
    return nested(201) if value == "deep" else "x" * value


class Refused(Exception):
    def __init__(self, detail: str) -> None:
        super().__init__("refused")
        self.detail = detail


@step(raises=Refused, retry=Retry(max_attempts=3, initial=0.1))
async def raises_large() -> None:
    raise Refused(LARGE)


@step(retry=None)
async def writes(value: Any) -> None:
    current_step().write("log", value)


@step(retry=None)
async def raises_long_message() -> None:
    raise ValueError("x" * 1_000_000)


async def make(ctx: Context, what: str, value: Any) -> Any:
    match what:
        case "publish":
            await ctx.publish("key", value)
        case "stream":
            await ctx.stream("log").write(value)
        case "send":
            await ctx.send("other", Sent(value))
        case "broadcast":
            await ctx.broadcast(Sent(value))
        case "child":
            await ctx.run_child(child, value)
        case "start_child":
            await ctx.start_child(child, value)
        case "continue_as":
            await ctx.continue_as(what, value)
        case "loop":
            await ctx.loop("loop", loop_body, value)
        case "written":
            await writes(value)


async def loop_body(ctx: Context, state: Any) -> None:
    raise AssertionError("the state is refused before")


@workflow(name="limits.makes")
async def makes(ctx: Context, what: str, value: Any = None) -> str:
    try:
        await make(ctx, what, LARGE if value is None else nested(201))
    except (InvalidPayload, StepFailed) as error:
        return str(error)
    return "accepted"


MADE = ("publish", "stream", "send", "broadcast", "child", "start_child", "continue_as", "loop", "written")


@pytest.mark.parametrize("what", MADE)
@on_every_store
async def test_workflow_gets_the_error_for_a_value_that_is_too_large_or_too_deep(h, what):
    engine = await h.engine(makes, child, config=CONFIG)
    large = await h.run_to_end(await engine.start(makes, what))
    assert "bytes when encoded" in large
    deep = await h.run_to_end(await engine.start(makes, what, "deep"))
    assert TOO_DEEP in deep


def refused_calls(engine: Any, token: str) -> Iterator[tuple[str, Any]]:
    for words, value in ((TOO_LARGE, LARGE), (TOO_DEEP, DEEP)):
        yield words, lambda value=value: engine.start(waits, value)
        yield words, lambda value=value: engine.start("limits.waits", value)
        yield words, lambda value=value: engine.execute(waits, value)
        yield words, lambda value=value: engine.send("waiting", Sent(value))
        yield words, lambda value=value: engine.send("waiting", "topic", value)
        yield words, lambda value=value: engine.request("waiting", Sent(value))
        yield words, lambda value=value: engine.broadcast(Sent(value))
        yield words, lambda value=value: engine.emit("topic", value)
        yield words, lambda value=value: engine.complete(token, value)


@on_every_store
async def test_calls_refuse_a_value_that_is_too_large_or_too_deep_and_store_nothing(h):
    engine = await h.engine(waits, config=CONFIG)
    await engine.start(waits, SMALL, id="waiting")
    token = await engine.deferred_token("waiting", "verdict")
    await h.settle()
    committed = len(engine.faults.committed)
    for words, call in refused_calls(engine, token):
        with pytest.raises(InvalidPayload, match=words):
            await call()
    assert len(engine.faults.committed) == committed
    await engine.send("waiting", Sent(SMALL))
    assert await engine.complete(token, SMALL)
    assert await h.drive(engine.result("waiting")) == [True, True]


@on_every_store
async def test_step_whose_result_is_too_large_or_too_deep_fails_and_is_not_repeated(h):
    @workflow
    async def calls(ctx: Context, value: Any) -> str:
        try:
            await returns(value)
        except StepFailed as error:
            return f"{error.type}: {error.message}"
        return "accepted"

    engine = await h.engine(calls, config=CONFIG)
    too_large = await h.run_to_end(await engine.start(calls, LIMIT, id="large"))
    assert too_large.startswith("InvalidPayload: result of step returns: has 1,002 bytes")
    too_deep = await h.run_to_end(await engine.start(calls, "deep", id="deep"))
    assert "InvalidPayload" in too_deep
    assert TOO_DEEP in too_deep
    assert h.executed("large") == h.executed("deep") == [("returns", 1)]
    assert await h.run_to_end(await engine.start(calls, LIMIT - 2)) == "accepted"


@on_every_store
async def test_run_whose_result_is_too_large_fails(h):
    @workflow
    async def returns_large(ctx: Context) -> str:
        return LARGE

    engine = await h.engine(returns_large, config=CONFIG)
    with pytest.raises(RunFailed, match="InvalidPayload: result of workflow 'returns_large': has 1,002 bytes"):
        await h.run_to_end(await engine.start(returns_large))


@on_every_store
async def test_error_with_large_fields_or_a_long_message_ends_the_step(h):
    @workflow
    async def calls(ctx: Context, long: bool) -> int:
        try:
            await (raises_long_message() if long else raises_large())
        except (StepFailed, Refused) as error:
            return len(str(error))
        return 0

    engine = await h.engine(calls, config=CONFIG)
    assert 0 < await h.run_to_end(await engine.start(calls, False)) < 100_000
    assert 0 < await h.run_to_end(await engine.start(calls, True, id="long")) < 100_000
    (entry,) = await engine.history("long")
    assert len(entry.error.message) < 100_000, "a message is cut"


@on_every_store
async def test_deferred_that_fails_with_a_large_error_gets_its_message(h):
    @workflow
    async def defers(ctx: Context) -> bool:
        try:
            await ctx.deferred("verdict")
        except Exception as error:
            return LARGE in str(error)
        return False

    engine = await h.engine(defers, config=CONFIG)
    await engine.start(defers, id="x")
    assert await engine.fail(await engine.deferred_token("x", "verdict"), LARGE)
    assert await h.drive(engine.result("x"))


@on_every_store
async def test_batch_of_events_that_together_exceed_a_limit_is_received(h):
    @workflow
    async def batches(ctx: Context) -> int:
        await ctx.sleep(1)
        received = [each async for each in receive_all(ctx)]
        return sum(len(str(each)) > 50 for each in received)

    async def receive_all(ctx: Context) -> Any:
        for each in await ctx.receive_batch("large", "deep", max=5):
            yield each

    engine = await h.engine(batches, config=EngineConfig(max_payload_bytes=LIMIT))
    await engine.start(batches, id="x")
    for _ in range(3):
        await engine.send("x", "large", SMALL)
    await engine.send("x", "deep", nested(198))
    assert await h.drive(engine.result("x")) == 4
    other = await h.engine(batches, config=EngineConfig(max_payload_bytes=LIMIT))
    assert (await other.history("x"))[-1].status == "succeeded"


@on_every_store
async def test_import_refuses_payloads_that_are_too_large_or_too_deep(h):
    engine = await h.engine(child)
    await h.run_to_end(await engine.start(child, SMALL, id="x"))
    exported = await engine.export_history("x")
    small = await h.client(config=EngineConfig(max_payload_bytes=100))
    with pytest.raises(InvalidPayload, match=r"input of the run in the export: has 8\d\d bytes"):
        await import_run(small, exported, run_id="other")
    deep = {**exported, "run": {**exported["run"], "input": {"value": nested(201)}}}
    with pytest.raises(InvalidPayload, match=TOO_DEEP):
        await import_run(engine, deep, run_id="other")
    far_too_deep = {**exported, "run": {**exported["run"], "input": {"value": nested(20_000)}}}
    with pytest.raises(ValueError, match="not an exported run"):
        await import_run(engine, far_too_deep, run_id="other")
    assert await engine.status("other") is None


def test_limit_is_64_mebibytes_by_default():
    assert EngineConfig().max_payload_bytes == 64 * 1024 * 1024

    async def main() -> None:
        async with Harness() as h:
            engine = await h.engine(child)
            with pytest.raises(InvalidPayload, match=r"has 67,1\d\d,\d\d\d bytes when encoded"):
                await engine.start(child, "x" * 64 * 1024 * 1024)

    asyncio.run(main())
