"""Several real processes on one file. Locks between connections of one process would prove little."""

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
from perdure.testing.contract.builders import claim, claim_ids, entry, load, run, suspended, turn, worker

SPAWN = multiprocessing.get_context("spawn")
POSITIONS = 60
TIMEOUT_SECONDS = 60.0  # until a test fails because of a hanging process


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


def run_processes(target: Any, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Run one process per name, all started at the same time. Return the result of each."""
    barrier = SPAWN.Barrier(len(names))
    results: Any = SPAWN.SimpleQueue()
    processes = [SPAWN.Process(target=_report, args=(target, path, name, barrier, results)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode == 0
    return dict(results.get() for _ in names)


def _report(target: Any, path: str, name: str, barrier: Any, results: Any) -> None:
    barrier.wait(TIMEOUT_SECONDS)
    results.put((name, asyncio.run(target(path, name))))


# --- races ------------------------------------------------------------------------------------------------------------


async def commit_as_often_as_possible(path: str, name: str) -> list[int]:
    won = []
    async with opened(path, name, synchronous="off") as store:
        while (position := (await load(store)).position) < POSITIONS:
            (result,) = await store.commit([turn(position, entry(name), worker=name, owned=False)])
            if isinstance(result, Committed):
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
    won = run_processes(commit_as_often_as_possible, path, ("p", "q", "s"))
    assert sorted(position for positions in won.values() for position in positions) == list(range(1, POSITIONS))
    assert Counter(asyncio.run(winners())) == Counter({name: len(positions) for name, positions in won.items()})


async def claim_as_many_as_possible(path: str, name: str) -> list[str]:
    claimed: list[str] = []
    async with opened(path, name, synchronous="off") as store:
        while page := await claim_ids(store, claim(name, limit=7)):
            claimed += page
    return claimed


def test_processes_claim_each_run_once(path: str) -> None:
    ids = [f"r{n:03d}" for n in range(300)]

    async def prepare() -> None:
        async with opened(path, "a") as store:
            await store.commit([run(id) for id in ids])

    asyncio.run(prepare())
    claimed = run_processes(claim_as_many_as_possible, path, ("p", "q", "s"))
    assert sorted(id for page in claimed.values() for id in page) == ids


async def open_and_create_a_key(path: str, name: str) -> bytes:
    async with opened(path, name) as store:
        (key,) = await store.keys("tokens", 100.0)
        return key.secret


def test_processes_that_open_a_new_file_agree_on_one_signing_key(path: str) -> None:
    secrets = run_processes(open_and_create_a_key, path, ("p", "q", "s", "t"))
    assert len(set(secrets.values())) == 1


# --- processes that die or fork ---------------------------------------------------------------------------------------


def stop_during_a_commit(path: str, pipe: Connection) -> None:
    connection = apsw.Connection(path)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE runs SET owner = 'thief', fence = 99")
    connection.execute("PRAGMA cache_spill = ON")
    pipe.send("in the transaction")
    pipe.recv()


def test_a_process_killed_during_a_commit_leaves_no_change(path: str) -> None:
    async def main() -> None:
        async with opened(path, "a", busy_timeout=0.05) as store:
            await store.commit([run(owner="a")])
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=stop_during_a_commit, args=(path, theirs))
            process.start()
            assert ours.poll(TIMEOUT_SECONDS)
            with pytest.raises(StoreError) as caught:
                await store.commit([turn(0, entry())])
            assert caught.value.retryable
            process.kill()
            process.join(TIMEOUT_SECONDS)
            assert await store.commit([turn(0, entry())]) == [Committed()]
            assert (await load(store)).record.fence == 0

    asyncio.run(main())


async def create_a_run(path: str, name: str) -> None:
    async with opened(path, name) as store:
        await store.commit([run("from outside")])


def test_a_commit_of_another_process_gives_a_change_hint(path: str) -> None:
    async def main() -> None:
        async with opened(path, "a") as store:
            noticed = asyncio.Event()
            store.on_change(lambda ids: noticed.set())
            await asyncio.to_thread(run_processes, create_a_run, path, ("p",))
            await asyncio.wait_for(noticed.wait(), TIMEOUT_SECONDS)
            assert (await load(store, "from outside")).position == 0

    asyncio.run(main())


FORKING = """
import asyncio, os, sys
from perdure.errors import StoreError
from perdure.stores.results import Committed
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import entry, load, run, turn, worker

async def start():
    await store.open(shards=16)
    await store.join(worker("a"))
    await store.commit([run(owner="a")])

async def use_in_child():
    try:
        await store.commit([run("from the child")])
    except StoreError as error:
        print(error, flush=True)
    await store.close()

async def use_in_parent():
    assert await store.commit([turn(0, entry())]) == [Committed()]
    assert (await load(store)).position == 1
    await store.close()

store = SqliteStore(sys.argv[1])
asyncio.run(start())
child = os.fork()
if child == 0:
    asyncio.run(use_in_child())
    sys.exit(0)  # the interpreter's shutdown garbage-collects the connections
assert os.waitpid(child, 0)[1] == 0
asyncio.run(use_in_parent())
"""


def test_a_forked_child_is_refused_and_does_not_damage_the_file(path: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, path]
    program = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert program.returncode == 0, program.stderr
    assert "before a fork" in program.stdout
    connection = apsw.Connection(path)
    assert connection.execute("PRAGMA integrity_check").get == "ok"
    assert connection.execute("SELECT count(*) FROM history").get == 1
