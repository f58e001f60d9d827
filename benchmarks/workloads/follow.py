"""Following: how late a reader gets what a run in another process writes, and what a writer without readers pays.

<store>, stream    a reader follows a stream, and the run writes an item after a silence: from the write to the read
<store>, request   a client sends a request, and a run in another process replies
<store>, writer    steps per second of a run that streams, in turns: alone, while another process has the store open
                   and follows no run, and while that process follows another run
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter

from benchmarks.harness import ROOT, Figure, Measures, Round, Setting, Sizes, Subject, Workload
from perdure import Client, Context, Engine, Worker, current_step, event, step, workflow

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis"}


@event(name="follow.number")
class Number:
    value: int


@step(name="follow.write-slowly")
async def write_slowly(items: int, silence_ms: int) -> None:
    """Write the time to the stream after each silence."""
    for _ in range(items):
        await asyncio.sleep(silence_ms / 1000)
        current_step().write("times", time.time())


@step(name="follow.write-one")
async def write_one(number: int) -> int:
    current_step().write("numbers", number)
    return number


@workflow(name="follow.slow-writer")
async def slow_writer(ctx: Context, items: int, silence_ms: int) -> None:
    await write_slowly(items, silence_ms)


@workflow(name="follow.fast-writer")
async def fast_writer(ctx: Context, steps: int) -> None:
    for number in range(steps):
        await write_one(number)


@workflow(name="follow.replies")
async def replies(ctx: Context, requests: int) -> None:
    for _ in range(requests):
        request = await ctx.receive_request(Number)
        await request.reply(request.value.value)


WORKFLOWS = (slow_writer, replies)


# --- the reader


def stream(store: str, setting: Setting) -> Measures:
    with _other_process("work", _url(store, setting)):
        return asyncio.run(_stream(_url(store, setting), setting.sizes))


async def _stream(url: str, sizes: Sizes) -> Measures:
    async with Client(url) as client:
        run = await client.start(slow_writer, sizes["items"], sizes["silence_ms"])
        written = client.read_stream(run.id, "times")
        return _percentiles([time.time() - written_at async for written_at in written])


def request(store: str, setting: Setting) -> Measures:
    with _other_process("work", _url(store, setting)):
        return asyncio.run(_request(_url(store, setting), setting.sizes["requests"]))


async def _request(url: str, requests: int) -> Measures:
    delays = []
    async with Client(url) as client:
        run = await client.start(replies, requests)
        for number in range(requests):
            started_at = perf_counter()
            assert await client.request(run.id, Number(number)) == number
            delays.append(perf_counter() - started_at)
        await run.result()
    return _percentiles(delays)


# --- the writer


def writer(store: str, setting: Setting) -> Measures:
    """Measure in turns, so that a temporary slowdown concerns all three."""
    url, steps = _url(store, setting), setting.sizes["steps"]
    kinds = ("alone", "open", "follow")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    asyncio.run(_write(url, steps))  # warm-up
    for _ in range(setting.sizes["turns"]):
        for kind in kinds:
            with contextlib.nullcontext() if kind == "alone" else _other_process(kind, url):
                seconds[kind].append(asyncio.run(_write(url, steps)))
    return {f"{kind}_steps_per_s": steps / statistics.median(seconds[kind]) for kind in kinds}


async def _write(url: str, steps: int) -> float:
    async with Engine(url, workflows=[fast_writer]) as engine:
        started_at = perf_counter()
        await engine.execute(fast_writer, steps)
        return perf_counter() - started_at


# --- the other process


async def work(url: str) -> None:
    """Execute runs."""
    async with Worker(url, WORKFLOWS):
        _report_ready()
        await asyncio.Event().wait()


async def keep_open(url: str) -> None:
    """Have the store open and follow no run."""
    async with Client(url):
        _report_ready()
        await asyncio.Event().wait()


async def follow_another_run(url: str) -> None:
    """Follow a run that nothing writes to."""
    async with Client(url) as client:
        run = await client.start(replies, 1)
        _report_ready()
        async for _ in client.read_stream(run.id, "times"):
            pass


OTHER_PROCESSES = {"work": work, "open": keep_open, "follow": follow_another_run}


def _report_ready() -> None:
    print("ready", flush=True)


@contextlib.contextmanager
def _other_process(kind: str, url: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.workloads.follow", kind, url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            os.kill(process.pid, signal.SIGKILL)


# --- the workload


def _url(store: str, setting: Setting) -> str:
    return f"sqlite:///{setting.folder / 'follow.db'}" if store == "sqlite" else setting.urls[store]


def _percentiles(seconds: Sequence[float]) -> Measures:
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": 1000 * hundredths[49], "p99_ms": 1000 * hundredths[98]}


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _over_alone(store: str, kind: str, measured: Round) -> float:
    rates = measured[f"{store}, writer"]
    return rates[f"{kind}_steps_per_s"] / rates["alone_steps_per_s"]


def _subjects() -> Iterator[tuple[str, Subject]]:
    for store in STORES:
        yield f"{store}, stream", partial(stream, store)
        yield f"{store}, request", partial(request, store)
        yield f"{store}, writer", partial(writer, store)


def _figures() -> Iterator[Figure]:
    for store, title in STORES.items():
        for subject, what in (("stream", "item of a stream after a silence"), ("request", "request and reply")):
            for percentile in ("p50", "p99"):
                measure = partial(_of, f"{store}, {subject}", f"{percentile}_ms")
                yield Figure(f"{title}: {what}, {percentile}", "ms", measure)
        for kind, what in (("open", "another process"), ("follow", "a follower of another run")):
            ratio = partial(_over_alone, store, kind)
            yield Figure(f"{title}: writer with {what}, steps/s over alone", "x", ratio)


WORKLOAD = Workload(
    title="a reader follows a run in another process: {items} items, {silence_ms} ms of silence before each",
    subjects=dict(_subjects()),
    needs={subject: (store,) for subject, _ in _subjects() if (store := subject.partition(",")[0]) != "sqlite"},
    figures=list(_figures()),
    sizes={"items": 100, "silence_ms": 200, "requests": 200, "steps": 500, "turns": 5},
    quick={"items": 3, "silence_ms": 20, "requests": 5, "steps": 5, "turns": 1},
)


if __name__ == "__main__":
    asyncio.run(OTHER_PROCESSES[sys.argv[1]](sys.argv[2]))
