"""A crash before and after every commit of a workflow that uses every feature."""

import asyncio
from itertools import count

import pytest

from perdure import Context, Retry, StepFailed, StepInterrupted, current_step, step, workflow
from perdure.stores.memory.store import MemoryStore
from perdure.testing import crash_everywhere
from tests.engine.crash_points import crash_on
from tests.engine.store_matrix import STORES
from tests.repetitions import crash_interval

EFFECTS: list[tuple[str, int]] = []


def effect() -> None:
    EFFECTS.append((current_step().location, current_step().attempt))


@step
async def fetch(n: int) -> int:
    effect()
    return n * 10


@step
def in_thread(n: int) -> int:
    effect()
    return n + 1


@step(retry=Retry(max_attempts=4, initial=2, jitter=0))
async def flaky() -> str:
    effect()
    if current_step().attempt < 3:
        raise ConnectionError("not yet")
    return "at last"


@step(at_most_once=True)
async def pay(cents: int) -> str:
    effect()
    return f"paid {cents}"


@step(retry=Retry(max_attempts=2, initial=1, jitter=0))
async def hopeless() -> None:
    effect()
    raise ValueError("hopeless")


@step(timeout=3, retry=None)
async def too_slow() -> None:
    effect()
    await asyncio.Event().wait()


async def branch(ctx: Context, n: int) -> int:
    first = await fetch(n)
    await ctx.sleep(n)
    return first + await in_thread(n)


@workflow
async def everything(ctx: Context, start: int) -> dict[str, object]:
    total = await fetch(start)
    both = await asyncio.gather(fetch(1), in_thread(2), branch(ctx, 3), branch(ctx, 1))
    gate = ctx.version("gate", latest=2)
    word = await flaky()
    try:
        paid = await pay(total)
    except StepInterrupted:
        paid = "unknown"
    try:
        await hopeless()
    except StepFailed as failed:
        word += f", {failed.type} after {failed.attempts}"
    try:
        await too_slow()
    except StepFailed as failed:
        word += f", {failed.type}"
    try:
        async with asyncio.timeout(5):
            await ctx.sleep(1000)
    except TimeoutError:
        word += ", timed out"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(branch(ctx, n), name=f"b{n}") for n in (2, 1)]
    await ctx.sleep(30)
    chance = ctx.random.randrange(10**9)
    again = await in_thread(chance)
    return {
        "total": total,
        "both": both,
        "gate": gate,
        "word": word,
        "paid": paid,
        "tasks": [task.result() for task in tasks],
        "steady": again == chance + 1,
        "last": await fetch(7),
    }


def same_but_for_the_payment(clean, crashed) -> bool:
    return (
        clean[0] == crashed[0] == "returned"
        and {**clean[1], "paid": ""} == {**crashed[1], "paid": ""}
        and crashed[1]["paid"] in ("paid 50", "unknown")
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_a_crash_at_every_commit_and_claim(kind, tmp_path):
    report = crash_on(
        kind, tmp_path, everything, 5, same=same_but_for_the_payment, calls=("commit", "claim"), begin=EFFECTS.clear
    )
    assert report.outcome[1]["word"] == "at last, ValueError after 2, TimeoutError, timed out"
    assert report.outcome[1]["paid"] == "paid 50"
    assert report.commits > 20
    at_commits = [crash for crash in report.crashes if crash.call == "commit"]
    assert len(at_commits) * crash_interval(kind) >= 2 * report.commits - 4


def test_store_that_loses_a_commit_is_caught():
    """The harness itself: a step whose record got lost is executed again, and the harness says so."""

    class Forgetful(MemoryStore):
        async def load(self, ids):
            snapshots = await super().load(ids)
            self.loads = getattr(self, "loads", 0) + 1
            if self.loads > 1 and snapshots[0] is not None:  # the first load is by the harness, at the crash
                snapshots[0] = type(snapshots[0])(
                    snapshots[0].record, snapshots[0].position, snapshots[0].entries[:1], snapshots[0].inbox
                )
            return snapshots

    @workflow
    async def three(ctx: Context) -> int:
        return await fetch(1) + await fetch(2) + await fetch(3)

    with pytest.raises(AssertionError, match=r"fetch#1 was recorded .* and was executed again"):
        asyncio.run(crash_everywhere(three, make_store=Forgetful))


def test_another_outcome_after_a_crash_is_caught():
    calls: list[int] = []

    @step
    async def counts() -> int:
        calls.append(1)
        return len(calls)

    @workflow
    async def fickle(ctx: Context) -> int:
        return await counts()

    with pytest.raises(AssertionError, match="the outcome is"):
        asyncio.run(crash_everywhere(fickle, begin=calls.clear))


def test_changed_arguments_on_replay_are_caught():
    odds = count()

    @workflow
    async def drifting(ctx: Context) -> int:
        await fetch(next(odds))
        await ctx.sleep(1)
        return await fetch(1)

    with pytest.raises(AssertionError, match="other arguments"):
        asyncio.run(crash_everywhere(drifting))


def test_failing_workflow_fails_with_the_same_error():
    @workflow
    async def doomed(ctx: Context) -> None:
        await fetch(1)
        await hopeless()

    report = asyncio.run(crash_everywhere(doomed))
    assert report.outcome[:2] == ("failed", "StepFailed")
    assert len(report.crashes) == 2 * report.commits
