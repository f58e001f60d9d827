"""What fails is logged by default: attempts, steps, runs and dead letters, with fields and without payloads."""

import asyncio
import logging

import pytest

from perdure import Context, CriticalError, Retry, RunFailed, event, step, workflow
from tests.engine.store_matrix import on_every_store

SECRET = "s3cret-payload"


@step(retry=Retry(max_attempts=3, initial=2.0, factor=1.0, jitter=0.0))
async def flaky(token: str) -> str:
    raise ConnectionError("the bank is closed")


@step(retry=None)
async def undo(token: str) -> None:
    raise ValueError("cannot undo")


@workflow(name="logged.fails")
async def fails(ctx: Context, token: str) -> str:
    ctx.on_rollback(undo, token)
    return await flaky(token)


@workflow(name="logged.retried", retry=Retry(max_attempts=2, initial=5.0, jitter=0.0))
async def retried(ctx: Context) -> None:
    raise KeyError("nothing")


@event(name="logged.note", on_target_terminated="dead_letter")
class LoggedNote:
    text: str


@workflow(name="logged.naps")
async def naps(ctx: Context) -> None:
    await ctx.sleep(10)


def logged(caplog, *words: str) -> list[logging.LogRecord]:
    found = [each for each in caplog.records if each.name.startswith("perdure")]
    return [each for each in found if all(word in each.getMessage() for word in words)]


@on_every_store
async def test_failed_attempts_steps_and_runs_are_logged_with_fields(h, caplog):
    engine = await h.engine(fails)
    with pytest.raises(RunFailed):
        await h.drive(engine.execute(fails, SECRET, id="f"))
    attempts = logged(caplog, "Run f: step flaky failed", "ConnectionError: the bank is closed")
    assert [each.levelno for each in attempts] == [logging.WARNING, logging.WARNING, logging.ERROR]
    assert [vars(each)["attempt"] for each in attempts] == [1, 2, 3]
    assert [vars(each)["retry_in"] for each in attempts] == [2.0, 2.0, None]
    assert "retrying in 2 seconds" in attempts[0].getMessage()
    for record in attempts:
        fields = vars(record)
        assert (fields["run_id"], fields["workflow"], fields["step"]) == ("f", "logged.fails", "flaky")
        assert (fields["location"], fields["error_type"]) == ("flaky", "ConnectionError")
    (failed,) = logged(caplog, "Run f failed at flaky: StepFailed: ")
    assert failed.levelno == logging.ERROR
    assert (vars(failed)["run_id"], vars(failed)["worker"]) == ("f", engine.worker)
    (letter,) = logged(caplog, "Run f: dead letter", "compensation")
    assert letter.levelno == logging.WARNING
    assert (vars(letter)["run_id"], vars(letter)["kind"]) == ("f", "compensation")
    assert not any(SECRET in each.getMessage() or SECRET in str(vars(each)) for each in logged(caplog))


@on_every_store
async def test_run_that_is_retried_is_a_warning_until_it_fails_for_good(h, caplog):
    engine = await h.engine(retried)
    with pytest.raises(RunFailed):
        await h.drive(engine.execute(retried, id="r"))
    found = logged(caplog, "Run r failed")
    assert [each.levelno for each in found] == [logging.WARNING, logging.ERROR]
    assert vars(found[0])["retry_in"] == 5.0


@on_every_store
async def test_undelivered_event_is_logged_as_a_dead_letter(h, caplog):
    engine = await h.engine(naps)
    run = await engine.start(naps, id="n")
    await h.settle()
    await engine.send("n", LoggedNote(SECRET))
    await h.run_to_end(run)
    await h.settle()
    (letter,) = logged(caplog, "Run n: dead letter")
    assert (letter.levelno, vars(letter)["kind"]) == (logging.WARNING, "event")
    assert SECRET not in letter.getMessage()


@on_every_store
async def test_success_is_silent(h, caplog):
    @step
    async def works() -> int:
        return 1

    @workflow(name="logged.works")
    async def succeeds(ctx: Context) -> int:
        return sum(await asyncio.gather(works(), works()))

    engine = await h.engine(succeeds)
    assert await h.drive(engine.execute(succeeds)) == 2
    assert [each for each in logged(caplog) if each.levelno >= logging.WARNING] == []


@on_every_store
async def test_error_that_is_not_retried_is_logged_once(h, caplog):
    @step
    async def refuses() -> None:
        raise CriticalError("never")

    @workflow(name="logged.refuses")
    async def refused(ctx: Context) -> str:
        try:
            await refuses()
        except Exception:
            return "handled"
        return "passed"

    engine = await h.engine(refused)
    assert await h.drive(engine.execute(refused, id="x")) == "handled"
    (failed,) = logged(caplog, "Run x: step refuses failed after attempt 1")
    assert failed.levelno == logging.ERROR
    await h.crash(engine)
    assert len(logged(caplog, "Run x: step")) == 1
