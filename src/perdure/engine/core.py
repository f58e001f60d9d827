"""Core: the executing half of a process. Puts coordinator, duties and membership together over a link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.clock import pause
from perdure.definition import Workflow
from perdure.engine.catalog import Catalog
from perdure.engine.coordinator import Coordinator
from perdure.engine.due import Due
from perdure.engine.duties import Duty
from perdure.engine.link import LAST_WORDS, Link
from perdure.engine.member import Member
from perdure.engine.patience import read_patiently
from perdure.engine.upkeep import Exposure, Retention
from perdure.errors import StoreError
from perdure.records import RunRecord, Takeover
from perdure.store.base import Answer, Created

LOGGER = logging.getLogger("perdure.engine")
DRAIN_STEP = 0.02


class Core:
    """One worker. `start` makes it a member that takes work; `stop` gives its runs back and leaves."""

    def __init__(self, link: Link, catalog: Catalog, pool: str, member: Member, concurrency: int | None) -> None:
        self._link = link
        self._catalog = catalog
        self._member = member
        self._pool = pool
        config, clock = link.config, link.clock
        self.coordinator = Coordinator(
            store=link.store,
            clock=clock,
            codec=link.codec,
            config=config,
            committer=link.committer,
            hub=link.hub,
            definitions=catalog.find,
            suspended=self._suspended,
            freed=self._freed,
            concurrency=concurrency,
        )
        self._due = Due(link.store, self.coordinator, config, pool, catalog.pairs)
        interval = config.seconds("sweep_interval")
        self._claiming = Duty("claiming", self._due.tick, clock, interval)
        self._duties = [
            self._claiming,
            Duty("lease", member.renew, clock, interval),
            Duty("takeover", member.look_after_others, clock, interval),
            Duty("exposure", Exposure(self.coordinator).tick, clock, interval),
            Duty("retention", Retention(link.store).tick, clock, interval),
        ]
        self._rejoining: asyncio.Task[None] | None = None
        self._leave_hints = link.store.on_change(self._hinted)
        member.listen(lost=self._lost, released=self._claiming.poke)

    # --- life

    async def start(self) -> None:
        await self._join(for_ever=False)
        for duty in self._duties:
            duty.start()
            duty.poke()

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
        while not self.coordinator.drained() and clock.now() < deadline:
            await pause(clock, DRAIN_STEP)
        self.coordinator.given_back()
        await self._link.committer.drained(LAST_WORDS)
        await self._stop_duties()
        self.coordinator.dropped()
        self.coordinator.executor.close()
        try:
            await self._member.leave()
        except StoreError as error:
            LOGGER.warning("this worker's runs go on elsewhere once its lease has run out; leaving failed: %s", error)

    async def abandon(self) -> None:
        """Stop as a crash would: without a word to the store."""
        self._leave_hints()
        await self._stop_duties()
        self.coordinator.dropped()
        self.coordinator.executor.close()

    @property
    def quiet(self) -> bool:
        """Nothing is happening: only time or an outside call can change anything."""
        return (
            not self.coordinator.loading
            and not self.coordinator.executor.busy
            and self._rejoining is None
            and not any(duty.pending for duty in self._duties)
        )

    # --- what callers and the store tell it

    def owner_for(self, workflow: Workflow[Any, Any]) -> str | None:
        """Who a run that is started here belongs to: this worker, if it can execute it and has room."""
        serves = self._catalog.take(workflow) and workflow.settings.pool == self._pool
        ready = not self.coordinator.draining and self._rejoining is None and self.coordinator.room > 0
        return self.coordinator.worker if serves and ready else None

    def adopting(self, record: RunRecord, workflow: Workflow[Any, Any]) -> Callable[[Answer | StoreError], None]:
        """Takes the answer to the creation of a run that is to be ours."""

        def adopt(answer: Answer | StoreError) -> None:
            if isinstance(answer, Created) and answer.owned:
                self.coordinator.created(record, workflow)
            elif isinstance(answer, StoreError) and answer.retryable:  # given up on; it may be there all the same
                self._due.unsure = True
                self._claiming.poke()

        return adopt

    def look(self, run_id: str) -> None:
        """The run has mail or is due."""
        self.coordinator.mailed([run_id])
        self._claiming.poke()

    def ended(self, run_id: str) -> None:
        self.coordinator.ended(run_id)

    def executes(self, run_id: str) -> bool:
        return self.coordinator.residents.active(run_id) is not None

    def _hinted(self, run_ids: frozenset[str] | None) -> None:
        """Look for work, unless the hint is about runs that are active here: those we know about ourselves."""
        if run_ids is None or not all(self.executes(run_id) for run_id in run_ids):
            self._claiming.poke()

    def _suspended(self, wake_at: float | None) -> None:
        if wake_at is not None:
            self._claiming.poke(wake_at)

    def _freed(self) -> None:
        if self._due.starved:
            self._claiming.poke()

    # --- membership

    async def _join(self, *, for_ever: bool) -> None:
        link = self._link
        await read_patiently(self._member.join, link.clock, link.config.store_retry, for_ever=for_ever)
        self.coordinator.worker = self._member.id
        await self._wake_held()

    async def _wake_held(self) -> None:
        """Other code may have come to own runs that the old code could not go on with: each gets another chance."""
        link = self._link
        for kind in ("diverged", "deadlock", "spinning", "defect"):
            wake = partial(link.store.wake_held, self._catalog.pairs(), kind, link.clock.now())
            await read_patiently(wake, link.clock, link.config.store_retry)

    def _lost(self) -> None:
        """Declared gone: what is in memory counts for nothing. Begin again as a new member."""
        if self._rejoining is None:
            self.coordinator.dropped()
            self._rejoining = asyncio.get_running_loop().create_task(self._rejoin())

    async def _rejoin(self) -> None:
        try:
            await self._join(for_ever=True)
        finally:
            self._rejoining = None
        self._claiming.poke()

    async def _stop_duties(self) -> None:
        for duty in self._duties:
            await duty.stop()
        if self._rejoining is not None:
            self._rejoining.cancel()
        await self.coordinator.stop_tasks()
