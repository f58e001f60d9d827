"""An open engine that is used from another event loop, thread or process raises at once and says what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Client, Context, Engine, RunFailed, Worker, WorkflowMisuse, event, step, workflow
from perdure.testing import VirtualClock
from tests.crash.store_readers import reader_of
from tests.engine.store_matrix import STORES, make_store, on_every_store

TIMEOUT_SECONDS = 60.0  # a call that does not raise hangs


@event
class Knock:
    n: int


@workflow
async def waits_for_knock(ctx: Context) -> int:
    return (await ctx.receive(Knock)).n


async def read_all(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


CALLS: dict[str, Callable[[Engine], Awaitable[object]]] = {
    "start": lambda engine: engine.start(waits_for_knock),
    "execute": lambda engine: engine.execute(waits_for_knock),
    "status": lambda engine: engine.status("w"),
    "result": lambda engine: engine.result("w"),
    "send": lambda engine: engine.send("w", Knock(1)),
    "request": lambda engine: engine.request("w", Knock(1), timeout=1),
    "broadcast": lambda engine: engine.broadcast(Knock(1)),
    "cancel": lambda engine: engine.cancel("w"),
    "runs": lambda engine: engine.runs(),
    "dead_letters": lambda engine: engine.dead_letters(),
    "deferred_token": lambda engine: engine.deferred_token("w", "review"),
    "read_stream": lambda engine: read_all(engine.read_stream("w", "tokens")),
    "watch": lambda engine: read_all(engine.watch("w")),
    "handle's result": lambda engine: engine.get("w").result(),
    "handle's watch": lambda engine: read_all(engine.get("w").watch()),
    "recover": lambda engine: engine.recover(),
    "open": lambda engine: engine.open(),
    "async with": lambda engine: engine.__aenter__(),
    "shutdown": lambda engine: engine.shutdown(),
}


async def refused(call: Callable[[Engine], Awaitable[object]], engine: Engine) -> str:
    with pytest.raises(WorkflowMisuse) as raised:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await call(engine)
    return str(raised.value)


def run_refused(call: Callable[[Engine], Awaitable[object]], engine: Engine) -> str:
    return asyncio.run(refused(call, engine))


@on_every_store
async def test_calls_from_another_thread_raise(h):
    engine = await h.engine(waits_for_knock)
    await engine.start(waits_for_knock, id="w")
    await h.settle()
    for name, call in CALLS.items():
        message = await asyncio.to_thread(run_refused, call, engine)
        assert "another thread: use asyncio.run_coroutine_threadsafe" in message, name
    await engine.send("w", Knock(3))
    assert await h.run_to_end(engine.get("w")) == 3, "the engine is not affected"


@pytest.mark.parametrize("store_kind", STORES)
def test_calls_from_another_event_loop_of_the_same_thread_raise(store_kind: str, tmp_path: Path):
    engine = Engine(make_store(store_kind, tmp_path, VirtualClock()), [waits_for_knock])
    with asyncio.Runner() as first:
        first.run(engine.open())
        with asyncio.Runner() as second:
            for name, call in CALLS.items():
                assert "another event loop: create and open another Engine" in second.run(refused(call, engine)), name
        assert first.run(engine.status("w")) is None
        first.run(engine.shutdown())
        with asyncio.Runner() as third:  # closed, it may be opened again, also elsewhere
            third.run(engine.open())
            third.run(engine.shutdown())


@pytest.mark.parametrize("store_kind", STORES)
def test_iterators_that_another_event_loop_continues_raise(store_kind: str, tmp_path: Path):
    @workflow
    async def writes(ctx: Context) -> None:
        for n in range(3):
            await ctx.stream("tokens").write(n)

    async def first_item(engine: Engine) -> AsyncIterator[Any]:
        await engine.open()
        await engine.execute(writes, id="w")
        items = engine.read_stream("w", "tokens")
        assert await anext(items) == 0
        return items

    engine = Engine(make_store(store_kind, tmp_path, VirtualClock()), [writes])
    with asyncio.Runner() as first:
        items = first.run(first_item(engine))
        with asyncio.Runner() as second, pytest.raises(WorkflowMisuse, match="another event loop"):
            second.run(read_all(items))
        first.run(engine.shutdown())


FORK = """
import asyncio, os, signal, sys
from perdure import Client, Engine, PerdureError, Worker

async def call(opened, how):
    if isinstance(opened, Worker):
        await opened.__aenter__()
    else:
        await getattr(opened, how)("w") if how == "status" else await getattr(opened, how)()

async def main(kind):
    opened = {"Engine": Engine, "Client": Client, "Worker": Worker}[kind](sys.argv[1])
    await opened.__aenter__()
    for how in ("status", "open", "shutdown"):
        for run in ("same loop", "new loop"):
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # kills a child that hangs
                try:
                    if run == "same loop":
                        await call(opened, how)
                    else:
                        asyncio.run(call(opened, how))
                except PerdureError as error:
                    right = "fork" in str(error) and f"another {kind} in the child" in str(error)
                    os._exit(0 if right else 3)
                os._exit(4)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, (kind, how, run, os.waitstatus_to_exitcode(status))
    await opened.__aexit__(None, None, None)

for kind in ("Engine", "Client", "Worker"):
    asyncio.run(main(kind))
print("all refused")
"""


@pytest.mark.parametrize("store_kind", STORES)
def test_calls_in_a_forked_process_raise(store_kind: str, tmp_path: Path):
    def execute(url: str) -> None:
        given = [sys.executable, "-W", "ignore", "-c", FORK, url]
        done = subprocess.run(given, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout == "all refused\n", done.stderr

    if store_kind == "memory":
        execute("memory://")
    else:
        with reader_of(store_kind, tmp_path) as reader:
            execute(reader.url)


@on_every_store
async def test_opening_twice_is_refused(h):
    engine, client = await h.engine(waits_for_knock), await h.client()
    for opened in (engine, client):
        for opening in (opened.open, opened.__aenter__):
            with pytest.raises(WorkflowMisuse, match="open already"):
                await opening()
    assert await engine.status("w") is None
    await h.drive(engine.shutdown())
    await h.drive(engine.open())
    assert await engine.status("w") is None


@on_every_store
async def test_opening_twice_at_the_same_time_is_refused(h):
    client = Client(h.faulty(), clock=h.clock)
    h._open.append(client)
    outcomes = await h.drive(asyncio.gather(client.open(), client.open(), return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [type(None), WorkflowMisuse]


@on_every_store
async def test_worker_that_runs_already_is_refused(h):
    worker = Worker(h.faulty(), [waits_for_knock], clock=h.clock)
    await h.drive(worker.__aenter__())
    with pytest.raises(WorkflowMisuse, match="this Worker is open already"):
        await worker.__aenter__()
    await h.drive(worker.__aexit__(None, None, None))


@on_every_store
async def test_call_of_an_engine_in_a_workflow_names_the_alternative(h):
    @workflow
    async def calls_engine(ctx: Context) -> None:
        await engine.send("w", Knock(1))

    engine = await h.engine(calls_engine)
    run = await engine.start(calls_engine)
    with pytest.raises(RunFailed, match=r"WorkflowMisuse.*move the call into a step"):
        await h.run_to_end(run)


def test_sync_step_that_calls_its_engine_with_asyncio_run_gets_an_error():
    async def main() -> str:
        @step(retry=None)
        def sends() -> str:
            try:
                asyncio.run(engine.send("w", Knock(1)))
            except WorkflowMisuse as error:
                return str(error)
            return "sent"

        @workflow
        async def sends_in_a_thread(ctx: Context) -> str:
            return await sends()

        async with Engine("memory://", [sends_in_a_thread]) as engine:
            return await engine.execute(sends_in_a_thread)

    assert "another thread" in asyncio.run(main())


def test_blocking_run_in_a_running_event_loop_is_refused():
    async def main() -> None:
        with pytest.raises(WorkflowMisuse, match=r"use await engine\.execute\(\.\.\.\)"):
            perdure.run(waits_for_knock)

    asyncio.run(main())


def test_worker_that_handles_signals_outside_of_the_main_thread_is_refused():
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(Worker("memory://", []).run())
        except WorkflowMisuse as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert "main thread" in str(errors[0])
