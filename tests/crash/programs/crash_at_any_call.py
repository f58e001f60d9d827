"""Forks one process after the other, each killed with SIGKILL at a chosen function call, until all runs have ended.

`crash_at_any_call URL LOG SEED`. The process imports everything once and forks for each attempt, so that many fit
into a second. A child counts its function calls, of Python and C, in all threads, and kills itself at the given
number: between any two instructions that call something, in the engine, the store, or the workflow.
After each death the program prints a line and waits for one: meanwhile the test reads the recorded steps.
"""

import asyncio
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from perdure import Context, Engine, EngineConfig, Retry, current_step, step, workflow
from tests.crash.effect_log import effect

LIVES = 30
CALLS = 40_000  # of about twice as many that it takes to finish all runs in one life
RUNS = 3
PATIENCE = 40.0  # seconds; a child takes less than one

Live = Callable[[str, str], Coroutine[Any, Any, None]]


@step
async def fetch(log: str, number: int) -> int:
    await asyncio.sleep(0.002)
    effect(log)
    return number * 10


@step
def compute(log: str, number: int) -> int:
    effect(log)
    return number + 1


@step(retry=Retry(max_attempts=3, initial=0.01))
async def flaky(log: str) -> int:
    effect(log)
    if current_step().attempt < 3:
        raise ConnectionError("not yet")
    return 5


@step(retry=Retry(max_attempts=2, initial=0.01))
def hopeless(log: str) -> int:
    effect(log)
    raise ConnectionError("never")


@workflow
async def mixed(ctx: Context, log: str, number: int) -> list[int]:
    first = await compute(log, number)
    await ctx.sleep(0.02)
    both = await asyncio.gather(fetch(log, first), compute(log, first), flaky(log))
    try:
        await hopeless(log)
    except Exception:
        await asyncio.sleep(0.01)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(branch(log, n)) for n in both]
    return [task.result() for task in tasks]


async def branch(log: str, number: int) -> int:
    value = await fetch(log, number)
    return await compute(log, value)


def expected(number: int) -> list[int]:
    return [n * 10 + 1 for n in ((number + 1) * 10, number + 2, 5)]


async def live(url: str, log: str) -> None:
    async with Engine(url, config=EngineConfig(max_recoveries=1_000)) as engine:
        runs = [await engine.start(mixed, log, number, id=f"run-{number}") for number in range(RUNS)]
        for number, run in enumerate(runs):
            assert await run.result() == expected(number)


def die_at(call: int) -> None:
    """Kill this process at its n-th function call, in any thread."""
    calls = itertools.count()

    def count(frame: Any, what: str, argument: Any) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def life(live: Live, url: str, log: str, call: int | None) -> int:
    """Return how a forked process ended."""
    child = os.fork()
    if child == 0:
        status = 1
        faulthandler.dump_traceback_later(
            PATIENCE, exit=True
        )  # a child that hangs prints its traceback and fails the test
        try:
            if call is not None:
                die_at(call)
            asyncio.run(live(url, log))
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.setprofile(None)
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(live: Live, url: str, log: str, seed: int, calls: int = CALLS) -> None:
    dice = random.Random(seed)
    for _ in range(LIVES):
        ended = life(live, url, log, dice.randrange(calls))
        sys.stdout.write("died\n" if ended == -signal.SIGKILL else f"ended {ended}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        if ended != -signal.SIGKILL:
            sys.exit(ended)
    sys.exit(life(live, url, log, None))


if __name__ == "__main__":
    main(live, sys.argv[1], sys.argv[2], int(sys.argv[3]))
