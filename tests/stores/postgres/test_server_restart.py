"""A PostgreSQL server that dies and comes back."""

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
from tests.servers import postgres as launcher


@pytest.fixture
def server() -> Iterator[launcher.Server]:
    """One that a test may stop as it likes."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    server = launcher.Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.remove()


async def commit_patiently(store: PostgresStore, batch: list[Write]) -> list[WriteResult]:
    while True:
        try:
            return await store.commit(batch)
        except StoreError as error:
            if not error.retryable:
                raise
            await sleep_on(SYSTEM_CLOCK, 0.02)


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT], ids=["as by a crash", "in order"])
def test_what_was_acknowledged_is_there_after_the_server_came_back(
    server: launcher.Server, how: signal.Signals
) -> None:
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
                assert await commit_patiently(store, [write]) == [Committed()]
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
