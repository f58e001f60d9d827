"""Worker: a process that only executes runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from perdure.client.store_urls import open_store
from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.config import EngineConfig
from perdure.engine import Engine
from perdure.errors import WorkflowMisuse
from perdure.execution.lifespan import LifespanOption
from perdure.stores.protocol import Store
from perdure.workflows.definition import Workflow
from perdure.workflows.work_queues import WorkQueue


class Worker:
    """Executes runs. Use `await Worker(url).run()` until SIGTERM or SIGINT, or `async with Worker(url):`.

    You may start it before its store: opening retries until the store is available. It raises `WorkflowMisuse` if it
    would have to choose between two definitions of one workflow name and version. `lifespan` and `queues` are as for an
    `Engine`; the function gets the worker.
    """

    def __init__(
        self,
        url: str | Store,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        pool: str = "default",
        concurrency: int | None = None,
        config: EngineConfig | None = None,
        lifespan: LifespanOption | None = None,
        *,
        queues: Iterable[WorkQueue] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        store = open_store(url, clock, owns_loop=True)
        self._engine = Engine(
            store,
            workflows,
            config,
            lifespan,
            pool=pool,
            clock=clock,
            concurrency=concurrency,
            queues=queues,
            _wait_for_store=True,
        )
        self._engine._lifespan_owner = self
        self._engine._session.client_name = "Worker"

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def _open(self) -> None:
        """Open the engine. Unlike an engine, a worker gets no `start(workflow)` that could name a definition."""
        self._engine._catalog.refuse_ambiguous()
        await self._engine.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._engine.shutdown()

    async def run(self) -> None:
        """Execute runs until SIGTERM or SIGINT, then let steps finish within the grace and release all runs."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        signals = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            raise WorkflowMisuse(
                "Worker.run() handles signals, which is possible in the main thread only; "
                "use `async with Worker(...)` in other threads"
            )
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            await self.run_until(stop)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def run_until(self, stop: asyncio.Event, on_started: Callable[[], None] = lambda: None) -> None:
        """Execute runs until `stop` is set, which also ends the wait for an unavailable store.

        `on_started` is called when the worker starts to execute runs.
        """
        opening = asyncio.ensure_future(self._open())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
                on_started()
                await stopping
        finally:
            for waiting in (opening, stopping):
                waiting.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)
            await self._engine.shutdown()
