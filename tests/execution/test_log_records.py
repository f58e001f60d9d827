"""Log records of the worker: ids in `extra`, warning if the worker recovers by itself, error if a person must act."""

import logging

from perdure import Context, step, workflow
from perdure.stores.writes import CommitTurn
from tests.engine.store_matrix import on_every_store


@step
async def logged_step() -> int:
    return 1


@workflow
async def logged_run(ctx: Context) -> int:
    return await logged_step()


def records(caplog, logger: str, start: str) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.name == logger and each.getMessage().startswith(start)]


@on_every_store
async def test_unavailable_store_is_a_warning_with_the_number_of_writes(h, caplog):
    engine = await h.engine(logged_run)
    engine.faults.fail_calls(2, calls=["commit"])
    await h.drive(engine.execute(logged_run))
    found = records(caplog, "perdure.execution", "Store unavailable, retrying 1 writes (attempt ")
    assert [record.levelno for record in found] == [logging.WARNING] * 2


@on_every_store
async def test_held_run_is_an_error_with_run_workflow_and_worker(h, caplog):
    engine = await h.engine(logged_run)
    engine.faults.refuse(
        lambda write: isinstance(write, CommitTurn) and write.patch is not None and not write.patch.held
    )
    await engine.start(logged_run, id="r")
    await h.settle()
    (held,) = records(caplog, "perdure.execution", "Run r held: ")
    assert held.levelno == logging.ERROR
    fields = vars(held)
    assert (fields["run_id"], fields["workflow"], fields["worker"]) == ("r", "logged_run", engine.worker)


@on_every_store
async def test_fenced_worker_and_takeover_are_warnings_with_the_worker(h, caplog):
    frozen = await h.engine(logged_run)
    old = frozen.worker
    frozen.faults.pause()
    other = await h.engine(logged_run)
    await h.clock.advance(40)
    frozen.faults.unblock()
    await h.settle()
    (fenced,) = records(caplog, "perdure.cluster", f"Worker {old} was fenced")
    (takeover,) = records(caplog, "perdure.cluster", "Took over 0 runs from 1 dead worker: ")
    assert (fenced.levelno, vars(fenced)["worker"]) == (logging.WARNING, old)
    assert (takeover.levelno, vars(takeover)["worker"]) == (logging.WARNING, other.worker)
