"""`perdure.run`, `Worker` and `async with`, on the machine's own clock: nothing here waits for time to pass."""

import asyncio
import importlib.util
import os
import signal

import pytest

import perdure
from perdure import Client, Context, Engine, RunFailed, Worker, step, workflow

CALLS: list[int] = []


@step
async def add(a: int, b: int) -> int:
    CALLS.append(a)
    return a + b


@step(retry=None)
async def fail() -> None:
    raise ValueError("no")


@workflow
async def script(ctx: Context, n: int) -> int:
    return await add(n, 1)


@workflow
async def failing_script(ctx: Context) -> None:
    await fail()


@pytest.fixture(autouse=True)
def forget():
    CALLS.clear()


def test_run_returns_the_value():
    assert perdure.run(script, 4) == 5


@workflow
async def on_which_loop(ctx: Context) -> str:
    return await name_of_loop()


@step
async def name_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_run_uses_uvloop_if_installed(monkeypatch):
    assert perdure.run(on_which_loop).startswith("uvloop")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert perdure.run(on_which_loop).startswith("asyncio")


def test_run_raises_the_outcome_of_the_run():
    with pytest.raises(RunFailed, match="no"):
        perdure.run(failing_script)


def test_run_with_an_id_on_a_durable_store_executes_once(tmp_path):
    url = f"sqlite:///{tmp_path}/script.db"
    assert perdure.run(script, 4, store=url, id="s") == 5
    assert perdure.run(script, 4, store=url, id="s") == 5
    assert CALLS == [4]


def test_a_relative_path_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert perdure.run(script, 4, store="sqlite:///script.db") == 5
    assert (tmp_path / "script.db").exists()


def test_a_worker_executes_what_a_client_starts(tmp_path):
    url = f"sqlite:///{tmp_path}/work.db"

    async def main() -> int:
        async with Client(url) as client, Worker(url, [script]):
            return await asyncio.wait_for(client.execute(script, 1), 30)

    assert asyncio.run(main()) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_runs_until_a_signal(tmp_path, number):
    url = f"sqlite:///{tmp_path}/work.db"

    async def main() -> int:
        async with Client(url) as client:
            working = asyncio.create_task(Worker(url, [script]).run())
            result = await asyncio.wait_for(client.execute(script, 1), 30)
            os.kill(os.getpid(), number)
            await asyncio.wait_for(working, 30)
            assert await client._session.store.workers() == []
            return result

    assert asyncio.run(main()) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_engines_one_after_the_other_on_one_file(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"

    async def main(n: int) -> int:
        async with Engine(url) as engine:
            return await engine.execute(script, n, id=f"s{n}")

    assert [asyncio.run(main(n)) for n in (1, 2, 1)] == [2, 3, 2]
    assert CALLS == [1, 2]
