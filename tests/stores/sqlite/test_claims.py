"""Claims of the SQLite store: what they wait for, and in which thread they execute."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import StoreError
from perdure.stores.results import Committed
from perdure.stores.sqlite import connection as connection_module
from perdure.stores.sqlite import workers
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing.contract.builders import claim, claim_ids, entry, run, turn, worker


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


class Statements:
    """The statements of the writer's connection, and the thread that executed each. `refused` ones fail."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: dict[str, int] = {}
        self.refused = ""

    def trace(self, cursor: Any, sql: str, values: Any) -> bool:
        words = " ".join(re.findall(r"\w+", sql)[:3]).lower()
        self.seen.append(words)
        self.threads[words.split()[0]] = threading.get_ident()
        if self.refused and words.startswith(self.refused):
            raise apsw.IOError("planned")
        return True


def on(store: SqliteStore, test: Callable[[SqliteStore, Statements], Awaitable[None]]) -> None:
    """Run a test on an open store with the worker "a" and the due runs "r0" and "r1"."""

    async def main() -> None:
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.commit([run("r0"), run("r1")])
            statements = Statements()
            await writer_of(store).call(lambda connection: setattr(connection, "exec_trace", statements.trace))
            await test(store, statements)
        finally:
            await store.close()

    asyncio.run(main())


def writer_of(store: SqliteStore) -> connection_module.ConnectionThread:
    return store._thread(store._writer)


async def level_of(store: SqliteStore) -> int:
    return int(await writer_of(store).call(lambda connection: connection.pragma("synchronous")))


@pytest.mark.parametrize("limit", [1, workers.FEW + 10])
def test_the_commit_of_a_claim_does_not_wait_for_the_disk(path: str, limit: int) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        assert await claim_ids(store, claim("a", limit=limit)) == ["r0", "r1"][:limit]
        levels = [each for each in statements.seen if each.startswith(("pragma synchronous", "begin", "commit"))]
        assert levels[-4:] == ["pragma synchronous 1", "begin immediate", "commit", "pragma synchronous 2"]
        assert await store.commit([turn(0, entry(), id="r0")]) == [Committed()]
        assert await level_of(store) == 2

    on(SqliteStore(path), test)


@pytest.mark.parametrize(("synchronous", "level"), [("normal", 1), ("off", 0)])
def test_a_claim_keeps_a_level_that_does_not_wait_for_the_disk(path: str, synchronous: str, level: int) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        assert await claim_ids(store, claim("a")) == ["r0", "r1"]
        assert not any(each.startswith("pragma synchronous ") for each in statements.seen)
        assert await level_of(store) == level

    on(SqliteStore(path, synchronous=synchronous), test)


@pytest.mark.parametrize("refused", ["update runs set", "commit", "pragma synchronous 2"])
@pytest.mark.parametrize("due", [2, workers.FEW + 1])
def test_commits_after_a_failed_claim_wait_for_the_disk(path: str, refused: str, due: int) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        await store.commit([run(f"r{n}") for n in range(2, due)])
        statements.refused = refused
        with pytest.raises(StoreError) as caught:
            await store.claim(claim("a"))
        assert caught.value.retryable
        statements.refused = ""
        assert await level_of(store) == 2
        claimed = await claim_ids(store, claim("a"))
        owned = await store.owned("a")
        assert sorted({*claimed, *owned}) == sorted(f"r{n}" for n in range(due))
        assert await store.commit([turn(0, entry(), id="r0")]) == [Committed()]

    on(SqliteStore(path), test)


@pytest.mark.parametrize("due", [2, workers.FEW, workers.FEW + 1])
def test_few_due_runs_are_claimed_in_the_thread_of_the_caller(path: str, due: int) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        await store.commit([run(f"r{n}") for n in range(2, due)])
        assert len(await store.claim(claim("a"))) == due
        assert (statements.threads["update"] == threading.get_ident()) is (due <= workers.FEW)

    on(SqliteStore(path), test)


def test_runs_in_shards_of_other_workers_count_for_the_thread_that_claims(path: str) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        await store.commit([run(f"other {n}", shard=1) for n in range(workers.FEW)])
        await store.commit([run("mine", shard=2)])
        assert await claim_ids(store, claim("a", shards=frozenset([2]))) == ["mine"]
        assert statements.threads["update"] != threading.get_ident()
        assert await claim_ids(store, claim("a", shards=frozenset([2]))) == []

    on(SqliteStore(path), test)


def test_a_claim_for_many_workflows_executes_in_the_thread(path: str) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        given = claim("a")
        more = tuple((f"workflow {n}", 1) for n in range(workers.FEW))
        assert await claim_ids(store, claim("a", workflows=(*given.workflows, *more))) == ["r0", "r1"]
        assert statements.threads["update"] != threading.get_ident()

    on(SqliteStore(path), test)


def test_the_event_loop_runs_while_a_claim_waits_for_another_process(path: str) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        other = apsw.Connection(path)
        other.execute("BEGIN IMMEDIATE")
        claiming = asyncio.create_task(store.claim(claim("a")))
        locked = asyncio.Event()
        loop = asyncio.get_running_loop()
        writer = writer_of(store)
        wait = writer._wait_for_lock

        def wait_and_notify(waits: int) -> bool:
            loop.call_soon_threadsafe(locked.set)
            return wait(waits)

        writer._wait_for_lock = wait_and_notify  # type: ignore[method-assign]
        await locked.wait()
        assert not claiming.done()
        other.execute("ROLLBACK")
        other.close()
        assert [each.id for each in await claiming] == ["r0", "r1"]
        assert statements.threads["update"] != threading.get_ident()

    on(SqliteStore(path), test)


def test_a_claim_waits_for_jobs_that_use_the_connection(path: str) -> None:
    async def test(store: SqliteStore, statements: Statements) -> None:
        started, finish = threading.Event(), threading.Event()

        def occupy(connection: apsw.Connection) -> None:
            started.set()
            finish.wait(60)

        occupying = asyncio.create_task(writer_of(store).call(occupy))
        await asyncio.to_thread(started.wait, 60)
        claiming = asyncio.create_task(store.claim(claim("a")))
        await asyncio.sleep(0)
        assert not claiming.done()
        finish.set()
        assert [each.id for each in await claiming] == ["r0", "r1"]
        assert statements.threads["update"] != threading.get_ident()
        await occupying

    on(SqliteStore(path), test)


def test_a_claim_in_the_thread_of_the_caller_leaves_a_checkpoint_to_the_thread(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: list[int] = []
    monkeypatch.setattr(
        connection_module.ConnectionThread, "_checkpoint", lambda self: checkpoints.append(threading.get_ident())
    )

    async def test(store: SqliteStore, statements: Statements) -> None:
        monkeypatch.setattr(connection_module, "CHECKPOINT_PAGES", writer_of(store)._wal_pages)
        assert await claim_ids(store, claim("a")) == ["r0", "r1"]
        assert statements.threads["update"] == threading.get_ident()
        await writer_of(store).call(lambda connection: None)
        assert checkpoints
        assert threading.get_ident() not in checkpoints

    on(SqliteStore(path), test)
