"""Worker: a process that only executes runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.config import EngineConfig
from perdure.definition import Workflow
from perdure.embedded import Engine
from perdure.store.base import Store


class Worker:
    """`async with Worker(url): ...`, or `await Worker(url).run()` until SIGTERM or SIGINT."""

    def __init__(
        self,
        url: str | Store,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        pool: str = "default",
        concurrency: int | None = None,
        config: EngineConfig | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = Engine(url, workflows, config, pool=pool, clock=clock, concurrency=concurrency)

    async def __aenter__(self) -> Self:
        await self._engine.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._engine.shutdown()

    async def run(self) -> None:
        """Execute runs until SIGTERM or SIGINT, then finish steps within the grace and give the runs back."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            async with self:
                await stop.wait()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
