"""Search: pages of 50 runs by tag and range, on a store that already has many runs; and the cost of tags at a start.

tag         a tag that 20 runs have
two tags    a rare and a common tag
range       a range of a numeric tag that 20 runs are in
workflow    the newest runs of one workflow in ten
start       creating a run with three tags, over one without
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter

from benchmarks.harness import Figure, Measures, Round, Setting, Workload
from perdure import RunQuery
from perdure.config import EngineConfig
from perdure.model.records import RunRecord
from perdure.stores.memory.store import MemoryStore
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.protocol import Store
from perdure.stores.redis.store import RedisStore
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.writes import CreateRun

BATCH = 500
RARE = 20  # runs that a search finds
PAGES = 20  # of each kind, measured one after the other
STORES: Mapping[str, Callable[[Setting], Store]] = {
    "memory": lambda setting: MemoryStore(),
    "sqlite": lambda setting: SqliteStore(str(setting.folder / "search.db")),
    "postgres": lambda setting: PostgresStore(setting.urls["postgres"]),
    "redis": lambda setting: RedisStore(setting.urls["redis"]),
}
NAMES = {"memory": "in memory", "sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}


def search(kind: str, setting: Setting) -> Measures:
    return asyncio.run(_measure(STORES[kind](setting), setting.sizes["runs"]))


async def _measure(store: Store, count: int) -> Measures:
    await store.open(shards=EngineConfig().shards)
    try:
        await _create(store, count)
        queries = {
            "tag_ms": RunQuery(where="rare:yes", limit=50),
            "two_tags_ms": RunQuery(where="rare:yes tenant:t0", limit=50),
            "range_ms": RunQuery(where=f"number>={count - RARE}", limit=50),
            "workflow_ms": RunQuery(workflow="w3", limit=50),
        }
        measures = {name: await _measure_page(store, query) for name, query in queries.items()}
        return {**measures, "start_with_tags": await _compare_starts(store, count)}
    finally:
        await store.close()


async def _create(store: Store, count: int) -> None:
    """Store runs that wait for a far time: every 20th part of them has the rare tag."""
    step = max(1, count // RARE)
    for first in range(0, count, BATCH):
        batch = []
        for number in range(first, min(first + BATCH, count)):
            tags: dict[str, str | int] = {"tenant": f"t{number % 10}", "number": number}
            if number % step == 0:
                tags["rare"] = "yes"
            batch.append(_new_run(f"r{number}", number, tags))
        await store.commit(batch)


def _new_run(id: str, number: int, tags: Mapping[str, str | int]) -> CreateRun:
    record = RunRecord(
        id=id,
        workflow=f"w{number % 10}",
        version=1,
        input=b"{}",
        created_at=float(number),
        created_by=id,
        seed=1,
        wake_at=4e9,
        tags=tags,
    )
    return CreateRun(record)


async def _measure_page(store: Store, query: RunQuery) -> float:
    """Return the median milliseconds of a page."""
    durations = []
    for _ in range(PAGES):
        started_at = perf_counter()
        page = await store.runs(query, bare=True)
        durations.append(1000 * (perf_counter() - started_at))
        assert page.runs
    return statistics.median(durations)


async def _compare_starts(store: Store, count: int) -> float:
    """Return the time of new runs with three tags over that of runs without, in batches that alternate."""
    durations: dict[bool, float] = {True: 0.0, False: 0.0}
    for round_number in range(PAGES):
        for tagged in (True, False):
            tags: dict[str, str | int] = {"a": "x", "b": 2, "c": "y"} if tagged else {}
            ids = [f"s{round_number}-{tagged}-{number}" for number in range(50)]
            batch = [_new_run(id, count + number, tags) for number, id in enumerate(ids)]
            started_at = perf_counter()
            await store.commit(batch)
            durations[tagged] += perf_counter() - started_at
    return durations[True] / durations[False]


def _figures() -> list[Figure]:
    targets = {"tag_ms": ("a tag", 5.0), "two_tags_ms": ("two tags", 20.0), "range_ms": ("a range", 20.0)}
    found = [
        Figure(f"{NAMES[kind]}: page by {text}", "ms", partial(_of, kind, name), at_most=most)
        for kind in STORES
        for name, (text, most) in targets.items()
    ]
    found += [Figure(f"{NAMES[kind]}: page by workflow", "ms", partial(_of, kind, "workflow_ms")) for kind in STORES]
    title = "new runs with three tags over none"
    return found + [Figure(f"{NAMES[kind]}: {title}", "x", partial(_of, kind, "start_with_tags")) for kind in STORES]


def _of(kind: str, measure: str, measured: Round) -> float:
    return measured[f"perdure-{kind}"][measure]


WORKLOAD = Workload(
    title="pages of a search among {runs:,} runs",
    subjects={f"perdure-{kind}": partial(search, kind) for kind in STORES},
    figures=_figures(),
    sizes={"runs": 100_000},
    quick={"runs": 200},
    needs={"perdure-postgres": ("postgres",), "perdure-redis": ("redis",)},
)
