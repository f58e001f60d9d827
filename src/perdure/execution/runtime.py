"""Core: the executing half of a process. Puts coordinator, duties and membership together over a link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from perdure.clock import pause
from perdure.errors import StoreError
from perdure.execution.catalog import Catalog
from perdure.execution.claimer import Due
from perdure.execution.coordinator import Coordinator
from perdure.execution.finalizer import News, Settling
from perdure.execution.maintenance import Exposure, FanOuts, Retention
from perdure.execution.membership import Member
from perdure.execution.periodic import Duty
from perdure.execution.store_session import LAST_WORDS, Link, read_patiently
from perdure.model.records import RunRecord, Takeover
from perdure.stores.results import Answer, Created
from perdure.workflows.definition import Workflow
from perdure.workflows.tokens import KEYS, KEYS_EVERY

LOGGER = logging.getLogger("perdure.execution")
DRAIN_STEP = 0.02
SETTLE_SOON = 0.1
MAX_OBSERVED = 10_000


class Core:
    """One worker. `start` makes it a member that takes work; `stop` gives its runs back and leaves."""

    def __init__(self, link: Link, catalog: Catalog, pool: str, member: Member, concurrency: int | None) -> None:
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
        self._due = Due(link.store, self.coordinator, member, config, pool, catalog.pairs)
        self._observed: set[str] = set()  # runs whose end somebody in this process waits to be told
        interval = config.seconds("sweep_interval")
        self._claiming = Duty("claiming", self._due.tick, clock, interval)
        self._fan_outs = Duty("topics", FanOuts(link, self.woken).tick, clock, interval)
        news = News(self.look, self.woken, self._fan_outs.poke, self.coordinator.ended)
        self._settling = Duty("settling", Settling(link, news).tick, clock, interval)
        lease = config.seconds("lease")
        self._renewing = Duty("lease", member.renew, clock, lease / 10)
        self._duties = [
            self._claiming,
            self._settling,
            self._fan_outs,
            self._renewing,
            Duty("takeover", member.look_after_others, clock, min(interval, lease / 3)),
            Duty("exposure", Exposure(self.coordinator).tick, clock, interval),
            Duty("retention", Retention(link.store, config).tick, clock, interval),
            Duty("keys", self._read_keys, clock, interval),
        ]
        self._rejoining: asyncio.Task[None] | None = None
        self._leave_hints = link.on_change(self._hinted)
        link.hub.expects = self.coordinator.commits
        member.listen(lost=self._lost, more=self._claiming.poke)

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
        await self._withdraw()
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
            and not self.coordinator.errands.busy
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

    def woken(self) -> None:
        """Some runs have mail or are due."""
        self._claiming.poke()

    def ended(self, run_id: str) -> None:
        """The run was ended or cut back from outside: what is in memory of it counts for nothing, and it may owe."""
        self.coordinator.ended(run_id)
        self._settling.poke()

    def observed(self, run_id: str) -> None:
        """Somebody waits for the end of this run. No more than a hint: whoever is forgotten is told by a sweep."""
        if len(self._observed) >= MAX_OBSERVED:
            self._observed.clear()
        self._observed.add(run_id)

    def executes(self, run_id: str) -> bool:
        return self.coordinator.residents.active(run_id) is not None

    def _hinted(self, run_ids: frozenset[str] | None) -> None:
        """Look for work and mail, unless the hint comes of a turn that we are committing ourselves."""
        if run_ids is None or not all(self.executes(run_id) for run_id in run_ids):
            self._claiming.poke()
            # Whoever ends a run settles it, unless it was a mere client: that need not be seen to the millisecond.
            self._settling.poke(self._link.clock.now() + SETTLE_SOON)
        if run_ids is not None:
            self.coordinator.maybe_mailed(run_ids)

    def _suspended(self, wake_at: float | None) -> None:
        if wake_at is not None:
            self._claiming.poke(wake_at)

    def _finished(self, record: RunRecord, had_mail: bool) -> None:
        """A run ended here. Most owe nothing; those that may are looked at without delay."""
        if had_mail or record.parent is not None or record.id in self._observed:
            self._observed.discard(record.id)
            self._settling.poke()

    def _freed(self) -> None:
        if self._due.starved:
            self._claiming.poke()

    # --- membership

    async def _join(self, *, for_ever: bool) -> None:
        link = self._link
        await read_patiently(self._member.join, link.clock, link.config.store_retry, for_ever=for_ever)
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
        self._due.unsure = True
        self._renewing.poke()
        return False

    async def _withdraw(self) -> None:
        try:
            await self._member.withdraw()
        except StoreError as error:
            LOGGER.warning("others do not know yet that this worker stops: %s", error)

    async def _wake_held(self) -> None:
        """Other code may have come to own runs that the old code could not go on with: each gets another chance."""
        link = self._link
        for kind in ("diverged", "deadlock", "spinning", "defect"):
            wake = partial(link.store.wake_held, self._catalog.pairs(), kind, link.clock.now())
            await read_patiently(wake, link.clock, link.config.store_retry)

    async def _read_keys(self, now: float) -> float | None:
        """The keys that sign the tokens of deferreds. A new one signs only after everyone has had time to read it."""
        link = self._link
        keys = await read_patiently(lambda: link.store.keys(KEYS, now), link.clock, link.config.store_retry)
        self.coordinator.keys = tuple(keys)
        return now + KEYS_EVERY

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
