"""Long histories: one run of 5,000 steps.

A step must cost the same at the end as at the start, and a run that was left in the middle must be back soon: one load,
then a replay of 5,000 recorded steps that executes none of them.

    <store>           the run from its first step to its last, left waiting in one more step; with one step per commit
    <store>, replay   a new process opens what that left, until the step that was under way begins again
    memory            the same without a disk or a server, whose noise might hide what the engine itself adds
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter, time

from benchmarks.harness import Figure, Measures, Round, Setting, Subject, Workload
from benchmarks.recording_stores import WatchedStore
from perdure import Context, Engine, EngineConfig, step, workflow
from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK
from perdure.runner.runner import Runner, RunStart
from perdure.stores.memory.store import MemoryStore
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot
from perdure.workflows.context import RunInfo

PLACES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis", "memory": "in memory"}
SERVERS = ("postgres", "redis")
RUN = "long"
BEGINNINGS: list[float] = []
"""When each step of this process began."""
AT_THE_END = asyncio.Event()


@step
async def tick(n: int) -> int:
    BEGINNINGS.append(perf_counter())
    return n


@step
async def stay() -> None:
    BEGINNINGS.append(perf_counter())
    AT_THE_END.set()
    await asyncio.Event().wait()


@workflow
async def many_steps(ctx: Context, steps: int, staying: bool) -> None:
    for number in range(steps):
        await tick(number)
    if staying:
        await stay()


def grow(place: str, setting: Setting) -> Measures:
    return asyncio.run(_grow(_store(place, setting), setting))


def _store(place: str, setting: Setting) -> Store:
    match place:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return WatchedStore(str(setting.folder / "history.db"))
        case _:
            return open_store(setting.urls[place], SYSTEM_CLOCK)


async def _grow(store: Store, setting: Setting) -> Measures:
    engine = Engine(store, workflows=[many_steps])
    await engine.open()
    await engine.execute(many_steps, setting.sizes["warm_up"], False)
    BEGINNINGS.clear()
    await engine.start(many_steps, setting.sizes["steps"], True, id=RUN)
    await AT_THE_END.wait()
    await engine.shutdown(grace=0)
    return _costs(BEGINNINGS)


def _costs(beginnings: Sequence[float]) -> Measures:
    """Microseconds from the beginning of a step to that of the next one: the median of 50."""
    costs = [1e6 * (after - before) for before, after in pairwise(beginnings)]
    return {
        "first_50_us": statistics.median(costs[:50]),
        "last_50_us": statistics.median(costs[-50:]),
        "steps_per_s": len(costs) / (beginnings[-1] - beginnings[0]),
    }


def replay(place: str, setting: Setting) -> Measures:
    """The figures of the load and of the replay alone come from a second time, when imports are paid for."""
    store = _store(place, setting)
    began = perf_counter()
    reached = asyncio.run(_until_it_goes_on(store))
    loads = {"loads": store.calls["load"]} if isinstance(store, WatchedStore) else {}
    assert len(BEGINNINGS) == 1, "recorded steps were executed again"
    load_s, snapshot = asyncio.run(_load(_store(place, setting)))
    assert len(snapshot.entries) >= setting.sizes["steps"]
    return {
        "open_to_step_ms": 1000 * (reached - began),
        "load_ms": 1000 * load_s,
        "replay_ms": 1000 * _replay_alone(snapshot),
        **loads,
    }


async def _until_it_goes_on(store: Store) -> float:
    engine = Engine(store, workflows=[many_steps])
    await engine.open()
    await AT_THE_END.wait()
    await engine.shutdown(grace=0)
    return BEGINNINGS[0]


async def _load(store: Store) -> tuple[float, Snapshot]:
    await store.open(shards=EngineConfig().shards)
    began = perf_counter()
    snapshot = (await store.load([RUN]))[0]
    seconds = perf_counter() - began
    await store.close()
    assert snapshot is not None
    return seconds, snapshot


def _replay_alone(snapshot: Snapshot) -> float:
    """The seconds that the runner takes from the loaded history to the turn that asks for the next step."""
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
    began = perf_counter()
    runner = Runner(start)
    turn = runner.advance(now)
    seconds = perf_counter() - began
    assert len(turn.effects) == 1
    runner.close()
    return seconds


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _growth(subject: str, measured: Round) -> float:
    return measured[subject]["last_50_us"] / measured[subject]["first_50_us"]


def _subjects() -> Iterator[tuple[str, Subject]]:
    """A store's replay comes after its growth, and finds what that has left."""
    for place in PLACES:
        yield place, partial(grow, place)
        if place != "memory":
            yield f"{place}, replay", partial(replay, place)


def _figures() -> Iterator[Figure]:
    for place, title in PLACES.items():
        yield Figure(f"{title}: a step among the first 50", "us", partial(_of, place, "first_50_us"))
        yield Figure(f"{title}: a step among the last 50", "us", partial(_of, place, "last_50_us"))
        yield Figure(f"{title}: last 50 over first 50", "x", partial(_growth, place), at_most=1.2)
        if place != "memory":
            again = f"{place}, replay"
            yield Figure(f"{title}: open, until the next step begins", "ms", partial(_of, again, "open_to_step_ms"))
            yield Figure(f"{title}: the load alone", "ms", partial(_of, again, "load_ms"))
    yield Figure("loads while doing so", "", partial(_of, "sqlite, replay", "loads"), at_most=1)
    yield Figure("the replay alone", "ms", partial(_of, "sqlite, replay", "replay_ms"))


WORKLOAD = Workload(
    title="one run of {steps:,} steps",
    subjects=dict(_subjects()),
    needs={subject: (place,) for subject, _ in _subjects() if (place := subject.partition(",")[0]) in SERVERS},
    figures=list(_figures()),
    sizes={"steps": 5_000, "warm_up": 300},
    quick={"steps": 120, "warm_up": 10},
    one_place=True,
)
