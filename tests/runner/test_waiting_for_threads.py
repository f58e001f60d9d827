"""Workflow code that waits for a thread is held with its line, before the thread starts."""

import asyncio
import concurrent.futures
import sys
from types import ModuleType

import pytest
from anyio import to_thread

from tests.runner.turn_driver import Play, note

REASON = "workflow code waits for a thread: move it into a step"

# The part of `anyio.to_thread.run_sync` that matters: a plain future is created, then a thread starts, which
# completes the future through the event loop.
ANYIO = """
import asyncio
import threading

started = []

async def run_sync_in_worker_thread(fn):
    future = asyncio.Future()
    started.append(fn)
    threading.Thread(target=fn).start()
    return await future

async def run_sync(fn):
    return await run_sync_in_worker_thread(fn)
"""


@pytest.fixture
def anyio(monkeypatch):
    module = ModuleType("anyio")
    exec(ANYIO, module.__dict__)
    monkeypatch.setitem(sys.modules, "anyio", module)
    return module


def test_thread_of_anyio_holds_the_run_with_its_line_and_does_not_start(anyio):
    async def program(ctx):
        await anyio.run_sync(print)

    play = Play(program).begin()
    assert (play.held.kind, play.held.reason) == ("deadlock", REASON)
    assert f"{__file__}:" in (play.held.line or "")
    assert "in program" in (play.held.line or "")
    assert anyio.started == []


def test_run_that_handles_the_refusal_is_held_all_the_same(anyio):
    async def program(ctx):
        try:
            await anyio.run_sync(print)
        except BaseException as error:
            note(str(error))
        return "end"

    play = Play(program).begin()
    assert play.held.reason == REASON
    assert play.notes == [REASON]


def test_wrapped_future_of_an_executor_holds_the_run():
    pending: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def program(ctx):
        await asyncio.wrap_future(pending)

    assert Play(program).begin().held.reason == REASON


def test_to_thread_is_refused_as_misuse():
    async def program(ctx):
        await asyncio.to_thread(print)

    failure = Play(program).begin().failure
    assert failure.type == "WorkflowMisuse"
    assert "move it into a step" in failure.message


def test_real_anyio_holds_the_run():
    async def program(ctx):
        await to_thread.run_sync(print)

    play = Play(program).begin()
    assert play.held.reason == REASON
    assert "in program" in (play.held.line or "")
