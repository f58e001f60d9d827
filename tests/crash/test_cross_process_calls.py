"""Callers in one process, the worker in another: every call works, and notifications arrive without polling.

With sweeps and leases of an hour, only a notification can wake the other process.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure import Client, Context, Engine, EngineConfig, workflow
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.request_worker import WordRequest, replying, staying
from tests.crash.store_readers import TIMEOUT_SECONDS

HOUR = 3600.0
SHORT = 0.2  # seconds


@workflow(name="across.own")
async def own(ctx: Context) -> str:
    return "done here"


def start_worker(here: Scenario, sweep: float = HOUR) -> subprocess.Popen[bytes]:
    """A worker that has joined."""
    worker = here.start("request_worker", sweep, HOUR)
    here.until(lambda: worker.pid in {row.pid for row in here.book.workers()}, "the worker joins")
    return worker


def call(here: Scenario, calls: Callable[[Client], Awaitable[None]], *, executes: bool, sweep: float = HOUR) -> None:
    """Make calls from this process: with a worker in it that has none of the workflows, or without one."""
    config = EngineConfig(sweep_interval=sweep, lease=HOUR)

    async def main() -> None:
        caller = Engine(here.url, [own], config) if executes else Client(here.url, config=config)
        async with asyncio.timeout(TIMEOUT_SECONDS), caller:
            await calls(caller)

    try:
        asyncio.run(main())
    except TimeoutError:
        pytest.fail(f"waited in vain\n{here.explanation()}")


async def talk(here: Scenario, worker: subprocess.Popen[bytes], caller: Client) -> None:
    log = str(here.log)
    assert await caller.execute(replying, log, 0) == worker.pid
    run = await caller.start(replying, log, 2, id="talk")
    words, entries = caller.read_stream("talk", "words"), caller.watch("talk")
    for n, word in enumerate(("one", "two")):
        assert await caller.request("talk", WordRequest(word)) == f"{word}!"
        assert await anext(words) == word, "while the run continues"
        while (await anext(entries)).location != ("words" if n == 0 else "words#1"):
            pass  # it must arrive while the run is still open
    assert await run.result() == worker.pid
    assert await caller.result("talk") == worker.pid
    assert [word async for word in words] == []
    assert [entry.location async for entry in entries][-1] == "who_works"
    assert {line.pid for line in here.effects()} == {worker.pid}


@pytest.mark.parametrize("executes", [False, True], ids=["client", "engine"])
@pytest.mark.parametrize("kind", STORES)
def test_every_call_works_from_a_process_that_does_not_execute_the_run(
    kind: str, executes: bool, tmp_path: Path
) -> None:
    with scenario(tmp_path, kind) as here:
        worker = start_worker(here)
        call(here, lambda caller: talk(here, worker, caller), executes=executes)


@pytest.mark.parametrize("executes", [False, True], ids=["client", "engine"])
def test_calls_work_without_notifications(executes: bool, tmp_path: Path) -> None:
    with scenario(tmp_path, "postgres") as here:
        here.book.url += "&listen=no"
        worker = start_worker(here, SHORT)
        call(here, lambda caller: talk(here, worker, caller), executes=executes, sweep=SHORT)


@pytest.mark.parametrize("kind", STORES)
def test_sigterm_hands_runs_over_at_once(kind: str, tmp_path: Path) -> None:
    """Neither a lease expiry nor a sweep would be in time."""
    gate = tmp_path / "gate"
    ids = [f"run-{number}" for number in range(6)]

    async def start(caller: Client) -> None:
        for run_id in ids:
            await caller.start(staying, str(here.log), str(gate), id=run_id)

    with scenario(tmp_path, kind) as here:
        leaver, other = start_worker(here), start_worker(here)
        call(here, start, executes=False)
        here.until(lambda: len(here.effects("begun")) == len(ids), "all runs are in the middle of a step")
        leaver.send_signal(signal.SIGTERM)
        here.until_ended(leaver)
        gate.touch()
        here.until(here.all_succeeded, "the other one does the rest")
        assert set(here.results().values()) == {str(other.pid)}
        assert {run.recoveries for run in here.book.runs()} == {0}, "no worker died"
