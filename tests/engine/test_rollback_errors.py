"""`RollbackError` of a step: never retried, no `StepFailed`, and it rolls the run back."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import (
    ChildFailed,
    Context,
    CriticalError,
    JoinError,
    Retry,
    RollbackError,
    RunFailed,
    RunStatus,
    StepFailed,
    step,
    workflow,
)
from tests.engine.store_matrix import another_handle, on_every_store

LOG: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    LOG.clear()


class UndoAll(RollbackError):
    def __init__(self, *, order: str) -> None:
        super().__init__(f"undo order {order}")
        self.order = order


@step
async def undo(what: str) -> None:
    LOG.append(f"undo {what}")


@step(compensate=undo)
async def do(what: str) -> str:
    LOG.append(what)
    return what


@step(retry=Retry(max_attempts=5, retry_on=lambda error: True))
async def refuse(kind: str) -> None:
    LOG.append(f"refuse {kind}")
    raise {"plain": RollbackError("no"), "own": UndoAll(order="7"), "critical": CriticalError("never")}[kind]


@step(retry=Retry(max_attempts=5))
def refuse_in_a_thread(kind: str) -> None:
    raise UndoAll(order="7")


@workflow(name="rollback.orders", raises=UndoAll)
async def orders(ctx: Context, kind: str) -> str:
    await do("reserve")
    try:
        await refuse(kind)
    except StepFailed as failed:
        return f"continued after {failed.type}"
    return "done"


async def failure(h: Any, work: Any) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        await h.drive(work)
    return caught.value


@on_every_store
async def test_rollback_error_passes_a_handler_of_step_failed_and_rolls_back(h):
    engine = await h.engine(orders)
    failed = await failure(h, engine.execute(orders, "plain", id="x"))
    assert (failed.type, failed.message) == ("RollbackError", "no")
    assert LOG == ["reserve", "refuse plain", "undo reserve"]
    assert await engine.status("x") is RunStatus.FAILED
    assert not issubclass(RollbackError, StepFailed)


@on_every_store
async def test_subclass_keeps_its_fields_and_rolls_back(h):
    engine = await h.engine(orders)
    failed = await failure(h, engine.execute(orders, "own", id="x"))
    cause: Any = failed.__cause__
    assert (type(cause), cause.order) == (UndoAll, "7")
    assert LOG == ["reserve", "refuse own", "undo reserve"]
    entry = next(each for each in await engine.history("x") if each.name == "refuse")
    assert entry.error is not None
    assert (entry.attempts, entry.error.type, entry.error.fields) == (1, "UndoAll", {"order": "7"})


@on_every_store
async def test_critical_error_is_a_step_failed_after_one_attempt(h):
    engine = await h.engine(orders)
    assert await h.run_to_end(await engine.start(orders, "critical", id="x")) == "continued after CriticalError"
    assert h.executed("x") == [("do", 1), ("refuse", 1)]
    assert LOG == ["reserve", "refuse critical"]


@on_every_store
async def test_workflow_catches_it_by_its_type_live_and_on_replay(h):
    seen: list[list[str]] = []

    @workflow(name="rollback.catches")
    async def catches(ctx: Context) -> list[str]:
        for call in (refuse("plain"), refuse("own"), refuse_in_a_thread("own")):
            try:
                await call
            except RollbackError as error:
                seen.append([type(error).__name__, str(error), getattr(error, "order", "")])
        await ctx.sleep(60)
        return [name for name, _, _ in seen[-3:]]

    first = await h.engine(catches)
    await first.start(catches, id="x")
    await h.settle()
    await h.crash(first)
    second = await h.engine(catches, store=another_handle(h.store, h.clock))
    assert await h.drive(second.result("x")) == ["RollbackError", "UndoAll", "UndoAll"]
    assert seen == 2 * [["RollbackError", "no", ""], ["UndoAll", "undo order 7", "7"], ["UndoAll", "undo order 7", "7"]]
    assert h.executed("x") == [("refuse", 1), ("refuse#1", 1), ("refuse_in_a_thread", 1)]


@on_every_store
async def test_rollback_scope_rolls_back_its_block(h):
    @workflow(name="rollback.scope")
    async def scoped(ctx: Context) -> str:
        await do("outside")
        try:
            async with ctx.rollback_scope():
                await do("inside")
                await refuse("plain")
        except RollbackError:
            LOG.append("caught")
        return "done"

    engine = await h.engine(scoped)
    assert await h.run_to_end(await engine.start(scoped)) == "done"
    assert LOG == ["outside", "inside", "refuse plain", "undo inside", "caught"]


@on_every_store
async def test_neither_a_retry_of_the_run_nor_suspend_on_failure_delays_the_rollback(h):
    @workflow(name="rollback.retried", retry=Retry(max_attempts=3), suspend_on_failure=True)
    async def retried(ctx: Context) -> None:
        await do("work")
        await refuse("own")

    engine = await h.engine(retried)
    await failure(h, engine.execute(retried, id="x"))
    assert LOG == ["work", "refuse own", "undo work"]
    assert (await engine.describe("x")).generation == 0


@on_every_store
async def test_branches_and_children_fail_with_it(h):
    @workflow(name="rollback.child")
    async def child(ctx: Context) -> None:
        await do("child")
        await refuse("plain")

    @workflow(name="rollback.parent")
    async def parent(ctx: Context) -> list[str]:
        seen = []
        try:
            await ctx.join(good=do("branch"), bad=refuse("plain"))
        except JoinError as error:
            seen.append(type(error.errors["bad"]).__name__)
        try:
            await ctx.run_child(child)
        except ChildFailed as failed:
            seen += [failed.type, type(failed.__cause__).__name__]
        return seen

    engine = await h.engine(parent, child)
    assert await h.run_to_end(await engine.start(parent)) == ["RollbackError", "RollbackError", "RollbackError"]
    assert LOG[-3:] == ["child", "refuse plain", "undo child"]


@on_every_store
async def test_compensation_that_raises_it_becomes_a_dead_letter_and_the_rest_run(h):
    @step(compensate=refuse)
    async def cannot_be_undone() -> str:
        return "own"

    @workflow(name="rollback.compensation")
    async def compensation(ctx: Context) -> None:
        await do("first")
        await cannot_be_undone()
        await refuse("plain")

    engine = await h.engine(compensation)
    await failure(h, engine.execute(compensation, id="x"))
    assert LOG == ["first", "refuse plain", "refuse own", "undo first"]
    (letter,) = await engine.dead_letters()
    assert (letter.kind, letter.original_target) == ("compensation", "x")
    assert "undo order 7" in letter.reason
