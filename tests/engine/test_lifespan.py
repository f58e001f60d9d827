"""The lifespan of an engine or worker: entered before the first step, exited after the last one."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest

import perdure
from perdure import Context, Engine, RunStatus, Worker, WorkflowMisuse, current_step, step, workflow
from perdure.errors import InvalidArgument
from perdure.testing import Harness, TestEngine, crash_everywhere
from tests.engine.store_matrix import on_every_store

LOG: list[Any] = []


@pytest.fixture(autouse=True)
def empty_log():
    LOG.clear()


class Pool:
    def __init__(self) -> None:
        self.open = True


@contextlib.asynccontextmanager
async def lifespan(owner):
    LOG.append(("enter", type(owner).__name__))
    pool = Pool()
    task = asyncio.current_task()
    try:
        yield pool
    finally:
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        pool.open = False
        LOG.append("exit")


@step
async def read_async() -> bool:
    return bool(current_step().state.open)


@step
def read_in_thread() -> bool:
    return bool(current_step().state.open)


@workflow(name="lifespan.reads")
async def reads(ctx: Context) -> list[bool]:
    return [await read_async(), await read_in_thread(), await ctx.step("plain", lambda: current_step().state.open)]


@on_every_store
async def test_steps_read_what_the_lifespan_yields(harness):
    engine = await harness.engine(reads, lifespan=lifespan)
    assert LOG == [("enter", "WatchedEngine")]
    assert await harness.drive(engine.execute(reads)) == [True, True, True]
    await harness.drive(engine.shutdown())
    assert LOG == [("enter", "WatchedEngine"), "exit"]


@on_every_store
async def test_error_of_the_lifespan_fails_the_opening_and_nothing_is_claimed(harness):
    client = await harness.client()
    await client.start(reads, id="r")

    @contextlib.asynccontextmanager
    async def fails(engine):
        raise ConnectionRefusedError("no database")
        yield

    with pytest.raises(ConnectionRefusedError, match="no database"):
        await harness.engine(reads, lifespan=fails)
    assert list(await harness.store.workers()) == []
    assert await client.status("r") is RunStatus.PENDING
    assert harness.executed() == []


async def finish(harness, engine):
    run = await engine.start(reads)
    return await harness.drive(run.result())


def on_memory(test):
    async def main():
        async with Harness() as harness:
            await test(harness)

    asyncio.run(main())


@pytest.mark.parametrize("form", ["with owner", "without parameters", "manager", "class"])
def test_lifespan_is_a_function_or_an_async_context_manager(form):
    @contextlib.asynccontextmanager
    async def no_parameters():
        yield Pool()

    class Manager:
        def __init__(self, owner: Any = None) -> None:
            self.owner = owner

        async def __aenter__(self) -> Pool:
            return Pool()

        async def __aexit__(self, *error: object) -> None:
            LOG.append(self.owner)

    forms: dict[str, Any] = {
        "with owner": lifespan,
        "without parameters": no_parameters,
        "manager": Manager(),
        "class": Manager,
    }

    async def test(harness):
        engine = await harness.engine(reads, lifespan=forms[form])
        assert await finish(harness, engine) == [True, True, True]
        await harness.drive(engine.shutdown())
        if form == "class":
            assert [engine] == LOG

    on_memory(test)


def test_state_is_none_without_a_lifespan_and_if_it_yields_nothing():
    @step
    async def state() -> str:
        return repr(current_step().state)

    @workflow
    async def shows(ctx: Context) -> str:
        return await state()

    @contextlib.asynccontextmanager
    async def nothing(engine):
        yield

    async def test(harness):
        for options in ({}, {"lifespan": nothing}):
            engine = await harness.engine(shows, **options)
            assert await harness.drive(engine.execute(shows)) == "None"

    on_memory(test)


async def generator(engine):
    yield 1


async def coroutine(engine):
    return 1


@contextlib.contextmanager
def synchronous(engine):
    yield 1


class SyncManager:
    def __enter__(self):
        return 1

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("wrong", [3, "lifespan", generator, coroutine, SyncManager()])
def test_what_is_no_async_context_manager_is_refused_at_once(wrong):
    with pytest.raises(InvalidArgument, match="must be an async context manager"):
        Engine("memory://", lifespan=wrong)
    with pytest.raises(InvalidArgument, match=r"contextlib\.asynccontextmanager"):
        Worker("memory://", lifespan=wrong)


@pytest.mark.parametrize(("wrong", "kind"), [(synchronous, "a synchronous context manager"), (lambda engine: 3, "3")])
def test_function_that_returns_no_async_context_manager_fails_the_opening(wrong, kind):
    async def main():
        with pytest.raises(InvalidArgument, match=f"must be an async context manager, not {kind}"):
            async with Engine("memory://", lifespan=wrong):
                pass

    asyncio.run(main())


def test_lifespan_is_exited_after_the_last_body_has_ended():
    started = asyncio.Event()

    @step
    async def endless() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            LOG.append(("body ends", current_step().state.open))

    @workflow
    async def runs(ctx: Context) -> None:
        await endless()

    async def test(harness):
        engine = await harness.engine(runs, lifespan=lifespan)
        await engine.start(runs)
        await started.wait()
        await harness.drive(engine.shutdown(grace=0))
        assert LOG[1:] == [("body ends", True), "exit"]

    on_memory(test)


def test_error_on_exit_is_raised_by_the_shutdown_and_the_store_is_closed():
    @contextlib.asynccontextmanager
    async def fails(engine):
        yield
        raise OSError("cannot close")

    async def main():
        engine = Engine("memory://", lifespan=fails)
        await engine.open()
        with pytest.raises(OSError, match="cannot close"):
            await engine.shutdown()
        with pytest.raises(WorkflowMisuse):
            await engine.status("r")

    asyncio.run(main())


def test_cancelled_shutdown_exits_the_lifespan():
    @step
    async def endless() -> None:
        await asyncio.Event().wait()

    @workflow
    async def runs(ctx: Context) -> None:
        await endless()

    async def main():
        engine = Engine("memory://", [runs], lifespan=lifespan)
        await engine.open()
        await engine.start(runs)
        stopping = asyncio.create_task(engine.shutdown(grace=3600))
        while engine._runtime is not None:
            await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping

    asyncio.run(main())
    assert LOG[1:] == ["exit"]


def test_cancelled_opening_exits_the_lifespan():
    @contextlib.asynccontextmanager
    async def slow(engine):
        LOG.append("enter")
        try:
            await asyncio.Event().wait()
            yield
        finally:
            LOG.append("exit")

    async def main():
        opening = asyncio.create_task(Engine("memory://", lifespan=slow).open())
        while not LOG:
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(main())
    assert LOG == ["enter", "exit"]


def test_lifespan_that_ends_early_is_reported(caplog):
    @contextlib.asynccontextmanager
    async def fails_later(engine):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield

    async def fail():
        raise OSError("lost")

    async def test(harness):
        engine = await harness.engine(reads, lifespan=fails_later)
        await harness.settle()
        with pytest.raises(ExceptionGroup):
            await harness.drive(engine.shutdown())

    with caplog.at_level(logging.ERROR):
        on_memory(test)
    assert "Lifespan ended while steps may run" in caplog.text


def test_worker_passes_itself_and_exits_its_lifespan():
    async def main():
        stop = asyncio.Event()
        worker = Worker("memory://", [reads], lifespan=lifespan)
        await worker.run_until(stop, on_started=stop.set)
        assert LOG == [("enter", "Worker"), "exit"]
        async with Worker("memory://", [reads], lifespan=lifespan):
            assert LOG[2:] == [("enter", "Worker")]

    asyncio.run(main())
    assert LOG[3:] == ["exit"]


def test_script_takes_a_lifespan():
    assert perdure.run(reads, lifespan=lifespan) == [True, True, True]
    assert LOG == [("enter", "Engine"), "exit"]


def test_lifespan_can_use_the_engine_as_a_client():
    @contextlib.asynccontextmanager
    async def starts(engine):
        await engine.start(reads, id="from-lifespan")
        yield Pool()

    async def test(harness):
        engine = await harness.engine(reads, lifespan=starts)
        assert await harness.drive(engine.result("from-lifespan")) == [True, True, True]

    on_memory(test)


def test_test_engine_takes_a_lifespan_and_must_be_opened_then():
    async def main():
        async with TestEngine([reads], lifespan=lifespan) as engine:
            assert await engine.execute(reads) == [True, True, True]
        assert LOG == [("enter", "TestEngine"), "exit"]
        with pytest.raises(WorkflowMisuse, match="use `async with TestEngine"):
            await TestEngine([reads], lifespan=lifespan).execute(reads)

    asyncio.run(main())


def test_crash_everywhere_opens_new_resources_for_each_engine():
    report = asyncio.run(crash_everywhere(reads, lifespan=lifespan))
    assert report.outcome == ("returned", [True, True, True])
    assert LOG.count("exit") == len(LOG) / 2
