"""Long histories: one run of 5,000 steps.

A step must cost the same at the end as at the start, and an interrupted run must resume quickly: one load, then a
replay of 5,000 recorded steps that executes none of them.

    <store>           the run from its first step to its last, then blocked in one more step; one step per commit
    <store>, replay   a new process opens that store, until the interrupted step starts again
    memory            the same without a disk or a server, whose noise could hide the cost of the engine
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter, time

from benchmarks.harness import Figure, Measures, Round, Setting, Subject, Workload
from benchmarks.recording_stores import CountingSqliteStore
from perdure import Context, Engine, EngineConfig, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.runner.runner import Runner, RunStart
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot
from perdure.workflows.context import RunInfo

TITLES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis", "memory": "in memory"}
SERVERS = ("postgres", "redis")
RUN = "long"
STARTED_AT: list[float] = []
"""The start time of each step of this process."""
LAST_STEP_STARTED = asyncio.Event()


@step
async def tick(n: int) -> int:
    STARTED_AT.append(perf_counter())
    return n


@step
async def block() -> None:
    STARTED_AT.append(perf_counter())
    LAST_STEP_STARTED.set()
    await asyncio.Event().wait()


@workflow
async def many_steps(ctx: Context, steps: int, blocking: bool) -> None:
    for number in range(steps):
        await tick(number)
    if blocking:
        await block()


def grow(store: str, setting: Setting) -> Measures:
    return asyncio.run(_grow(_store(store, setting), setting))


def _store(store: str, setting: Setting) -> Store:
    match store:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return CountingSqliteStore(str(setting.folder / "history.db"))
        case _:
            return open_store(setting.urls[store], SYSTEM_CLOCK)


async def _grow(store: Store, setting: Setting) -> Measures:
    engine = Engine(store, workflows=[many_steps])
    await engine.open()
    await engine.execute(many_steps, setting.sizes["warm_up"], False)
    STARTED_AT.clear()
    await engine.start(many_steps, setting.sizes["steps"], True, id=RUN)
    await LAST_STEP_STARTED.wait()
    await engine.shutdown(grace=0)
    return _costs(STARTED_AT)


def _costs(starts: Sequence[float]) -> Measures:
    """Return the microseconds from the start of a step to the start of the next one: the median of 50."""
    costs = [1e6 * (after - before) for before, after in pairwise(starts)]
    return {
        "first_50_us": statistics.median(costs[:50]),
        "last_50_us": statistics.median(costs[-50:]),
        "steps_per_s": len(costs) / (starts[-1] - starts[0]),
    }


def replay(name: str, setting: Setting) -> Measures:
    """Measure a resumption. Load and replay are then measured a second time, so that they contain no imports."""
    store = _store(name, setting)
    started_at = perf_counter()
    resumed_at = asyncio.run(_time_of_next_step(store))
    loads = {"loads": store.calls["load"]} if isinstance(store, CountingSqliteStore) else {}
    assert len(STARTED_AT) == 1, "recorded steps were executed again"
    load_s, snapshot = asyncio.run(_load(_store(name, setting)))
    assert len(snapshot.entries) >= setting.sizes["steps"]
    return {
        "open_to_step_ms": 1000 * (resumed_at - started_at),
        "load_ms": 1000 * load_s,
        "replay_ms": 1000 * _replay_alone(snapshot),
        **loads,
    }


async def _time_of_next_step(store: Store) -> float:
    engine = Engine(store, workflows=[many_steps])
    await engine.open()
    await LAST_STEP_STARTED.wait()
    await engine.shutdown(grace=0)
    return STARTED_AT[0]


async def _load(store: Store) -> tuple[float, Snapshot]:
    await store.open(shards=EngineConfig().shards)
    started_at = perf_counter()
    snapshot = (await store.load([RUN]))[0]
    seconds = perf_counter() - started_at
    await store.close()
    assert isinstance(snapshot, Snapshot)
    return seconds, snapshot


def _replay_alone(snapshot: Snapshot) -> float:
    """Return the seconds of the runner from the loaded history to the turn that starts the next step."""
    record = snapshot.record
    facts = RunInfo(
        id=record.id,
        workflow=record.workflow,
        version=record.version,
        generation=record.generation,
        tags=record.tags,
        parent=record.parent,
    )
    start = RunStart(
        definition=many_steps,
        facts=facts,
        input=record.input,
        seed=record.seed,
        first_executed_at=record.first_executed_at or record.created_at,
        history=snapshot.entries,
    )
    now = time()
    started_at = perf_counter()
    runner = Runner(start)
    turn = runner.advance(now)
    seconds = perf_counter() - started_at
    assert turn is not None
    assert len(turn.effects) == 1
    runner.close()
    return seconds


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _growth(subject: str, measured: Round) -> float:
    return measured[subject]["last_50_us"] / measured[subject]["first_50_us"]


def _subjects() -> Iterator[tuple[str, Subject]]:
    """Yield the subjects. The replay of a store follows its growth and uses its data."""
    for store in TITLES:
        yield store, partial(grow, store)
        if store != "memory":
            yield f"{store}, replay", partial(replay, store)


def _figures() -> Iterator[Figure]:
    for store, title in TITLES.items():
        yield Figure(f"{title}: a step among the first 50", "us", partial(_of, store, "first_50_us"))
        yield Figure(f"{title}: a step among the last 50", "us", partial(_of, store, "last_50_us"))
        yield Figure(f"{title}: last 50 over first 50", "x", partial(_growth, store), at_most=1.2)
        if store != "memory":
            subject = f"{store}, replay"
            yield Figure(f"{title}: open, until the next step starts", "ms", partial(_of, subject, "open_to_step_ms"))
            yield Figure(f"{title}: load alone", "ms", partial(_of, subject, "load_ms"))
    yield Figure("loads per resumption", "", partial(_of, "sqlite, replay", "loads"), at_most=1)
    yield Figure("replay alone", "ms", partial(_of, "sqlite, replay", "replay_ms"))


WORKLOAD = Workload(
    title="one run of {steps:,} steps",
    subjects=dict(_subjects()),
    needs={subject: (store,) for subject, _ in _subjects() if (store := subject.partition(",")[0]) in SERVERS},
    figures=list(_figures()),
    sizes={"steps": 5_000, "warm_up": 300},
    quick={"steps": 120, "warm_up": 10},
    shares_servers=True,
)
