"""Closing what outlives its users, but not the event loop that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakKeyDictionary

_ends: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncIterator[None]]] = WeakKeyDictionary()


async def when_the_loop_ends(close: Callable[[], Awaitable[object]]) -> None:
    """Have this called last on the running event loop: `asyncio.run` ends generators that are still suspended."""

    async def end() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await close()

    suspended = end()
    await anext(suspended)
    _ends.setdefault(asyncio.get_running_loop(), []).append(suspended)
