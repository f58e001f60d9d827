"""Arguments of steps: bound to the signature and checked against the annotations at the call, before anything runs."""

import asyncio
import functools
import gc
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Context, InvalidPayload, Retry, RunFailed, RunStatus, step, workflow
from perdure.testing import TestEngine, replay
from tests.engine.store_matrix import on_every_store

CALLS: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class GiftOrder(Order):
    wrapped: bool = True


@step(retry=Retry(max_attempts=3, initial=1, jitter=0))
async def charge(order: Order, gift: bool = False) -> str:
    CALLS.append(order)
    return f"receipt-{order.id}"


@step
async def pause() -> None:
    CALLS.append("pause")


@workflow(name="arguments.missing")
async def missing(ctx: Context) -> str:
    await pause()
    return await charge()  # type: ignore[call-arg]


@workflow(name="arguments.wrong_type")
async def wrong_type(ctx: Context) -> str:
    await pause()
    return await charge(Order("1", "many"))  # type: ignore[arg-type]


@workflow(name="arguments.caught")
async def caught(ctx: Context) -> list[str]:
    seen = []
    try:
        await charge(Order("1", 5), colour="red")  # type: ignore[call-arg]
    except TypeError as error:
        seen.append(str(error))
    try:
        await charge("1")  # type: ignore[arg-type]
    except InvalidPayload as error:
        seen.append(str(error))
    seen.append(await charge(Order("2", 5)))
    await ctx.sleep(60)
    seen.append(await charge(Order("3", 5), gift=True))
    return seen


EXPECTED = [
    "charge(): got an unexpected keyword argument 'colour'",
    "arguments of step 'charge': order: Expected `Order`, got `str`",
    "receipt-2",
    "receipt-3",
]


@on_every_store
async def test_call_that_does_not_match_the_signature_fails_the_run_and_records_nothing(harness):
    engine = await harness.engine(missing)
    with pytest.raises(RunFailed, match="missing a required argument: 'order'") as failed:
        await harness.drive(engine.execute(missing, id="r"))
    assert failed.value.type == "TypeError"
    assert "await charge()" in (failed.value.traceback or "")
    assert [entry.location for entry in await engine.history("r")] == ["pause"]
    assert harness.executed("r") == [("pause", 1)]


@on_every_store
async def test_argument_that_does_not_fit_its_annotation_is_refused_with_its_path_and_not_retried(harness):
    engine = await harness.engine(wrong_type)
    with pytest.raises(
        RunFailed, match=r"arguments of step 'charge': order.cents: Expected `int`, got `str`"
    ) as failed:
        await harness.drive(engine.execute(wrong_type, id="r"))
    assert failed.value.type == "InvalidPayload"
    assert [entry.location for entry in await engine.history("r")] == ["pause"]
    assert harness.executed("r") == [("pause", 1)]


@on_every_store
async def test_refused_calls_raise_again_on_replay_and_take_no_location(harness):
    engine = await harness.engine(caught)
    run = await engine.start(caught, id="r")
    await harness.settle()
    await harness.crash(engine)
    engine = await harness.engine(caught)
    assert await harness.drive(engine.get("r").result()) == EXPECTED
    assert [entry.location for entry in await engine.history(run.id)] == ["charge", "sleep", "charge#1"]
    assert [order.id for order in CALLS] == ["2", "3"]


async def of_workflow(definition):
    async with TestEngine([definition]) as engine:
        return await engine.execute(definition, id="r")


def test_type_error_is_raised_at_the_line_of_the_call_and_before_it_is_awaited():
    lines = []

    @workflow
    async def unawaited(ctx: Context) -> None:
        try:
            _ = charge(Order("1", 1), False, 3)  # type: ignore[call-arg]
        except TypeError as error:
            lines.append(traceback.extract_tb(error.__traceback__)[0].line)

    asyncio.run(of_workflow(unawaited))
    assert lines == ['_ = charge(Order("1", 1), False, 3)  # type: ignore[call-arg]']


def test_gather_raises_the_error_of_a_refused_call():
    @workflow
    async def gathers(ctx: Context) -> str:
        try:
            await asyncio.gather(charge(Order("1", 1)), charge(3))  # type: ignore[arg-type]
        except InvalidPayload as error:
            return str(error)
        return ""

    assert "order: Expected `Order`, got `int`" in asyncio.run(of_workflow(gathers))


@step
async def everything(a: int, /, b: int, *rest: int, c: int, d: int = 4, **more: int) -> list[int]:
    return [a, b, *rest, c, d, *more.values()]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {"c": 3}, [1, 2, 3, 4]),
        ((1,), {"c": 3, "b": 2}, [1, 2, 3, 4]),
        ((1,), {"b": 2, "c": 3, "d": 9}, [1, 2, 3, 9]),
        ((1, 2, 5, 6), {"c": 3, "x": 7, "a": 8}, [1, 2, 5, 6, 3, 4, 7, 8]),
        ((), {"c": 3, "b": 2}, "missing a required"),
        ((1, 2), {}, "missing a required"),
        ((1, "2"), {"c": 3}, "b: Expected `int`, got `str`"),
        ((1, 2, 5, "6"), {"c": 3}, r"rest\[1\]: Expected `int`, got `str`"),
        ((1, 2), {"c": 3, "x": "7"}, "x: Expected `int`, got `str`"),
        ((1, 2), {"c": None}, "c: Expected `int`, got `NoneType`"),
    ],
)
def test_every_kind_of_parameter_is_bound_and_checked(args, kwargs, expected):
    @workflow
    async def calls(ctx: Context) -> list[int]:
        for _ in range(2):  # the second call finds the bound shape
            result = await everything(*args, **kwargs)
        return result

    if isinstance(expected, list):
        assert asyncio.run(of_workflow(calls)) == expected
    else:
        with pytest.raises(RunFailed, match=expected):
            asyncio.run(of_workflow(calls))


def test_wrapper_that_supplies_an_argument_is_bound_by_its_own_signature():
    def with_database(fn):
        @functools.wraps(fn)
        async def wrapper(*args, **kwargs):
            return await fn("database", *args, **kwargs)

        return wrapper

    @step
    @with_database
    async def load(database: str, key: int) -> str:
        return f"{database}/{key}"

    @workflow
    async def loads(ctx: Context) -> str:
        return await load(3)

    assert asyncio.run(of_workflow(loads)) == "database/3"


def test_unannotated_parameter_takes_anything_and_an_object_that_cannot_be_encoded():
    class Connection:
        pass

    @step
    async def use(connection, count: "Connection | int") -> str:
        return type(connection).__name__

    @step
    async def typed(connection: Connection) -> str:
        return type(connection).__name__

    @workflow
    async def passes(ctx: Context) -> list[str]:
        seen = [await use(Connection(), 3), await use(lambda: 3, Connection()), await typed(Connection())]
        try:
            await typed(3)  # type: ignore[arg-type]
        except InvalidPayload as error:
            seen.append(str(error))
        return seen

    assert asyncio.run(of_workflow(passes)) == [
        "Connection",
        "function",
        "Connection",
        "arguments of step 'typed': connection: Expected `Connection`, got `int`",
    ]


def test_context_step_binds_and_checks_too():
    async def plain(order: Order) -> str:
        return order.id

    @workflow
    async def calls(ctx: Context) -> list[str]:
        seen = [await ctx.step("plain", plain, GiftOrder("7", 1))]
        for args in ((), ({"id": "7"},)):
            try:
                await ctx.step("plain", plain, *args)
            except (TypeError, InvalidPayload) as error:
                seen.append(type(error).__name__)
        return seen

    assert asyncio.run(of_workflow(calls)) == ["7", "TypeError", "InvalidPayload"]


def test_closures_that_are_passed_to_context_step_are_collected():
    references = []

    @workflow
    async def passes(ctx: Context) -> list[int]:
        seen = []
        for number in range(3):

            async def closure(number: int = number) -> int:
                return number

            references.append(weakref.ref(closure))
            seen += [await ctx.step("closure", closure), await ctx.step("lambda", lambda: 1)]
            del closure
        return seen

    assert asyncio.run(of_workflow(passes)) == [0, 1, 1, 1, 2, 1]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("args", [(), (1, 2, 3)])
def test_unannotated_function_is_bound_too(args):
    @workflow
    async def calls(ctx: Context) -> None:
        assert await ctx.step("lambda", lambda a, b=2: a + b, 1) == 3
        await ctx.step("lambda", lambda a, b=2: a + b, *args)

    with pytest.raises(RunFailed, match=r"<lambda>\(\): (missing a required argument|too many positional)"):
        asyncio.run(of_workflow(calls))


# --- histories of versions that did not check


def exported(definition, entries):
    """Return the export of a run with these recorded entries."""

    async def record():
        async with TestEngine([definition]) as engine:
            run = await engine.start(definition, id="r")
            await engine.settle()
            return await engine.export_history(run.id)

    history = asyncio.run(record())
    assert [entry["location"] for entry in history["entries"]] == entries
    return history


def test_recorded_calls_that_would_be_refused_today_replay():
    """The same calls are recorded without checks, as by an earlier version, and replayed with them."""

    async def loose(*args: Any, **kwargs: Any) -> str:
        return "done"

    async def strict(order: Order) -> str:
        return "done"

    def define(fn):
        called = step(name="called")(fn)

        @workflow(name="arguments.earlier", strict=True)
        async def earlier(ctx: Context) -> None:
            await called(Order("1", "many"))  # type: ignore[arg-type]
            await called()
            await ctx.sleep(60)

        return earlier

    history = exported(define(loose), ["called", "called#1", "sleep"])
    replay(history, define(strict))


def test_default_and_keyword_do_not_change_the_recorded_fingerprint():
    """The fingerprint is that of the arguments as given: a new parameter with a default is no divergence."""

    def define(fn):
        called = step(name="called")(fn)

        @workflow(name="arguments.defaults", strict=True)
        async def defaults(ctx: Context) -> None:
            await called(1)
            await called(number=1)
            await ctx.sleep(60)

        return defaults

    async def before(number: int) -> int:
        return number

    async def after(number: int, unit: str = "g", *, round_up: bool = True) -> int:
        return number

    replay(exported(define(before), ["called", "called#1", "sleep"]), define(after))


def test_status_of_a_run_whose_call_was_refused_is_failed():
    async def main():
        async with TestEngine([missing]) as engine:
            run = await engine.start(missing)
            with pytest.raises(RunFailed):
                await run.result()
            assert await run.status() is RunStatus.FAILED

    asyncio.run(main())
