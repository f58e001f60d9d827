"""Core: the executing half of a process. Puts coordinator, duties and membership together over a link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.clock import sleep_on
from perdure.errors import StoreError
from perdure.execution.catalog import Catalog
from perdure.execution.claimer import Claimer
from perdure.execution.coordinator import Coordinator
from perdure.execution.finalizer import FinalizerCallbacks, RunFinalizer
from perdure.execution.maintenance import BroadcastResumer, RetentionPruner, SlowStepRecorder
from perdure.execution.membership import MembershipProtocol
from perdure.execution.periodic import PeriodicTask
from perdure.execution.store_session import CLOSE_TIMEOUT_SECONDS, StoreSession, retry_store_call
from perdure.model.records import RunRecord, Takeover
from perdure.stores.results import Created, WriteResult
from perdure.workflows.definition import Workflow
from perdure.workflows.tokens import KEY_REFRESH_SECONDS, KEYS

LOGGER = logging.getLogger("perdure.execution")
DRAIN_STEP = 0.02
SETTLE_SOON = 0.1
MAX_OBSERVED = 10_000


class WorkerRuntime:
    """One worker. `start` makes it a member that takes work; `stop` gives its runs back and leaves."""

    def __init__(
        self, link: StoreSession, catalog: Catalog, pool: str, member: MembershipProtocol, concurrency: int | None
    ) -> None:
        self._link = link
        self._catalog = catalog
        self._member = member
        self._pool = pool
        config, clock = link.config, link.clock
        self.coordinator = Coordinator(
            link,
            self,
            definitions=catalog.find,
            suspended=self._suspended,
            freed=self._freed,
            finished=self._finished,
            may_act=self._may_act,
            concurrency=concurrency,
        )
        self._due = Claimer(link.store, self.coordinator, member, config, pool, catalog.pairs)
        self._observed: set[str] = set()  # runs whose end somebody in this process waits to be told
        interval = config.seconds("sweep_interval")
        self._claiming = PeriodicTask("claiming", self._due.tick, clock, interval)
        self._fan_outs = PeriodicTask("topics", BroadcastResumer(link, self.runs_may_be_due).tick, clock, interval)
        news = FinalizerCallbacks(
            self.run_has_messages, self.runs_may_be_due, self._fan_outs.trigger, self.coordinator.on_run_terminated
        )
        self._settling = PeriodicTask("settling", RunFinalizer(link, news).tick, clock, interval)
        lease = config.seconds("lease")
        self._renewing = PeriodicTask("lease", member.renew, clock, lease / 10)
        self._duties = [
            self._claiming,
            self._settling,
            self._fan_outs,
            self._renewing,
            PeriodicTask("takeover", member.take_over_expired, clock, min(interval, lease / 3)),
            PeriodicTask("exposure", SlowStepRecorder(self.coordinator).tick, clock, interval),
            PeriodicTask("retention", RetentionPruner(link.store, config).tick, clock, interval),
            PeriodicTask("keys", self._read_keys, clock, interval),
        ]
        self._rejoining: asyncio.Task[None] | None = None
        self._leave_hints = link.on_change(self._on_change_hint)
        link.hub.expects = self.coordinator.is_committing
        member.listen(lost=self._lost, more=self._claiming.trigger)

    # --- life

    async def start(self) -> None:
        await self._join(for_ever=False)
        for duty in self._duties:
            duty.start()
            duty.trigger()

    async def recover(self) -> tuple[Takeover, int]:
        """Take over from dead workers, give held runs another chance with this code, and claim what is due."""
        now = self._link.clock.now()
        before = self._due.claimed  # what is released is claimed by whoever comes first: the duty, or us below
        takeover = await self._member.take_over(now)
        await self._wake_held()
        await self._due.tick(now)
        return takeover, self._due.claimed - before

    async def stop(self, grace: float) -> None:
        """Take no more work, let steps finish within `grace`, give all runs back, and leave."""
        clock = self._link.clock
        self._leave_hints()
        deadline = clock.now() + grace
        await self._withdraw()
        while not self.coordinator.drain() and clock.now() < deadline:
            await sleep_on(clock, DRAIN_STEP)
        self.coordinator.release_all()
        await self._link.committer.wait_idle(CLOSE_TIMEOUT_SECONDS)
        await self._stop_duties()
        self.coordinator.discard_all()
        self.coordinator.executor.close()
        try:
            await self._member.leave()
        except StoreError as error:
            LOGGER.warning("this worker's runs go on elsewhere once its lease has run out; leaving failed: %s", error)

    async def abort(self) -> None:
        """Stop as a crash would: without a word to the store."""
        self._leave_hints()
        await self._stop_duties()
        self.coordinator.discard_all()
        self.coordinator.executor.close()

    @property
    def is_idle(self) -> bool:
        """Nothing is happening: only time or an outside call can change anything."""
        return (
            not self.coordinator.loading
            and not self.coordinator.executor.busy
            and not self.coordinator.errands.busy
            and self._rejoining is None
            and not any(duty.pending for duty in self._duties)
        )

    # --- what callers and the store tell it

    def owner_for_new_run(self, workflow: Workflow[Any, Any]) -> str | None:
        """Who a run that is started here belongs to: this worker, if it can execute it and has room."""
        serves = self._catalog.take(workflow) and workflow.settings.pool == self._pool
        ready = not self.coordinator.draining and self._rejoining is None and self.coordinator.free_slots > 0
        return self.coordinator.worker if serves and ready else None

    def on_created_callback(
        self, record: RunRecord, workflow: Workflow[Any, Any]
    ) -> Callable[[WriteResult | StoreError], None]:
        """Takes the answer to the creation of a run that is to be ours."""

        def adopt(answer: WriteResult | StoreError) -> None:
            if isinstance(answer, Created) and answer.owned:
                self.coordinator.on_run_created(record, workflow)
            elif isinstance(answer, StoreError) and answer.retryable:  # given up on; it may be there all the same
                self._due.needs_reconcile = True
                self._claiming.trigger()

        return adopt

    def run_has_messages(self, run_id: str) -> None:
        """The run has mail or is due."""
        self.coordinator.on_messages([run_id])
        self._claiming.trigger()

    def runs_may_be_due(self) -> None:
        """Some runs have mail or are due."""
        self._claiming.trigger()

    def run_ended_externally(self, run_id: str) -> None:
        """The run was ended or cut back from outside: what is in memory of it counts for nothing, and it may owe."""
        self.coordinator.on_run_terminated(run_id)
        self._settling.trigger()

    def run_is_observed(self, run_id: str) -> None:
        """Somebody waits for the end of this run. No more than a hint: whoever is forgotten is told by a sweep."""
        if len(self._observed) >= MAX_OBSERVED:
            self._observed.clear()
        self._observed.add(run_id)

    def is_executing(self, run_id: str) -> bool:
        return self.coordinator.residents.active(run_id) is not None

    def can_execute(self, record: RunRecord) -> bool:
        return record.pool == self._pool and (record.workflow, record.version) in self._catalog.pairs()

    def _on_change_hint(self, run_ids: frozenset[str] | None) -> None:
        """Look for work and mail, unless the hint comes of a turn that we are committing ourselves."""
        if run_ids is None or not all(self.is_executing(run_id) for run_id in run_ids):
            self._claiming.trigger()
            # Whoever ends a run settles it, unless it was a mere client: that need not be seen to the millisecond.
            self._settling.trigger(self._link.clock.now() + SETTLE_SOON)
        if run_ids is not None:
            self.coordinator.on_change_hint(run_ids)

    def _suspended(self, wake_at: float | None) -> None:
        if wake_at is not None:
            self._claiming.trigger(wake_at)

    def _finished(self, record: RunRecord, had_mail: bool) -> None:
        """A run ended here. Most owe nothing; those that may are looked at without delay."""
        if had_mail or record.parent is not None or record.id in self._observed:
            self._observed.discard(record.id)
            self._settling.trigger()

    def _freed(self) -> None:
        if self._due.at_capacity:
            self._claiming.trigger()

    # --- membership

    async def _join(self, *, for_ever: bool) -> None:
        link = self._link
        await retry_store_call(self._member.join, link.clock, link.config.store_retry, for_ever=for_ever)
        self.coordinator.worker = self._member.id
        await self._read_keys(link.clock.now())
        await self._wake_held()

    def _may_act(self, now: float) -> bool:
        """Whether this worker's lease stands. If it has run out, what was ours may be another's: first find that out.

        A turn that comes back as committed tells only that it was: its answer may have been lost, and found again
        after another worker went on from there.
        """
        if self._member.lease_until >= now:
            return True
        self._due.needs_reconcile = True
        self._renewing.trigger()
        return False

    async def _withdraw(self) -> None:
        try:
            await self._member.stop_accepting()
        except StoreError as error:
            LOGGER.warning("others do not know yet that this worker stops: %s", error)

    async def _wake_held(self) -> None:
        """Other code may have come to own runs that the old code could not go on with: each gets another chance."""
        link = self._link
        for kind in ("diverged", "deadlock", "livelock", "internal_error"):
            wake = partial(link.store.retry_held, self._catalog.pairs(), kind, link.clock.now())
            await retry_store_call(wake, link.clock, link.config.store_retry)

    async def _read_keys(self, now: float) -> float | None:
        """The keys that sign the tokens of deferreds. A new one signs only after everyone has had time to read it."""
        link = self._link
        keys = await retry_store_call(lambda: link.store.keys(KEYS, now), link.clock, link.config.store_retry)
        self.coordinator.keys = tuple(keys)
        return now + KEY_REFRESH_SECONDS

    def _lost(self) -> None:
        """Declared gone: what is in memory counts for nothing. Begin again as a new member."""
        if self._rejoining is None:
            self.coordinator.discard_all()
            self._rejoining = asyncio.get_running_loop().create_task(self._rejoin())

    async def _rejoin(self) -> None:
        try:
            await self._join(for_ever=True)
        finally:
            self._rejoining = None
        self._claiming.trigger()

    async def _stop_duties(self) -> None:
        for duty in self._duties:
            await duty.stop()
        if self._rejoining is not None:
            self._rejoining.cancel()
        await self.coordinator.stop_tasks()
