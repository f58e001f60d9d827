"""Schedules: 10,000 of them are due at once, and the cost of 10,000 that are not due.

fired           from the time slot until the run of the last schedule is created and every outcome is stored, on a
                worker that also executes the runs
commits         of the store, per schedule, until all runs have ended
idle query      the query of a sweep, with 10,000 schedules of which none is due
"""

from __future__ import annotations

import asyncio
from time import perf_counter, time

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.recording_stores import CountingSqliteStore
from perdure import Context, Engine, EngineConfig, workflow
from perdure.execution.schedule_trigger import OpenSchedule, put_schedule
from perdure.model.schedule_records import KIND, ScheduleSpec, ScheduleTarget
from perdure.schedules.schedule_plan import new_schedule

PAGE = 500
POLL_SECONDS = 0.01
IDLE_QUERIES = 50
TARGET = ScheduleTarget(workflow="noop", version=1, input=b"{}")


@workflow
async def noop(ctx: Context) -> None: ...


def sqlite(setting: Setting) -> Measures:
    return asyncio.run(_measure(setting))


async def _measure(setting: Setting) -> Measures:
    store = CountingSqliteStore(str(setting.folder / "schedules.db"))
    count = setting.sizes["schedules"]
    await store.open(shards=EngineConfig().shards)
    due_at = time() + 2.0
    await _create(store, count, due_at)
    idle_ms = await _measure_idle(store)
    await asyncio.sleep(max(0.0, due_at - time()))
    store.calls.clear()
    started_at = perf_counter()
    async with Engine(store, workflows=[noop]) as engine:
        while await store.documents(KIND, limit=1, due_by=time() + 10):
            await asyncio.sleep(POLL_SECONDS)
        fired_s = perf_counter() - started_at
        first, last = await engine.get_schedule("s0"), await engine.get_schedule(f"s{count - 1}")
        assert (first.started, last.started) == (1, 1), "each schedule has fired once"
        commits = store.calls["commit"] / count
    await store.close()
    return {"fired_s": fired_s, "commits_per_schedule": commits, "idle_ms": idle_ms}


async def _create(store: CountingSqliteStore, count: int, due_at: float) -> None:
    """Store schedules that are due once, at this time."""
    now = time()
    schedule = new_schedule(ScheduleSpec(at=(due_at,), catch_up="all"), TARGET, now)
    for first in range(0, count, PAGE):
        ids = (f"s{number}" for number in range(first, min(first + PAGE, count)))
        await store.commit([put_schedule(OpenSchedule(id, 0, schedule), schedule, due_at, "created") for id in ids])


async def _measure_idle(store: CountingSqliteStore) -> float:
    """Return the milliseconds of the query of one sweep when no schedule is due."""
    started_at = perf_counter()
    for _ in range(IDLE_QUERIES):
        assert not await store.documents(KIND, limit=PAGE, due_by=1.0)
    return 1000 * (perf_counter() - started_at) / IDLE_QUERIES


def _of(measure: str, measured: Round) -> float:
    return measured["perdure-sqlite"][measure]


WORKLOAD = Workload(
    title="{schedules:,} schedules due at once",
    subjects={"perdure-sqlite": sqlite},
    figures=[
        Figure("10,000 schedules fired, SQLite", "s", lambda measured: _of("fired_s", measured), at_most=5.0),
        Figure("commits per schedule", "", lambda measured: _of("commits_per_schedule", measured), at_most=2.0),
        Figure("idle query per sweep", "ms", lambda measured: _of("idle_ms", measured), at_most=10.0),
    ],
    sizes={"schedules": 10_000},
    quick={"schedules": 100},
)
