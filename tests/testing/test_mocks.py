"""A mock replaces the body of a step; retries, records and errors stay the same."""

import asyncio

import pytest

from perdure import Context, Retry, RollbackError, RunFailed, StepFailed, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import TestEngine
from tests.testing.async_runner import with_engine

REAL: list[object] = []


async def undo(receipt: str) -> None:
    REAL.append(f"undone {receipt}")


@step(retry=Retry(max_attempts=3, initial=60, jitter=0), compensate=undo)
async def mocked_charge(cents: int, *, currency: str = "EUR") -> str:
    REAL.append(cents)
    return f"{cents} {currency}"


@step
def mocked_sync(cents: int) -> int:
    REAL.append(cents)
    return cents


async def undecorated(cents: int) -> int:
    REAL.append(cents)
    return cents


@workflow(name="mocks.pay")
async def pay(ctx: Context, cents: int) -> str:
    try:
        return await mocked_charge(cents, currency="USD")
    except StepFailed as failed:
        return f"{failed.type} after {failed.attempts}"


@pytest.fixture(autouse=True)
def nothing_real():
    REAL.clear()
    yield
    REAL.clear()


@with_engine
async def test_mock_returns_values_and_counts_calls(engine):
    mock = engine.mock(mocked_charge, returns="receipt")
    run = await engine.start(pay, 5)
    assert await run.result() == "receipt"
    [call] = mock.calls
    assert (call.args, call.kwargs) == ((5,), {"currency": "USD"})
    assert (call.run_id, call.location, call.attempt) == (run.id, "mocked_charge", 1)
    assert REAL == []
    assert repr(mock) == "<mock of mocked_charge, called 1 times>"


@with_engine
async def test_mock_raises_at_every_attempt(engine):
    mock = engine.mock(mocked_charge, raises=ConnectionError("away"))
    assert await engine.execute(pay, 5) == "ConnectionError after 3"
    assert [call.attempt for call in mock.calls] == [1, 2, 3]
    engine.mock(mocked_charge, raises=KeyError)
    assert await engine.execute(pay, 6) == "KeyError after 3"


@with_engine
async def test_mock_returns_a_sequence_of_values(engine):
    mock = engine.mock(mocked_charge, side_effect=[ConnectionError, ValueError("no"), "third"])
    assert await engine.execute(pay, 5) == "third"
    assert len(mock.calls) == 3
    assert await engine.execute(pay, 6) == "CriticalError after 1", "no value is left, also for another attempt"


@with_engine
async def test_mock_function_may_be_async_or_sync(engine):
    async def later(cents: int, currency: str) -> str:
        await asyncio.sleep(0)
        return f"later {cents} {currency}"

    engine.mock(mocked_charge, side_effect=lambda cents, currency: f"now {cents}")
    assert await engine.execute(pay, 1) == "now 1"
    engine.mock(mocked_charge, side_effect=later)
    assert await engine.execute(pay, 2) == "later 2 USD"


@with_engine
async def test_mock_without_a_value_returns_none_checked_against_the_type(engine):
    engine.mock(mocked_charge)
    assert await engine.execute(pay, 1) == "InvalidPayload after 1", "a str was promised"


@with_engine
async def test_latest_mock_wins_and_ends_with_its_block(engine):
    engine.mock(mocked_charge, returns="first")
    with engine.mock(mocked_charge, returns="second") as second:
        assert await engine.execute(pay, 1) == "second"
    assert await engine.execute(pay, 2) == "first"
    assert len(second.calls) == 1
    third = engine.mock("mocked_charge", returns="third")
    third.stop()
    assert await engine.execute(pay, 3) == "first"


def test_mocks_do_not_leak_into_other_engines():
    async def main() -> None:
        async with TestEngine() as engine, TestEngine() as other:
            engine.mock(mocked_charge, returns="mocked")
            assert await other.execute(pay, 1) == "1 USD"
            assert await engine.execute(pay, 1) == "mocked"
            assert await mocked_charge(2) == "2 EUR", "outside of a workflow a step is its function"

    asyncio.run(main())
    assert REAL == [1, 2]


@with_engine
async def test_sync_steps_functions_names_and_compensations(engine):
    @workflow(name="mocks.all")
    async def everything(ctx: Context) -> None:
        await mocked_charge(1)
        assert await mocked_sync(2) == 20
        assert await ctx.step("by_name", undecorated, 3) == 30
        assert await ctx.step("by_function", undecorated, 4) == 40
        raise RollbackError("back")

    engine.mock(mocked_charge.options(name="another"), returns="receipt")
    engine.mock(mocked_sync, returns=20)
    engine.mock(undecorated, returns=40)
    engine.mock("by_name", returns=30)
    undone = engine.mock(undo)
    with pytest.raises(RunFailed, match="back"):
        await engine.execute(everything)
    assert [call.args for call in undone.calls] == [("receipt",)]
    assert REAL == []


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("", {}),
        (42, {}),
        (mocked_charge, {"returns": 1, "raises": ValueError}),
        (mocked_charge, {"raises": "no exception"}),
        (mocked_charge, {"side_effect": "a string"}),
        (mocked_charge, {"side_effect": 42}),
    ],
)
def test_invalid_arguments_are_refused(target, options):
    with pytest.raises(InvalidArgument):
        TestEngine().mock(target, **options)
