"""Work queues: throughput with a limit of concurrency, latency of an admission, and the cost of 100,000 waiting runs.

Throughput and latency are compared with the queues of other engines; caller and worker are one process. The rate is of
runs of one step, in a queue with 50 slots, from the first start on. The latency is from the end of a run to the
beginning of the next one in a queue with one slot.

100,000 waiting: the rate of runs outside the queue while so many wait in a paused queue, compared with an empty store.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import perf_counter

from benchmarks.comparison import Comparison
from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from perdure import Context, Engine, WorkQueue, step, workflow

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}
AT_ONCE = 100
BACKLOG = WorkQueue("benchmark.backlog", 50)


@step(name="queues.noop")
async def noop(number: int) -> int:
    return number


@workflow(name="queues.one-step")
async def one_step(ctx: Context, number: int) -> int:
    return await noop(number)


def backlog(store: str, setting: Setting) -> Measures:
    return asyncio.run(_measure(_url(store, setting), setting))


def _url(store: str, setting: Setting) -> str:
    if store == "sqlite":
        return f"sqlite:///{setting.folder / 'queues.db'}"
    return setting.urls[store]


async def _measure(url: str, setting: Setting) -> Measures:
    async with Engine(url, workflows=[one_step], queues=[BACKLOG]) as engine:
        runs, waiting = setting.sizes["others"], setting.sizes["waiting"]
        await _execute(engine, runs)
        empty = await _execute(engine, runs)
        queue = engine.queue(BACKLOG.name)
        await queue.pause()
        started_at = perf_counter()
        await _repeat(partial(engine.start, one_step, queue=BACKLOG), waiting)
        starts = waiting / (perf_counter() - started_at)
        full = await _execute(engine, runs)
        started_at = perf_counter()
        await queue.resume()
        while (await queue.describe()).held == 0:  # noqa: ASYNC110 - another process could admit
            await asyncio.sleep(0.001)
        return {
            "rest_of_rate": full / empty,
            "starts_per_s": starts,
            "first_admission_ms": 1000 * (perf_counter() - started_at),
        }


async def _execute(engine: Engine, runs: int) -> float:
    """Return the rate of runs outside the queue."""
    started_at = perf_counter()
    await _repeat(partial(engine.execute, one_step), runs)
    return runs / (perf_counter() - started_at)


async def _repeat(call: partial[object], count: int) -> None:
    numbers = iter(range(count))

    async def call_sequentially() -> None:
        for number in numbers:
            await call(number)  # type: ignore[misc]  # a coroutine function

    await asyncio.gather(*(call_sequentially() for _ in range(AT_ONCE)))


def _of(store: str, measure: str, measured: Round) -> float:
    return measured[f"perdure-{store}-backlog"][measure]


WORKLOAD = Workload(
    title="{runs:,} queued runs with a concurrency of 50; {waiting:,} waiting runs",
    compared=[
        Comparison("queued_runs_per_s", "queued runs", "/s", targets={("postgres", "dbos"): 20}),
        Comparison("admission_ms", "admission", "ms", more_is_better=False, targets={("postgres", "dbos"): 20}),
    ],
    subjects={f"perdure-{store}-backlog": partial(backlog, store) for store in STORES},
    needs={f"perdure-{server}-backlog": (server,) for server in ("postgres", "redis")},
    figures=[
        figure
        for store, title in STORES.items()
        for figure in (
            Figure(f"rate of others with a backlog, {title}", "x", partial(_of, store, "rest_of_rate"), at_least=0.95),
            Figure(f"starts into the queue, {title}", "/s", partial(_of, store, "starts_per_s")),
            Figure(f"first admission of the backlog, {title}", "ms", partial(_of, store, "first_admission_ms")),
        )
    ],
    sizes={
        "runs": 10_000,
        "warm_up": 200,
        "in_turn": 100,
        "most_ms": 30_000,
        "rest_ms": 60_000,
        "waiting": 100_000,
        "others": 3_000,
    },
    quick={
        "runs": 200,
        "warm_up": 20,
        "in_turn": 10,
        "most_ms": 5_000,
        "rest_ms": 5_000,
        "waiting": 500,
        "others": 100,
    },
)
