"""Code that a type checker must reject. Each line names its error; an accepted line would have an unused comment."""

from __future__ import annotations

import perdure
from perdure import Context, Engine, Run, WorkQueue, step, workflow
from tests.typing.valid import Gateway, Order, charge, checkout, eight, four, import_file, nightly, refund, weigh


async def of_steps(ctx: Context, order: Order) -> None:
    await charge("x")  # type: ignore[arg-type]
    await charge()  # type: ignore[call-arg]
    await charge(order, order)  # type: ignore[call-arg]
    await weigh(order, unit=3)  # type: ignore[arg-type]
    await charge.options(key=1)(3)  # type: ignore[arg-type]
    charge.options(colour="red")  # type: ignore[call-arg]
    receipt: int = await charge(order)  # type: ignore[assignment]
    charge(order)  # type: ignore[unused-coroutine]
    await ctx.step("n", 3)  # type: ignore[call-overload]
    await ctx.step("n", charge, order, timeout="soon")  # type: ignore[call-overload]
    await ctx.step("n", charge, order, colour="red")  # type: ignore[call-overload]
    await ctx.step("n", charge, order, context="copy")  # type: ignore[call-overload]
    await ctx.sleep("long")  # type: ignore[arg-type]
    assert receipt


async def of_method_steps(gateway: Gateway, order: Order) -> None:
    await gateway.charge()  # type: ignore[call-arg]
    await gateway.charge("x")  # type: ignore[arg-type]
    await gateway.charge(gateway, order)  # type: ignore[arg-type]
    number: int = await gateway.charge(order)  # type: ignore[assignment]
    assert number


def sync_lifespan(engine: Engine) -> int:
    return 1


Engine("memory://", lifespan=3)  # type: ignore[arg-type]
Engine("memory://", lifespan=sync_lifespan)  # type: ignore[arg-type]


@step(context="copy")  # type: ignore[call-overload]
async def other_context(order: Order) -> int:
    return 1


@step(compensate=refund)  # type: ignore[arg-type]
async def other_result(order: Order) -> int:
    return 1


@step(colour="red")  # type: ignore[call-overload]
async def unknown_option(order: Order) -> int:
    return 1


@workflow  # type: ignore[arg-type]
def not_async(ctx: Context) -> int:
    return 1


@workflow  # type: ignore[arg-type]
async def without_context(order: Order) -> int:
    return 1


async def of_the_engine(engine: Engine, order: Order) -> None:
    await engine.start(checkout)  # type: ignore[arg-type]
    await engine.start(checkout, 3)  # type: ignore[arg-type]
    await engine.start(checkout, order, order)  # type: ignore[arg-type]
    await engine.start(checkout, order=3)  # type: ignore[call-overload]
    await engine.start(checkout, order, id=3)  # type: ignore[call-arg]
    await engine.start(checkout, order, colour="red")  # type: ignore[call-arg]
    await engine.start(checkout, order, if_exists="replace")  # type: ignore[call-arg]
    await engine.start(eight, 1, "b", b"c", 2.0, True, 6, 7, 8)  # type: ignore[arg-type]
    await engine.execute(eight, 1, "b", b"c", 2.0, True, "f", "7", id="x")  # type: ignore[arg-type]
    await engine.start(nightly, 1)  # type: ignore[arg-type]
    await engine.start(four, 1, "b", "c", 2.0)  # type: ignore[arg-type]
    await engine.start(checkout.options(id="o"), 3)  # type: ignore[call-overload]
    await engine.start(import_file.options(), "x", wet=True)  # type: ignore[call-arg]
    await engine.execute(checkout, 3)  # type: ignore[arg-type]
    await engine.execute(nightly, 1)  # type: ignore[arg-type]
    await engine.execute(charge, order)  # type: ignore[arg-type]
    run: Run[int] = await engine.start(checkout, order)  # type: ignore[arg-type]
    assert run.id


WorkQueue("invalid", concurrency="5")  # type: ignore[arg-type]
WorkQueue("invalid", rate=5)  # type: ignore[arg-type]


async def of_queues(engine: Engine, ctx: Context, order: Order) -> None:
    await engine.start(checkout, order, queue=5)  # type: ignore[call-arg]
    await engine.start(checkout, order, priority="high")  # type: ignore[call-arg]
    await engine.start(checkout, order, dedupe="k", on_duplicate="drop")  # type: ignore[call-arg]
    await ctx.run_child(checkout, order, dedupe="k")  # type: ignore[call-arg]
    await engine.queue("typed").resize(colour=5)  # type: ignore[call-arg]


async def of_children(ctx: Context, order: Order) -> None:
    await ctx.run_child(four, 1, "b", "c", 2.0)  # type: ignore[arg-type]
    await ctx.run_child(eight, 1, "b", b"c", 2.0, True, 6, 7, "h")  # type: ignore[arg-type]
    await ctx.run_child(checkout, order=3)  # type: ignore[call-overload]


def of_scripts(order: Order) -> None:
    perdure.run(checkout, 3)  # type: ignore[arg-type]
    perdure.run(checkout)  # type: ignore[arg-type]


@workflow(raises=[KeyError])  # type: ignore[call-overload]
async def raises_a_list(ctx: Context) -> None: ...


@workflow(raises=KeyError("x"))  # type: ignore[call-overload]
async def raises_an_instance(ctx: Context) -> None: ...


@workflow(raises=(KeyError, int))  # type: ignore[arg-type]
async def raises_a_number(ctx: Context) -> None: ...


@step(raises=KeyboardInterrupt)  # type: ignore[arg-type]
async def raises_an_interrupt(order: Order) -> None: ...


async def of_errors(ctx: Context) -> None:
    await ctx.deferred("review", int, raises="KeyError")  # type: ignore[call-overload]
    charge.options(raises=[KeyError])  # type: ignore[arg-type]
