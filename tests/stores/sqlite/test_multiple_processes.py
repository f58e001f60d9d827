"""Several processes on one file: real ones, because locks between connections of one process prove little."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import StoreError
from perdure.stores.results import Committed
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import claim, entry, load, run, suspended, take, turn, worker

SPAWN = multiprocessing.get_context("spawn")
POSITIONS = 60
PATIENCE = 60.0  # seconds until a test gives a process up; none is waited for on purpose


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@contextlib.asynccontextmanager
async def opened(path: str, worker_id: str, **options: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, **options)
    await store.open(shards=16)
    try:
        await store.join(worker(worker_id))
        yield store
    finally:
        await store.close()


def answers_of(target: Any, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What each process, told to begin at the same moment, has to say in the end."""
    barrier = SPAWN.Barrier(len(names))
    answers: Any = SPAWN.SimpleQueue()
    processes = [SPAWN.Process(target=_report, args=(target, path, name, barrier, answers)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return dict(answers.get() for _ in names)


def _report(target: Any, path: str, name: str, barrier: Any, answers: Any) -> None:
    barrier.wait(PATIENCE)
    answers.put((name, asyncio.run(target(path, name))))


# --- races -----------------------------------------------------------------------------------------------------------


async def commit_as_often_as_possible(path: str, name: str) -> list[int]:
    won = []
    async with opened(path, name, synchronous="off") as store:
        while (position := (await load(store)).position) < POSITIONS:
            (answer,) = await store.commit([turn(position, entry(name), worker=name, owned=False)])
            if isinstance(answer, Committed):
                won.append(position)
    return won


def test_processes_race_for_every_position_and_one_wins(path: str) -> None:
    async def prepare() -> None:
        async with opened(path, "a") as store:
            await store.commit([run(owner="a"), turn(0, patch=suspended())])

    async def winners() -> list[str]:
        async with opened(path, "a") as store:
            return [row.entry.location for row in await store.history("r")]

    asyncio.run(prepare())
    won = answers_of(commit_as_often_as_possible, path, ("p", "q", "s"))
    assert sorted(position for positions in won.values() for position in positions) == list(range(1, POSITIONS))
    assert Counter(asyncio.run(winners())) == Counter({name: len(positions) for name, positions in won.items()})


async def claim_as_many_as_possible(path: str, name: str) -> list[str]:
    taken: list[str] = []
    async with opened(path, name, synchronous="off") as store:
        while page := await take(store, claim(name, limit=7)):
            taken += page
    return taken


def test_processes_claim_each_run_once(path: str) -> None:
    ids = [f"r{n:03d}" for n in range(300)]

    async def prepare() -> None:
        async with opened(path, "a") as store:
            await store.commit([run(id) for id in ids])

    asyncio.run(prepare())
    taken = answers_of(claim_as_many_as_possible, path, ("p", "q", "s"))
    assert sorted(id for page in taken.values() for id in page) == ids


async def open_and_make_a_key(path: str, name: str) -> bytes:
    async with opened(path, name) as store:
        (key,) = await store.keys("tokens", 100.0)
        return key.secret


def test_processes_make_one_file_and_one_key(path: str) -> None:
    secrets = answers_of(open_and_make_a_key, path, ("p", "q", "s", "t"))
    assert len(set(secrets.values())) == 1


# --- a process that dies or forks ----------------------------------------------------------------------------------


def stop_in_the_middle_of_a_commit(path: str, pipe: Connection) -> None:
    connection = apsw.Connection(path)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE runs SET owner = 'thief', fence = 99")
    connection.execute("PRAGMA cache_spill = ON")
    pipe.send("in the middle")
    pipe.recv()


def test_a_process_killed_in_the_middle_of_a_commit_leaves_nothing(path: str) -> None:
    async def life() -> None:
        async with opened(path, "a", busy_timeout=0.05) as store:
            await store.commit([run(owner="a")])
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=stop_in_the_middle_of_a_commit, args=(path, theirs))
            process.start()
            assert ours.poll(PATIENCE)
            with pytest.raises(StoreError) as caught:
                await store.commit([turn(0, entry())])
            assert caught.value.retryable
            process.kill()
            process.join(PATIENCE)
            assert await store.commit([turn(0, entry())]) == [Committed()]
            assert (await load(store)).record.fence == 0

    asyncio.run(life())


async def make_a_run(path: str, name: str) -> None:
    async with opened(path, name) as store:
        await store.commit([run("from outside")])


def test_the_commits_of_another_process_are_noticed(path: str) -> None:
    async def life() -> None:
        async with opened(path, "a") as store:
            noticed = asyncio.Event()
            store.on_change(lambda ids: noticed.set())
            await asyncio.to_thread(answers_of, make_a_run, path, ("p",))
            await asyncio.wait_for(noticed.wait(), PATIENCE)
            assert (await load(store, "from outside")).position == 0

    asyncio.run(life())


FORKING = """
import asyncio, os, sys
from perdure.errors import StoreError
from perdure.stores.results import Committed
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import entry, load, run, turn, worker

async def begin():
    await store.open(shards=16)
    await store.join(worker("a"))
    await store.commit([run(owner="a")])

async def use_in_child():
    try:
        await store.commit([run("from the child")])
    except StoreError as error:
        print(error, flush=True)
    await store.close()

async def go_on():
    assert await store.commit([turn(0, entry())]) == [Committed()]
    assert (await load(store)).position == 1
    await store.close()

store = SqliteStore(sys.argv[1])
asyncio.run(begin())
child = os.fork()
if child == 0:
    asyncio.run(use_in_child())
    sys.exit(0)  # with the clean-up of an interpreter that ends, which throws the connections away
assert os.waitpid(child, 0)[1] == 0
asyncio.run(go_on())
"""


def test_a_forked_child_is_refused_and_does_no_harm(path: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, path]
    program = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert program.returncode == 0, program.stderr
    assert "before a fork" in program.stdout
    connection = apsw.Connection(path)
    assert connection.execute("PRAGMA integrity_check").get == "ok"
    assert connection.execute("SELECT count(*) FROM history").get == 1
