"""A fleet: what several worker processes do on one server, how soon they take over from each other, and hear of things.

Runs of ten steps that do nothing lie ready when the workers are let go, so that nothing but workers and the server is
at work; the time is from there to the end of the last run. Beside it, in the same round, stands what the server itself
can do: the rows of such runs in the batches of one worker, without an engine (`raw_servers.py`).

Takeover: a worker is killed (SIGKILL) while all its runs are in the middle of a step, and the time is until the last
of them executes again in another process. On one machine that is noticed by looking for the process; the second figure
is of a worker that is stopped (SIGSTOP), where only the lease can tell.

Wake-ups: a client sends an event to a run that waits in another process, one at a time; from there to the first line of
the step that follows.
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
from benchmarks.raw_servers import RememberingPostgres, RememberingRedis, write_raw_postgres, write_raw_redis
from benchmarks.recording_stores import Remembering
from perdure import Client, Context, Engine, EngineConfig, Worker, event, step, workflow
from perdure.admin.health_check import workers_of
from perdure.model.queries import RunQuery
from perdure.stores.protocol import Store
from perdure.stores.writes import Write

STEPS = 10
LEASE = 3.0  # seconds
POLL = 0.01  # seconds between two looks
OPEN = ("pending", "running", "suspended")
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


@step(name="fleet.stay")
async def stay(folder: str, run_id: str) -> None:
    """Says when and where it began, and stays."""
    began = Path(folder) / f"{run_id}-{os.getpid()}"
    await asyncio.to_thread(began.write_text, repr(time.time()))
    await asyncio.Event().wait()


@workflow(name="fleet.stays")
async def stays(ctx: Context, folder: str) -> None:
    await stay(folder, ctx.run_id)


@step(name="fleet.late-by")
async def late_by(sent_at: float) -> float:
    return time.time() - sent_at


@workflow(name="fleet.hears")
async def hears(ctx: Context) -> float:
    return await late_by((await ctx.receive(Ping)).sent_at)


WORKFLOWS = (ten_steps, stays, hears)


# --- throughput


def workers(store: str, count: int, setting: Setting) -> Measures:
    return asyncio.run(_throughput(_url(store, setting), count, setting.sizes["runs"]))


async def _throughput(url: str, count: int, runs: int) -> Measures:
    async with Client(url) as client:
        await _started(client, runs)
        with _processes(url, count) as processes:
            began = perf_counter()
            for process in processes:
                _let_go(process)
            await _until(partial(_none_is, client, *OPEN))
            return {"steps_per_s": runs * STEPS / (perf_counter() - began)}


async def _started(client: Client, runs: int) -> None:
    numbers = iter(range(runs))

    async def one_after_the_other() -> None:
        for number in numbers:
            await client.start(ten_steps, number)

    await asyncio.gather(*(one_after_the_other() for _ in range(100)))


def raw(store: str, setting: Setting) -> Measures:
    """What one worker writes for these runs, written without it."""
    url = setting.urls[store]
    recording = asyncio.run(_recorded(_remembering(store, url), setting.sizes["runs"]))
    writing = write_raw_postgres(url, recording, "fleet") if store == "postgres" else write_raw_redis(url, recording)
    return {"steps_per_s": setting.sizes["runs"] * STEPS / sum(asyncio.run(writing))}


def _remembering(store: str, url: str) -> Remembering:
    if store == "postgres":
        return RememberingPostgres(f"{url}&schema=fleet")
    return RememberingRedis(f"{url}?prefix=fleet")


async def _recorded(remembering: Remembering, runs: int) -> list[tuple[Write, ...]]:
    assert isinstance(remembering, Store)
    async with Engine(remembering, [ten_steps]) as engine:
        await asyncio.gather(*(engine.execute(ten_steps, number) for number in range(runs)))
    return remembering.recording.batches


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
    """Seconds from the signal until the last of the worker's runs executes elsewhere."""
    async with Client(url) as client:
        ids = [f"{folder.name}-{number}" for number in range(runs)]
        with _processes(url, 2) as (victim, other):
            _let_go(victim)
            for run_id in ids:
                await client.start(stays, str(folder), id=run_id)
            await _until(partial(_execute_in, victim.pid, folder, ids))
            _let_go(other)
            await _until(partial(_has_joined, client, other.pid))
            began = time.time()
            victim.send_signal(how)
            await _until(partial(_execute_in, other.pid, folder, ids))
            last = max([await asyncio.to_thread(_began, folder / f"{run_id}-{other.pid}") for run_id in ids])
        for run_id in ids:
            await client.terminate(run_id)
    return last - began


def _began(note: Path) -> float:
    while not (text := note.read_text()):
        time.sleep(POLL)  # it is being written
    return float(text)


async def _execute_in(pid: int, folder: Path, ids: list[str]) -> bool:
    return await asyncio.to_thread(lambda: all((folder / f"{run_id}-{pid}").exists() for run_id in ids))


# --- wake-ups


def wake_up(store: str, setting: Setting) -> Measures:
    return asyncio.run(_wake_up(_url(store, setting), setting.sizes["wake_ups"]))


async def _wake_up(url: str, count: int) -> Measures:
    async with Client(url) as client:
        with _processes(url, 1) as (worker,):
            _let_go(worker)
            runs = [await client.start(hears, id=f"hears-{number}") for number in range(count)]
            await _until(partial(_none_is, client, "pending", "running"))
            late = []
            for run in runs:
                await client.send(run.id, Ping(time.time()))
                late.append(1_000 * await run.result())
    return {"median_ms": statistics.median(late), "p99_ms": sorted(late)[int(0.99 * (len(late) - 1))]}


# --- worker processes


@contextmanager
def _processes(url: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that have imported everything, and open the store when they are let go."""
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


def _let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(POLL)


async def _none_is(client: Client, *statuses: str) -> bool:
    return not (await client.runs(RunQuery(status=statuses, limit=1))).runs


async def _has_joined(client: Client, pid: int) -> bool:
    return any(worker.pid == pid for worker in await workers_of(client))


def _url(store: str, setting: Setting) -> str:
    return setting.urls[store]


def _work(url: str) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    asyncio.run(Worker(url, WORKFLOWS, config=EngineConfig(lease=LEASE)).run())


# --- the workload


def _of(subject: str, measure: str, measured: Round) -> float:
    return measured[subject][measure]


def _share(store: str, count: int, measured: Round) -> float:
    return 100 * measured[f"{store}, {count}"]["steps_per_s"] / measured[f"{store}, raw"]["steps_per_s"]


def _figures(store: str, name: str) -> Iterator[Figure]:
    for count in (1, 2, 4):
        title = f"{count} worker processes, {name}" if count > 1 else f"1 worker process, {name}"
        yield Figure(title, "steps/s", partial(_of, f"{store}, {count}", "steps_per_s"))
    yield Figure(f"the raw rate, {name}", "steps/s", partial(_of, f"{store}, raw", "steps_per_s"))
    yield Figure(f"4 workers' share of the raw rate, {name}", "%", partial(_share, store, 4))
    yield Figure(f"takeover from a killed worker, {name}", "s", partial(_of, f"{store}, takeover", "killed_s"))
    yield Figure(
        f"takeover when a lease of {LEASE:g} s runs out, {name}",
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
    title="a fleet: {runs:,} runs of 10 steps, {taken_over} runs taken over, {wake_ups} wake-ups",
    subjects=SUBJECTS,
    needs={subject: (subject.partition(",")[0],) for subject in SUBJECTS},
    figures=[figure for store, name in STORES.items() for figure in _figures(store, name)],
    sizes={"runs": 2_000, "taken_over": 100, "wake_ups": 300},
    quick={"runs": 20, "taken_over": 3, "wake_ups": 5},
)


if __name__ == "__main__":
    _work(sys.argv[1])
