"""Blocking calls in workflow code are refused under the kit, with the line; everywhere else they are allowed."""

import asyncio
import importlib
import logging
import logging.handlers
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from perdure import Context, RunFailed, step, workflow
from perdure.runner.blocking_guard import blocking_refused
from perdure.testing import TestEngine, crash_everywhere
from tests.testing.async_runner import with_engine

FILE = Path(__file__).name


def connect() -> None:
    with socket.socket() as refused:
        refused.connect(("127.0.0.1", 9))


CALLS = {
    "time.sleep": lambda folder: time.sleep(0),
    "socket.connect": lambda folder: connect(),
    "socket.getaddrinfo": lambda folder: urllib.request.urlopen("http://localhost:9/"),
    "subprocess.Popen": lambda folder: subprocess.run([sys.executable, "--version"], check=False),
    "os.system": lambda folder: os.system("true"),
    "sqlite3.connect": lambda folder: sqlite3.connect(":memory:"),
    "open": lambda folder: (folder / "written").write_text("x"),
    "os.mkdir": lambda folder: (folder / "made").mkdir(),
    "os.remove": lambda folder: (folder / "there").unlink(),
}
if sys.version_info >= (3, 12):  # before, Python does not tell
    CALLS["threading.Thread.start"] = lambda folder: threading.Thread(target=print).start()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "there").write_text("x")
    return tmp_path


@workflow(name="blocking.calls")
async def calls(ctx: Context, name: str, folder: str) -> None:
    CALLS[name](Path(folder))


@pytest.mark.parametrize("name", CALLS)
@with_engine
async def test_blocking_call_is_refused_with_line_and_advice(engine, name, folder):
    with pytest.raises(RunFailed) as failed:
        await engine.execute(calls, name, str(folder))
    assert failed.value.type == "WorkflowMisuse"
    assert f"{name}() cannot be called in a workflow: move it into a step" in failed.value.message
    assert FILE in failed.value.message
    assert sorted(path.name for path in folder.iterdir()) == ["there"]


@with_engine
async def test_blocking_calls_in_workflow_helpers_are_refused(engine):
    async def helper() -> None:
        time.sleep(0)

    @workflow(name="blocking.helper")
    async def helped(ctx: Context) -> None:
        await asyncio.gather(helper())

    with pytest.raises(RunFailed, match="in helper"):
        await engine.execute(helped)


@with_engine
async def test_steps_may_block(engine, folder):
    @step
    async def on_the_loop() -> None:
        time.sleep(0)
        (folder / "written").write_text("x")

    @step
    def in_a_thread() -> None:
        time.sleep(0)
        (folder / "written").unlink()

    @workflow(name="blocking.steps")
    async def steps(ctx: Context) -> str:
        await on_the_loop()
        await in_a_thread()
        return "done"

    assert await engine.execute(steps) == "done"
    time.sleep(0)  # and so may the test


@with_engine
async def test_blocking_guard_allows_reading_importing_and_logging(engine, folder, monkeypatch):
    (folder / "imported_in_a_workflow.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    handler = logging.FileHandler(folder / "log", delay=True)
    logger = logging.getLogger("tests.testing.blocking")
    logger.addHandler(handler)
    try:

        @workflow(name="blocking.harmless")
        async def harmless(ctx: Context) -> str:
            importlib.import_module("imported_in_a_workflow")
            logger.warning("written to a file that is opened now")
            return Path(folder, "there").read_text()

        assert await engine.execute(harmless) == "x"
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (folder / "log").exists()
    assert (folder / "__pycache__").exists(), "the module was compiled and written inside the workflow"


def test_blocking_guard_can_be_disabled_and_ends_with_the_engine(folder):
    async def main(*, refuse_blocking: bool = True) -> None:
        async with TestEngine(refuse_blocking=refuse_blocking) as engine:
            await engine.execute(calls, "time.sleep", str(folder))

    sleep = time.sleep
    asyncio.run(main(refuse_blocking=False))
    with pytest.raises(RunFailed):
        asyncio.run(main())
    assert time.sleep is sleep
    asyncio.run(main(refuse_blocking=False))


def test_server_fixture_can_be_requested_repeatedly():
    sleep = time.sleep
    with blocking_refused():
        with blocking_refused():
            pass
        assert time.sleep is not sleep or sys.version_info >= (3, 13)
    assert time.sleep is sleep


def test_crash_everywhere_refuses_blocking_calls(folder):
    report = asyncio.run(crash_everywhere(calls, "time.sleep", str(folder)))
    assert report.outcome[:2] == ("failed", "WorkflowMisuse")
