"""`@step(context=...)`: whether the context variables of the workflow reach the body of a step."""

import asyncio
import contextvars
from typing import Any

import pytest

from perdure import Context, Retry, RunFailed, current_step, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import TestEngine
from tests.engine.store_matrix import on_every_store

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@step(context="inherit")
async def read_variable() -> str:
    return VARIABLE.get()


@step(context="inherit")
def read_variable_in_thread() -> str:
    return VARIABLE.get()


@step
async def read_empty() -> str:
    return VARIABLE.get()


@workflow(name="context.variables")
async def variables(ctx: Context) -> list[str]:
    async def branch(value: str) -> str:
        VARIABLE.set(value)
        return await read_variable()

    seen = [await read_variable()]
    VARIABLE.set("first")
    seen += [await read_variable(), await read_variable_in_thread(), await read_empty()]
    seen += await asyncio.gather(branch("left"), branch("right"))
    await ctx.sleep(60)
    seen += [await read_variable(), await read_variable_in_thread()]
    return seen


@on_every_store
async def test_step_inherits_the_context_variables_of_the_workflow_also_after_recovery(harness):
    VARIABLE.set("caller")  # does not reach the run
    engine = await harness.engine(variables)
    await engine.start(variables, id="r")
    await harness.settle()
    await harness.crash(engine)
    engine = await harness.engine(variables)
    assert await harness.drive(engine.get("r").result()) == [
        *("unset", "first", "first", "unset", "left", "right", "first", "first"),
    ]


def test_variable_that_a_body_sets_reaches_neither_the_workflow_nor_the_next_attempt():
    @step(context="inherit", retry=Retry(max_attempts=2))
    async def sets() -> str:
        before = VARIABLE.get()
        VARIABLE.set("set by the body")
        if current_step().attempt == 1:
            raise ConnectionError
        return before

    @workflow
    async def calls(ctx: Context) -> list[str]:
        VARIABLE.set("workflow")
        return [await sets(), VARIABLE.get()]

    async def main():
        async with TestEngine([calls]) as engine:
            assert await engine.execute(calls) == ["workflow", "workflow"]

    asyncio.run(main())


def test_mocked_step_inherits_too():
    @workflow
    async def calls(ctx: Context) -> str:
        VARIABLE.set("workflow")
        return await read_variable()

    async def main():
        async with TestEngine([calls]) as engine:
            engine.mock(read_variable, side_effect=lambda: VARIABLE.get())
            assert await engine.execute(calls) == "workflow"

    asyncio.run(main())


def test_compensation_inherits_from_the_code_that_registers_it():
    seen = []

    @step(context="inherit")
    async def undo(what: str) -> None:
        seen.append((what, VARIABLE.get()))

    @step(compensate=undo)
    async def work() -> str:
        return VARIABLE.get()

    @workflow
    async def fails(ctx: Context) -> None:
        VARIABLE.set("at the step")
        await work()
        VARIABLE.set("at on_rollback")
        ctx.on_rollback(undo, "registered")
        VARIABLE.set("at the end")
        raise ValueError

    async def main():
        async with TestEngine([fails]) as engine:
            with pytest.raises(RunFailed):
                await engine.execute(fails)

    asyncio.run(main())
    assert seen == [("registered", "at on_rollback"), ("unset", "at the step")]


@pytest.mark.parametrize("value", ["copy", None, True, ""])
def test_other_contexts_are_refused(value: Any):
    with pytest.raises(InvalidArgument, match="must be 'empty' or 'inherit'"):
        step(context=value)
    with pytest.raises(InvalidArgument, match="must be 'empty' or 'inherit'"):
        read_empty.options(context=value)
