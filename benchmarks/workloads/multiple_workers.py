"""Multiple workers on one server: throughput, takeover time and wake-up latency.

Throughput: runs of ten steps that do nothing are stored before the workers start, so that only workers and the server
are busy. The time is from the start of the workers to the end of the last run. The raw rate of the same round is the
limit of the server: the rows of such runs in the batches of one worker, without an engine (`raw_servers.py`).

Takeover: a worker is killed (SIGKILL) while all its runs execute a step. The time is until the last of them executes
again in another process. On one machine, other workers notice the missing process. The second figure is of a stopped
worker (SIGSTOP), which only the expired lease reveals.

Wake-ups: a client sends events, one at a time, to runs that wait in another process. The time is until the next step of
the run starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.harness import ROOT, Figure, Measures, Round, Setting, Workload
from benchmarks.raw_servers import RecordingPostgresStore, RecordingRedisStore, write_raw_postgres, write_raw_redis
from benchmarks.recording_stores import RecordingMixin
from perdure import Client, Context, Engine, EngineConfig, Worker, event, step, workflow
from perdure.admin.store_views import workers_of
from perdure.model.queries import RunQuery
from perdure.stores.protocol import Store
from perdure.stores.writes import Write

STEPS = 10
LEASE_SECONDS = 3.0
POLL_INTERVAL_SECONDS = 0.01
OPEN_STATUSES = ("pending", "running", "suspended")
STORES = {"postgres": "PostgreSQL", "redis": "Redis"}


@event(name="fleet.ping")
class Ping:
    sent_at: float


@step(name="fleet.noop")
async def noop(n: int) -> int:
    return n


@workflow(name="fleet.ten-steps")
async def ten_steps(ctx: Context, n: int) -> int:
    for _ in range(STEPS):
        n = await noop(n)
    return n


@step(name="fleet.block")
async def block(folder: str, run_id: str) -> None:
    """Record the start time and the process, then block."""
    started = Path(folder) / f"{run_id}-{os.getpid()}"
    await asyncio.to_thread(started.write_text, repr(time.time()))
    await asyncio.Event().wait()


@workflow(name="fleet.blocks")
async def blocks(ctx: Context, folder: str) -> None:
    await block(folder, ctx.run_id)


@step(name="fleet.delay-since")
async def delay_since(sent_at: float) -> float:
    return time.time() - sent_at


@workflow(name="fleet.receives")
async def receives(ctx: Context) -> float:
    return await delay_since((await ctx.receive(Ping)).sent_at)


WORKFLOWS = (ten_steps, blocks, receives)


# --- throughput


def workers(store: str, count: int, setting: Setting) -> Measures:
    return asyncio.run(_throughput(_url(store, setting), count, setting.sizes["runs"]))


async def _throughput(url: str, count: int, runs: int) -> Measures:
    async with Client(url) as client:
        await _start_runs(client, runs)
        with _processes(url, count) as processes:
            started_at = perf_counter()
            for process in processes:
                _release_worker(process)
            await _wait_until(partial(_none_is, client, *OPEN_STATUSES))
            return {"steps_per_s": runs * STEPS / (perf_counter() - started_at)}


async def _start_runs(client: Client, runs: int) -> None:
    numbers = iter(range(runs))

    async def run_sequentially() -> None:
        for number in numbers:
            await client.start(ten_steps, number)

    await asyncio.gather(*(run_sequentially() for _ in range(100)))


def raw(store: str, setting: Setting) -> Measures:
    """Measure the writes of one worker for these runs, without the worker."""
    url = setting.urls[store]
    recording = asyncio.run(_record(_recording_store(store, url), setting.sizes["runs"]))
    writing = write_raw_postgres(url, recording, "fleet") if store == "postgres" else write_raw_redis(url, recording)
    return {"steps_per_s": setting.sizes["runs"] * STEPS / sum(asyncio.run(writing))}


def _recording_store(store: str, url: str) -> RecordingMixin:
    if store == "postgres":
        return RecordingPostgresStore(f"{url}&schema=fleet")
    return RecordingRedisStore(f"{url}?prefix=fleet")


async def _record(store: RecordingMixin, runs: int) -> list[tuple[Write, ...]]:
    assert isinstance(store, Store)
    async with Engine(store, [ten_steps]) as engine:
        await asyncio.gather(*(engine.execute(ten_steps, number) for number in range(runs)))
    return store.recording.batches


# --- takeover


def takeover(store: str, setting: Setting) -> Measures:
    url, runs = _url(store, setting), setting.sizes["taken_over"]
    killed, stopped = ((setting.folder / f"{store}-{how}") for how in ("killed", "stopped"))
    killed.mkdir()
    stopped.mkdir()
    return {
        "killed_s": asyncio.run(_takeover(url, killed, runs, signal.SIGKILL)),
        "stopped_s": asyncio.run(_takeover(url, stopped, runs, signal.SIGSTOP)),
    }


async def _takeover(url: str, folder: Path, runs: int, how: signal.Signals) -> float:
    """Return the seconds from the signal until the last run of the worker executes in another process."""
    async with Client(url) as client:
        ids = [f"{folder.name}-{number}" for number in range(runs)]
        with _processes(url, 2) as (victim, other):
            _release_worker(victim)
            for run_id in ids:
                await client.start(blocks, str(folder), id=run_id)
            await _wait_until(partial(_all_execute_in, victim.pid, folder, ids))
            _release_worker(other)
            await _wait_until(partial(_has_joined, client, other.pid))
            started_at = time.time()
            victim.send_signal(how)
            await _wait_until(partial(_all_execute_in, other.pid, folder, ids))
            last = max([await asyncio.to_thread(_read_start_time, folder / f"{run_id}-{other.pid}") for run_id in ids])
        for run_id in ids:
            await client.terminate(run_id)
    return last - started_at


def _read_start_time(file: Path) -> float:
    while not (text := file.read_text()):
        time.sleep(POLL_INTERVAL_SECONDS)  # the file is being written
    return float(text)


async def _all_execute_in(pid: int, folder: Path, ids: list[str]) -> bool:
    return await asyncio.to_thread(lambda: all((folder / f"{run_id}-{pid}").exists() for run_id in ids))


# --- wake-ups


def wake_up(store: str, setting: Setting) -> Measures:
    return asyncio.run(_wake_up(_url(store, setting), setting.sizes["wake_ups"]))


async def _wake_up(url: str, count: int) -> Measures:
    async with Client(url) as client:
        with _processes(url, 1) as (worker,):
            _release_worker(worker)
            runs = [await client.start(receives, id=f"receives-{number}") for number in range(count)]
            await _wait_until(partial(_none_is, client, "pending", "running"))
            delays_ms = []
            for run in runs:
                await client.send(run.id, Ping(time.time()))
                delays_ms.append(1_000 * await run.result())
    return {"median_ms": statistics.median(delays_ms), "p99_ms": sorted(delays_ms)[int(0.99 * (len(delays_ms) - 1))]}


# --- worker processes


@contextmanager
def _processes(url: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start worker processes that have imported everything and wait for `_release_worker` to open the store."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workloads.multiple_workers", url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def _release_worker(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()


async def _wait_until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def _none_is(client: Client, *statuses: str) -> bool:
    return not (await client.runs(RunQuery(status=statuses, limit=1))).runs


async def _has_joined(client: Client, pid: int) -> bool:
    return any(worker.pid == pid for worker in await workers_of(client))


def _url(store: str, setting: Setting) -> str:
    return setting.urls[store]


def _run_worker(url: str) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    asyncio.run(Worker(url, WORKFLOWS, config=EngineConfig(lease=LEASE_SECONDS)).run())


# --- the workload


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _share(store: str, count: int, measured: Round) -> float:
    return 100 * measured[f"{store}, {count}"]["steps_per_s"] / measured[f"{store}, raw"]["steps_per_s"]


def _figures(store: str, name: str) -> Iterator[Figure]:
    for count in (1, 2, 4):
        title = f"{count} worker processes, {name}" if count > 1 else f"1 worker process, {name}"
        yield Figure(title, "steps/s", partial(_of, f"{store}, {count}", "steps_per_s"))
    yield Figure(f"raw rate, {name}", "steps/s", partial(_of, f"{store}, raw", "steps_per_s"))
    yield Figure(f"4 workers' share of the raw rate, {name}", "%", partial(_share, store, 4))
    yield Figure(f"takeover from a killed worker, {name}", "s", partial(_of, f"{store}, takeover", "killed_s"))
    yield Figure(
        f"takeover from a stopped worker, lease of {LEASE_SECONDS:g} s, {name}",
        "s",
        partial(_of, f"{store}, takeover", "stopped_s"),
    )
    yield Figure(f"wake-up of another process, median, {name}", "ms", partial(_of, f"{store}, wake-up", "median_ms"))
    yield Figure(f"wake-up of another process, p99, {name}", "ms", partial(_of, f"{store}, wake-up", "p99_ms"))


SUBJECTS = {
    **{f"{store}, {count}": partial(workers, store, count) for store in STORES for count in (1, 2, 4)},
    **{f"{store}, raw": partial(raw, store) for store in STORES},
    **{f"{store}, takeover": partial(takeover, store) for store in STORES},
    **{f"{store}, wake-up": partial(wake_up, store) for store in STORES},
}

WORKLOAD = Workload(
    title="multiple workers: {runs:,} runs of 10 steps, {taken_over} runs taken over, {wake_ups} wake-ups",
    subjects=SUBJECTS,
    needs={subject: (subject.partition(",")[0],) for subject in SUBJECTS},
    figures=[figure for store, name in STORES.items() for figure in _figures(store, name)],
    sizes={"runs": 2_000, "taken_over": 100, "wake_ups": 300},
    quick={"runs": 20, "taken_over": 3, "wake_ups": 5},
)


if __name__ == "__main__":
    _run_worker(sys.argv[1])
