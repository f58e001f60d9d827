"""Execution of step bodies: attempts, timeouts, threads, slots, and the context that a body sees."""

import asyncio
import contextvars
import itertools
import threading
import time
from typing import Any

import pytest

from perdure import (
    Context,
    CriticalError,
    EngineConfig,
    Retry,
    RunFailed,
    StepFailed,
    WorkflowMisuse,
    current_step,
    step,
    workflow,
)
from tests.engine.store_matrix import on_every_store

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def workflow_of(*steps, **options):
    """Return a workflow that awaits these steps in order and returns their results or errors."""

    @workflow(name="of_steps", **options)
    async def of_steps(ctx: Context) -> list[str]:
        results = []
        for each in steps:
            try:
                results.append(str(await each()))
            except StepFailed as failed:
                results.append(f"{failed.type}/{failed.attempts}")
        return results

    return of_steps


@on_every_store
async def test_current_step_describes_the_attempt(h):
    seen: list[Any] = []

    @step(timeout=50, retry=Retry(initial=3, jitter=0))
    async def curious() -> None:
        me = current_step()
        seen.append((me.run_id, me.workflow, me.name, me.location, me.attempt, me.idempotency_key, me.deadline))
        assert not me.cancelled.is_set()
        if me.attempt == 1:
            raise ValueError("again")

    wf = workflow_of(curious, curious)
    engine = await h.engine(wf)
    started = h.clock.now()
    await h.run_to_end(await engine.start(wf, id="r"))
    assert [each[:5] for each in seen] == [
        ("r", "of_steps", "curious", "curious", 1),
        ("r", "of_steps", "curious", "curious", 2),
        ("r", "of_steps", "curious", "curious#1", 1),
        ("r", "of_steps", "curious", "curious#1", 2),
    ]
    keys = [each[5] for each in seen]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert [each[6].timestamp() for each in seen[:2]] == [started + 50, pytest.approx(started + 53, abs=0.1)]


@on_every_store
async def test_idempotency_key_is_the_same_after_a_crash(h):
    keys = []

    @step
    async def keyed() -> None:
        keys.append(current_step().idempotency_key)
        if len(keys) == 1:
            await asyncio.Event().wait()

    wf = workflow_of(keyed)
    first = await h.engine(wf)
    await first.start(wf, id="r")
    await first.start(wf, id="other")
    await h.settle()
    await h.crash(first)
    second = await h.engine(wf)
    await h.run_to_end(second.get("r"))
    assert len(keys) == 3
    assert keys[0] == keys[2] != keys[1]


def test_current_step_outside_of_a_step_raises():
    with pytest.raises(WorkflowMisuse, match="outside of a step"):
        current_step()


@on_every_store
async def test_retry_policy_sets_the_delays_between_attempts(h):
    times = []

    @step(retry=Retry(max_attempts=4, initial=10, factor=3, max_delay=50, jitter=0))
    async def failing() -> None:
        times.append(h.clock.now())
        raise ValueError("no")

    wf = workflow_of(failing)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == ["ValueError/4"]
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert waits == [pytest.approx(each, abs=0.05) for each in (10, 30, 50)]


@on_every_store
async def test_errors_that_are_not_retried(h):
    @step
    async def critical() -> None:
        raise CriticalError("no")

    @step(retry=None)
    async def once() -> None:
        raise ValueError("no")

    @step(retry=Retry(retry_on=KeyError))
    async def other_error() -> None:
        raise ValueError("no")

    @step(retry=Retry(retry_on=lambda error: "yes" in str(error)))
    async def predicate() -> None:
        raise ValueError("no")

    wf = workflow_of(critical, once, other_error, predicate)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == [
        "CriticalError/1",
        "ValueError/1",
        "ValueError/1",
        "ValueError/1",
    ]


@on_every_store
async def test_timeout_cancels_the_body_and_is_not_retried(h):
    cancelled = []

    @step(timeout=5)
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(current_step().cancelled.is_set())
            raise

    wf = workflow_of(slow)
    engine = await h.engine(wf)
    started = h.clock.now()
    assert await h.run_to_end(await engine.start(wf)) == ["TimeoutError/1"]
    assert h.clock.now() == started + 5
    assert cancelled == [True]
    assert engine.slots_taken == 0


@on_every_store
async def test_timeout_is_retried_with_retry_on_timeout(h):
    @step(timeout=5, retry_on_timeout=True, retry=Retry(max_attempts=3, initial=1, jitter=0))
    async def slow() -> str:
        if current_step().attempt < 3:
            await asyncio.Event().wait()
        return "third time"

    wf = workflow_of(slow)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == ["third time"]


@on_every_store
async def test_late_result_of_a_timed_out_attempt_is_not_recorded(h):
    @step(timeout=5, retry=None)
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        return "?"

    wf = workflow_of(stubborn)
    engine = await h.engine(wf)
    run = await engine.start(wf)
    assert await h.run_to_end(run) == ["TimeoutError/1"]
    (entry,) = await engine.history(run.id)
    assert (entry.value, str(entry.status)) == (None, "failed")


@on_every_store
async def test_sync_steps_run_in_threads(h):
    names = []

    @step
    def blocking() -> str:
        names.append(threading.current_thread().name)
        current_step().heartbeat("half way")
        return f"{current_step().location} {threading.current_thread() is threading.main_thread()}"

    wf = workflow_of(blocking, blocking)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == ["blocking False", "blocking#1 False"]


@on_every_store
async def test_sync_body_that_outlives_its_timeout_frees_its_slot_and_its_result_is_discarded(h):
    release, ended = threading.Event(), threading.Event()
    saw_cancel = []

    @step(timeout=5, retry=None)
    def stubborn() -> str:
        with h.bodies.parked():
            saw_cancel.append(current_step().cancelled.wait(30))
            release.wait(30)
        ended.set()
        return "late"

    @step
    def quick() -> str:
        return "quick"

    wf = workflow_of(stubborn, quick)
    engine = await h.engine(wf, config=EngineConfig(max_concurrent_steps=1))
    run = await engine.start(wf)
    assert await h.run_to_end(run) == ["TimeoutError/1", "quick"]
    release.set()
    assert await asyncio.to_thread(ended.wait, 30)
    await h.settle()
    assert saw_cancel == [True]
    assert [str(entry.status) for entry in await engine.history(run.id)] == ["failed", "succeeded"]
    assert engine.slots_taken == 0


@on_every_store
async def test_heartbeat_raises_in_a_cancelled_body(h):
    stopped = []

    @step(timeout=5, retry=None)
    def beating() -> None:
        me = current_step()
        me.heartbeat("fine")
        with h.bodies.parked():
            me.cancelled.wait(30)
        try:
            me.heartbeat("too late")
        except asyncio.CancelledError:
            stopped.append(me.details)
            raise

    wf = workflow_of(beating)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == ["TimeoutError/1"]
    for _ in range(12_000):
        if stopped:
            break
        time.sleep(0.005)  # the harness does not wait for a parked thread
    assert stopped == ["too late"]


@on_every_store
async def test_step_that_the_workflow_abandons_is_cancelled(h):
    ended = []

    @step
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(current_step().location)

    @workflow
    async def impatient(ctx: Context) -> str:
        try:
            async with asyncio.timeout(5):
                await slow()
        except TimeoutError:
            pass
        await ctx.sleep(1)
        return "moved on"

    engine = await h.engine(impatient)
    run = await engine.start(impatient)
    assert await h.run_to_end(run) == "moved on"
    assert ended == ["slow"]
    assert [str(entry.status) for entry in await engine.history(run.id) if entry.name == "slow"] == ["cancelled"]
    assert engine.slots_taken == 0


@on_every_store
async def test_context_variables_do_not_reach_workflows_and_steps(h):
    @step
    async def look() -> str:
        return VARIABLE.get()

    @step
    def look_in_thread() -> str:
        return VARIABLE.get()

    @workflow
    async def variables(ctx: Context) -> list[str]:
        seen = [VARIABLE.get()]
        VARIABLE.set("the workflow's")
        return [*seen, await look(), await look_in_thread(), VARIABLE.get()]

    VARIABLE.set("the caller's")
    engine = await h.engine(variables)
    assert await h.run_to_end(await engine.start(variables)) == ["unset", "unset", "unset", "the workflow's"]


@on_every_store
async def test_concurrent_bodies_are_limited_and_slots_are_freed(h):
    inside = most = 0
    gate = asyncio.Event()

    @step(retry=None)
    async def crowded(n: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await gate.wait()
            if n % 3 == 0:
                raise ValueError("every third fails")
            return n
        finally:
            inside -= 1

    @workflow
    async def crowd(ctx: Context) -> int:
        results = await asyncio.gather(*(crowded(n) for n in range(20)), return_exceptions=True)
        return sum(isinstance(each, StepFailed) for each in results)

    engine = await h.engine(crowd, config=EngineConfig(max_concurrent_steps=4))
    runs = [await engine.start(crowd) for _ in range(3)]
    await h.settle()
    assert inside == 4
    assert engine.slots_taken == 60
    await runs[2].cancel()  # with its bodies queued
    await h.settle()
    assert engine.slots_taken == 40
    gate.set()
    assert [await h.run_to_end(run) for run in runs[:2]] == [7, 7]
    assert most == 4
    assert engine.slots_taken == 0


@on_every_store
async def test_unusual_exceptions_of_bodies_fail_only_the_step(h):
    @step(retry=None)
    async def exits() -> None:
        raise SystemExit(3)

    @step(retry=None)
    async def cancels() -> None:
        raise asyncio.CancelledError

    @step(retry=None)
    def stops() -> None:
        raise StopIteration

    @step(retry=None)
    def interrupts() -> None:
        raise GeneratorExit

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    @step(retry=None)
    async def unprintable() -> None:
        raise UnprintableError

    wf = workflow_of(exits, cancels, stops, interrupts, unprintable)
    engine = await h.engine(wf)
    assert await h.run_to_end(await engine.start(wf)) == [
        "SystemExit/1",
        "CancelledError/1",
        "StopIteration/1",
        "GeneratorExit/1",
        "UnprintableError/1",
    ]


@on_every_store
async def test_recorded_failure_is_replayed_even_if_the_step_would_now_succeed(h):
    calls = []

    @step(retry=None)
    async def moody() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("bad day")
        return "good day"

    @workflow
    async def catching(ctx: Context) -> str:
        try:
            word = await moody()
        except StepFailed as failed:
            word = failed.message
        await ctx.sleep(100)
        return word

    first = await h.engine(catching)
    await first.start(catching, id="c")
    await h.settle()
    await h.crash(first)
    second = await h.engine(catching)
    assert await h.run_to_end(second.get("c")) == "bad day"
    assert len(calls) == 1


@on_every_store
async def test_results_pass_through_the_codec_on_first_execution_too(h):
    shared: list[int] = [1, 2]

    @step
    async def give() -> list[int]:
        return shared

    @workflow
    async def changing(ctx: Context) -> list[int]:
        got = await give()
        got.append(3)
        return await give()

    engine = await h.engine(changing)
    assert await h.run_to_end(await engine.start(changing)) == [1, 2]
    assert shared == [1, 2]


@on_every_store
async def test_result_that_cannot_be_encoded_fails_the_step_without_retry_and_names_the_path(h):
    calls = []

    @step
    async def unserialisable() -> dict[str, object]:
        calls.append(1)
        return {"outer": [1, {"inner": threading.Lock()}]}

    @step
    async def wrong_type() -> int:
        calls.append(1)
        return "text"  # type: ignore[return-value]

    @workflow
    async def catches(ctx: Context) -> list[str]:
        seen = []
        for each in (unserialisable, wrong_type):
            try:
                await each()
            except StepFailed as failed:
                seen.append(f"{failed.type}/{failed.attempts}: {failed.message}")
        return seen

    engine = await h.engine(catches)
    first, second = await h.run_to_end(await engine.start(catches))
    assert first.startswith("InvalidPayload/1: result of step unserialisable")
    assert "outer" in first
    assert "inner" in first
    assert second.startswith("InvalidPayload/1: result of step wrong_type")
    assert len(calls) == 2


@on_every_store
async def test_workflow_result_that_cannot_be_encoded_fails_the_run(h):
    @workflow
    async def wrong(ctx: Context) -> int:
        return "text"  # type: ignore[return-value]

    engine = await h.engine(wrong)
    with pytest.raises(RunFailed, match="InvalidPayload"):
        await h.run_to_end(await engine.start(wrong))
