"""The Redis store passes the contract on a cluster of six nodes: three primaries, each with a replica."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Connection

from perdure.errors import StoreError
from perdure.stores.redis.server import RedisServer, parse_url
from perdure.stores.redis.store import RedisStore
from perdure.stores.results import Committed, Created, WriteResult
from perdure.testing.contract.builders import SHARDS, entry, refused, run, turn, worker
from perdure.testing.contract.queue_builders import configure
from perdure.testing.store_contract import ContractWithoutQueues
from tests.servers.redis import Cluster, new_prefix, with_options


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.remove()


class TestRedisCluster(ContractWithoutQueues):
    @pytest.fixture(autouse=True)
    def _server(self, cluster):
        self._url = with_options(cluster.url, prefix=new_prefix())

    async def make_store(self):
        return RedisStore(self._url)

    async def again(self, store):
        return RedisStore(self._url)


def test_queue_is_refused_on_a_cluster_with_one_partition(cluster: Cluster) -> None:
    async def scenario() -> None:
        store = RedisStore(with_options(cluster.url, prefix=new_prefix(), partitions=1))
        await store.open(shards=SHARDS)
        try:
            assert "has no queues on several partitions or a cluster" in str(await refused(store.commit([configure()])))
            assert await store.queues() == []
        finally:
            await store.close()

    asyncio.run(scenario())


def test_store_continues_when_a_primary_is_lost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        asyncio.run(_lose_a_primary(cluster))
    finally:
        cluster.remove()


async def _lose_a_primary(cluster: Cluster) -> None:
    store = RedisStore(with_options(cluster.nodes[1].url, prefix=new_prefix()))
    await store.open(shards=SHARDS)
    try:
        await store.join(worker("a"))
        ids = [f"r{n}" for n in range(50)]
        await store.commit([run(id, owner="a") for id in ids])
        for node in cluster.nodes[:3]:
            node.command("WAIT", 1, 5000)  # replication is asynchronous: what a replica lacks is lost
        cluster.nodes[0].stop(signal.SIGKILL)
        results = await _retry_until_available(lambda: store.commit([turn(0, entry(), id=id) for id in ids]))
        assert results == [Committed()] * 50
        assert all(snapshot and snapshot.position == 1 for snapshot in await store.load(ids))
    finally:
        await store.close()


async def _retry_until_available(call: Callable[[], Awaitable[list[WriteResult]]]) -> list[WriteResult]:
    """Retry the call, as the engine would, until the replica is promoted."""
    for _ in range(600):
        try:
            return await call()
        except StoreError as error:
            if not error.retryable:
                raise
            last = error
            await asyncio.sleep(0.1)
    raise AssertionError("no replica was promoted") from last


def test_client_without_nodes_finds_the_node_of_a_key_without_redirects(cluster: Cluster) -> None:
    async def scenario() -> None:
        server = RedisServer(parse_url(cluster.url))
        await server.connect()
        try:
            await server.client.aclose()  # as the client does itself when a primary is lost
            await asyncio.gather(*(server.command("EVAL", "return 1", 1, f"key {n}") for n in range(50)))
        finally:
            await server.close()

    before = _count_redirects(cluster)
    asyncio.run(scenario())
    assert _count_redirects(cluster) == before


def test_client_whose_last_call_failed_leaves_no_connection(cluster: Cluster) -> None:
    async def call_all(server: RedisServer) -> None:
        for n in range(20):
            await server.command("EVAL", "return 1", 1, f"key {n}")

    async def scenario() -> None:
        server = RedisServer(parse_url(cluster.url))
        await server.connect()
        try:
            await call_all(server)
            cluster.nodes[0].command("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(StoreError, match="cannot be reached"):
                await call_all(server)
        finally:
            await server.close()
        assert not any(connection.is_connected for connection in connections)

    connections: list[Connection] = []
    with pytest.MonkeyPatch.context() as patch:
        initialize = Connection.__init__

        def recorded(self: Connection, *args: Any, **settings: Any) -> None:
            initialize(self, *args, **settings)
            connections.append(self)

        patch.setattr(Connection, "__init__", recorded)
        asyncio.run(scenario())
    assert len(connections) > 3


def _count_redirects(cluster: Cluster) -> list[bytes]:
    return [line for node in cluster.nodes for line in node.command("INFO", "errorstats").split() if b"MOVED" in line]


def test_listener_on_another_node_gets_hints(cluster: Cluster) -> None:
    prefix = new_prefix()

    async def scenario() -> None:
        store, other = (RedisStore(with_options(node.url, prefix=prefix)) for node in cluster.nodes[:2])
        await store.open(shards=SHARDS)
        await other.open(shards=SHARDS)
        hints: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        other.on_change(hints.put_nowait)
        try:
            for n in range(20):  # on all nodes, also on that of `store`, where no other store listens
                await store.commit([run(f"r{n}")])
                assert await asyncio.wait_for(hints.get(), 60) == frozenset([f"r{n}"])
        finally:
            await store.close()
            await other.close()

    asyncio.run(scenario())


def test_follower_on_another_node_is_notified(cluster: Cluster) -> None:
    prefix = new_prefix()

    async def scenario() -> None:
        store, other = (RedisStore(with_options(node.url, prefix=prefix)) for node in cluster.nodes[:2])
        await store.open(shards=SHARDS)
        await other.open(shards=SHARDS)
        try:
            await store.join(worker("a"))
            for n in range(5):  # on all nodes
                await store.commit([run(f"r{n}", owner="a")])
                notified = asyncio.Event()
                unfollow = other.follow(f"r{n}", notified.set)
                async with asyncio.timeout(10):
                    while not store._listener.followed_runs.is_followed_elsewhere(f"r{n}"):
                        await asyncio.sleep(0.001)
                    await store.commit([turn(0, entry(), id=f"r{n}")])
                    await notified.wait()
                unfollow()
        finally:
            await store.close()
            await other.close()

    asyncio.run(scenario())


def test_runs_are_distributed_over_the_primaries(cluster: Cluster) -> None:
    async def scenario() -> None:
        store = RedisStore(with_options(cluster.url, prefix="spread"))
        await store.open(shards=SHARDS)
        try:
            await store.join(worker("a"))
            ids = [f"r{n}" for n in range(200)]
            assert await store.commit([run(id) for id in ids]) == [Created(owned=False)] * 200
        finally:
            await store.close()

    asyncio.run(scenario())
    sizes = [int(node.command("DBSIZE").split(b"\r\n")[0][1:]) for node in cluster.nodes[:3]]
    assert min(sizes) > 0
