"""Events: round trips between two processes, and a broadcast to 10,000 runs that wait.

<store>, round trip   a run in this process and a run in another one send each other an event in turn: from one ping
                      to the next, which is two events, each from a commit here to a step of the run there
<store>, broadcast    one event for all runs that wait, until the last of them has ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from time import perf_counter

from benchmarks.harness import Figure, Measures, Round, Setting, Subject, Workload
from benchmarks.waiting_workflows import News, fall_asleep, waiter, woken
from perdure import Context, Engine, workflow

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}
AT_ONCE = 500
PINGS: list[float] = []


@workflow
async def pinger(ctx: Context, trips: int) -> None:
    for _ in range(trips):
        PINGS.append(perf_counter())
        await ctx.send("ponger", "ping")
        await ctx.receive("pong")


@workflow
async def ponger(ctx: Context, trips: int) -> None:
    for _ in range(trips):
        await ctx.receive("ping")
        await ctx.send("pinger", "pong")


def round_trip(store: str, setting: Setting) -> Measures:
    url = _url(store, setting)
    with _other_process(url):
        asyncio.run(_ping(url, setting.sizes["trips"]))
    trips = [1000 * (after - before) for before, after in pairwise(PINGS)]
    hundredths = statistics.quantiles(trips, n=100, method="inclusive")
    return {"p50_ms": hundredths[49], "p99_ms": hundredths[98]}


async def _ping(url: str, trips: int) -> None:
    async with Engine(url, workflows=[pinger]) as engine:
        await engine.start(ponger, trips, id="ponger")
        await engine.execute(pinger, trips, id="pinger")


def pong(url: str) -> None:
    """The other process."""

    async def serve() -> None:
        async with Engine(url, workflows=[ponger]):
            print("ready", flush=True)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def _other_process(url: str) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.workloads.events", url], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            os.kill(process.pid, signal.SIGKILL)


def broadcast(store: str, setting: Setting) -> Measures:
    return asyncio.run(_broadcast(_url(store, setting), setting.sizes["waiting"]))


async def _broadcast(url: str, waiting: int) -> Measures:
    async with Engine(url, workflows=[waiter]) as engine:
        for _ in range(0, waiting, AT_ONCE):
            await fall_asleep(engine, min(AT_ONCE, waiting), waiter)
        all_are_awake = woken(waiting)
        began = perf_counter()
        await engine.broadcast(News())
        answered = perf_counter()
        await engine.get(await all_are_awake).result()
        done = perf_counter()
    return {"broadcast_s": answered - began, "all_awake_s": done - began}


def _url(store: str, setting: Setting) -> str:
    return f"sqlite:///{setting.folder / 'events.db'}" if store == "sqlite" else setting.urls[store]


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _subjects() -> Iterator[tuple[str, Subject]]:
    for store in STORES:
        yield f"{store}, round trip", partial(round_trip, store)
        yield f"{store}, broadcast", partial(broadcast, store)


def _figures() -> Iterator[Figure]:
    for store, title in STORES.items():
        there_and_back, told = f"{store}, round trip", f"{store}, broadcast"
        yield Figure(f"{title}: round trip between two processes, p50", "ms", partial(_of, there_and_back, "p50_ms"))
        yield Figure(f"{title}: round trip between two processes, p99", "ms", partial(_of, there_and_back, "p99_ms"))
        yield Figure(f"{title}: broadcast, until all have ended", "s", partial(_of, told, "all_awake_s"))


WORKLOAD = Workload(
    title="round trips between two processes; a broadcast to {waiting:,} runs",
    subjects=dict(_subjects()),
    needs={subject: (store,) for subject, _ in _subjects() if (store := subject.partition(",")[0]) != "sqlite"},
    figures=list(_figures()),
    sizes={"trips": 200, "waiting": 10_000},
    quick={"trips": 10, "waiting": 50},
)

if __name__ == "__main__":
    pong(sys.argv[1])
