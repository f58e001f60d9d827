"""Claimer: claims due runs for this worker and gives them to the coordinator.

A run is due when its `wake_at` has passed and no worker owns it. A claim sets the owner in the store before anything
executes, so two workers never both get a run.

With other workers in the pool, a worker claims the runs of its assigned shards only. Runs that stay due for two sweeps
are claimed by any worker: their assigned worker is full, paused, or does not know that it is assigned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from perdure.config import EngineConfig
from perdure.execution.coordinator import Coordinator
from perdure.execution.membership import MembershipProtocol
from perdure.execution.queue_gates import QueueGates
from perdure.model.shards import WorkflowVersions
from perdure.stores.protocol import Claim, Store

PAGE = 500
STEAL_AFTER_SWEEPS = 2
# Pauses between claims while runs of other workers are due. The pause doubles each time.
FIRST_RECHECK_SECONDS = 0.05
MAX_RECHECK_SECONDS = 1.0


class Claimer:
    """Claims due runs. `workflows` returns what this process can execute now.

    `on_unclaimed` is called when a run is due and this worker, which has free slots, did not claim it.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        member: MembershipProtocol,
        config: EngineConfig,
        pool: str,
        workflows: Callable[[], WorkflowVersions],
        on_unclaimed: Callable[[], Awaitable[None]],
        gates: QueueGates,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._member = member
        self._pool = pool
        self._workflows = workflows
        self._on_unclaimed = on_unclaimed
        self._gates = gates
        self._gate_sweep_at = 0.0
        self._open_gates: list[str] = []  # that had free slots at the last claim
        self._sweep = config.seconds("sweep_interval")
        self._resolution = config.seconds("timer_resolution")
        self._steal_at = 0.0
        self._recheck_seconds = FIRST_RECHECK_SECONDS
        # The result of a claim or a creation was lost: this worker may own runs in the store that it does not know.
        self.needs_reconcile = False
        self.claimed = 0
        self.at_capacity = False  # the last claim stopped for lack of slots: more runs may be due

    async def tick(self, now: float) -> float | None:
        """Claim all due runs that fit, fetch messages of active runs, and return when to do so again."""
        if self._coordinator.draining:
            return None
        if self.needs_reconcile:
            await self._reconcile()
        self.at_capacity = False
        before = self.claimed
        try:
            for workflows, shards in self._member.assignments(self._workflows()):
                await self._claim_pages(now, workflows, shards)
            if self._has_peers and now >= self._steal_at:
                self._steal_at = now + self._sweep
                await self._claim_pages(now, self._workflows(), None, due_by=now - STEAL_AFTER_SWEEPS * self._sweep)
            await self._claim_gated(now)
        except Exception:
            self._on_claim_lost()
            raise
        if self.claimed > before:
            await asyncio.sleep(0)  # the reads that claimed runs wait for go first
        # Change hints may be lost: read here which active runs of this worker have messages.
        self._coordinator.on_messages(await self._store.owned_with_messages(self._coordinator.worker))
        return await self._next_tick(now, has_claimed=self.claimed > before)

    @property
    def _has_peers(self) -> bool:
        return any(shards is not None for _, shards in self._member.assignments(self._workflows()))

    async def _claim_pages(
        self, now: float, workflows: WorkflowVersions, shards: frozenset[int] | None, due_by: float | None = None
    ) -> None:
        """Claim such runs, a page at a time, until no more are due or no slot is free."""
        may_be_more = shards is None or len(shards) > 0
        while may_be_more and (free_slots := self._coordinator.free_slots) > 0:
            limit = min(PAGE, free_slots)
            page = await self._store.claim(
                Claim(
                    worker=self._coordinator.worker,
                    now=now,
                    workflows=workflows,
                    pool=self._pool,
                    shards=shards,
                    limit=limit,
                    due_by=due_by,
                )
            )
            self._coordinator.on_runs_claimed(page, now)
            self.claimed += len(page)
            may_be_more = len(page) == limit
        self.at_capacity = self.at_capacity or may_be_more

    async def _claim_gated(self, now: float) -> None:
        """Claim runs of queues with a limit per worker, of all shards."""
        sweep = now >= self._gate_sweep_at
        free_slots = self._coordinator.free_slots
        gates = self._gates.count_free(free_slots, sweep=sweep)
        self._open_gates = [name for name, _ in gates]
        if not gates or free_slots <= 0:
            return
        self._gate_sweep_at = now + self._sweep if sweep else self._gate_sweep_at
        page = await self._store.claim(
            Claim(
                worker=self._coordinator.worker,
                now=now,
                workflows=self._workflows(),
                pool=self._pool,
                shards=frozenset(),
                limit=min(PAGE, free_slots),
                gates=gates,
            )
        )
        self._coordinator.on_runs_claimed(page, now)
        self._gates.on_claimed(run.id for run in page)
        self.claimed += len(page)

    @property
    def awaits_slot(self) -> bool:
        """Whether runs may be due that are not claimed until a slot of this worker is free."""
        return self.at_capacity or self._gates.at_limit

    async def _next_wake(self) -> float | None:
        """Return when the next run is due that this worker may claim."""
        if not self._gates.at_limit:
            return await self._store.next_wake(self._pool)
        return await self._store.next_wake(self._pool, self._open_gates)

    async def _next_tick(self, now: float, *, has_claimed: bool) -> float:
        sweep_at = now + self._sweep
        if self._gates.is_loading:  # their gates are unknown, and may have further free slots
            sweep_at = now + self._resolution
        next_at = await self._next_wake()
        if next_at is None or next_at > now:
            self._recheck_seconds = FIRST_RECHECK_SECONDS
            return sweep_at if next_at is None else min(sweep_at, max(next_at, now + self._resolution))
        # A run is still due. Possible causes: no free slot; a row that another transaction locked, which a claim skips
        # if it finds other rows; a workflow that this process does not have; a shard of another worker.
        if self.at_capacity:
            return sweep_at  # the coordinator triggers this task when a slot is free
        if has_claimed:
            return now  # claim again: the skipped rows are unlocked by now
        await self._on_unclaimed()
        if not self._has_peers:
            return sweep_at  # only a workflow that this process does not have remains
        if await self._member.refresh_members(now):
            return now  # the assignment has changed
        pause = self._recheck_seconds
        self._recheck_seconds = min(2 * self._recheck_seconds, MAX_RECHECK_SECONDS)
        return min(sweep_at, now + pause)

    def _on_claim_lost(self) -> None:
        """Note that runs may be claimed that the coordinator did not get."""
        self.needs_reconcile = True

    async def _reconcile(self) -> None:
        """Load the runs that this worker owns in the store and that are not in memory."""
        owned = await self._store.owned(self._coordinator.worker)
        self._coordinator.on_runs_found(owned)
        self._gates.on_claimed(owned)  # until they are loaded their gates are unknown, and each may be full
        self.needs_reconcile = False
