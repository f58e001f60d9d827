"""Due: claims runs whose time has come and that nobody owns, and hands them to the coordinator.

A claim makes this worker the owner in the store before anything is executed: two workers never both get a run. Among
others it asks for its share only (the shards that are assigned to it), and for what has stayed due for two sweeps:
whoever should take that is full, paused or wrong about who is alive.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.config import EngineConfig
from perdure.errors import StoreError
from perdure.execution.coordinator import Coordinator
from perdure.execution.membership import MembershipProtocol
from perdure.model.types import WorkflowVersions
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import ClaimedRun

PAGE = 500
STEAL_AFTER_SWEEPS = 2  # sweeps
FIRST_LOOK = 0.05  # seconds, and twice as many each time: when to look again at runs that others should take
LAST_LOOK = 1.0


class Claimer:
    """The duty of taking work. `workflows` says what this process can execute right now."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        member: MembershipProtocol,
        config: EngineConfig,
        pool: str,
        workflows: Callable[[], WorkflowVersions],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._member = member
        self._pool = pool
        self._workflows = workflows
        self._sweep = config.seconds("sweep_interval")
        self._resolution = config.seconds("timer_resolution")
        self._rescue_at = 0.0
        self._look_again = FIRST_LOOK
        self.needs_reconcile = (
            False  # the answer to a claim or a creation got lost: some runs may be ours without our knowing
        )
        self.claimed = 0
        self.at_capacity = False  # there may be more that is due, and we had no room for it

    async def tick(self, now: float) -> float | None:
        if self._coordinator.draining:
            return None
        if self.needs_reconcile:
            await self._reconcile()
        self.at_capacity = False
        before = self.claimed
        for workflows, shards in self._member.shares(self._workflows()):
            await self._claim_pages(now, workflows, shards)
        if self._has_peers and now >= self._rescue_at:
            self._rescue_at = now + self._sweep
            await self._claim_pages(now, self._workflows(), None, due_by=now - STEAL_AFTER_SWEEPS * self._sweep)
        self._coordinator.on_messages(await self._store.owned_with_messages(self._coordinator.worker))
        return await self._next_tick(now, took=self.claimed > before)

    @property
    def _has_peers(self) -> bool:
        return any(shards is not None for _, shards in self._member.shares(self._workflows()))

    async def _claim_pages(
        self, now: float, workflows: WorkflowVersions, shards: frozenset[int] | None, due_by: float | None = None
    ) -> None:
        """Claim such runs until there are no more, or there is no room for them."""
        full = shards is None or len(shards) > 0
        while full and (room := self._coordinator.free_slots) > 0:
            limit = min(PAGE, room)
            page = await self._claim(
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
            full = len(page) == limit
        self.at_capacity = self.at_capacity or full

    async def _next_tick(self, now: float, took: bool) -> float:
        sweep_at = now + self._sweep
        next_at = await self._store.next_wake(self._pool)
        if next_at is None or next_at > now:
            self._look_again = FIRST_LOOK
            return sweep_at if next_at is None else min(sweep_at, max(next_at, now + self._resolution))
        # Something stays due although we asked: no room (then `starved` tells), a row that a commit was just at (what
        # a claim passes over if it finds others), other code, or another one's share.
        if self.at_capacity:
            return sweep_at
        if took:
            return now
        if not self._has_peers:
            return sweep_at
        if await self._member.refresh_members(now):
            return now
        pause, self._look_again = self._look_again, min(2 * self._look_again, LAST_LOOK)
        return min(sweep_at, now + pause)

    async def _claim(self, claim: Claim) -> list[ClaimedRun]:
        try:
            return await self._store.claim(claim)
        except StoreError:
            self.needs_reconcile = True
            raise

    async def _reconcile(self) -> None:
        """Take up runs that are ours in the store and that we do not have."""
        self._coordinator.on_runs_found(await self._store.owned(self._coordinator.worker))
        self.needs_reconcile = False
