"""Key prefixes on the session's Redis that tests borrow; their keys are deleted when the test is over.

All stores on an event loop share their connections, because opening one takes longer than a short test.
"""

from __future__ import annotations

import asyncio
import os
from itertools import count
from weakref import WeakKeyDictionary

import redis
from redis.asyncio import BlockingConnectionPool, Redis

from perdure.clock import Clock
from perdure.stores.redis.connections import ScriptConnectionPool
from perdure.stores.redis.store import RedisStore
from tests.servers.redis import shared_url, with_options
from tests.servers.session_cleanup import when_the_loop_ends

_SESSION = f"t-{os.urandom(6).hex()}"
_numbers = count()
_borrowed: list[str] = []
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, BlockingConnectionPool] = WeakKeyDictionary()
_script_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, ScriptConnectionPool] = WeakKeyDictionary()


class SharedScriptPool(ScriptConnectionPool):
    """A pool that is closed when the event loop ends, and not by the first store that closes."""

    async def close(self) -> None:
        return


class BorrowedStore(RedisStore):
    """A Redis store with the clock of a test."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, clock=clock)
        self.url = url
        self._server.build_single_client = _client  # type: ignore[method-assign]
        self._server._build_script_pool = _script_pool  # type: ignore[method-assign]

    async def open(self, *, shards: int) -> None:
        loop = asyncio.get_running_loop()
        if loop not in _pools:
            _pools[loop] = BlockingConnectionPool.from_url(shared_url())
            _script_pools[loop] = SharedScriptPool(_pools[loop], 50, 30.0)
            await when_the_loop_ends(_script_pools[loop].drop_idle)
            await when_the_loop_ends(_pools[loop].disconnect)
        await super().open(shards=shards)


def _client() -> Redis:
    """Return a client that leaves its connections open for other stores when it is closed."""
    return Redis(connection_pool=_pools[asyncio.get_running_loop()])


def _script_pool(client: Redis) -> ScriptConnectionPool:
    return _script_pools[asyncio.get_running_loop()]


def borrow(clock: Clock) -> BorrowedStore:
    """Return a store with a new prefix."""
    prefix = f"{_SESSION}-{next(_numbers)}"
    _borrowed.append(prefix)
    return BorrowedStore(with_options(shared_url(), prefix=prefix, durability="relaxed"), clock)


def release_all() -> None:
    """Delete the keys of all prefixes that this process has borrowed."""
    if not _borrowed:
        return
    _borrowed.clear()
    with redis.Redis.from_url(shared_url()) as client:
        keys = list(client.scan_iter(match=f"{{{_SESSION}-*", count=1000))
        for first in range(0, len(keys), 500):
            client.unlink(*keys[first : first + 500])
