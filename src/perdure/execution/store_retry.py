"""Reading from a store that may be away for a while."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.clock import Clock, pause
from perdure.errors import StoreError
from perdure.retry import Retry

LOGGER = logging.getLogger("perdure.execution")
T = TypeVar("T")


async def read_patiently(read: Callable[[], Awaitable[T]], clock: Clock, retry: Retry, *, for_ever: bool = True) -> T:
    """Call until it answers, or for the attempts of `retry`; an error that no waiting mends is raised at once."""
    tries = 0
    while True:
        try:
            return await read()
        except StoreError as error:
            tries += 1
            if not error.retryable or (tries >= retry.max_attempts and not for_ever):
                raise
            LOGGER.warning("the store is away, a read waits (try %d): %s", tries, error)
        await pause(clock, retry.pause_after(min(tries, 32), random.random()))
