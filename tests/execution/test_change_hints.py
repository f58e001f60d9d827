"""Who gets a change hint of the store first."""

from __future__ import annotations

import asyncio

from perdure.clock import SYSTEM_CLOCK
from perdure.config import EngineConfig
from perdure.execution.store_session import StoreSession
from perdure.stores.memory.store import MemoryStore


def test_a_worker_gets_a_change_hint_before_callers_that_wait() -> None:
    async def main() -> None:
        session = StoreSession(MemoryStore(), SYSTEM_CLOCK, EngineConfig())
        await session.open(retry_forever=False)
        waiter = session.waiters.wait("r", end=True)
        woken_before: list[bool] = []
        session.on_change(lambda run_ids: woken_before.append(waiter.done()))
        session._on_change_hint(frozenset(["r"]))
        assert woken_before == [False]
        assert waiter.done()
        await session.close(1.0)

    asyncio.run(main())
