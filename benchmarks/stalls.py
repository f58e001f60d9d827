"""Micro-benchmarks of the runner and the event loop, in one process without a disk: `python -m benchmarks.stalls`.

map           ctx.map over many items, live and on replay, over asyncio.gather with a semaphore; processor time
long history  the longest stall of the event loop while a run with a long history is loaded and replayed
many runs     the longest stall with many concurrent runs

Both stalls are measured without the collector settings of `perdure worker`, and with them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from time import perf_counter, process_time, thread_time

from perdure import Context, Engine, step, workflow
from perdure.execution.collector_settings import tune_collector
from perdure.stores.memory.store import MemoryStore

CALLS_PER_ITERATION = 50
BLOCKED = asyncio.Event()


@step
async def visit(number: int) -> int:
    return number


@step
async def block() -> None:
    BLOCKED.set()
    await asyncio.Event().wait()


@workflow
async def map_items(ctx: Context, items: int, concurrency: int) -> None:
    await ctx.map(visit, range(items), concurrency=concurrency)
    await block()


@workflow
async def gather_items(ctx: Context, items: int, concurrency: int) -> None:
    semaphore = asyncio.Semaphore(concurrency)

    async def one(number: int) -> int:
        async with semaphore:
            return await visit(number)

    await asyncio.gather(*(one(number) for number in range(items)))
    await block()


@workflow
async def long_run(ctx: Context, steps: int) -> None:
    for start in range(0, steps, 1_000):
        await ctx.map(visit, range(start, start + 1_000), concurrency=1_000)
    await block()


@workflow
async def ten_steps(ctx: Context) -> None:
    for number in range(10):
        await visit(number)


class StallMeter:
    """Measures the longest iteration of the event loop, and the longest collection, both in processor time.

    Other processes of the machine have no influence on it.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_collection_s = 0.0
        self._collection_at = 0.0

    async def __aenter__(self) -> StallMeter:
        self._last = thread_time()
        gc.callbacks.append(self._on_collection)
        self._task = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        gc.callbacks.remove(self._on_collection)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            self.longest_s, self._last = max(self.longest_s, now - self._last), now

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_at = thread_time()
        else:
            self.longest_collection_s = max(self.longest_collection_s, thread_time() - self._collection_at)


async def measure_map(items: int, concurrency: int) -> None:
    """Print the processor time of map over that of gather, live and on replay: the best of three, in turns."""
    live: dict[str, float] = {}
    replayed: dict[str, float] = {}
    for _ in range(3):
        for fn in (gather_items, map_items):
            store = MemoryStore()
            for best in (live, replayed):  # the second engine loads the run and replays it
                started_at = process_time()
                engine = Engine(store, workflows=[fn])
                await engine.open()
                await engine.start(fn, items, concurrency, id="items")
                await BLOCKED.wait()
                best[fn.name] = min(process_time() - started_at, best.get(fn.name, 1e9))
                await engine.shutdown(grace=0)
                BLOCKED.clear()
    for what, best in (("", live), (" on replay", replayed)):
        ratio = best["map_items"] / best["gather_items"]
        print(f"{items:,} items, concurrency {concurrency:,}{what}: {best['map_items']:.2f} s, {ratio:.2f} of gather")


async def measure_long_history(steps: int) -> None:
    """Print the longest stall while a run is loaded and replayed."""
    store = MemoryStore()
    engine = Engine(store, workflows=[long_run])
    await engine.open()
    await engine.start(long_run, steps, id="long")
    await BLOCKED.wait()
    await engine.shutdown(grace=0)
    BLOCKED.clear()
    async with StallMeter() as meter:
        started_at = perf_counter()
        again = Engine(store, workflows=[long_run])
        await again.open()
        await BLOCKED.wait()
        seconds = perf_counter() - started_at
    await again.shutdown(grace=0)
    print(f"history of {steps:,} entries: {seconds:.1f} s, {_describe(meter)}")


async def measure_many_runs(runs: int, rounds: int) -> None:
    """Print the longest stall with concurrent runs.

    The callers start a few runs per iteration of the event loop: calls that a program makes at once are its own stall.
    """
    async with Engine(MemoryStore(), workflows=[ten_steps]) as engine, StallMeter() as meter:
        for _ in range(rounds):
            async with asyncio.TaskGroup() as callers:
                for n in range(runs):
                    callers.create_task(engine.execute(ten_steps))
                    if n % CALLS_PER_ITERATION == 0:
                        await asyncio.sleep(0)
    print(f"{runs:,} concurrent runs: {_describe(meter)}")


def _describe(meter: StallMeter) -> str:
    return f"longest stall {1e3 * meter.longest_s:.0f} ms, longest collection {1e3 * meter.longest_collection_s:.0f} ms"


async def measure_all(scale: float) -> None:
    """Measure everything, at sizes that are this share of the full ones."""
    await measure_map(int(10_000 * scale), int(1_000 * scale))
    for settings in ("default collector settings", "collector settings of `perdure worker`"):
        print(f"{settings}:")
        await measure_long_history(max(1, int(100 * scale)) * 1_000)
        await measure_many_runs(int(1_000 * scale), rounds=5)
        tune_collector()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="sizes as a share of the full ones: 0.1")
    asyncio.run(measure_all(parser.parse_args().scale))


if __name__ == "__main__":
    main()
