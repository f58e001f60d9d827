"""The measurements of the comparison: the same code for every engine, through its adapter.

Only the standard library: this runs in the environments of the peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter
from typing import TypeVar

from benchmarks.harness import Measures, Setting
from benchmarks.peer_protocol import Adapter, Entrant
from benchmarks.step_bodies import STEPS, Gate

T = TypeVar("T")

PATIENCE = 300.0  # seconds until a phase of `recovery` is given up
LOOK = 0.005  # seconds between two looks at a file


# --- one process ---------------------------------------------------------------------------------------------------


async def noop10(engine: Adapter, setting: Setting) -> Measures:
    """Start runs for some seconds, so many at a time; the rate is over the time until the last of them is done."""
    sizes = setting.sizes
    # With fewer at a time: all of them would take a slow engine as long as the measurement itself.
    await _for_a_while(engine, sizes["warm_up_ms"] / 1000, max(1, sizes["at_once"] // 10))
    seconds, runs = await _for_a_while(engine, sizes["measured_ms"] / 1000, sizes["at_once"])
    return {"steps_per_s": runs * STEPS / seconds, "runs": runs}


async def _for_a_while(engine: Adapter, seconds: float, at_once: int) -> tuple[float, int]:
    began = perf_counter()
    done = 0

    async def one_after_the_other(number: int) -> None:
        nonlocal done
        while True:  # at least one
            assert await engine.execute("ten_steps", number) == number
            done += 1
            if perf_counter() - began > seconds:
                return

    await asyncio.gather(*map(one_after_the_other, range(at_once)))
    return perf_counter() - began, done


async def latency(engine: Adapter, setting: Setting) -> Measures:
    """One run at a time, for so many runs or so many seconds, in a process that has been at work for a while."""
    sizes = setting.sizes
    began = perf_counter()
    while perf_counter() - began < sizes["warm_up_ms"] / 1000:
        await engine.timed("one_step", 0)
    seconds: list[float] = []
    began = perf_counter()
    while len(seconds) < sizes["runs"] and (len(seconds) < 20 or perf_counter() - began < sizes["most_ms"] / 1000):
        seconds.append(await engine.timed("one_step", len(seconds)))
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1000 * hundredths[49], "p99_ms": 1000 * hundredths[98], "runs": len(seconds)}


async def fanout(engine: Adapter, setting: Setting) -> Measures:
    """The seconds of one run with many children, and of one with many steps at once."""
    sizes = setting.sizes
    measured: dict[str, float] = {}
    for workflow in ("children", "parallel"):
        with contextlib.suppress(NotImplementedError):
            await engine.timed(workflow, sizes["warm_up"])
            measured[f"{workflow}_s"] = await engine.timed(workflow, sizes["width"])
    return measured


# --- two processes, the first of which is killed ---------------------------------------------------------------------


def recovery(entrant: Entrant, setting: Setting) -> Measures:
    """From SIGKILL, with all runs in the middle, to the last result: a new process takes over at once."""
    gate = Gate(setting.folder)
    runs = setting.sizes["runs"]
    with entrant.peer.beside(setting):
        with _process(entrant, "before", setting) as first:
            assert _line(first) == "all are in the middle"
            os.killpg(first.pid, signal.SIGKILL)
            killed = perf_counter()
        gate.open()
        with _process(entrant, "after", setting) as second:
            assert _line(second) == "all are done"
            seconds = perf_counter() - killed
    return {"recovery_s": seconds, "runs": runs}


async def before(engine: Adapter, setting: Setting) -> None:
    """Get all runs to the gate, say so, and wait to be killed."""
    gate, runs = Gate(setting.folder), setting.sizes["runs"]
    async with asyncio.timeout(PATIENCE):
        await _some_at_a_time(lambda number: engine.start("halfway", number, f"run-{number}"), runs)
        while gate.arrivals < runs:  # noqa: ASYNC110 - they arrive in other processes, too
            await asyncio.sleep(LOOK)
    print("all are in the middle", flush=True)
    await asyncio.Event().wait()


async def after(engine: Adapter, setting: Setting) -> None:
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*(engine.result(f"run-{number}") for number in range(setting.sizes["runs"])))
    assert results == list(range(setting.sizes["runs"]))
    print("all are done", flush=True)


async def _some_at_a_time(start: Callable[[int], Awaitable[None]], runs: int, at_once: int = 100) -> None:
    numbers = iter(range(runs))

    async def one_after_the_other() -> None:
        for number in numbers:
            await start(number)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))


@contextlib.contextmanager
def _process(entrant: Entrant, phase: str, setting: Setting) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, which is gone afterwards with everything in it."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run_peer", phase, entrant.name, setting.to_json()],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- by name -----------------------------------------------------------------------------------------------------


def measured(workload: str, entrant: Entrant, setting: Setting) -> Measures:
    """What `workload` measures of this engine."""
    if workload == "recovery":
        return recovery(entrant, setting)
    drive = {"noop10": noop10, "latency": latency, "fanout": fanout}[workload]
    with entrant.peer.beside(setting):
        return asyncio.run(_with_engine(drive, entrant, setting))


def phase(name: str, entrant: Entrant, setting: Setting) -> None:
    asyncio.run(_with_engine({"before": before, "after": after}[name], entrant, setting))


async def _with_engine(work: Callable[[Adapter, Setting], Awaitable[T]], entrant: Entrant, setting: Setting) -> T:
    engine = entrant.peer.adapter(entrant.variant_name, setting)
    await engine.open()
    try:
        return await work(engine, setting)
    finally:
        await engine.close()
