"""The virtual clock, the faulty store and periodic tasks."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

import pytest

from perdure import Context, Retry, StoreError, step, workflow
from perdure.clock import sleep_on
from perdure.errors import InvalidArgument
from perdure.execution.committer import Committer
from perdure.execution.periodic import PeriodicTask
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import WriteResult
from perdure.stores.writes import ReleaseRun, Write
from perdure.testing import FaultyStore, VirtualClock, on_virtual_time


def run(test):
    return asyncio.run(test())


def test_timers_fire_in_order_at_their_times():
    async def main():
        clock, start = VirtualClock(1000), 1000
        fired: list[tuple[float, float]] = []

        def note(after: float) -> None:
            fired.append((after, clock.now() - start))

        for after in (5, 1, 3, 1):
            clock.call_at(start + after, partial(note, after))
        cancelled = clock.call_at(start + 2, partial(note, 2))
        cancelled.cancel()
        assert clock.next_due == 1001
        await clock.advance(4)
        assert fired == [(1, 1), (1, 1), (3, 3)]
        assert clock.now() == 1004
        assert clock.next_due == 1005
        await clock.advance(1)
        assert fired[-1] == (5, 5)
        assert clock.next_due is None

    run(main)


def test_effects_of_one_timer_happen_before_the_next_timer():
    async def main():
        clock = VirtualClock()
        start = clock.now()
        log = []

        async def sleeper(name: str, seconds: float, times: int) -> None:
            for _ in range(times):
                await sleep_on(clock, seconds)
                log.append((name, clock.now() - start))

        tasks = [asyncio.create_task(sleeper("a", 2, 3)), asyncio.create_task(sleeper("b", 3, 2))]
        await clock.advance(6)
        assert log == [("a", 2), ("b", 3), ("a", 4), ("a", 6), ("b", 6)] or log == [
            ("a", 2),
            ("b", 3),
            ("a", 4),
            ("b", 6),
            ("a", 6),
        ]
        await asyncio.gather(*tasks)

    run(main)


def test_a_jump_fires_timers_late_as_after_a_pause():
    async def main():
        clock = VirtualClock(1000)
        fired = []
        clock.call_at(1001, lambda: fired.append(clock.now()))
        await clock.jump(50)
        assert fired == [1050]

    run(main)


def test_past_timer_fires_on_the_next_iteration():
    async def main():
        clock = VirtualClock(1000)
        fired = []
        clock.call_at(999, lambda: fired.append(1))
        assert fired == []
        await clock.settle()
        assert fired == [1]
        assert not await clock.move_to_next()

    run(main)
    with pytest.raises(InvalidArgument):
        VirtualClock(0)


def test_faulty_store_implements_the_protocol_and_injects_faults():
    async def main():
        inner = MemoryStore(VirtualClock())
        faulty = FaultyStore(inner)
        assert isinstance(faulty, Store)
        await faulty.open(shards=4)
        assert await faulty.commit([]) == []
        faulty.fail_calls(1)
        with pytest.raises(StoreError, match="unavailable") as raised:
            await faulty.commit([])
        assert raised.value.retryable
        faulty.lose_responses(1)
        with pytest.raises(StoreError, match="lost") as raised:
            await faulty.commit([])
        assert raised.value.retryable
        assert len(faulty.committed) == 2
        faulty.crash(2, "after")
        await faulty.commit([])
        dying = asyncio.create_task(faulty.commit([]))
        await faulty.crashed.wait()
        assert len(faulty.committed) == 4
        after = asyncio.create_task(faulty.records(["x"]))
        await VirtualClock().settle()
        assert not dying.done()
        assert not after.done()
        dying.cancel()
        after.cancel()
        await asyncio.gather(dying, after, return_exceptions=True)

    run(main)


def test_periodic_task_triggered_during_its_tick_keeps_the_earlier_time():
    """A run that suspends while the claiming task queries the store must not be woken a whole sweep late."""

    async def main():
        clock = VirtualClock(1000)
        gate = asyncio.Event()
        ticks = []

        async def tick(now: float) -> float:
            ticks.append(now)
            await gate.wait()
            return now + 100

        task = PeriodicTask("test", tick, clock, 100)
        task.start()
        task.trigger()
        await clock.settle()
        task.trigger(1003)
        gate.set()
        await clock.advance(10)
        await task.stop()
        assert ticks == [1000, 1003]

    run(main)


def test_periodic_task_survives_exceptions_of_its_tick(caplog):
    async def main():
        clock = VirtualClock(1000)
        ticks = []

        async def tick(now: float) -> float:
            ticks.append(now)
            if len(ticks) == 1:
                raise StoreError("away", retryable=True)
            if len(ticks) == 2:
                raise ZeroDivisionError
            return now + 1

        task = PeriodicTask("test", tick, clock, 10)
        task.start()
        task.trigger()
        await clock.advance(21.5)
        await task.stop()
        assert ticks == [1000, 1010, 1020, 1021]

    run(main)


def test_month_takes_no_real_time_on_the_virtual_clock():
    @step
    async def note() -> str:
        return "done"

    @workflow
    async def month(ctx: Context) -> str:
        await ctx.sleep(3600 * 2)
        return await note()

    async def story(h):
        engine = await h.engine(month)
        before = h.clock.now()
        result = await h.run_to_end(await engine.start(month), within=3 * 3600)
        return result, h.clock.now() - before

    result, took = on_virtual_time(story)
    assert result == "done"
    assert 7200 <= took < 7210


def test_workflow_that_never_ends_is_reported():
    @workflow
    async def endless(ctx: Context) -> None:
        while True:
            await ctx.sleep(10)

    async def story(h):
        engine = await h.engine(endless)
        with pytest.raises(AssertionError, match="within 60 seconds"):
            await h.run_to_end(await engine.start(endless), within=60)

    on_virtual_time(story)


def test_periodic_task_and_committer_stop_although_a_driver_loses_the_cancel():
    async def answer_though_cancelled(began: asyncio.Event) -> None:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def main() -> None:
        clock, began = VirtualClock(), asyncio.Event()

        async def tick(now: float) -> None:
            await answer_though_cancelled(began)

        task = PeriodicTask("deaf", tick, clock, 10)
        task.start()
        task.trigger()
        await began.wait()
        await asyncio.wait_for(task.stop(), 60)
        began.clear()
        store = MemoryStore(clock)

        async def commit(batch: Sequence[Write]) -> list[WriteResult]:
            await answer_though_cancelled(began)
            return []

        store.commit = commit  # type: ignore[method-assign]
        committer = Committer(store, clock, Retry())
        committer.start()
        committer.submit(ReleaseRun(run_id="r", worker="w", now=0.0), lambda answer: None)
        await began.wait()
        await asyncio.wait_for(committer.stop(), 60)

    asyncio.run(main())
