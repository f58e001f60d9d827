"""The pause that an error requests (`retry_after`), and the limit over all attempts (`Retry(max_elapsed=)`)."""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest

from perdure import Context, EngineConfig, Retry, RunFailed, RunStatus, StepFailed, current_step, step, workflow
from perdure.clock import sleep_on
from perdure.errors import InvalidArgument
from tests.engine.store_matrix import on_every_store


class Busy(Exception):
    def __init__(self, message: str = "busy", retry_after: Any = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Rejected(Busy):
    pass


class Unreadable(Exception):
    @property
    def retry_after(self) -> float:
        raise RuntimeError("no header")


def workflow_of(call, **options):
    @workflow(name="limited", **options)
    async def limited(ctx: Context) -> str:
        try:
            return str(await call())
        except StepFailed as failed:
            return f"{failed.type}/{failed.attempts}: {failed.message}"

    return limited


async def times_of(h, call, **options) -> tuple[list[float], str]:
    """Run a step to its end. Return the times of its attempts after the first, in seconds since it, and the result."""
    wf = workflow_of(call, **options)
    engine = await h.engine(wf)
    result = await h.run_to_end(await engine.start(wf, id="r"))
    return [round(at - ATTEMPTS[0], 1) for at in ATTEMPTS], result


ATTEMPTS: list[float] = []


@pytest.fixture(autouse=True)
def clear():
    ATTEMPTS.clear()


# --- retry_after


@on_every_store
async def test_retry_after_overrides_the_pause_of_the_policy(h):
    pauses = [30, 2.5, timedelta(minutes=2), 0, None]

    @step(retry=Retry(max_attempts=6, initial=10, factor=1, jitter=0, max_delay=20))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        if pauses:
            raise Busy(retry_after=pauses.pop(0))
        return "done"

    assert await times_of(h, call) == ([0, 30, 32.5, 152.5, 152.5, 162.5], "done")


@on_every_store
async def test_retry_after_of_a_declared_error_overrides_the_pause_and_survives_a_crash(h):
    @step(retry=Retry(max_attempts=2, initial=1), raises=Rejected)
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Rejected("not now", retry_after=600)

    @workflow(name="declared")
    async def declared(ctx: Context) -> Any:
        try:
            return await call()
        except Rejected as error:
            return [str(error), error.retry_after]

    engine = await h.engine(declared)
    run = await engine.start(declared, id="r")
    await h.settle()
    [entry] = await engine.history("r")
    assert entry.error is not None
    assert (entry.error.type, entry.error.retry_after) == ("Rejected", 600)
    [reason] = (await run.describe()).waiting_for
    assert (reason.kind, round(reason.until.timestamp() - ATTEMPTS[0])) == ("retry", 600)
    await h.crash(engine)
    other = await h.engine(declared)
    assert await h.drive(other.result("r")) == ["not now", 600]
    assert round(ATTEMPTS[1] - ATTEMPTS[0]) == 600


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), True, "30", 1e30, object(), timedelta(-1)])
@on_every_store
async def test_an_invalid_retry_after_is_logged_and_ignored(h, wrong, caplog: pytest.LogCaptureFixture):
    @step(retry=Retry(max_attempts=2, initial=7, jitter=0))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        if len(ATTEMPTS) == 1:
            raise Busy(retry_after=wrong)
        return "done"

    with caplog.at_level(logging.WARNING, "perdure.execution"):
        assert await times_of(h, call) == ([0, 7], "done")
    [text] = [each.getMessage() for each in caplog.records if "retry_after" in each.getMessage()]
    assert text.startswith("Run r: step call: retry_after of Busy is ignored: retry_after ")


@on_every_store
async def test_a_retry_after_that_raises_is_ignored(h, caplog: pytest.LogCaptureFixture):
    @step(retry=Retry(max_attempts=2, initial=7, jitter=0))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        if len(ATTEMPTS) == 1:
            raise Unreadable
        return "done"

    assert await times_of(h, call) == ([0, 7], "done")
    assert "RuntimeError('no header')" in caplog.text


@on_every_store
async def test_retry_after_gives_no_further_attempt(h):
    @step(retry=Retry(max_attempts=2, retry_on=ConnectionError))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Busy(retry_after=1)

    assert await times_of(h, call) == ([0], "Busy/1: busy")


@on_every_store
async def test_a_long_retry_after_counts_as_one_suspension(h):
    @step(retry=Retry(max_attempts=3, initial=1))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Busy(retry_after=1_000)

    @workflow(name="impatient", max_suspend=100)
    async def impatient(ctx: Context) -> str:
        return await call()

    engine = await h.engine(impatient)
    started = h.clock.now()
    with pytest.raises(RunFailed, match="TimeoutError"):
        await h.run_to_end(await engine.start(impatient, id="r"))
    assert (len(ATTEMPTS), round(h.clock.now() - started)) == (1, 100)


# --- max_elapsed


@on_every_store
async def test_no_attempt_starts_after_max_elapsed(h):
    @step(retry=Retry(max_attempts=100, initial=10, factor=1, jitter=0, max_elapsed=timedelta(seconds=35)))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Busy(f"attempt {len(ATTEMPTS)}")

    started = h.clock.now()
    assert await times_of(h, call) == ([0, 10, 20, 30], "Busy/4: attempt 4")
    assert round(h.clock.now() - started, 1) == 30, "the step fails when its last attempt does"


@on_every_store
async def test_max_elapsed_counts_a_requested_pause(h):
    @step(retry=Retry(max_attempts=100, max_elapsed=35))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Busy(retry_after=60)

    assert await times_of(h, call) == ([0], "Busy/1: busy")


@on_every_store
async def test_an_attempt_that_runs_at_max_elapsed_is_cancelled(h):
    ended: list[Any] = []

    @step(retry=Retry(max_attempts=100, initial=10, jitter=0, max_elapsed=35), timeout=30, retry_on_timeout=True)
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        me = current_step()
        assert me.deadline is not None
        if me.attempt == 1:
            raise Busy
        try:
            await asyncio.Event().wait()
        finally:
            ended.append((round(h.clock.now() - ATTEMPTS[0]), round(me.deadline.timestamp() - ATTEMPTS[0])))
        return "never"

    times, result = await times_of(h, call)
    assert times == [0, 10]
    assert result == "TimeoutError/2: step call took longer than 35 seconds for all attempts (max_elapsed)"
    assert ended == [(35, 35)]
    engine = await h.engine(workflow_of(call))
    [entry] = await engine.history("r")
    assert entry.error is not None
    assert entry.error.cause is not None
    assert entry.error.cause.type == "Busy"


@on_every_store
async def test_a_timeout_before_max_elapsed_is_a_timeout_of_the_attempt(h):
    @step(retry=Retry(max_attempts=100, initial=1, jitter=0, max_elapsed=35), timeout=30)
    async def call() -> str:
        await asyncio.Event().wait()
        return "never"

    wf = workflow_of(call)
    engine = await h.engine(wf)
    result = await h.run_to_end(await engine.start(wf, id="r"))
    assert result == "TimeoutError/1: step call took longer than 30.0 seconds"


@on_every_store
async def test_max_elapsed_continues_across_crashes(h):
    @step(retry=Retry(max_attempts=100, initial=10, factor=1, jitter=0, max_elapsed=100))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        if len(ATTEMPTS) == 3:
            await sleep_on(h.clock, 1_000)
        raise Busy(f"attempt {len(ATTEMPTS)}")

    wf = workflow_of(call)
    engine = await h.engine(wf)
    await engine.start(wf, id="r")
    await h.clock.advance(15)
    await h.settle()
    await h.crash(engine)  # during a pause
    engine = await h.engine(wf)
    await h.clock.advance(20)
    await h.settle()
    assert len(ATTEMPTS) == 3
    await h.crash(engine)  # during an attempt
    engine = await h.engine(wf)
    result = await h.drive(engine.result("r"))
    assert result.startswith("Busy/")
    assert ATTEMPTS[-1] - ATTEMPTS[0] < 100
    assert h.clock.now() - ATTEMPTS[0] < 110


@on_every_store
async def test_max_elapsed_counts_from_the_start_of_an_interrupted_first_attempt(h):
    @step(retry=Retry(max_elapsed=50))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        await asyncio.Event().wait()
        return "never"

    wf = workflow_of(call)
    engine = await h.engine(wf)
    await engine.start(wf, id="r")
    await h.clock.advance(20)
    await h.settle()
    await h.crash(engine)
    engine = await h.engine(wf)
    result = await h.drive(engine.result("r"))
    assert result == "TimeoutError/1: step call took longer than 50 seconds for all attempts (max_elapsed)"
    assert len(ATTEMPTS) == 2
    assert round(h.clock.now() - ATTEMPTS[0]) == 50


@on_every_store
async def test_a_retry_that_no_worker_made_in_time_fails_with_the_last_error(h):
    @step(retry=Retry(max_attempts=100, initial=10, max_elapsed=50))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        raise Busy("the last error")

    wf = workflow_of(call)
    engine = await h.engine(wf)
    await engine.start(wf, id="r")
    await h.clock.advance(1)
    await h.settle()
    await h.crash(engine)
    await h.clock.advance(100)
    engine = await h.engine(wf)
    result = await h.drive(engine.result("r"))
    assert result.endswith(": the last error")
    assert len(ATTEMPTS) == 1, "the body did not start"
    assert engine.slots_taken == 0


@on_every_store
async def test_max_elapsed_starts_again_when_a_held_step_is_resumed(h):
    @step(retry=Retry(max_attempts=100, initial=10, factor=1, jitter=0, max_elapsed=25))
    async def call() -> str:
        ATTEMPTS.append(h.clock.now())
        if len(ATTEMPTS) < 5:
            raise Busy
        return "done"

    wf = workflow_of(call, suspend_on_failure=True)
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.clock.advance(200)
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    assert len(ATTEMPTS) == 3
    await engine.resume("r")
    assert await h.run_to_end(run) == "done"
    assert [round(at - ATTEMPTS[3]) for at in ATTEMPTS[3:]] == [0, 10]


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "10", True, timedelta(0)])
def test_max_elapsed_must_be_a_duration(wrong):
    with pytest.raises(InvalidArgument, match=r"Retry.max_elapsed"):
        Retry(max_elapsed=wrong)


# --- retry of a whole run


@on_every_store
async def test_retry_after_overrides_the_pause_before_the_next_attempt_of_a_run(h):
    @workflow(name="again", retry=Retry(max_attempts=2, initial=5))
    async def again(ctx: Context) -> str:
        ATTEMPTS.append(h.clock.now())
        if len(ATTEMPTS) == 1:
            raise Busy(retry_after=timedelta(minutes=5))
        return "done"

    engine = await h.engine(again)
    assert await h.run_to_end(await engine.start(again, id="r")) == "done"
    assert round(ATTEMPTS[1] - ATTEMPTS[0]) == 300


def test_max_elapsed_of_a_workflow_is_refused_in_favour_of_its_timeout():
    with pytest.raises(InvalidArgument, match="use timeout= of the workflow"):
        workflow(retry=Retry(max_elapsed=60))


def test_max_elapsed_of_store_retry_is_refused():
    with pytest.raises(InvalidArgument, match="store_retry has a max_elapsed"):
        EngineConfig(store_retry=Retry(max_elapsed=60))
