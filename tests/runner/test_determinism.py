"""Histories replay whatever the hash seed, the heap and the version of Python."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.golden_histories import FOLDER, faults_of, read
from tests.runner.turn_driver import Play
from tests.runner.workflows import fetch, helper

ROOT = Path(__file__).parents[2]
GOLDEN = sorted(FOLDER.glob("python3.*.json"))


def interpreters():
    """This Python, and those that PERDURE_PYTHONS names, separated by colons: they must have perdure's dependencies."""
    return [sys.executable, *filter(None, os.environ.get("PERDURE_PYTHONS", "").split(":"))]


def test_every_supported_version_has_a_golden_history():
    assert [path.stem for path in GOLDEN] == ["python3.11", "python3.12", "python3.13"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_histories_replay_on_this_python(path):
    assert [fault for golden in read(path) for fault in faults_of(golden)] == []


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
@pytest.mark.parametrize("python", interpreters())
def test_golden_histories_replay_under_other_hash_seeds(python, hash_seed):
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "tests.runner.golden_histories", "check"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == ""
    assert result.returncode == 0, result.stderr


def order_of(fn, seed=7):
    """In which order the workflow walked a set: fetches are named after what it met."""
    dice = random.Random(1)
    noise = [bytearray(dice.randrange(40, 600)) for _ in range(dice.randrange(300))]
    play = Play(fn, seed=seed).run()
    del noise
    return play.value


async def walks_wait(ctx):
    tasks = [asyncio.create_task(helper(number), name=f"t{number}") for number in range(9)]
    done, _ = await asyncio.wait(tasks)
    return [task.get_name() for task in done]


async def walks_group(ctx):
    order = []

    async def member(number):
        try:
            await asyncio.sleep(100)
        finally:
            order.append(number)

    async def bad():
        await fetch("boom")

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(9):
                group.create_task(member(number))
            group.create_task(bad())
    except* Exception:
        pass
    return order


async def walks_as_completed(ctx):
    """Completions that come at once are met in list order."""
    gate = asyncio.Event()
    order = []

    async def member(number):
        order.append(number)
        await gate.wait()
        return number

    found = asyncio.as_completed([member(number) for number in range(9)])
    await fetch("first")
    gate.set()
    return [order, [await each for each in found]]


@pytest.mark.parametrize("fn", [walks_wait, walks_group, walks_as_completed])
def test_sets_are_iterated_in_the_same_order_on_every_replay(fn):
    assert len({repr(order_of(fn)) for _ in range(10)}) == 1


def test_as_completed_starts_its_tasks_in_list_order():
    started, finished = order_of(walks_as_completed)
    assert started == list(range(9))
    assert sorted(finished) == list(range(9))


def test_sets_are_iterated_in_different_orders_in_different_runs():
    """So that nobody comes to rely on an order; the seed of the run decides it."""
    assert len({repr(order_of(walks_wait, seed)) for seed in range(40)}) > 1


def test_internal_asyncio_tasks_do_not_change_the_order_of_sets():
    """It makes more futures on some versions of Python than on others."""

    async def with_futures(ctx):
        loop = asyncio.get_running_loop()
        for _ in range(ctx.random.randrange(1) + 3):
            loop.create_future()
        return await walks_wait(ctx)

    assert order_of(with_futures) == order_of(walks_wait)


def test_wait_for_starts_its_awaitable_before_other_ready_tasks():
    """On 3.11 it makes a task, later it does not: what it awaits is asked for at the same point on both."""

    async def beside(ctx):
        other = asyncio.create_task(fetch("other"))
        await asyncio.wait_for(fetch("mine"), 5)
        await other

    play = Play(beside).begin()
    assert [step.call.args[0] for step in play.running.values()] == ["mine", "other"]
    play.close()


def test_wait_for_returns_before_other_ready_tasks():
    async def woken(ctx):
        gate, order = asyncio.Event(), []

        async def waiter():
            await gate.wait()
            order.append("waiter")

        async def opener():
            await fetch("key")
            gate.set()

        task = asyncio.create_task(waiter())
        await asyncio.wait_for(opener(), 5)
        order.append("caller")
        await task
        return order

    assert Play(woken).run().value == ["caller", "waiter"]


def test_wait_for_on_a_shared_task_wakes_in_the_order_of_its_waiters():
    async def shared(ctx):
        order = []
        task = asyncio.create_task(helper(1))

        async def plainly():
            await task
            order.append("plainly")

        async def in_time():
            await asyncio.wait_for(task, 5)
            order.append("in time")

        await asyncio.gather(plainly(), in_time(), plainly())
        return order

    assert Play(shared).run().value == ["plainly", "in time", "plainly"]
