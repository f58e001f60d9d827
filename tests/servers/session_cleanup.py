"""Cleanup of resources that outlive their users, at the end of their event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakKeyDictionary

_ends: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncIterator[None]]] = WeakKeyDictionary()


async def when_the_loop_ends(close: Callable[[], Awaitable[object]]) -> None:
    """Call `close` last on the running event loop: `asyncio.run` ends generators that are still suspended."""

    async def end() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await close()

    suspended = end()
    await anext(suspended)
    _ends.setdefault(asyncio.get_running_loop(), []).append(suspended)
