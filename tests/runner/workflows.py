"""Workflows with many asyncio constructs; the replay and golden tests run them in many orders."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.errors import JoinError, StepFailed
from perdure.retry import Retry
from perdure.workflows.context import Context
from perdure.workflows.steps import step
from tests.runner.turn_driver import note


@step(retry=None)
async def fetch(what: Any) -> Any:
    if what == "boom":
        raise ValueError("boom")
    return what


@step(retry=Retry(max_attempts=3, initial=10, jitter=0.5))
async def flaky(what: Any) -> Any:
    raise ValueError(f"{what} never works")


async def helper(number: int) -> int:
    note(("began", number))
    value: int = await fetch(number)
    note(("got", number, value))
    return value


async def gathered(ctx: Context) -> Any:
    return await asyncio.gather(*[helper(i) for i in range(5)], fetch(9), fetch(10))


async def first_completed(ctx: Context) -> Any:
    waiting = [asyncio.create_task(helper(i)) for i in range(8)]
    rounds = []
    while waiting:
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        rounds.append([task.result() for task in done])
        waiting = list(pending)
        note([task.get_name() for task in pending])
        if len(rounds) == 3:
            # Replay must reproduce the iteration order of the set.
            rounds.append([await fetch(task.get_name()) for task in done | pending])
    return rounds


async def as_completed(ctx: Context) -> Any:
    return [await found for found in asyncio.as_completed([helper(i) for i in range(8)])]


async def as_completed_in_time(ctx: Context) -> Any:
    found = []
    try:
        for each in asyncio.as_completed([helper(i) for i in range(4)] + [fetch(9)], timeout=4):
            found.append(await each)  # noqa: PERF401 - the loop may end early
    except TimeoutError:
        note("too late")
        found.append(-1)
    return [*found, await fetch("after")]


async def task_group(ctx: Context) -> Any:
    async def bad() -> None:
        await fetch(1)
        await fetch("boom")

    async def good(number: int) -> None:
        try:
            await fetch(number)
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            note(("cancelled", number))
            await fetch(["clean up", number])
            raise

    seen: list[str] = []
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(good(number))
            group.create_task(bad())
    except* StepFailed as failures:
        seen += [str(failure) for failure in failures.exceptions]
    return seen


async def timeouts(ctx: Context) -> Any:
    seen: list[Any] = []
    try:
        async with asyncio.timeout(5):
            await asyncio.sleep(10)
    except TimeoutError:
        seen.append("timed out")
    try:
        async with asyncio.timeout(2):
            seen.append(await fetch(3))
            seen.append(await fetch(33))
            await asyncio.sleep(1)
    except TimeoutError:
        seen.append("slow")
    beside = asyncio.create_task(fetch("beside"))
    try:
        seen.append(await asyncio.wait_for(fetch(4), 3))
        seen.append(await asyncio.wait_for(helper(5), 3))
    except TimeoutError:
        seen.append(await fetch("late"))
    return [*seen, await beside, ctx.now().timestamp(), ctx.random.random(), str(ctx.uuid())]


async def producers_and_consumers(ctx: Context) -> Any:
    queue: asyncio.Queue[Any] = asyncio.Queue(2)
    finished, lock = asyncio.Event(), asyncio.Lock()
    out: list[Any] = []

    async def produce() -> None:
        for number in range(5):
            await queue.put(await fetch(number))
        finished.set()

    async def consume(name: str) -> None:
        while True:
            value = await queue.get()
            async with lock:
                out.append([name, await fetch(value)])
            queue.task_done()

    consumers = [asyncio.create_task(consume(name)) for name in "ab"]
    producer = asyncio.create_task(produce())
    await finished.wait()
    await queue.join()
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, producer, return_exceptions=True)
    return out


async def race(ctx: Context) -> Any:
    """Race without `ctx.race`: the first task wins, losers are cancelled and clean up."""

    async def slow() -> int:
        try:
            await fetch("slow")
            await asyncio.sleep(100)
            return 1
        finally:
            note("loser's finally")
            await fetch("clean up")

    results = []
    for contestants in ([slow(), ctx.sleep(5)], [fetch(1), fetch(2), flaky(3)]):
        tasks = [asyncio.create_task(contestant) for contestant in contestants]
        done, losers = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for loser in losers:
            loser.cancel()
        results.append([repr(task.exception() or task.result()) for task in done])
        await fetch("between")
    return results


async def unawaited(ctx: Context) -> str:
    asyncio.create_task(helper(1))  # noqa: RUF006
    await fetch(2)
    asyncio.create_task(helper(3))  # noqa: RUF006
    return "end"


async def current_tasks(ctx: Context) -> Any:
    me = asyncio.current_task()
    assert me is not None
    other = asyncio.create_task(helper(1))
    named = asyncio.create_task(helper(2), name="second helper")
    count = len(asyncio.all_tasks())
    await asyncio.gather(other, named)
    return [me.get_name(), other.get_name(), named.get_name(), count, len(asyncio.all_tasks())]


async def retries(ctx: Context) -> Any:
    async def try_it(name: str) -> str:
        try:
            await flaky(name)
        except StepFailed as failure:
            return f"{failure.location} {failure.attempts}"
        return "never"

    version = ctx.version("gate", latest=3)
    results = await asyncio.gather(try_it("a"), try_it("b"), ctx.sleep(30), ctx.sleep(30), asyncio.sleep(30))
    return [*results, version, ctx.version("later", latest=5), ctx.now().timestamp()]


async def semaphores(ctx: Context) -> Any:
    slots, condition = asyncio.Semaphore(2), asyncio.Condition()
    out: list[int] = []

    async def work(number: int) -> None:
        async with slots:
            value = await fetch(number)
            async with condition:
                out.append(value)
                condition.notify_all()

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(work(number))
        async with condition:
            await condition.wait_for(lambda: len(out) >= 3)
            note(list(out))
            out.append(await asyncio.shield(fetch("shielded")))
    return out


async def branches(ctx: Context) -> Any:
    async def patient(number: int) -> Any:
        try:
            return await ctx.map(fetch, range(number), concurrency=2)
        finally:
            note(("done", number))
            await fetch(("cleanup", number))

    joined = await ctx.join(a=patient(3), b=ctx.race(slow=patient(4), fast=helper(9), limit=ctx.sleep(4)))
    try:
        await ctx.join(fetch("boom"), helper(1))
    except JoinError as error:
        note(sorted(error.errors))
    return joined


WORKFLOWS = [
    gathered,
    first_completed,
    as_completed,
    as_completed_in_time,
    task_group,
    timeouts,
    producers_and_consumers,
    race,
    unawaited,
    current_tasks,
    retries,
    semaphores,
    branches,
]
