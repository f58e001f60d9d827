"""Heartbeats of steps: recorded at a bounded rate, shown while the step runs, and handed to its next attempt."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from perdure import (
    Context,
    EngineConfig,
    InvalidPayload,
    Retry,
    RunFailed,
    RunStatus,
    StepFailed,
    StepInterrupted,
    current_step,
    step,
    workflow,
)
from perdure.clock import sleep_on
from perdure.errors import InvalidArgument
from perdure.model.records import EntryStatus
from tests.engine.store_matrix import on_every_store

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def clear():
    SEEN.clear()


def see() -> Any:
    """Note what the attempt sees of earlier ones, and return it."""
    me = current_step()
    SEEN.append((me.attempt, me.last_heartbeat))
    return me


def workflow_of(call, **options):
    @workflow(name="beating", **options)
    async def beating(ctx: Context) -> str:
        try:
            return str(await call())
        except StepFailed as failed:
            return f"{failed.type}: {failed.message}"

    return beating


async def rows_at(h, location: str, run_id: str = "r") -> list[Any]:
    return [row.entry for row in await h.store.history(run_id) if row.entry.location == location]


@on_every_store
async def test_the_next_attempt_gets_the_last_heartbeat_of_the_failed_one(h):
    @step(retry=Retry(max_attempts=4, initial=1))
    async def copy() -> str:
        me = see()
        if me.attempt == 1:
            for page in range(500):
                me.heartbeat({"page": page})
            raise ConnectionError("lost")
        if me.attempt == 2:
            raise ConnectionError("lost before the first page")
        if me.attempt == 3:
            me.heartbeat(None)
            raise ConnectionError("again")
        return "copied"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf, id="r")) == "copied"
    assert SEEN == [(1, None), (2, {"page": 499}), (3, {"page": 499}), (4, None)]
    [entry] = await engine.history("r")
    assert (entry.value, entry.heartbeat, entry.heartbeat_at) == ("copied", None, None)
    assert [row.status for row in await rows_at(h, "copy")] == [EntryStatus.SUCCEEDED], "no heartbeat is left"


@on_every_store
async def test_a_running_step_shows_its_last_heartbeat(h):
    @step
    async def slow() -> str:
        me = see()
        for done in range(5):
            me.heartbeat(done)
            await sleep_on(h.clock, 10)
        return "done"

    wf = workflow_of(slow)
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.clock.advance(25)
    await h.settle()
    [entry] = await engine.history("r")
    assert (str(entry.status), entry.value, entry.heartbeat, entry.attempts) == ("pending", None, 2, 1)
    assert entry.heartbeat_at is not None
    assert h.clock.now() - 15 < entry.heartbeat_at.timestamp() < h.clock.now()
    described = await run.describe()
    assert {at: (beat.details, beat.at) for at, beat in described.heartbeats.items()} == {
        "slow": (2, entry.heartbeat_at)
    }
    assert await h.run_to_end(run) == "done"
    assert (await run.describe()).heartbeats == {}


@on_every_store
async def test_heartbeats_are_written_once_per_second_and_keep_one_row(h):
    @step
    async def busy() -> str:
        me = see()
        for number in range(2_000):  # twenty seconds
            me.heartbeat(number)
            if number % 10 == 0:
                await sleep_on(h.clock, 0.1)
        return "done"

    wf = workflow_of(busy)
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.clock.advance(10)
    await h.settle()
    assert [row.status for row in await rows_at(h, "busy")] == [EntryStatus.PENDING]
    assert await h.run_to_end(run) == "done"
    written = [write for batch in engine.faults.committed for write in batch if getattr(write, "entries", ())]
    assert 15 <= len(written) <= 25, "one per second, and the result"
    assert [row.status for row in await rows_at(h, "busy")] == [EntryStatus.SUCCEEDED]


@on_every_store
async def test_another_worker_hands_over_the_heartbeat_after_a_crash(h):
    @step
    async def copy() -> str:
        me = see()
        if me.last_heartbeat is None:
            me.heartbeat({"page": 7})
            await sleep_on(h.clock, 2)
            me.heartbeat({"page": 8})
            await asyncio.Event().wait()
        return f"from {me.last_heartbeat}"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    await engine.start(wf, id="r")
    await h.clock.advance(4)
    await h.settle()
    await h.crash(engine)
    other = await h.engine(wf)
    assert await h.drive(other.result("r")) == "from {'page': 8}"
    assert SEEN == [(1, None), (1, {"page": 8})], "an interrupted attempt is repeated under its number"


@on_every_store
async def test_the_late_heartbeat_of_a_fenced_worker_changes_nothing(h):
    go_on = asyncio.Event()

    @step
    async def copy() -> str:
        me = see()
        me.heartbeat(len(SEEN))
        await go_on.wait() if len(SEEN) == 1 else await sleep_on(h.clock, 300)
        me.heartbeat("late") if me.last_heartbeat is None else None
        await sleep_on(h.clock, 5)
        return f"from {me.last_heartbeat}"

    wf = workflow_of(copy)
    old = await h.engine(wf, config=EngineConfig(lease=5))
    await old.start(wf, id="r")
    await h.settle()
    old.faults.pause()
    other = await h.engine(wf, config=EngineConfig(lease=5))
    await h.clock.advance(60)
    await h.settle()
    assert SEEN == [(1, None), (1, 1)]
    go_on.set()
    await h.settle()
    old.faults.unblock()
    await h.clock.advance(10)
    await h.settle()
    [entry] = await other.history("r")
    assert entry.heartbeat == 2
    assert await h.drive(other.result("r")) == "from 1"
    assert len(SEEN) == 2


@on_every_store
async def test_a_timed_out_attempt_hands_over_its_heartbeat(h):
    @step(timeout=5, retry_on_timeout=True, retry=Retry(initial=1))
    async def copy() -> str:
        me = see()
        if me.attempt == 1:
            me.heartbeat("half")
            await asyncio.Event().wait()
        return "done"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf, id="r")) == "done"
    assert SEEN == [(1, None), (2, "half")]


@on_every_store
async def test_heartbeats_from_threads_and_of_dataclasses(h):
    @dataclass
    class Page:
        number: int

    @step(retry=Retry(initial=1))
    def copy() -> str:
        me = see()
        if me.attempt == 1:
            for number in range(300):
                me.heartbeat(Page(number))
            raise ConnectionError("lost")
        return "done"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf, id="r")) == "done"
    assert SEEN == [(1, None), (2, {"number": 299})]


@on_every_store
async def test_details_that_cannot_be_encoded_are_refused_at_the_call(h):
    @step(retry=Retry(initial=1))
    async def copy() -> str:
        me = see()
        if me.attempt == 1:
            me.heartbeat("good")
            with pytest.raises(InvalidPayload, match="heartbeat of step copy"):
                me.heartbeat(object())
            raise ConnectionError("lost")
        return "done"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf, id="r")) == "done"
    assert SEEN == [(1, None), (2, "good")]


@on_every_store
async def test_a_silent_attempt_fails_and_is_retried(h):
    ended = []

    @step(heartbeat_timeout=timedelta(seconds=10), retry=Retry(initial=1))
    async def copy() -> str:
        me = see()
        try:
            for number in range(4):  # longer than the timeout, in all
                me.heartbeat(number)
                await sleep_on(h.clock, 6)
            if me.attempt == 1:
                await asyncio.Event().wait()
        finally:
            ended.append((me.attempt, me.cancelled.is_set()))
        return "done"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.clock.advance(28.5)
    await h.settle()
    [entry] = await engine.history("r")
    assert entry.error is not None
    assert (entry.error.type, entry.error.message) == ("TimeoutError", "step copy sent no heartbeat for 10.0 seconds")
    assert (entry.heartbeat, entry.attempts) == (3, 1)
    assert (await run.describe()).heartbeats == {}, "no attempt is running"
    assert await h.run_to_end(run) == "done"
    assert SEEN == [(1, None), (2, 3)]
    assert ended == [(1, True), (2, False)]


@on_every_store
async def test_the_retry_policy_decides_on_a_silent_attempt(h):
    @step(heartbeat_timeout=10, retry=Retry(retry_on=ConnectionError))
    async def copy() -> str:
        see()
        await asyncio.Event().wait()
        return "never"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    result = await h.run_to_end(await engine.start(wf, id="r"))
    assert result == "TimeoutError: step copy sent no heartbeat for 10.0 seconds"
    assert SEEN == [(1, None)]


@on_every_store
async def test_the_late_result_of_a_silent_thread_is_not_recorded(h):
    @step(heartbeat_timeout=10, retry=Retry(initial=1))
    def copy() -> str:
        me = see()
        if me.attempt == 1:
            with h.bodies.parked():
                assert me.cancelled.wait(30)
            return "late"
        return "done"

    wf = workflow_of(copy)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf, id="r")) == "done"
    assert SEEN == [(1, None), (2, None)]
    assert engine.slots_taken == 0


@on_every_store
async def test_an_at_most_once_step_that_a_crash_interrupts_is_not_executed_again(h):
    @step(at_most_once=True)
    async def copy() -> str:
        see().heartbeat("half")
        await asyncio.Event().wait()
        return "never"

    @workflow(name="once")
    async def once(ctx: Context) -> str:
        try:
            return await copy()
        except StepInterrupted:
            return "interrupted"

    engine = await h.engine(once)
    await engine.start(once, id="r")
    await h.clock.advance(2)
    await h.settle()
    await h.crash(engine)
    other = await h.engine(once)
    assert await h.drive(other.result("r")) == "interrupted"
    assert SEEN == [(1, None)]
    [entry] = await other.history("r")
    assert (str(entry.status), entry.heartbeat) == ("failed", None)


@on_every_store
async def test_a_rewound_step_and_a_fork_do_not_see_old_heartbeats(h):
    @step
    async def prepare() -> None:
        pass

    @step
    async def copy() -> str:
        me = see()
        me.heartbeat("old")
        await sleep_on(h.clock, 60)
        return "done"

    @workflow(name="two")
    async def two(ctx: Context) -> str:
        await prepare()
        both = [asyncio.ensure_future(copy()), asyncio.ensure_future(ctx.receive("stop"))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        both[0].cancel()
        await prepare()
        return await copy()

    engine = await h.engine(two)
    await engine.start(two, id="r")
    await h.clock.advance(3)
    await h.settle()
    fork = await h.drive(engine.fork("r", "prepare"))
    await engine.rewind("r", "copy")
    await h.clock.advance(3)
    await h.settle()
    await engine.send("r", "stop", None)
    await h.settle()
    assert [str(entry.status) for entry in await engine.history("r") if entry.location == "copy"] == ["cancelled"]
    await engine.rewind("r", "prepare#1")  # the cancelled step before it is open again
    await engine.send(fork.id, "stop", None)
    for run_id in ("r", fork.id):
        await h.drive(engine.result(run_id))
    assert {last for _, last in SEEN} == {None}
    assert len(SEEN) >= 5


@on_every_store
async def test_a_fork_of_a_running_step_starts_without_its_heartbeat(h):
    @step
    async def copy() -> str:
        me = see()
        me.heartbeat("old")
        await sleep_on(h.clock, 60)
        return "done"

    @step
    async def note() -> None:
        pass

    @workflow(name="side_by_side")
    async def side_by_side(ctx: Context) -> str:
        copying = asyncio.ensure_future(copy())
        await ctx.sleep(1)
        await note()
        return await copying

    engine = await h.engine(side_by_side)
    await engine.start(side_by_side, id="r")
    await h.clock.advance(3)
    await h.settle()
    fork = await h.drive(engine.fork("r", "note"))
    await h.settle()
    await h.drive(fork.result())
    await h.drive(engine.result("r"))
    assert SEEN == [(1, None), (1, None)]


@on_every_store
async def test_a_held_step_gets_its_heartbeat_when_it_is_resumed(h):
    broken = [True]

    @step(retry=None)
    async def copy() -> str:
        me = see()
        if broken[0]:
            me.heartbeat("half")
            raise ConnectionError("lost")
        return "done"

    wf = workflow_of(copy, suspend_on_failure=True)
    engine = await h.engine(wf)
    run = await engine.start(wf, id="r")
    await h.settle()
    assert await run.status() is RunStatus.SUSPENDED
    broken[0] = False
    await engine.resume("r")
    assert await h.run_to_end(run) == "done"
    assert SEEN == [(1, None), (1, "half")]


@on_every_store
async def test_a_heartbeat_does_not_run_the_workflow(h):
    turns = []

    @step
    async def copy() -> str:
        me = see()
        for number in range(10):
            me.heartbeat(number)
            await sleep_on(h.clock, 1)
        return "done"

    @workflow(name="observed")
    async def observed(ctx: Context) -> str:
        turns.append("start")
        value = await copy()
        turns.append("end")
        return value

    engine = await h.engine(observed)
    run = await engine.start(observed, id="r")
    await engine.send("r", "unrelated", 1)
    assert await h.run_to_end(run) == "done"
    assert turns == ["start", "end"]
    assert engine._runtime.coordinator.rejected_turns == 0


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "10", True, timedelta(0)])
def test_heartbeat_timeout_must_be_a_duration(wrong):
    with pytest.raises(InvalidArgument, match="a step's heartbeat_timeout"):
        step(heartbeat_timeout=wrong)


def test_heartbeat_timeout_is_an_option_of_a_call():
    @step
    async def copy() -> None:
        pass

    assert copy.options(heartbeat_timeout=timedelta(minutes=1)).settings.heartbeat_timeout == 60.0


@on_every_store
async def test_a_failed_run_keeps_no_heartbeat(h):
    @step(retry=None)
    async def copy() -> None:
        see().heartbeat("half")
        raise ConnectionError("lost")

    @workflow(name="failing")
    async def failing(ctx: Context) -> None:
        await copy()

    engine = await h.engine(failing)
    with pytest.raises(RunFailed):
        await h.run_to_end(await engine.start(failing, id="r"))
    [entry] = await engine.history("r")
    assert (str(entry.status), entry.value, entry.heartbeat) == ("failed", None, None)
