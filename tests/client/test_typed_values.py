"""Values arrive as they were declared: dead letters, results, histories, published values, streams and replies."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from perdure import Complete, Context, InvalidPayload, RunStatus, WorkflowMisuse, event, step, workflow
from perdure.model.records import DeadLetter
from perdure.model.turns import TurnExtras
from tests.engine.store_matrix import on_every_store
from tests.engine.store_setup import Stage


@dataclass
class Receipt:
    number: int
    tags: tuple[str, ...] = ()


class Progress(msgspec.Struct):
    done: int
    total: int = 10


class Quote(BaseModel):
    price: int


@event(name="typed.as-dataclass", on_target_terminated="dead_letter")
class LostDataclass:
    receipt: Receipt


@event(name="typed.as-struct", on_target_terminated="dead_letter")
class LostStruct(msgspec.Struct):
    n: int


@event(name="typed.as-model", on_target_terminated="dead_letter")
class LostModel(BaseModel):
    quote: Quote


@event(name="typed.price")
class PriceRequest:
    item: str


@event(name="typed.order")
class Ordered:
    receipt: Receipt


@step(name="typed_charge")
async def charge(number: int) -> Receipt:
    return Receipt(number, ("a",))


@workflow
async def typed_child(ctx: Context, number: int) -> Quote:
    return Quote(price=number)


@workflow
async def typed_run(ctx: Context, number: int) -> list[Receipt]:
    await ctx.publish("progress", Progress(1))
    await ctx.publish("quote", Quote(price=2))
    await ctx.stream("lines").write(Progress(2))
    await ctx.stream("lines").write(Progress(3))
    await ctx.run_child(typed_child, 5, id="typed-child")
    return [await charge(number)]


@workflow
async def typed_waiting(ctx: Context) -> None:
    await ctx.receive("typed.end")


@workflow
async def typed_server(ctx: Context) -> int:
    request = await ctx.receive_request(PriceRequest)
    await request.reply(Quote(price=len(request.value.item)))
    batch = await ctx.receive_batch(Ordered, max=2)
    last = await ctx.receive(Ordered)
    return len(batch) + last.receipt.number


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


# --- dead letters


@on_every_store
async def test_dead_letters_of_a_class_have_its_instances_and_a_run_status(h):
    engine = await h.engine(typed_waiting)
    run = await engine.start(typed_waiting)
    sent = [LostDataclass(Receipt(1, ("a", "b"))), LostStruct(2), LostModel(quote=Quote(price=3))]
    for each in sent:
        await run.send(each)
    await run.send("typed.end")
    await h.settle()
    for each in sent:
        (dead_letter,) = await engine.dead_letters(type(each))
        assert dead_letter.value == each
        assert type(dead_letter.value) is type(each)
        assert type(dead_letter.target_status) is RunStatus
        assert dead_letter.target_status is RunStatus.SUCCEEDED
    (dead_letter,) = await engine.dead_letters("typed.as-struct")
    assert dead_letter.value == {"n": 2}
    assert {type(each.value) for each in await engine.dead_letters()} == {dict}


@on_every_store
async def test_status_of_every_kind_of_dead_letter_is_a_run_status(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r")
    common = {"kind": "event", "at": 1.0, "reason": "why"}
    dead_letters = tuple(
        DeadLetter(id=f"d{status}", target_status=status, **common)  # type: ignore[arg-type]
        for status in (None, *map(str, RunStatus))
    )
    await stage.turn("r", extras=TurnExtras(dead_letters=dead_letters))
    found = [each.target_status for each in await client.dead_letters()]
    assert found == [None, *RunStatus]
    assert {type(each) for each in found} == {type(None), RunStatus}


@on_every_store
async def test_dead_letter_that_does_not_match_its_class_is_plain_data(h):
    engine = await h.engine(typed_server)
    run = await engine.start(typed_server, id="server")
    await run.send("typed.price", {"item": 3})
    await run.send(PriceRequest("a"))
    await h.settle()
    (dead_letter,) = await engine.dead_letters(PriceRequest)
    assert (dead_letter.value, dead_letter.target_status) == ({"item": 3}, RunStatus.RUNNING)
    assert "item: Expected `str`, got `int`" in dead_letter.reason


# --- results and histories


@on_every_store
async def test_result_poll_and_history_have_the_types_of_imported_definitions(h):
    engine = await h.engine(typed_run, typed_child)
    await h.drive(engine.execute(typed_run, 7, id="r"))
    expected = [Receipt(7, ("a",))]
    for caller in (engine, await h.client()):
        assert await caller.result("r") == expected
        assert await caller.poll("r") == Complete(RunStatus.SUCCEEDED, expected)
        values = {entry.name: entry.value for entry in await caller.history("r")}
        assert values["typed_charge"] == Receipt(7, ("a",))
        assert values["typed_child"] == Quote(price=5)
        watched = {entry.name: entry.value async for entry in caller.watch("r")}
        assert watched["typed_charge"] == Receipt(7, ("a",))


@on_every_store
async def test_result_and_poll_have_the_type_that_the_caller_passes(h):
    stage, client = Stage(h), await h.client()
    await stage.run("r", workflow="unknown-to-this-process")
    await stage.end("r", result=b'[{"number":1}]')
    assert await client.result("r") == [{"number": 1}]
    assert await client.result("r", type=list[Receipt]) == [Receipt(1)]
    assert await client.poll("r", type=list[Receipt]) == Complete(RunStatus.SUCCEEDED, [Receipt(1)])
    with pytest.raises(InvalidPayload, match=r"result of run 'r': Expected `object`, got `array`"):
        await client.result("r", type=Receipt)


@on_every_store
async def test_received_events_are_typed_in_the_history(h):
    engine = await h.engine(typed_server)
    run = await engine.start(typed_server, id="server")
    reply = await h.drive(engine.request("server", PriceRequest("abc"), type=Quote))
    assert reply == Quote(price=3)
    for number in (1, 2):
        await run.send(Ordered(Receipt(number)))
        await h.settle()
    assert await h.run_to_end(run) == 3
    values = [entry.value for entry in await engine.history("server") if entry.kind.startswith("receive")]
    assert values == [PriceRequest("abc"), [Ordered(Receipt(1))], Ordered(Receipt(2))]


@on_every_store
async def test_history_of_other_code_is_plain_data(h):
    """A name that this process has defined with another type must not make a history unreadable."""
    engine = await h.engine(typed_other_code)
    await h.drive(engine.execute(typed_other_code, id="other"))
    (entry,) = await engine.history("other")
    assert (entry.name, entry.value) == ("typed_charge", "not a receipt")


@workflow
async def typed_other_code(ctx: Context) -> str:
    return await ctx.step("typed_charge", make_text)


def make_text() -> str:
    return "not a receipt"


# --- published values, streams, replies


@on_every_store
async def test_published_values_have_the_type_that_the_caller_passes(h):
    engine = await h.engine(typed_run, typed_child)
    await h.drive(engine.execute(typed_run, 7, id="r"))
    client = await h.client()
    assert await client.published("r") == {"progress": {"done": 1, "total": 10}, "quote": {"price": 2}}
    assert await client.published("r", "progress") == {"done": 1, "total": 10}
    assert await client.published("r", "progress", Progress) == Progress(1)
    assert await client.published("r", "quote", type=Quote) == Quote(price=2)
    assert await client.published("r", type=Progress | Quote) == {"progress": Progress(1), "quote": Quote(price=2)}
    assert await client.published("r", "unknown", type=Quote) is None
    with pytest.raises(InvalidPayload, match=r"the value 'progress' that run 'r' published: .*price"):
        await client.published("r", "progress", type=Quote)
    with pytest.raises(WorkflowMisuse):
        await client.published("r", "")


@on_every_store
async def test_stream_items_have_the_type_that_the_caller_passes(h):
    engine = await h.engine(typed_run, typed_child)
    await h.drive(engine.execute(typed_run, 7, id="r"))
    client = await h.client()
    assert await collect(client.read_stream("r", "lines")) == [{"done": n, "total": 10} for n in (2, 3)]
    assert await collect(client.read_stream("r", "lines", 0, Progress)) == [Progress(2), Progress(3)]
    (item,) = await collect(client.read_stream("r", "lines", 1, type=Progress, details=True))
    assert (item.offset, item.value) == (1, Progress(3))
    with pytest.raises(InvalidPayload, match=r"item 1 of stream 'lines' of run 'r': .*price"):
        await collect(client.read_stream("r", "lines", start=1, type=Quote))


@on_every_store
async def test_reply_that_does_not_match_the_type_is_refused_and_stays_readable(h):
    engine = await h.engine(typed_server)
    await engine.start(typed_server, id="server")
    with pytest.raises(InvalidPayload, match=r"the reply of run 'server': .*done"):
        await h.drive(engine.request("server", PriceRequest("abc"), event_id="e", type=Progress))
    assert await h.drive(engine.request("server", PriceRequest("abc"), event_id="e")) == {"price": 3}


# --- the engine's own workflows


def define(result: Any, module: str) -> Any:
    async def twice_defined(ctx: Context) -> Any:
        return 1

    twice_defined.__annotations__["return"] = result
    twice_defined.__module__ = module
    return workflow(name="typed.twice")(twice_defined)


@on_every_store
async def test_own_workflows_come_before_the_registry(h):
    as_number, as_text = define(int, "typed.first"), define(list[Receipt], "typed.second")
    engine = await h.engine(as_number)
    run = await engine.start("typed.twice", id="own")
    assert await h.run_to_end(run) == 1
    assert (await engine.poll("own")).value == 1
    stage = Stage(h)
    await stage.run("theirs", workflow="typed.twice")
    await stage.end("theirs", result=b'[{"number":1}]')
    other = await h.engine(as_text)
    assert await other.result("theirs") == [Receipt(1)]
    client = await h.client()  # cannot choose: plain data
    assert await client.result("theirs") == [{"number": 1}]
    with pytest.raises(WorkflowMisuse, match=r"defined in typed\.first.* and typed\.second"):
        await client.start("typed.twice")
