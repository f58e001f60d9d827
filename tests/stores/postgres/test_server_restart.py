"""A PostgreSQL server crashes or stops and restarts."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.clock import SYSTEM_CLOCK, sleep_on
from perdure.errors import StoreError
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.results import Committed, WriteResult
from perdure.stores.writes import Write
from perdure.testing.contract.builders import entry, load, run, turn, worker
from tests.servers.postgres import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that the test may stop and restart."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def commit_with_retries(store: PostgresStore, batch: list[Write]) -> list[WriteResult]:
    while True:
        try:
            return await store.commit(batch)
        except StoreError as error:
            if not error.retryable:
                raise
            await sleep_on(SYSTEM_CLOCK, 0.02)


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT], ids=["crash", "shutdown"])
def test_acknowledged_turns_are_stored_after_a_restart(server: Server, how: signal.Signals) -> None:
    async def test() -> None:
        store = PostgresStore(server.url)
        await store.open(shards=16)
        await store.join(worker("a"))
        await store.commit([run(f"r{n}", owner="a") for n in range(4)])
        acknowledged = dict.fromkeys((f"r{n}" for n in range(4)), 0)
        enough = asyncio.Event()

        async def work(id: str) -> None:
            for base in range(60):
                write = turn(base, entry(f"s#{base}", base), id=id)
                assert await commit_with_retries(store, [write]) == [Committed()]
                acknowledged[id] = base + 1
                if base == 10:
                    enough.set()

        working = asyncio.gather(*(work(id) for id in acknowledged))
        await enough.wait()
        await asyncio.to_thread(server.restart, how)
        await working
        for id in acknowledged:
            snapshot = await load(store, id)
            assert (snapshot.position, len(snapshot.entries)) == (60, 60)
        await store.close()

    asyncio.run(test())
