"""A step whose result or error cannot be recorded fails its run; the run does not wait for the result for ever."""

import pytest

from perdure import Context, Retry, RunFailed, step, workflow
from tests.engine.store_matrix import on_every_store


class Mute(Exception):
    """An exception that cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@step(retry=Retry(max_attempts=1))
async def raises_mute() -> None:
    raise Mute


@step(retry=Retry(max_attempts=1))
def raises_mute_in_a_thread() -> None:
    raise Mute


@workflow(name="mute")
async def mute(ctx: Context, in_thread: bool) -> None:
    await (raises_mute_in_a_thread() if in_thread else raises_mute())


@on_every_store
async def test_error_that_cannot_be_recorded_fails_the_run(h):
    engine = await h.engine(mute)
    for in_thread in (False, True):
        run = await engine.start(mute.options(id=f"mute-{in_thread}"), in_thread)
        with pytest.raises(RunFailed):
            await h.drive(run.result(), within=60)
