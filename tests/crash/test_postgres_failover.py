"""A PostgreSQL primary fails under load and its standby is promoted: no acknowledged write is lost.

With synchronous replication, and with both hosts in the URL: clients find the new primary themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import pytest

from perdure.errors import StoreError
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.results import Committed
from perdure.testing.contract.builders import entry, load, run, turn, worker
from tests.servers.postgres import Server, Standby, primary_and_standby, url_of

T = TypeVar("T")
RUNS = [f"r{n}" for n in range(4)]
COMMITS = 60


async def opened(url: str) -> PostgresStore:
    store = PostgresStore(url)
    await store.open(shards=16)
    await store.join(worker("a"))
    await store.commit([run(id, owner="a") for id in RUNS])
    return store


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except StoreError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.02)


def test_acknowledged_writes_survive_a_failover() -> None:
    async def test(primary: Server, standby: Standby) -> None:
        store = await opened(url_of(primary, standby))
        acknowledged = dict.fromkeys(RUNS, 0)
        enough = asyncio.Event()

        async def work(id: str) -> None:
            for base in range(COMMITS):
                write = turn(base, entry(f"s#{base}", base), id=id)
                assert await patiently(partial(store.commit, [write])) == [Committed()]
                acknowledged[id] = base + 1
                if base == 10:
                    enough.set()

        working = asyncio.gather(*(work(id) for id in RUNS))
        await enough.wait()
        await asyncio.to_thread(primary.stop, primary.at_once)
        before = dict(acknowledged)
        assert set(before.values()) != {COMMITS}, "it was lost in the middle"
        await standby.promote()
        found = {id: (await patiently(partial(load, store, id))).position for id in RUNS}
        assert all(found[id] >= before[id] for id in RUNS), (found, before)
        await working
        for id in RUNS:
            snapshot = await load(store, id)
            assert (snapshot.position, len(snapshot.entries)) == (COMMITS, COMMITS)
        await store.close()

    with primary_and_standby() as servers:
        asyncio.run(test(*servers))


def test_commit_that_the_standby_lacks_is_never_acknowledged() -> None:
    """A cancelled wait for the standby leaves the commit on the primary: a retry must wait again."""

    async def test(primary: Server, standby: Standby) -> None:
        store = await patiently(partial(opened, url_of(primary, standby) + "&timeout=1"))
        await asyncio.to_thread(standby.stop)
        write = turn(0, entry("s", 0), id="r0")
        for _ in range(3):
            with pytest.raises(StoreError) as refused:
                await store.commit([write])
            assert refused.value.retryable
        await asyncio.to_thread(standby.start)
        assert await patiently(partial(store.commit, [write])) == [Committed()]
        await store.close()

    with primary_and_standby() as servers:
        asyncio.run(test(*servers))
