"""A Redis store of an earlier format is upgraded when it is opened: once per partition, also after an interruption."""

from __future__ import annotations

import asyncio

import pytest

from perdure.errors import StoreError
from perdure.stores.redis import upgrades
from perdure.stores.redis.store import RedisStore
from perdure.testing.contract.builders import run
from tests.servers.redis import prefix_of_its_own


@pytest.fixture
def applied(monkeypatch):
    """Let this version have two more formats; return the (upgrade, partition) pairs that were applied."""
    done: list[tuple[str, int]] = []

    def upgrade_named(name):
        async def upgrade(partitions, number):
            await partitions.command(number, "HSET", "meta:", name, "1")
            done.append((name, number))

        return upgrade

    monkeypatch.setattr(upgrades, "UPGRADES", (upgrade_named("first"), upgrade_named("second")))
    return done


def test_store_of_an_earlier_format_is_upgraded_in_every_partition(monkeypatch, applied):
    async def scenario(url):
        await open_with(monkeypatch, url, ())
        store = RedisStore(url)
        await store.open(shards=16)
        assert applied == [(name, number) for name in ("first", "second") for number in range(3)]
        assert await store._partitions.command(0, "HGET", "meta:", "format") == b"5"
        assert [record.id for record in await store.records(["r"]) if record] == ["r"]
        await store.close()
        await open_once(url)
        assert len(applied) == 6, "an upgraded store is upgraded again"

    with prefix_of_its_own(partitions=3) as url:
        asyncio.run(scenario(url))


def test_interrupted_upgrade_is_completed_at_the_next_open(monkeypatch, applied):
    async def scenario(url):
        await open_with(monkeypatch, url, ())
        first, second = upgrades.UPGRADES

        async def interrupted(partitions, number):
            raise ConnectionError("the process dies")

        with pytest.raises(ConnectionError):
            await open_with(monkeypatch, url, (first, interrupted))
        await open_with(monkeypatch, url, (first, second))
        assert applied == [("first", 0), ("second", 0)], "the completed upgrade is not repeated"

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


def test_store_of_a_later_format_is_refused(monkeypatch, applied):
    async def scenario(url):
        await open_once(url)
        with pytest.raises(StoreError, match=r"another version of perdure \(format 5, not 3\)"):
            await open_with(monkeypatch, url, ())

    with prefix_of_its_own() as url:
        asyncio.run(scenario(url))


async def open_with(monkeypatch, url, steps):
    """Open the store as a version with these upgrades does."""
    with monkeypatch.context() as patch:
        patch.setattr(upgrades, "UPGRADES", steps)
        await open_once(url)


async def open_once(url):
    store = RedisStore(url)
    await store.open(shards=16)
    await store.commit([run()])
    await store.close()
