"""Methods as steps: bound to an instance that is not recorded, with inheritance, compensation and class methods."""

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import (
    Break,
    Context,
    Continue,
    InvalidPayload,
    Retry,
    RunFailed,
    WorkflowMisuse,
    current_step,
    step,
    workflow,
)
from perdure.runner.function_names import _find_registered
from perdure.testing import TestEngine, replay
from tests.engine.store_matrix import on_every_store


class Gateway:
    """Charges by a method; neither it nor its log can be encoded."""

    currency = "EUR"

    def __init__(self, log: list[Any], fail: int = 0) -> None:
        self.log = log
        self.fail = fail
        self.lock = threading.Lock()

    @step
    async def refund(self, receipt: str) -> None:
        self.log.append(("refund", receipt))

    @step(retry=Retry(max_attempts=3, initial=1, jitter=0), compensate=refund)
    async def charge(self, order: str, cents: int = 5) -> str:
        self.log.append(("charge", order, cents, current_step().attempt))
        if current_step().attempt <= self.fail:
            raise ConnectionError("try again")
        return f"{self.currency}-{order}"

    @step
    def print(self, text: str) -> str:
        with self.lock:
            self.log.append(threading.current_thread().name.rpartition("-")[0])
        return text.upper()

    @step
    @classmethod
    async def code(cls, sign: str) -> str:
        return sign + cls.currency

    @classmethod
    @step
    async def other_code(cls, sign: str) -> str:
        return sign + cls.currency

    @step
    @staticmethod
    async def add(a: int, b: int) -> int:
        return a + b

    @staticmethod
    @step
    async def other_add(a: int, b: int) -> int:
        return a + b


class DollarGateway(Gateway):
    currency = "USD"

    @step
    async def charge(self, order: str, cents: int = 5) -> str:
        return "$" + await super().charge(order, cents)

    @step
    async def refund(self, receipt: str) -> None:
        self.log.append(("dollars back", receipt))


class Service:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def checkout(self, order: str) -> str:
        return await self.gateway.charge(order)


def define(gateway: Gateway):
    service = Service(gateway)

    @workflow(name="methods.checkout")
    async def checkout(ctx: Context, order: str) -> list[Any]:
        first = await service.checkout(order)
        await ctx.sleep(60)
        return [first, await gateway.charge.options(key="again", retry=None)(order, cents=7)]

    return checkout


@on_every_store
async def test_method_is_a_step_that_records_neither_its_instance_nor_its_class(harness):
    log: list[Any] = []
    engine = await harness.engine(define(Gateway(log, fail=1)))
    await engine.start("methods.checkout", "o", id="r")
    await harness.clock.advance(10)
    assert log == [("charge", "o", 5, 1), ("charge", "o", 5, 2)]
    await harness.crash(engine)
    engine = await harness.engine(define(Gateway(log)))  # another process has an instance of its own
    assert await harness.drive(engine.get("r").result()) == ["EUR-o", "EUR-o"]
    assert log[2:] == [("charge", "o", 7, 1)]
    history = await engine.history("r")
    assert [(entry.location, entry.name) for entry in history] == [
        ("charge", "charge"),
        ("sleep", "sleep"),
        ("charge[again]", "charge"),
    ]
    assert not (await engine.describe("r")).drift


def test_history_of_one_class_replays_with_a_subclass_that_overrides_the_method():
    async def record():
        definition = define(Gateway([]))
        async with TestEngine([definition]) as engine:
            await engine.start(definition, "o", id="r")
            await engine.settle()
            return await engine.export_history("r")

    replay(asyncio.run(record()), define(DollarGateway([])))


async def results_of(make):
    @workflow
    async def calls(ctx: Context) -> Any:
        return await make(ctx)

    async with TestEngine([calls]) as engine:
        result = await engine.execute(calls, id="r")
        return result, [entry.location for entry in await engine.history("r")]


def test_override_runs_its_own_body_and_the_inherited_one_as_a_plain_method():
    log: list[Any] = []
    gateway = DollarGateway(log)
    assert asyncio.run(results_of(lambda ctx: gateway.charge("o"))) == ("$USD-o", ["charge"])
    assert len(log) == 1


def test_sync_method_runs_in_a_thread():
    log: list[Any] = []
    gateway = Gateway(log)
    assert asyncio.run(results_of(lambda ctx: gateway.print("x"))) == ("X", ["print"])
    assert log == ["perdure-step"]


def test_class_and_static_methods_are_steps_in_either_order_of_the_decorators():
    async def make(ctx):
        gateway: Any = DollarGateway([])
        cls: Any = Gateway
        return [
            await gateway.code("a"),
            await cls.code("b"),
            await gateway.other_code("c"),
            await cls.other_code("d"),
            await gateway.add(1, 2),
            await cls.add(3, 4),
            await gateway.other_add(5, 6),
            await cls.other_add(7, 8),
        ]

    result, locations = asyncio.run(results_of(make))
    assert result == ["aUSD", "bEUR", "cUSD", "dEUR", 3, 7, 11, 15]
    assert locations == [
        *("code", "code#1", "other_code", "other_code#1", "add", "add#1", "other_add", "other_add#1"),
    ]


def test_arguments_of_a_method_are_bound_without_self():
    gateway = Gateway([])

    async def make(ctx):
        seen = []
        for args in ((), (1, 2, 3), (3,)):
            try:
                await gateway.charge(*args)
            except Exception as error:
                seen.append(str(error))
        return seen

    assert asyncio.run(results_of(make)) == (
        [
            "Gateway.charge(): missing a required argument: 'order'",
            "Gateway.charge(): too many positional arguments",
            "arguments of step 'charge': order: Expected `str`, got `int`",
        ],
        [],
    )


def test_call_outside_of_a_workflow_is_the_plain_method():
    log: list[Any] = []
    gateway = Gateway(log)
    assert asyncio.run(gateway.print("x")) == "X"
    assert asyncio.run(gateway.refund("r")) is None
    assert asyncio.run(Gateway.refund(gateway, "s")) is None
    assert log[1:] == [("refund", "r"), ("refund", "s")]


def test_bound_step_looks_like_a_bound_method():
    gateway = Gateway([])
    bound: Any = gateway.charge
    assert bound.fn.__self__ is gateway
    assert bound.name == bound.__name__ == "charge"
    assert bound == gateway.charge
    assert bound != Gateway([]).charge
    assert hash(bound) == hash(gateway.charge)
    assert list(inspect.signature(bound).parameters) == ["order", "cents"]
    assert Gateway.charge.fn is vars(Gateway)["charge"].fn


def test_undecorated_method_is_a_step_through_the_context():
    class Plain:
        def __init__(self) -> None:
            self.factor = 3

        async def times(self, number: int) -> int:
            return number * self.factor

    plain, gateway = Plain(), Gateway([])

    async def make(ctx):
        return [await ctx.step("times", plain.times, 2), await ctx.step("paid", gateway.charge, "o")]

    assert asyncio.run(results_of(make)) == ([6, "EUR-o"], ["times", "paid"])


def test_methods_run_in_branches_and_over_items():
    gateway = Gateway([])

    async def make(ctx):
        joined = await ctx.join(left=gateway.charge("l"), right=gateway.print("r"))
        return [joined, await ctx.map(gateway.print, ["a", "b"]), await asyncio.gather(gateway.print("c"))]

    result, locations = asyncio.run(results_of(make))
    assert result == [{"left": "EUR-l", "right": "R"}, ["A", "B"], ["C"]]
    assert {"join/left/charge", "join/right/print", "print"} <= set(locations)


def test_abstract_method_must_be_overridden():
    class Sender(ABC):
        @step
        @abstractmethod
        async def send(self, text: str) -> str: ...

        @abstractmethod
        @step
        async def close(self) -> None: ...

    class Printer(Sender):
        @step
        async def send(self, text: str) -> str:
            return f"printed {text}"

        @step
        async def close(self) -> None: ...

    assert Sender.__abstractmethods__ == {"send", "close"}
    sender: Sender = Printer()
    assert asyncio.run(results_of(lambda ctx: sender.send("x"))) == ("printed x", ["send"])


def test_local_class_resolves_postponed_annotations():
    @dataclass
    class Parcel:
        kilos: int

    class Carrier:
        @step
        async def ship(self, parcel: "Parcel") -> "Parcel":
            return parcel

        @step
        async def __call__(self, parcel: "Parcel") -> int:
            return parcel.kilos

    async def make(ctx):
        seen: list[Any] = [await Carrier().ship(Parcel(3)), await Carrier()(Parcel(4))]
        try:
            await Carrier().ship(Parcel("3"))  # type: ignore[arg-type]
        except InvalidPayload as error:
            seen.append(str(error))
        return [type(seen[0]).__name__, *seen[1:]]

    assert asyncio.run(results_of(make)) == (
        ["Parcel", 4, "arguments of step 'ship': parcel.kilos: Expected `int`, got `str`"],
        ["ship", "__call__"],
    )


def test_mock_of_a_method_replaces_it_for_every_instance():
    one, other = Gateway([]), Gateway([])

    @workflow
    async def calls(ctx: Context) -> list[str]:
        return [await one.charge("a"), await other.charge("b")]

    async def main():
        async with TestEngine([calls]) as engine:
            mock = engine.mock(Gateway.charge, returns="mocked")
            assert await engine.execute(calls) == ["mocked", "mocked"]
            assert [call.args for call in mock.calls] == [("a",), ("b",)]
            engine.mock(one.charge, returns="bound")
            assert await engine.execute(calls) == ["bound", "bound"]

    asyncio.run(main())


# --- compensation


def failing(gateway: Gateway, register=lambda ctx, gateway: None):
    @workflow(name="methods.failing")
    async def fails(ctx: Context) -> None:
        await gateway.charge("o")
        register(ctx, gateway)
        await ctx.sleep(60)
        raise ValueError("stop")

    return fails


@on_every_store
async def test_compensation_of_a_method_is_the_method_of_the_same_instance_also_after_a_crash(harness):
    log: list[Any] = []
    engine = await harness.engine(failing(Gateway(log)))
    await engine.start("methods.failing", id="r")
    await harness.settle()
    await harness.crash(engine)
    engine = await harness.engine(failing(Gateway(log)))
    with pytest.raises(RunFailed, match="stop"):
        await harness.drive(engine.get("r").result())
    assert log[1:] == [("refund", "EUR-o")]


def test_compensation_calls_the_method_that_a_subclass_overrides():
    class Renamed(Gateway):
        @step
        async def refund(self, receipt: str) -> None:
            self.log.append(("renamed", receipt))

    log: list[Any] = []
    definition = failing(Renamed(log))

    async def main():
        async with TestEngine([definition]) as engine:
            with pytest.raises(RunFailed):
                await engine.execute(definition)

    asyncio.run(main())
    assert log[1:] == [("renamed", "EUR-o")]


def test_methods_can_be_registered_for_rollback_and_exit():
    log: list[Any] = []

    def register(ctx, gateway):
        ctx.on_rollback(gateway.refund, "registered")
        ctx.on_exit(gateway.refund, "exit")

    definition = failing(Gateway(log), register)

    async def main():
        async with TestEngine([definition]) as engine:
            with pytest.raises(RunFailed):
                await engine.execute(definition)

    asyncio.run(main())
    assert log[1:] == [("refund", "registered"), ("refund", "EUR-o"), ("refund", "exit")]


def test_unbound_method_is_refused_as_a_compensation():
    definition = failing(Gateway([]), lambda ctx, gateway: ctx.on_rollback(Gateway.refund, "x"))

    async def main():
        async with TestEngine([definition]) as engine:
            with pytest.raises(RunFailed, match="called without an instance"):
                await engine.execute(definition)

    asyncio.run(main())


def test_method_is_refused_where_a_compensation_outlives_its_history():
    gateway = Gateway([])

    async def body(ctx: Context, state: int) -> Continue[int] | Break[int]:
        await gateway.charge("o")
        return Break(state)

    @workflow
    async def loops(ctx: Context) -> int:
        return await ctx.loop("loop", body, 0)

    @workflow
    async def continues(ctx: Context) -> None:
        await gateway.charge("o")
        await ctx.continue_as()

    async def main(definition):
        async with TestEngine([definition]) as engine:
            with pytest.raises(RunFailed, match=r"no instance is stored; use a step that is a function") as failed:
                await engine.execute(definition)
            assert failed.value.type == WorkflowMisuse.__name__

    asyncio.run(main(loops))
    asyncio.run(main(continues))


def test_recorded_name_never_selects_a_method():
    assert _find_registered("step:Gateway.refund", __name__) is None
    assert _find_registered("step:Gateway.add", __name__) is not None


def test_step_of_a_module_that_is_a_class_attribute_keeps_its_registered_name():
    @step
    async def shared(self: Any, text: str) -> str:
        return text

    class Holder:
        call = shared

    assert not shared.is_method
    assert asyncio.run(Holder().call("x")) == "x"
