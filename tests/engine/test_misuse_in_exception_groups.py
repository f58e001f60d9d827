"""An exception group with a WorkflowMisuse inside shows first what the workflow must not do."""

import asyncio

import pytest

from perdure import Context, RunFailed, WorkflowMisuse, workflow
from perdure.codec.failures import message_of
from tests.engine.store_matrix import on_every_store


@workflow(name="group.connects")
async def connects(ctx: Context) -> None:
    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", 1)

    async with asyncio.TaskGroup() as group:  # as an HTTP client does
        group.create_task(connect())


@on_every_store
async def test_run_that_does_io_in_a_task_group_fails_with_the_message_of_the_misuse(h):
    engine = await h.engine(connects)
    with pytest.raises(RunFailed) as failed:
        await h.run_to_end(await engine.start(connects))
    assert failed.value.type == "ExceptionGroup"
    first, _, rest = failed.value.message.partition(" (")
    assert "move it into a step" in first
    assert rest == "unhandled errors in a TaskGroup (1 sub-exception))"
    assert f": ExceptionGroup: {first}" in str(failed.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ExceptionGroup("g", [ValueError("v"), WorkflowMisuse("move it")]), "move it (g (2 sub-exceptions))"),
        (ExceptionGroup("g", [ExceptionGroup("h", [WorkflowMisuse("a")]), WorkflowMisuse("b")]), "a (g (2 sub"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), WorkflowMisuse("a")]), "a (g (2 sub"),
        (ExceptionGroup("g", [ValueError("v")]), "g (1 sub-exception)"),
        (WorkflowMisuse("a"), "a"),
    ],
)
def test_message_of_a_group_starts_with_its_first_misuse(error, message):
    assert message_of(error).startswith(message)
