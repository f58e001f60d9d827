"""Engine: client and worker in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from perdure.client.client import Client
from perdure.client.views import RecoveryReport
from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.cluster.membership import Membership
from perdure.config import EngineConfig
from perdure.errors import WorkflowMisuse
from perdure.execution.catalog import Catalog
from perdure.execution.lifespan import Lifespan, LifespanOption, check_lifespan
from perdure.execution.local_worker import NullLocalWorker
from perdure.execution.queue_declarations import declare_queues
from perdure.execution.runtime import WorkerRuntime
from perdure.model.validation import check_count, check_public_name, check_seconds
from perdure.stores.protocol import Store
from perdure.workflows.definition import Workflow
from perdure.workflows.work_queues import QUEUES, WorkQueue, check_queues

LOGGER = logging.getLogger("perdure.execution")


class Engine(Client):
    """A `Client` that also executes runs, new ones and those that other workers left unfinished.

    Use it as `async with Engine(url) as engine:`. It executes the `workflows` of the list only. With `workflows=None`
    it executes every workflow that is imported or that you start through it.

    `lifespan` is an async context manager, or a function of the engine that returns one. It is entered before the first
    step and exited after the last one. Steps read the value that it yields as `current_step().state`.

    When it opens, it stores the settings of the work queues of the list `queues`, or of all that are imported.
    """

    def __init__(
        self,
        url: str | Store,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        config: EngineConfig | None = None,
        lifespan: LifespanOption | None = None,
        *,
        pool: str = "default",
        clock: Clock = SYSTEM_CLOCK,
        concurrency: int | None = None,
        queues: Iterable[WorkQueue] | None = None,
        _wait_for_store: bool = False,
    ) -> None:
        super().__init__(url, config=config, clock=clock)
        self._session.wait_for_store = _wait_for_store
        self._pool = check_public_name("a pool", pool)
        self._queues = check_queues(queues)
        self._session.declares_queue = lambda queue: self._queues is None or queue in self._queues
        self._catalog = Catalog(workflows)
        self._session.known_types.use(self._catalog.own, own_only=not self._catalog.is_open)
        self._concurrency = None if concurrency is None else check_count("concurrency", concurrency)
        self._runtime: WorkerRuntime | None = None
        self._lifespan_option = check_lifespan(lifespan)
        self._lifespan_owner: Any = self  # a worker passes itself
        self._lifespan: Lifespan | None = None

    async def open(self) -> None:
        """Open the store and start to execute runs; `async with` calls it."""
        await super().open()
        runtime: WorkerRuntime | None = None
        try:
            state = await self._enter_lifespan()
            await self._declare_queues()
            runtime = self._build_runtime()
            runtime.coordinator.executor.state = state
            await runtime.start(retry_forever=self._session.wait_for_store)
            await self._declare_schedules()
        except BaseException:
            if runtime is not None:
                await runtime.abort()
            await self._exit_lifespan_after_error()
            await self._session.close()
            raise
        self._attach(runtime)

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Stop claiming runs, let steps finish within `grace`, release all runs and close the store."""
        seconds = self._session.config.seconds("grace") if grace is None else check_seconds("grace", grace)
        self._session.check_caller()
        runtime = self._detach()
        if runtime is None:
            await self._session.close()
            return
        try:
            await runtime.stop(seconds, wait_for_bodies=self._lifespan is not None)
        finally:
            try:
                await self._exit_lifespan()
            finally:
                await self._session.close(writes_timeout=0.0)  # `stop` has waited for them

    async def recover(self) -> RecoveryReport:
        """Take over the runs of dead workers and claim what is due, now.

        An engine does this when it opens and periodically, so you rarely need to call it.
        """
        if self._runtime is None:
            raise WorkflowMisuse("this Engine is not open: use `async with Engine(...)`")
        self._session.check_caller()
        takeover, claimed = await self._runtime.recover()
        return RecoveryReport(takeover.workers, takeover.runs, claimed)

    async def _enter_lifespan(self) -> Any:
        """Enter the lifespan, and return what the steps get as their state."""
        if self._lifespan_option is None:
            return None
        self._lifespan, state = await Lifespan.enter(self._lifespan_option, self._lifespan_owner)
        return state

    async def _exit_lifespan(self) -> None:
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            await lifespan.exit()

    async def _exit_lifespan_after_error(self) -> None:
        """Exit the lifespan; log its error, because another one is being raised."""
        try:
            await self._exit_lifespan()
        except Exception:
            LOGGER.exception("Lifespan failed on exit; the resources that it opened may still be open")

    async def _declare_schedules(self) -> None:
        """Apply the schedules that the workflows of this engine declare."""
        await self._schedules.declare(self._catalog.all_latest())

    async def _declare_queues(self) -> None:
        """Store the settings of the queues of this engine. A process without queues makes no call."""
        declared = {each.name: each.settings for each in (QUEUES.all() if self._queues is None else self._queues)}
        if declared:
            retry = self._session.wait_for_store
            await declare_queues(self._session.store_session, declared, retry_forever=retry)

    def _build_runtime(self) -> WorkerRuntime:
        """Build the worker over the open store, without starting it."""
        store_session = self._session.store_session
        config = store_session.config
        membership = Membership(
            store_session.store,
            store_session.clock,
            pool=self._pool,
            lease=config.seconds("lease"),
            shards=config.shards,
            workflows=self._catalog.workflow_versions,
        )
        return WorkerRuntime(store_session, self._catalog, self._pool, membership, self._concurrency)

    def _attach(self, runtime: WorkerRuntime) -> None:
        """Make the worker visible to the calls of this client."""
        self._runtime = self._session.local_worker = runtime

    def _detach(self) -> WorkerRuntime | None:
        runtime, self._runtime = self._runtime, None
        self._session.local_worker = NullLocalWorker()
        return runtime

    async def _abandon(self) -> None:
        """Stop as a crash would, for tests: write nothing to the store and release no run."""
        runtime = self._detach()
        if runtime is not None:
            await runtime.abort()
        await self._exit_lifespan_after_error()
        await self._session.abandon()
