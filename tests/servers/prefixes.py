"""Prefixes of keys on the session's Redis that tests borrow; what they wrote is deleted when the test is over."""

from __future__ import annotations

import os
from itertools import count

import redis

from perdure.clock import Clock
from perdure.store.redis import RedisStore
from tests.servers.redis import shared_url, with_options

_SESSION = f"t-{os.urandom(6).hex()}"
_numbers = count()
_lent: list[str] = []


class BorrowedStore(RedisStore):
    """A Redis store whose time is a test's own."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, clock=clock)
        self.url = url


def borrow(clock: Clock) -> BorrowedStore:
    """A store over a prefix that nobody else uses."""
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
