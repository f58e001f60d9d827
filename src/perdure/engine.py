"""Engine: client and worker in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from perdure.client.client import Client
from perdure.client.views import RecoveryReport
from perdure.clock import SYSTEM_CLOCK, Clock
from perdure.cluster.membership import Membership
from perdure.config import EngineConfig
from perdure.errors import WorkflowMisuse
from perdure.execution.catalog import Catalog
from perdure.execution.runtime import WorkerRuntime
from perdure.execution.store_session import StoreSession
from perdure.execution.waiters import ChangeFuture
from perdure.model.records import RunRecord
from perdure.model.validation import check_count, check_name, check_seconds
from perdure.stores.protocol import Store
from perdure.stores.results import Created, WriteResult
from perdure.stores.writes import CreateRun
from perdure.workflows.definition import Workflow
from perdure.workflows.start_request import StartRequest, claimed_at_creation


class Engine(Client):
    """`async with Engine(url) as engine:` starts runs, executes them, and goes on with those that were left unfinished.

    `workflows=None` serves every workflow imported so far and any that is started through it; a list, just those.
    """

    def __init__(
        self,
        url: str | Store,
        workflows: Iterable[Workflow[Any, Any]] | None = None,
        config: EngineConfig | None = None,
        *,
        pool: str = "default",
        clock: Clock = SYSTEM_CLOCK,
        concurrency: int | None = None,
    ) -> None:
        super().__init__(url, config=config, clock=clock)
        self._pool = check_name("a pool", pool)
        self._catalog = Catalog(workflows)
        self._concurrency = None if concurrency is None else check_count("concurrency", concurrency)
        self._core: WorkerRuntime | None = None

    async def open(self) -> None:
        await super().open()
        if self._core is None:
            core = build_runtime(self._open, self._catalog, self._pool, self._concurrency)
            await core.start()
            self._core = core

    async def shutdown(self, grace: float | timedelta | None = None) -> None:
        """Take no more work, let steps finish within `grace`, give runs back, close."""
        if self._core is not None:
            core, self._core = self._core, None
            await core.stop(self._config.seconds("grace") if grace is None else check_seconds("grace", grace))
        await super().shutdown()

    async def recover(self) -> RecoveryReport:
        """Take over from dead workers and take up what is due. Opening does it too, and duties keep doing it."""
        if self._core is None:
            raise WorkflowMisuse("this Engine is not open: use `async with Engine(...)`")
        takeover, claimed = await self._core.recover()
        return RecoveryReport(takeover.workers, takeover.runs, claimed)

    async def _create(self, order: StartRequest) -> WriteResult:
        creating = self._start_locally(order)
        if creating is not None:
            return await creating
        answer = await super()._create(order)
        if self._core is not None:
            self._core.run_has_messages(order.record.id)
        return answer

    async def _execute(self, order: StartRequest) -> Any:
        """Who waits for a run that is begun here is woken when it ends. To be woken as well when it is stored, only to
        wait again, would come between its first step and the commit of that: some 4 us."""
        hub, run_id = self._open.waiters, order.record.id
        ended = hub.wait(run_id, end=True)
        try:
            creating = self._start_locally(order)
            if creating is None:
                return await super()._execute(order)
            creating.add_done_callback(partial(_wake_unless_created, ended))
            record = await self._wait_for_change(ended, None)
            if record is None or record.created_by != order.record.created_by:  # no more than a hint, or not this run
                self._check_created(order, await creating)
                record = await self._ended(run_id, None)
            return self._outcome(record, order.workflow)
        finally:
            hub.remove(run_id, ended, end=True)

    def _start_locally(self, order: StartRequest) -> asyncio.Future[WriteResult] | None:
        """A run that this process can execute is born as its own, so that it need not be claimed; None if it cannot."""
        core, record, workflow = self._core, order.record, order.workflow
        if core is None or workflow is None or record.wake_at != record.created_at:
            return None
        owner = core.owner_for_new_run(workflow)
        if owner is None:
            return None
        ours = claimed_at_creation(record, owner)
        return self._open.committer.submit_future(
            CreateRun(ours), core.on_created_callback(ours, workflow), wait_for_store=False
        )

    def _mailed(self, run_id: str) -> None:
        if self._core is not None:
            self._core.run_has_messages(run_id)

    def _woken(self) -> None:
        if self._core is not None:
            self._core.runs_may_be_due()

    def _cut_off(self, run_id: str) -> None:
        if self._core is not None:
            self._core.run_ended_externally(run_id)

    async def _has_live_worker(self, record: RunRecord) -> bool:
        here = record.pool == self._pool and (record.workflow, record.version) in self._catalog.pairs()
        return (here and self._core is not None) or await super()._has_live_worker(record)

    def _executes(self, run_id: str) -> bool:
        return self._core is not None and self._core.is_executing(run_id)

    async def _abandon(self) -> None:
        """Stop as a crash would, for tests: no word to the store, nothing given back."""
        if self._core is not None:
            core, self._core = self._core, None
            await core.abort()
        if self._link is not None:
            link, self._link = self._link, None
            await link.abandon()


def _wake_unless_created(waiter: ChangeFuture, creating: asyncio.Future[WriteResult]) -> None:
    """Who waits for the end of a run has to look what became of it, if it is not one that is executed here now."""
    if creating.cancelled():
        return
    owned = creating.exception() is None and isinstance(made := creating.result(), Created) and made.owned
    if not owned and not waiter.done():
        waiter.set_result(None)


def build_runtime(link: StoreSession, catalog: Catalog, pool: str, concurrency: int | None) -> WorkerRuntime:
    """The executing half over an open link."""
    config = link.config
    member = Membership(
        link.store,
        link.clock,
        pool=pool,
        lease=config.seconds("lease"),
        shards=config.shards,
        workflows=catalog.pairs,
    )
    return WorkerRuntime(link, catalog, pool, member, concurrency)
