"""The measurements of engines: the same code for every engine, through its adapter.

Imports only the standard library: this module runs in the environments of the peers.
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

PHASE_TIMEOUT_SECONDS = 300.0  # per phase of `recovery`
POLL_INTERVAL_SECONDS = 0.005


# --- one process ---------------------------------------------------------------------------------------------------


async def noop10(engine: Adapter, setting: Setting) -> Measures:
    """Start runs for some seconds with fixed concurrency, and return the rate until the last run has ended."""
    sizes = setting.sizes
    # Less concurrency: with all of it, the warm-up of a slow engine takes as long as the measurement.
    await _execute_for(engine, sizes["warm_up_ms"] / 1000, max(1, sizes["at_once"] // 10))
    seconds, runs = await _execute_for(engine, sizes["measured_ms"] / 1000, sizes["at_once"])
    return {"steps_per_s": runs * STEPS / seconds, "runs": runs}


async def _execute_for(engine: Adapter, seconds: float, at_once: int) -> tuple[float, int]:
    started_at = perf_counter()
    done = 0

    async def run_sequentially(number: int) -> None:
        nonlocal done
        while True:  # at least one
            assert await engine.execute("ten_steps", number) == number
            done += 1
            if perf_counter() - started_at > seconds:
                return

    await asyncio.gather(*map(run_sequentially, range(at_once)))
    return perf_counter() - started_at, done


async def latency(engine: Adapter, setting: Setting) -> Measures:
    """Return the durations of runs, one at a time, after a warm-up. Stops after a number of runs or a time limit."""
    sizes = setting.sizes
    started_at = perf_counter()
    while perf_counter() - started_at < sizes["warm_up_ms"] / 1000:
        await engine.timed("one_step", 0)
    seconds: list[float] = []
    started_at = perf_counter()
    while len(seconds) < sizes["runs"] and (len(seconds) < 20 or perf_counter() - started_at < sizes["most_ms"] / 1000):
        seconds.append(await engine.timed("one_step", len(seconds)))
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1000 * hundredths[49], "p99_ms": 1000 * hundredths[98], "runs": len(seconds)}


async def fanout(engine: Adapter, setting: Setting) -> Measures:
    """Return the seconds of one run with many children, and of one run with many concurrent steps."""
    sizes = setting.sizes
    measured: dict[str, float] = {}
    for workflow in ("children", "parallel"):
        with contextlib.suppress(NotImplementedError):
            await engine.timed(workflow, sizes["warm_up"])
            measured[f"{workflow}_s"] = await engine.timed(workflow, sizes["width"])
    return measured


async def queues(engine: Adapter, setting: Setting) -> Measures:
    """Return the rate of queued runs with a limit of concurrency, and how long a run waits for a slot that is free.

    All runs are enqueued; the rate is until the last one has executed or a time limit. The second figure is of runs
    that execute one at a time: from the end of one to the beginning of the next.
    """
    sizes, runs = setting.sizes, engine.queued
    await _enqueue(engine, "wide", sizes["warm_up"])
    await _wait_for_ends(engine, sizes["warm_up"], sizes["most_ms"] / 1000)
    before, started_at = len(runs.ended), perf_counter()
    await _enqueue(engine, "wide", sizes["runs"])
    await _wait_for_ends(engine, before + sizes["runs"], sizes["most_ms"] / 1000)
    rate = (len(runs.ended) - before) / (runs.ended[-1] - started_at)
    await _wait_for_ends(engine, before + sizes["runs"], sizes["rest_ms"] / 1000)
    first = len(runs.ended)
    await _enqueue(engine, "narrow", sizes["in_turn"])
    await _wait_for_ends(engine, first + sizes["in_turn"], sizes["most_ms"] / 1000)
    waits = [began - ended for ended, began in zip(runs.ended[first:], runs.began[first + 1 :], strict=False)]
    return {"queued_runs_per_s": rate, "admission_ms": 1000 * statistics.median(waits) if waits else float("nan")}


async def _enqueue(engine: Adapter, queue: str, runs: int) -> None:
    await _run_concurrently(lambda number: engine.enqueue(queue, number), runs)


async def _wait_for_ends(engine: Adapter, count: int, seconds: float) -> None:
    """Wait until so many queued runs have executed, or for some seconds."""
    until = perf_counter() + seconds
    while len(engine.queued.ended) < count and perf_counter() < until:  # noqa: ASYNC110 - engines have no event for it
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


# --- two processes; the first one is killed    ---------------------------------------------------------------------


def recovery(entrant: Entrant, setting: Setting) -> Measures:
    """Return the seconds from SIGKILL, with all runs unfinished, to the last result in a new process."""
    gate = Gate(setting.folder)
    runs = setting.sizes["runs"]
    with entrant.peer.external_process(setting):
        with _process(entrant, "before", setting) as first:
            assert _line(first) == "all runs are at the gate"
            os.killpg(first.pid, signal.SIGKILL)
            killed_at = perf_counter()
        gate.open()
        with _process(entrant, "after", setting) as second:
            assert _line(second) == "all runs have ended"
            seconds = perf_counter() - killed_at
    return {"recovery_s": seconds, "runs": runs}


async def before(engine: Adapter, setting: Setting) -> None:
    """Run all runs up to the gate, print a line, and wait for SIGKILL."""
    gate, runs = Gate(setting.folder), setting.sizes["runs"]
    async with asyncio.timeout(PHASE_TIMEOUT_SECONDS):
        await _run_concurrently(lambda number: engine.start("halfway", number, f"run-{number}"), runs)
        while gate.arrivals < runs:  # noqa: ASYNC110 - runs may arrive in other processes
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
    print("all runs are at the gate", flush=True)
    await asyncio.Event().wait()


async def after(engine: Adapter, setting: Setting) -> None:
    async with asyncio.timeout(PHASE_TIMEOUT_SECONDS):
        results = await asyncio.gather(*(engine.result(f"run-{number}") for number in range(setting.sizes["runs"])))
    assert results == list(range(setting.sizes["runs"]))
    print("all runs have ended", flush=True)


async def _run_concurrently(start: Callable[[int], Awaitable[None]], runs: int, at_once: int = 100) -> None:
    numbers = iter(range(runs))

    async def run_sequentially() -> None:
        for number in numbers:
            await start(number)

    await asyncio.gather(*(run_sequentially() for _ in range(at_once)))


@contextlib.contextmanager
def _process(entrant: Entrant, phase: str, setting: Setting) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session, and kill the whole session at the end."""
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


def measure_engine(workload: str, entrant: Entrant, setting: Setting) -> Measures:
    """Return the measures of this engine in a workload."""
    if workload == "recovery":
        return recovery(entrant, setting)
    measurement = {"noop10": noop10, "latency": latency, "fanout": fanout, "queues": queues}[workload]
    with entrant.peer.external_process(setting):
        return asyncio.run(_with_engine(measurement, entrant, setting))


def run_phase(name: str, entrant: Entrant, setting: Setting) -> None:
    asyncio.run(_with_engine({"before": before, "after": after}[name], entrant, setting))


async def _with_engine(work: Callable[[Adapter, Setting], Awaitable[T]], entrant: Entrant, setting: Setting) -> T:
    engine = entrant.peer.adapter(entrant.variant_name, setting)
    await engine.open()
    try:
        return await work(engine, setting)
    finally:
        await engine.close()
