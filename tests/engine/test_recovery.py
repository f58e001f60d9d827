"""What survives the death of a worker, and what is executed again."""

import asyncio

import pytest

from perdure import Context, EngineConfig, Retry, RunStatus, StepInterrupted, current_step, step, workflow
from tests.engine.store_matrix import another_handle, on_every_store


@step
async def plain(n: int) -> int:
    return n


@on_every_store
async def test_run_continues_from_its_last_recorded_entry(h):
    @workflow
    async def three(ctx: Context) -> int:
        total = await plain(1)
        total += await plain(2)
        await ctx.sleep(100)
        return total + await plain(3)

    first = await h.engine(three)
    await first.start(three, id="t")
    await h.clock.advance(1)
    await h.crash(first)
    second = await h.engine(three, store=another_handle(h.store, h.clock))
    assert await h.run_to_end(second.get("t")) == 6
    assert h.executed() == [("plain", 1), ("plain#1", 1), ("plain#2", 1)]


@on_every_store
async def test_recover_reports_what_it_did(h):
    gate = asyncio.Event()

    @step
    async def hang() -> None:
        await gate.wait()

    @workflow
    async def stuck(ctx: Context) -> None:
        await hang()

    first = await h.engine(stuck)
    for i in range(3):
        await first.start(stuck, id=f"s{i}")
    await h.settle()
    await h.crash(first)
    config = EngineConfig(sweep_interval=10_000)
    second = await h.engine(stuck, config=config)
    report = await second.recover()
    assert (report.workers_fenced, report.runs_released, report.runs_claimed) == (0, 0, 0)
    h.clock._now += 16  # past the lease, before any periodic task has run
    report = await second.recover()
    assert (report.workers_fenced, report.runs_released, report.runs_claimed) == (1, 3, 3)
    gate.set()
    for i in range(3):
        await h.run_to_end(second.get(f"s{i}"))
    assert (await second.describe("s0")).recoveries == 1


@on_every_store
async def test_runs_of_a_dead_worker_continue_within_the_lease(h):
    gate = asyncio.Event()

    @step
    async def hang() -> str:
        if h.executed("s") == [("hang", 1)]:
            await gate.wait()
        return "free"

    @workflow
    async def stuck(ctx: Context) -> str:
        return await hang()

    first = await h.engine(stuck)
    second = await h.engine(stuck)
    await first.start(stuck, id="s")
    await h.settle()
    await h.crash(first)
    await h.clock.advance(14)
    assert await second.status("s") is RunStatus.RUNNING
    await h.clock.advance(6)
    assert await second.status("s") is RunStatus.SUCCEEDED
    assert h.executed() == [("hang", 1), ("hang", 1)]


@on_every_store
async def test_attempts_and_the_next_ones_time_survive_a_restart(h):
    @step(retry=Retry(max_attempts=3, initial=100, max_delay=100, jitter=0))
    async def failing() -> None:
        raise ValueError("never")

    @workflow
    async def trying(ctx: Context) -> str:
        try:
            await failing()
        except Exception as error:
            return f"{type(error).__name__} {error.attempts}"  # type: ignore[attr-defined]
        return "?"

    engine = await h.engine(trying)
    await engine.start(trying, id="t")
    begun = h.clock.now()
    await h.settle()
    for _ in range(5):  # five restarts neither reset the count nor shorten or prolong the wait
        await h.crash(engine)
        engine = await h.engine(trying)
        await h.clock.advance(15)
    assert h.executed() == [("failing", 1)]
    (reason,) = (await engine.describe("t")).waiting_for
    assert reason.until is not None
    assert reason.until.timestamp() == pytest.approx(begun + 100)
    assert await h.run_to_end(engine.get("t")) == "StepFailed 3"
    assert h.executed() == [("failing", 1), ("failing", 2), ("failing", 3)]
    assert h.clock.now() == pytest.approx(begun + 200, abs=1)


@on_every_store
async def test_attempt_interrupted_by_a_crash_keeps_its_number(h):
    gate = asyncio.Event()

    @step(retry=Retry(max_attempts=2, initial=1, jitter=0))
    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ValueError("first")
        await gate.wait()
        return "second"

    @workflow
    async def trying(ctx: Context) -> str:
        return await flaky()

    engine = await h.engine(trying)
    await engine.start(trying, id="t")
    await h.clock.advance(5)
    for _ in range(3):
        assert h.executed()[-1] == ("flaky", 2)
        await h.crash(engine)
        engine = await h.engine(trying)
        await h.clock.advance(25)
    gate.set()
    assert await h.run_to_end(engine.get("t")) == "second"
    assert h.executed() == [("flaky", 1)] + [("flaky", 2)] * 4


@on_every_store
async def test_at_most_once_across_a_crash(h):
    calls: list[int] = []
    gate = asyncio.Event()

    @step(at_most_once=True)
    async def pay() -> str:
        calls.append(current_step().attempt)
        await gate.wait()
        return "paid"

    @workflow
    async def paying(ctx: Context) -> str:
        try:
            return await pay()
        except StepInterrupted as interrupted:
            return f"{interrupted.location} is unknown, {await plain(1)}"

    first = await h.engine(paying)
    await first.start(paying, id="p")
    await h.settle()
    assert calls == [1]
    await h.crash(first)
    second = await h.engine(paying)
    assert await h.run_to_end(second.get("p")) == "pay is unknown, 1"
    assert calls == [1]
    (entry,) = [entry for entry in await second.history("p") if entry.name == "pay"]
    assert entry.status == "failed"


@on_every_store
async def test_recorded_at_most_once_step_does_not_start_after_a_crash(h):
    @step(at_most_once=True)
    async def pay() -> str:
        return "paid"

    @workflow
    async def paying(ctx: Context) -> str:
        try:
            return await pay()
        except StepInterrupted:
            return "unknown"

    first = await h.engine(paying)
    first.faults.crash(2, "after")  # the commit that records the attempt
    await h.drive_until_crash(first, first.execute(paying, id="p"))
    assert h.executed() == []
    await h.crash(first)
    second = await h.engine(paying)
    assert await h.run_to_end(second.get("p")) == "unknown"
    assert h.executed() == []


@on_every_store
async def test_at_most_once_still_retries_what_failed_on_record(h):
    @step(at_most_once=True, retry=Retry(initial=1, jitter=0))
    async def pay() -> str:
        if current_step().attempt == 1:
            raise ValueError("declined")
        return "paid"

    @workflow
    async def paying(ctx: Context) -> str:
        return await pay()

    first = await h.engine(paying)
    await first.start(paying, id="p")
    await h.settle()
    await h.crash(first)
    second = await h.engine(paying)
    assert await h.run_to_end(second.get("p")) == "paid"
    assert h.executed() == [("pay", 1), ("pay", 2)]


@on_every_store
async def test_a_poison_run_is_held_and_shown_as_a_dead_letter(h):
    @step
    async def poison() -> str:
        if not cure:
            await asyncio.Event().wait()
        return "well"

    @workflow
    async def victim(ctx: Context) -> str:
        return await poison()

    cure: list[int] = []
    h.config = EngineConfig(max_recoveries=2)
    engine = await h.engine(victim)
    await engine.start(victim, id="v")
    for _ in range(3):
        await h.settle()
        await h.crash(engine)
        engine = await h.engine(victim)
        await h.clock.advance(25)
    assert len(h.executed()) == 3
    seen = await engine.describe("v")
    assert seen.status is RunStatus.SUSPENDED
    assert seen.waiting_for[0].kind == "held"
    assert "died 3 times" in str(seen.waiting_for[0])
    (letter,) = await engine.dead_letters()
    assert (letter.kind, letter.original_target) == ("poison", "v")
    await h.clock.advance(1000)
    assert len(h.executed()) == 3
    cure.append(1)
    await engine.resume("v")
    assert await h.run_to_end(engine.get("v")) == "well"


@on_every_store
async def test_only_consecutive_recoveries_are_counted(h):
    """A run that makes progress in between is not a poison run."""

    @step
    async def work() -> None:
        if len(h.executed()) % 2:
            await asyncio.Event().wait()

    @workflow
    async def unlucky(ctx: Context) -> str:
        for _ in range(4):
            await work()
            await ctx.sleep(1)
        return "through"

    h.config = EngineConfig(max_recoveries=1)
    engine = await h.engine(unlucky)
    await engine.start(unlucky, id="u")
    for _ in range(4):
        await h.clock.advance(30)
        await h.crash(engine)
        engine = await h.engine(unlucky)
    assert await h.run_to_end(engine.get("u")) == "through"


@on_every_store
async def test_results_seen_by_a_caller_survive(h):
    """Guarantee 1: an entry that a caller has seen survives any crash."""

    @workflow
    async def counting(ctx: Context) -> int:
        total = 0
        for i in range(20):
            total += await plain(i)
            await ctx.sleep(1)  # gives the watcher time to catch up
        return total

    first = await h.engine(counting)
    run = await first.start(counting, id="c")
    seen: dict[str, None] = {}  # in order: a sleep occurs twice, requested and completed

    async def watch() -> None:
        async for entry in run.watch():
            seen[entry.location] = None

    first.faults.crash(12, "before")
    h.background(watch())
    await h.drive_until_crash(first, run.result())
    await h.settle()
    await h.crash(first)
    assert len(seen) >= 5
    second = await h.engine(counting)
    assert [entry.location for entry in await second.history("c")][: len(seen)] == list(seen)
    assert await h.run_to_end(second.get("c")) == 190
    assert len(h.executed()) <= 21  # at most the one that was under way is repeated
