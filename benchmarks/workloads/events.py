"""Events: round trips between two processes, and a broadcast to 10,000 waiting runs.

<store>, round trip   a run in this process and a run in another process send events to each other: the time from
                      one ping to the next, which is two events
<store>, broadcast    one event for all waiting runs, until the last of them has ended
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
from benchmarks.waiting_workflows import Announcement, start_suspended, wait_for_activations, waiter
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
    """Run the worker of the other process."""

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
            await start_suspended(engine, min(AT_ONCE, waiting), waiter)
        all_activated = wait_for_activations(waiting)
        started_at = perf_counter()
        await engine.broadcast(Announcement())
        published_at = perf_counter()
        await engine.get(await all_activated).result()
        ended_at = perf_counter()
    return {"broadcast_s": published_at - started_at, "all_awake_s": ended_at - started_at}


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
        trips, broadcasts = f"{store}, round trip", f"{store}, broadcast"
        yield Figure(f"{title}: round trip between two processes, p50", "ms", partial(_of, trips, "p50_ms"))
        yield Figure(f"{title}: round trip between two processes, p99", "ms", partial(_of, trips, "p99_ms"))
        yield Figure(f"{title}: broadcast, until all have ended", "s", partial(_of, broadcasts, "all_awake_s"))


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
