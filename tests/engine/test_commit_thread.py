"""Which thread commits to SQLite: an embedded Engine never waits for an fsync on its event loop, a Worker may."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import perdure
from perdure import Client, Context, Engine, Worker, step, workflow


@step
async def add_one(n: int) -> int:
    return n + 1


@workflow
async def add_twenty(ctx: Context, n: int) -> int:
    for _ in range(20):
        n = await add_one(n)
    return n


@pytest.fixture
def committing_threads() -> Iterator[list[int]]:
    """The threads of all commits, on every connection of the test."""
    threads: list[int] = []

    def trace(cursor: apsw.Cursor, sql: str, values: object) -> bool:
        if sql.startswith("COMMIT"):
            threads.append(threading.get_ident())
        return True

    def hook(connection: apsw.Connection) -> None:
        connection.exec_trace = trace

    apsw.connection_hooks.append(hook)
    yield threads
    apsw.connection_hooks.remove(hook)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'runs.db'}"


def test_an_embedded_engine_never_commits_on_the_loop(url: str, committing_threads: list[int]) -> None:
    async def main() -> None:
        async with Engine(url, [add_twenty]) as engine:
            assert await engine.execute(add_twenty, 1) == 21
            results = await asyncio.gather(*(engine.execute(add_twenty, n) for n in range(20)))
            assert results == [n + 20 for n in range(20)]

    asyncio.run(main())
    assert len(committing_threads) > 20
    assert threading.get_ident() not in committing_threads


def test_a_client_never_commits_on_the_loop(url: str, committing_threads: list[int]) -> None:
    async def main() -> None:
        async with Client(url) as client:
            await client.start(add_twenty, 1)

    asyncio.run(main())
    assert committing_threads
    assert threading.get_ident() not in committing_threads


def test_a_worker_commits_single_writes_on_its_loop(url: str, committing_threads: list[int]) -> None:
    async def main() -> None:
        async with Client(url) as client, Worker(url, [add_twenty]):
            run = await client.start(add_twenty, 1)
            assert await run.result() == 21

    asyncio.run(main())
    assert threading.get_ident() in committing_threads


def test_run_commits_single_writes_on_its_loop(url: str, committing_threads: list[int]) -> None:
    assert perdure.run(add_twenty, 1, store=url) == 21
    assert threading.get_ident() in committing_threads
