"""Turns share time slices: a paused turn continues before anything else happens to its run, and is committed once."""

import asyncio
from unittest.mock import patch

import pytest

from perdure import Context, RunStatus, step, workflow
from perdure.execution import time_slices
from perdure.execution.time_slices import TimeSlices
from perdure.runner import event_loop, history
from tests.engine.store_matrix import on_every_store


class SettableClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def run_slices(test):
    async def run():
        clock = SettableClock()
        await test(clock, TimeSlices(clock, seconds=1.0))  # type: ignore[arg-type]

    asyncio.run(run())


def test_turns_are_admitted_until_the_slice_of_an_iteration_is_used_up():
    async def test(clock, slices):
        assert slices.admits(clock.now())
        clock.time += 0.9
        assert slices.admits(clock.now())
        assert not slices.is_used_up()
        clock.time += 0.2
        assert slices.is_used_up()
        assert not slices.admits(clock.now())
        await asyncio.sleep(0)
        assert slices.admits(clock.now())

    run_slices(test)


def test_queued_callbacks_run_in_order_one_slice_per_iteration():
    async def test(clock, slices):
        called = []

        def work(number):
            called.append(number)
            clock.time += 0.6

        for number in range(5):
            slices.queue(lambda number=number: work(number))
        counts = []
        while slices.is_busy:
            await asyncio.sleep(0)
            counts.append(len(called))
        assert called == [0, 1, 2, 3, 4]
        assert counts == [2, 4, 5]

    run_slices(test)


def test_callback_that_raises_does_not_stop_the_others():
    async def test(clock, slices):
        called = []
        slices.queue(lambda: 1 / 0)
        slices.queue(lambda: called.append(1))
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert called == [1]

    run_slices(test)


def test_clock_that_is_set_back_ends_the_slice():
    async def test(clock, slices):
        assert slices.admits(clock.now())
        clock.time -= 50
        assert slices.is_used_up()

    run_slices(test)


@pytest.fixture(autouse=True)
def pause_everywhere(monkeypatch):
    """Pause every turn of an engine wherever it can be paused."""
    monkeypatch.setattr(event_loop, "CALLBACKS_PER_PAUSE_CHECK", 1)
    monkeypatch.setattr(history, "FAST_PATH_LENGTH", 1)
    monkeypatch.setattr(TimeSlices.__init__, "__defaults__", (0.0,))


@step
async def visit(number: int) -> int:
    return number


@workflow
async def visits(ctx: Context, count: int) -> int:
    results = await ctx.map(visit, range(count), concurrency=3)
    event = await ctx.receive("go")
    return sum(results) + int(event)


@on_every_store
async def test_run_whose_turns_are_paused_everywhere_executes_each_step_once(h):
    engine = await h.engine(visits)
    run = await engine.start(visits, 6, id="r")
    await h.settle()
    assert sorted(location for location, _ in h.executed()) == [f"map/~{number}/visit" for number in range(6)]
    await engine.send("r", "go", 100)
    assert await h.run_to_end(run) == 115


@on_every_store
async def test_message_that_arrives_while_a_turn_is_paused_is_received(h):
    engine = await h.engine(visits)
    queued = []
    with patch.object(TimeSlices, "queue", lambda self, callback: queued.append(callback)):
        run = await engine.start(visits, 2, id="r")
        await h.settle()
        assert len(queued) == 1
        await engine.send("r", "go", 100)
        await h.settle()
    for callback in queued:
        asyncio.get_running_loop().call_soon(callback)
    assert await h.run_to_end(run) == 101


@on_every_store
async def test_run_that_is_terminated_while_its_turn_is_paused_stays_terminated(h):
    engine = await h.engine(visits)
    queued = []
    with patch.object(TimeSlices, "queue", lambda self, callback: queued.append(callback)):
        run = await engine.start(visits, 2, id="r")
        await h.settle()
        await engine.terminate("r")
        await h.settle()
    for callback in queued:
        asyncio.get_running_loop().call_soon(callback)
    await h.settle()
    assert await run.status() is RunStatus.CANCELLED
    assert h.executed() == []


def test_two_slices_are_shorter_than_20_ms():
    assert 2 * time_slices.SLICE_SECONDS <= 0.02
