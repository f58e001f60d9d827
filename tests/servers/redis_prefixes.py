"""Prefixes of keys on the session's Redis that tests borrow; their keys are deleted when the test ends.

All stores on an event loop share their connections: to make one takes longer than to use it in a short scenario.
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
_lent: list[str] = []
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, BlockingConnectionPool] = WeakKeyDictionary()
_links: WeakKeyDictionary[asyncio.AbstractEventLoop, ScriptConnectionPool] = WeakKeyDictionary()


class SharedLink(ScriptConnectionPool):
    """Return the pool of this loop, closed when the loop ends and not with the first store."""

    async def close(self) -> None:
        return


class BorrowedStore(RedisStore):
    """A Redis store with the clock of a test."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, clock=clock)
        self.url = url
        self._server._alone = _client  # type: ignore[method-assign]
        self._server._linked = _linked  # type: ignore[method-assign]

    async def open(self, *, shards: int) -> None:
        loop = asyncio.get_running_loop()
        if loop not in _pools:
            _pools[loop] = BlockingConnectionPool.from_url(shared_url())
            _links[loop] = SharedLink(_pools[loop], 50, 30.0)
            await when_the_loop_ends(_links[loop].drop_idle)
            await when_the_loop_ends(_pools[loop].disconnect)
        await super().open(shards=shards)


def _client() -> Redis:
    """A connection pool that stays open for other stores when one store closes."""
    return Redis(connection_pool=_pools[asyncio.get_running_loop()])


def _linked(client: Redis) -> ScriptConnectionPool:
    return _links[asyncio.get_running_loop()]


def borrow(clock: Clock) -> BorrowedStore:
    """A store with its own prefix."""
    prefix = f"{_SESSION}-{next(_numbers)}"
    _lent.append(prefix)
    return BorrowedStore(with_options(shared_url(), prefix=prefix, durability="relaxed"), clock)


def give_back() -> None:
    """Delete everything under the prefixes that were lent, which are all of this process."""
    if not _lent:
        return
    _lent.clear()
    with redis.Redis.from_url(shared_url()) as client:
        keys = list(client.scan_iter(match=f"{{{_SESSION}-*", count=1000))
        for first in range(0, len(keys), 500):
            client.unlink(*keys[first : first + 500])
