"""`@workflow(raises=...)`: callers and parents get the error of a run with its type and fields."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from perdure import ChildFailed, Complete, Context, Retry, RunFailed, RunStatus, StepFailed, step, workflow
from perdure.errors import InvalidArgument, RecordedError
from perdure.workflows.definition import REGISTRY
from perdure.workflows.types import ErrorView
from tests.engine.store_matrix import another_handle, on_every_store


class Declined(Exception):
    def __init__(self, amount: Decimal, *, code: int) -> None:
        super().__init__(f"{amount} declined")
        self.amount = amount
        self.code = code


class Fraud(Declined):
    pass


class OutOfStock(Exception):
    item: str

    def __init__(self, item: str) -> None:
        super().__init__(item)
        self.item = item


DECLINED = Declined(Decimal("9.99"), code=51)
SEEN: list[list[str]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    SEEN.clear()


def assert_declined(cause: BaseException | None, kind: type[Declined] = Declined) -> None:
    assert type(cause) is kind
    assert (str(cause), cause.amount, cause.code) == ("9.99 declined", Decimal("9.99"), 51)


@step(retry=None, raises=Declined)
async def charge() -> str:
    raise DECLINED


@step(retry=None)
async def charge_untyped() -> str:
    raise DECLINED


@workflow(name="typed.pays", raises=(Declined, OutOfStock))
async def pays(ctx: Context, how: str) -> str:
    match how:
        case "raises":
            raise DECLINED
        case "fraud":
            raise Fraud(Decimal("9.99"), code=51)
        case "stock":
            raise OutOfStock("tea")
        case "other":
            raise LookupError("lost")
        case "step":
            return await charge()
        case "untyped step":
            return await charge_untyped()
        case "continues":
            await ctx.continue_as("step")
        case "continues as another":
            await ctx.continue_as("step", workflow=other_name)
    return how


@workflow(name="typed.other", raises=Declined)
async def other_name(ctx: Context, how: str) -> str:
    return await charge()


@workflow(name="typed.retried", raises=Declined, retry=Retry(max_attempts=3))
async def retried(ctx: Context) -> str:
    raise Declined(Decimal(ctx.generation), code=51)


@workflow(name="typed.undeclared")
async def undeclared(ctx: Context) -> str:
    return await charge()


WORKFLOWS = (pays, other_name, retried, undeclared)


async def failure(h: Any, work: Any) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        await h.drive(work)
    return caught.value


# --- callers


@pytest.mark.parametrize("how", ["raises", "step", "continues", "continues as another"])
@on_every_store
async def test_cause_of_run_failed_has_type_and_fields(h, how):
    engine = await h.engine(*WORKFLOWS)
    client = await h.client()
    run = await engine.start(pays, how, id="x")
    by_handle = await failure(h, run.result())
    assert (by_handle.type, by_handle.message) == ("Declined", "9.99 declined")
    assert "Declined: 9.99 declined" in by_handle.traceback
    for failed in (
        by_handle,
        await failure(h, engine.result("x")),
        await failure(h, engine.execute(pays, how, id="x")),
        await failure(h, engine.execute(pays, how)),
        await failure(h, client.result("x")),
        await failure(h, client.get("x").result()),
    ):
        assert_declined(failed.__cause__)


@on_every_store
async def test_each_caller_gets_its_own_exception(h):
    engine = await h.engine(pays)
    run = await engine.start(pays, "raises")
    one, other = await failure(h, run.result()), await failure(h, run.result())
    assert one.__cause__ is not other.__cause__


@on_every_store
async def test_subclasses_and_several_types_are_rebuilt(h):
    engine = await h.engine(pays)
    assert_declined((await failure(h, engine.execute(pays, "fraud"))).__cause__, Fraud)
    cause: Any = (await failure(h, engine.execute(pays, "stock"))).__cause__
    assert (type(cause), cause.item) == (OutOfStock, "tea")


@on_every_store
async def test_error_that_the_workflow_does_not_declare_has_no_cause(h):
    engine = await h.engine(*WORKFLOWS)
    for failed, kind in (
        (await failure(h, engine.execute(pays, "other")), "LookupError"),
        (await failure(h, engine.execute(pays, "untyped step")), "StepFailed"),
        (await failure(h, engine.execute(undeclared, id="u")), "Declined"),
    ):
        assert (failed.type, failed.__cause__) == (kind, None)
    outcome = await engine.poll("u")
    assert isinstance(outcome, Complete)
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.message, outcome.error.fields) == ("Declined", "9.99 declined", {})


@on_every_store
async def test_retried_run_fails_with_the_error_of_its_last_attempt(h):
    engine = await h.engine(retried)
    cause: Any = (await failure(h, engine.execute(retried))).__cause__
    assert (type(cause), cause.amount) == (Declined, Decimal(2))


@on_every_store
async def test_process_that_does_not_know_the_workflow_gets_no_cause(h, monkeypatch):
    engine = await h.engine(pays)
    await failure(h, engine.execute(pays, "raises", id="x"))
    client = await h.client()
    monkeypatch.delitem(REGISTRY._definitions, ("typed.pays", 1))
    failed = await failure(h, client.result("x"))
    assert (failed.type, failed.message, failed.__cause__) == ("Declined", "9.99 declined", None)
    outcome = await client.poll("x")
    assert isinstance(outcome, Complete)
    assert outcome.error is not None
    assert outcome.error.fields == {"amount": "9.99", "code": 51}, "plain data"


# --- poll, describe, history


@on_every_store
async def test_poll_gives_type_message_and_fields(h):
    engine = await h.engine(pays)
    await failure(h, engine.execute(pays, "step", id="x"))
    outcome = await engine.poll("x")
    assert isinstance(outcome, Complete)
    assert outcome.status is RunStatus.FAILED
    error = outcome.error
    assert isinstance(error, ErrorView)
    assert (error.type, error.message, error.dropped) == ("Declined", "9.99 declined", ())
    assert error.fields == {"amount": Decimal("9.99"), "code": 51}
    described = (await engine.describe("x")).error
    (entry,) = await engine.history("x")
    for shown in (described, entry.error):
        assert shown is not None
        assert (shown.type, shown.fields) == ("Declined", {"amount": "9.99", "code": 51})
    assert entry.error is not None
    assert entry.error.location == "charge"


# --- children


@workflow(name="typed.parent")
async def parent(ctx: Context, how: str) -> list[Any]:
    seen: list[Any] = []
    try:
        await ctx.run_child(pays, how)
    except ChildFailed as failed:
        seen.append(describe(failed))
    child = await ctx.start_child("typed.pays", how)
    try:
        await child.result()
    except ChildFailed as failed:
        seen.append(describe(failed))
    error = (await child.outcome()).error
    assert error is not None
    seen.append([error.type, error.message, str(error.fields.get("amount")), type(error.fields.get("amount")).__name__])
    await ctx.sleep(60)
    return seen


def describe(failed: ChildFailed) -> list[str]:
    cause = failed.__cause__
    fields = [str(getattr(cause, name, None)) for name in ("amount", "code")]
    SEEN.append([type(cause).__name__, str(cause), *fields])  # perdure: ignore
    return SEEN[-1]


@on_every_store
async def test_cause_of_child_failed_has_type_and_fields_live_and_on_replay(h):
    first = await h.engine(parent)
    await h.engine(pays, store=another_handle(h.store, h.clock))
    run = await first.start(parent, "step", id="p")
    await h.settle()
    assert len(SEEN) == 2
    await h.crash(first)
    second = await h.engine(parent, store=another_handle(h.store, h.clock))
    expected = ["Declined", "9.99 declined", "9.99", "51"]
    assert await h.drive(second.result(run.id)) == [
        expected,
        expected,
        ["Declined", "9.99 declined", "9.99", "Decimal"],
    ]
    assert {each.engine for each in h.executions} == {2}, "the children ran on another worker"
    assert [expected] * 4 == SEEN, "live, then on replay"


@on_every_store
async def test_child_error_that_is_not_declared_is_described(h):
    engine = await h.engine(parent, pays)
    run = await engine.start(parent, "untyped step")
    first, second, outcome = await h.run_to_end(run)
    assert first == second
    assert first[0] == RecordedError.__name__
    assert "StepFailed" in first[1]
    assert outcome[0] == "StepFailed"


# --- declaration


@pytest.mark.parametrize("wrong", ["Declined", 3, None, [Declined], (Declined, int), KeyboardInterrupt, DECLINED])
def test_raises_takes_exception_types_only(wrong):
    with pytest.raises(InvalidArgument, match="raises must be an exception type or a tuple of them, not "):

        @workflow(raises=wrong)
        async def never(ctx: Context) -> None: ...


@on_every_store
async def test_single_type_and_caught_step_error(h):
    @workflow(name="typed.single", raises=Declined)
    async def single(ctx: Context) -> str:
        try:
            await charge()
        except StepFailed:
            return "not as itself"
        except Declined as declined:
            raise Fraud(declined.amount, code=declined.code) from declined
        return "paid"

    engine = await h.engine(single)
    assert_declined((await failure(h, engine.execute(single))).__cause__, Fraud)
