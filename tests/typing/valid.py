"""Code whose types a type checker must infer. Never executed: `test_typing` runs mypy on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, assert_type

import perdure
from perdure import (
    Client,
    Context,
    Debounce,
    Engine,
    EngineConfig,
    Rate,
    Retry,
    Run,
    RunQuery,
    RunStatus,
    Worker,
    WorkQueue,
    event,
    step,
    workflow,
)
from perdure.client.views import HistoryEntry, RunDescription, Suspended
from perdure.workflows.messages import Request
from perdure.workflows.types import Complete, ErrorView


class Order:
    id: str


# --- steps


@step
async def charge(order: Order) -> str:
    return order.id


@step
def weigh(order: Order, *, unit: str = "g") -> int:
    return len(order.id + unit)


@step(retry=Retry(max_attempts=5), timeout=timedelta(minutes=1), raises=(KeyError, ValueError))
async def ship(order: Order, express: bool = False) -> bytes:
    return bytes(express)


@step(at_most_once=True, retry=None)
def shout(text: str) -> None:
    return None


async def refund(receipt: str) -> None: ...


def refund_in_a_thread(receipt: str) -> int:
    return 1


@step(compensate=refund)
async def charge_or_undo(order: Order) -> str:
    return order.id


@step(compensate=refund_in_a_thread, timeout=3)
def charge_or_undo_in_a_thread(order: Order) -> str:
    return order.id


async def plain(number: int) -> float:
    return float(number)


def plain_sync(number: int, text: str) -> list[str]:
    return [text] * number


async def of_steps(ctx: Context, order: Order) -> None:
    assert_type(await charge(order), str)
    assert_type(await weigh(order, unit="kg"), int)
    assert_type(await ship(order, True), bytes)
    assert_type(await charge_or_undo(order), str)
    assert_type(await charge_or_undo_in_a_thread(order), str)
    assert_type(await charge.options(key=3, timeout=2.5, name="pay")(order), str)
    assert_type(await weigh.options(retry=None)(order, unit="t"), int)
    assert_type(await asyncio.gather(charge(order), weigh(order)), tuple[str, int])
    assert_type(await asyncio.create_task(ship(order)), bytes)
    assert_type(await asyncio.wait_for(charge(order), 3), str)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(weigh(order))
    assert_type(task.result(), int)
    assert_type(await ctx.step("plain", plain, 3), float)
    assert_type(await ctx.step("sync", plain_sync, 3, "x", retry=None, timeout=timedelta(seconds=1)), list[str])
    assert_type(await ctx.step("again", charge, order, compensate=refund), str)
    functions: list[Callable[[Order], Any]] = [charge, charge.fn]
    assert functions


class Gateway:
    @step
    async def refund(self, receipt: str) -> None: ...

    @step(compensate=refund)
    async def charge(self, order: Order, cents: int = 0) -> str:
        return order.id

    @step(timeout=3, context="inherit")
    def weigh(self, order: Order) -> int:
        return len(order.id)

    @staticmethod
    @step
    async def add(a: int, b: int) -> int:
        return a + b


class Service:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def checkout(self, order: Order) -> str:
        return await self.gateway.charge(order)


async def of_method_steps(ctx: Context, order: Order, gateway: Gateway) -> None:
    assert_type(await gateway.charge(order), str)
    assert_type(await gateway.charge(order, cents=3), str)
    assert_type(await gateway.weigh(order), int)
    assert_type(await gateway.charge.options(key=3, compensate=gateway.refund)(order), str)
    assert_type(await Gateway.charge(gateway, order), str)
    assert_type(await Gateway.add(1, 2), int)
    assert_type(await asyncio.gather(gateway.charge(order), gateway.weigh(order)), tuple[str, int])
    assert_type(await ctx.step("charge", gateway.charge, order, at_most_once=True, context="inherit"), str)
    assert_type(await ctx.step("c", plain, 3, key="k", raises=KeyError, retry_on_timeout=True), float)
    assert_type(await ctx.map(gateway.weigh, [order]), list[int])
    ctx.on_rollback(gateway.refund, "receipt")


async def of_the_context(ctx: Context) -> None:
    await ctx.sleep(timedelta(days=1))
    await ctx.sleep_until(ctx.now())
    assert_type(ctx.version("gate", latest=2), int)
    assert_type(ctx.patched("gate"), bool)
    assert_type(ctx.random.random(), float)


# --- workflows


@workflow
async def checkout(ctx: Context, order: Order) -> str:
    return await charge(order)


@workflow
async def nightly(ctx: Context) -> int:
    return 1


@workflow(name="import", version=2, timeout=timedelta(hours=1), tags={"team": "data"}, idempotency_key=lambda a, b: a)
async def import_file(ctx: Context, path: str, limit: int = 10, *, dry: bool = False) -> list[str]:
    return [path] * limit


@workflow
async def four(ctx: Context, a: int, b: str, c: bytes, d: float) -> tuple[int, float]:
    return a, d


@workflow
async def eight(
    ctx: Context, a: int, b: str, c: bytes, d: float, e: bool, f: str, g: int, h: str = ""
) -> dict[str, int]:
    return {b: a}


async def of_workflows(ctx: Context, order: Order) -> None:
    assert_type(await checkout(ctx, order), str)
    assert_type(checkout.name, str)
    assert_type(checkout.version, int)


async def of_the_engine(order: Order) -> None:
    async with Engine("memory://", [checkout, nightly], EngineConfig(lease=timedelta(seconds=9))) as engine:
        assert_type(engine, Engine)
        run = await engine.start(checkout, order)
        assert_type(run, Run[str])
        assert_type(await run.result(timeout=3), str)
        assert_type(await run.status(), RunStatus)
        assert_type(await run.describe(), RunDescription)
        async for entry in run.watch():
            assert_type(entry, HistoryEntry)
        assert_type(await engine.start(nightly, id="n", tags={"a": "b"}, delay=3), Run[int])
        assert_type(await engine.start(import_file, "x"), Run[list[str]])
        assert_type(await engine.start(import_file, "x", 3, id="i", retention=timedelta(days=1)), Run[list[str]])
        assert_type(await engine.start(four, 1, "b", b"c", 2.0), Run[tuple[int, float]])
        assert_type(await engine.start(import_file.options(id="i"), "x", dry=True), Run[list[str]])
        assert_type(await engine.start(checkout.options(tags={"a": "b"}), order=order), Run[str])
        assert_type(await engine.start("import", "x", id="by-name"), Run[Any])
        assert_type(await engine.execute(checkout, order, id="o"), str)
        assert_type(await engine.execute(nightly), int)
        assert_type(await engine.execute(import_file, "x", 3), list[str])
        assert_type(await engine.execute(four, 1, "b", b"c", 2.0), tuple[int, float])
        assert_type(await engine.execute(import_file.options(id="i"), "x", dry=True), list[str])
        assert_type(engine.get("x"), Run[Any])
        assert_type(await engine.status("x"), RunStatus | None)
        assert_type(await engine.poll("x"), Complete[Any] | Suspended | None)
        assert_type(await engine.cancel("x"), bool)
        for found in (await engine.runs(RunQuery(status=RunStatus.FAILED))).runs:
            assert_type(found, RunDescription)


@asynccontextmanager
async def resources(owner: Engine | Worker) -> AsyncIterator[Gateway]:
    yield Gateway()


@asynccontextmanager
async def shared() -> AsyncIterator[Gateway]:
    yield Gateway()


async def of_lifespans() -> None:
    assert_type(Engine("memory://", None, None, resources), Engine)
    assert_type(Engine("memory://", lifespan=shared), Engine)
    assert_type(Engine("memory://", lifespan=shared()), Engine)
    assert_type(perdure.run(nightly, lifespan=resources), int)


async def of_starts(engine: Engine, ctx: Context, order: Order) -> None:
    assert_type(await engine.start(eight, 1, "b", b"c", 2.0, True, "f", 7, "h", id="x"), Run[dict[str, int]])
    assert_type(await engine.start(eight, 1, "b", b"c", 2.0, True, "f", 7, timeout=3), Run[dict[str, int]])
    assert_type(await engine.execute(eight, 1, "b", b"c", 2.0, True, "f", 7, h="h"), dict[str, int])
    assert_type(await engine.start(checkout, order=order), Run[str])
    assert_type(await engine.start(import_file, "x", dry=True), Run[list[str]])
    assert_type(await engine.start(checkout, order, id="o", if_exists="restart", send=[Paid(cents=1)]), Run[str])
    assert_type(await engine.execute(checkout.options(if_exists="reject", timeout=timedelta(hours=1)), order), str)
    assert_type(await ctx.run_child(eight, 1, "b", b"c", 2.0, True, "f", 7, id="x"), dict[str, int])
    assert_type(await ctx.run_child(import_file, "x", dry=True), list[str])
    assert_type(await (await ctx.start_child(eight, 1, "b", b"c", 2.0, True, "f", 7)).result(), dict[str, int])
    assert_type(perdure.run(eight, 1, "b", b"c", 2.0, True, "f", 7, id="x", if_exists="reject"), dict[str, int])
    assert_type(perdure.run(import_file.options(id="x"), "x", dry=True, store="memory://"), list[str])


queue = WorkQueue("typed", 5, 1, "100/min", lambda order: order.id, partition_rate=Rate(1, per=timedelta(seconds=1)))


@workflow(queue=queue)
async def queued(ctx: Context, order: Order) -> str:
    return order.id


async def of_queues(engine: Engine, ctx: Context, order: Order) -> None:
    assert_type(await engine.start(queued, order, queue=None), Run[str])
    assert_type(await engine.start(checkout, order, queue=queue, priority=-1, partition="p", max_wait=60), Run[str])
    assert_type(await engine.start(checkout, order, queue="typed", dedupe="k", on_duplicate="replace"), Run[str])
    assert_type(await engine.execute(checkout.options(debounce=Debounce("k", quiet=1, keep="first")), order), str)
    assert_type(await ctx.run_child(checkout, order, queue=queue, priority=1), str)
    assert_type(await (await ctx.start_child(checkout, order, queue="typed", detached=True)).result(), str)
    await engine.queue("typed").resize(concurrency=None, rate="5/s")
    assert_type([each.waiting for each in await engine.queues()], list[int])
    assert_type(Engine("memory://", queues=[queue]), Engine)


async def of_others(order: Order) -> None:
    async with Client("sqlite:///x.db") as client:
        assert_type(client, Client)
        assert_type(await client.start(checkout, order), Run[str])
    async with Worker("sqlite:///x.db", [checkout], concurrency=3, lifespan=resources) as worker:
        assert_type(worker, Worker)
    run: Run[object] = await Client("memory://").start(checkout, order)  # The result type of a run is covariant.
    assert run.id


def of_scripts(order: Order) -> None:
    assert_type(perdure.run(checkout, order), str)
    assert_type(perdure.run(import_file, "x", 3, store="sqlite:///x.db", id="i"), list[str])
    assert_type(perdure.run(nightly), int)
    assert_type(perdure.run(four, 1, "b", b"c", 2.0), tuple[int, float])


# --- events


@event
class Paid:
    cents: int


@event(name="orders.shipped", expire_after=60)
class Shipped:
    by: str


@workflow
async def receives(ctx: Context) -> None:
    assert_type(await ctx.receive(Paid), Paid)
    assert_type(await ctx.receive(Paid, Shipped, timeout=3), Paid | Shipped)
    assert_type(await ctx.receive_batch(Paid, max=3), list[Paid])
    assert_type(await ctx.receive_batch(Paid, Shipped, timeout=timedelta(hours=1)), list[Paid | Shipped])
    received = await ctx.receive_request(Paid, Shipped, Order)
    assert_type(received, Request[Paid | Shipped | Order])
    assert_type(received.value, Paid | Shipped | Order)
    checked = await ctx.receive_request(Paid, accept=lambda paid: paid.cents > 0, timeout=1)
    assert_type(checked, Request[Paid])
    assert_type(await checked.fail(ValueError("no")), None)
    assert_type(await checked.fail("no"), None)
    assert_type(await ctx.receive("plain", Paid), Any)
    assert_type(await ctx.broadcast(Paid(cents=7)), int)


# --- errors


@workflow(raises=KeyError)
async def fails_with_one(ctx: Context, order: Order) -> str:
    return await charge.options(raises=LookupError)(order)


@workflow(raises=(KeyError, ValueError))
async def fails_with_either(ctx: Context) -> None:
    assert_type(await ctx.deferred("review", int, raises=ValueError), int)
    assert_type(await ctx.deferred("other", int, raises=(KeyError, ValueError)), int)


async def of_errors(engine: Engine, order: Order) -> None:
    assert_type(await engine.execute(fails_with_one, order), str)
    outcome = await engine.poll("x")
    if isinstance(outcome, Complete) and outcome.error is not None:
        assert_type(outcome.error, ErrorView)
        assert_type(outcome.error.type, str)
        assert_type(outcome.error.fields["code"], Any)
        assert_type(outcome.error.dropped, tuple[str, ...])
    for entry in await engine.history("x"):
        assert_type(entry.error, ErrorView | None)
