"""SIGTERM ends a worker within the grace and five seconds, also if the store accepts connections and never responds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import Client
from tests.chaos.store_servers import PLACES

GRACE_SECONDS = 1.0
LIMIT_SECONDS = GRACE_SECONDS + 5.0
START_SECONDS = 60.0
HANG_SECONDS = 2.0  # for periodic tasks and turns to run into the hanging store

WORKER = """
import asyncio, sys, time
from perdure import Context, EngineConfig, Worker, step, workflow

@step
async def endless() -> None:
    await asyncio.sleep(3600)

@workflow
async def never_ends(ctx: Context) -> None:
    await endless()

@workflow
async def steps_forever(ctx: Context) -> None:
    while True:
        await ctx.step("tick", asyncio.sleep, 0.01)

async def main() -> None:
    worker = Worker(sys.argv[1], config=EngineConfig(grace=float(sys.argv[2]), lease=3.0, sweep_interval=0.5))
    stop = asyncio.Event()
    stopped_at = []

    def on_signal() -> None:
        stopped_at.append(time.monotonic())
        stop.set()

    import signal
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
    print("begun", flush=True)
    await worker.run_until(stop, lambda: print("started", flush=True))
    return stopped_at[0]

stopped_at = asyncio.run(main())
print(time.monotonic() - stopped_at)
"""


@contextlib.contextmanager
def worker_at(url: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process that has written the line `until`."""
    command = [sys.executable, "-c", WORKER, url, str(GRACE_SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stderr is not None
            errors: list[str] = []
            threading.Thread(target=lambda: errors.extend(worker.stderr or ()), daemon=True).start()
            while (line := worker.stdout.readline().strip()) != until:
                assert line, "".join(errors)
            yield worker
        finally:
            worker.kill()


def seconds_until_the_end(worker: subprocess.Popen[str]) -> float:
    """Send SIGTERM and return how long the worker took to end, by its own clock."""
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout is not None
    taken = float(worker.stdout.readline())
    assert worker.wait(START_SECONDS) == 0
    return taken


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_worker_whose_connections_do_not_respond_any_more_ends_in_time(kind: str, tmp_path: Path) -> None:
    async def start_runs(url: str) -> None:
        async with Client(url) as client:
            for workflow in ("never_ends", "steps_forever"):
                for n in range(3):
                    await client.start(workflow, id=f"{workflow}{n}")

    with PLACES[kind](tmp_path) as place, worker_at(place.worker_url, "started") as worker:
        asyncio.run(start_runs(place.url))
        time.sleep(HANG_SECONDS)
        assert place.proxy is not None
        place.proxy.hold_up()
        time.sleep(HANG_SECONDS)
        assert seconds_until_the_end(worker) < LIMIT_SECONDS


@pytest.mark.parametrize("url", ["postgresql://127.0.0.1:{port}/shop", "redis://127.0.0.1:{port}/0"])
def test_worker_that_waits_for_a_server_that_never_responds_ends_in_time(url: str) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        with worker_at(url.format(port=listening.getsockname()[1]), "begun") as worker:
            time.sleep(HANG_SECONDS)
            assert seconds_until_the_end(worker) < LIMIT_SECONDS
