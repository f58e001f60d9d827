"""Long histories: one run of 5,000 steps.

A step must cost the same at the end as at the start, and a run that was left in the middle must be back soon: one load,
then a replay of 5,000 recorded steps that executes none of them.

    sqlite   the run from its first step to its last, left waiting in one more step; with one step per commit
    memory   the same without a disk, whose noise might hide what the engine itself adds
    replay   a new process opens the file that `sqlite` left, until the step that was under way begins again
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter, time

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from benchmarks.watched import WatchedStore
from perdure import Context, Engine, EngineConfig, step, workflow
from perdure.context import RunFacts
from perdure.runner.runner import Runner, RunStart
from perdure.store.base import Snapshot, Store
from perdure.store.memory import MemoryStore

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


def sqlite(setting: Setting) -> Measures:
    return asyncio.run(_grow(WatchedStore(str(setting.folder / "history.db")), setting))


def memory(setting: Setting) -> Measures:
    return asyncio.run(_grow(MemoryStore(), setting))


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
    """Microseconds from the beginning of a step to that of the next one: the median of 50, and of 10."""
    costs = [1e6 * (after - before) for before, after in pairwise(beginnings)]
    return {
        "first_50_us": statistics.median(costs[:50]),
        "last_50_us": statistics.median(costs[-50:]),
        "first_10_us": statistics.median(costs[:10]),
        "last_10_us": statistics.median(costs[-10:]),
        "steps_per_s": len(costs) / (beginnings[-1] - beginnings[0]),
    }


def replay(setting: Setting) -> Measures:
    store = WatchedStore(str(setting.folder / "history.db"))
    began = perf_counter()
    reached, loads = asyncio.run(_until_it_goes_on(store))
    assert len(BEGINNINGS) == 1, "recorded steps were executed again"
    load_s, snapshot = asyncio.run(_load(WatchedStore(str(setting.folder / "history.db"))))
    assert len(snapshot.entries) >= setting.sizes["steps"]
    return {
        "open_to_step_ms": 1000 * (reached - began),
        "loads": loads,
        "load_ms": 1000 * load_s,
        "replay_ms": 1000 * _replay_alone(snapshot),
    }


async def _until_it_goes_on(store: WatchedStore) -> tuple[float, int]:
    engine = Engine(store, workflows=[many_steps])
    await engine.open()
    await AT_THE_END.wait()
    loads = store.calls["load"]
    await engine.shutdown(grace=0)
    return BEGINNINGS[0], loads


async def _load(store: WatchedStore) -> tuple[float, Snapshot]:
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
    facts = RunFacts(
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
        begun_at=record.begun_at or record.created_at,
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


def _growth(subject: str, steps: int, measured: Round) -> float:
    return measured[subject][f"last_{steps}_us"] / measured[subject][f"first_{steps}_us"]


WORKLOAD = Workload(
    title="one run of {steps:,} steps",
    subjects={"sqlite": sqlite, "memory": memory, "replay": replay},
    figures=[
        Figure("a step among the first 50, SQLite", "us", partial(_of, "sqlite", "first_50_us")),
        Figure("a step among the last 50, SQLite", "us", partial(_of, "sqlite", "last_50_us")),
        Figure("last 50 over first 50, SQLite", "x", partial(_growth, "sqlite", 50), at_most=1.2),
        Figure("last 10 over first 10, SQLite", "x", partial(_growth, "sqlite", 10)),
        Figure("a step among the first 50, memory", "us", partial(_of, "memory", "first_50_us")),
        Figure("a step among the last 50, memory", "us", partial(_of, "memory", "last_50_us")),
        Figure("last 50 over first 50, memory", "x", partial(_growth, "memory", 50), at_most=1.2),
        Figure("open the engine until the next step begins", "ms", partial(_of, "replay", "open_to_step_ms")),
        Figure("loads while doing so", "", partial(_of, "replay", "loads"), at_most=1),
        Figure("the load alone", "ms", partial(_of, "replay", "load_ms")),
        Figure("the replay alone", "ms", partial(_of, "replay", "replay_ms")),
    ],
    sizes={"steps": 5_000, "warm_up": 300},
    quick={"steps": 120, "warm_up": 10},
)
