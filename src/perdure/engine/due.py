"""Due: claims runs whose time has come and that nobody owns, and hands them to the coordinator.

A claim makes this worker the owner in the store before anything is executed: two workers never both get a run.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.config import EngineConfig
from perdure.engine.coordinator import Coordinator
from perdure.errors import StoreError
from perdure.store.base import Claim, ClaimedRun, Store

PAGE = 500


class Due:
    """The duty of taking work. `workflows` says what this process can execute right now."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        config: EngineConfig,
        pool: str,
        workflows: Callable[[], tuple[tuple[str, int], ...]],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._config = config
        self._pool = pool
        self._workflows = workflows
        self.unsure = False  # the answer to a claim or a creation got lost: some runs may be ours without our knowing
        self.claimed = 0
        self.starved = False  # there may be more that is due, and we had no room for it

    async def tick(self, now: float) -> float | None:
        if self._coordinator.draining:
            return None
        if self.unsure:
            await self._reconcile()
        sweep_at = now + self._config.seconds("sweep_interval")
        self.starved = True
        while self.starved and (room := self._coordinator.room) > 0:
            limit = min(PAGE, room)
            page = await self._claim(now, limit)
            self._coordinator.claimed(page)
            self.claimed += len(page)
            self.starved = len(page) == limit
        self._coordinator.mailed(await self._store.mailed(self._coordinator.worker))
        next_at = await self._store.next_wake(self._pool)
        if next_at is None or next_at >= sweep_at:
            return sweep_at
        # Runs that stay due although we asked are looked at again with the next sweep (other code), or when there is
        # room (`starved`).
        soonest = now + self._config.seconds("timer_resolution")
        return max(next_at, soonest) if next_at > now else sweep_at

    async def _claim(self, now: float, limit: int) -> list[ClaimedRun]:
        claim = Claim(
            worker=self._coordinator.worker, now=now, workflows=self._workflows(), pool=self._pool, limit=limit
        )
        try:
            return await self._store.claim(claim)
        except StoreError:
            self.unsure = True
            raise

    async def _reconcile(self) -> None:
        """Take up runs that are ours in the store and that we do not have."""
        self._coordinator.found(await self._store.owned(self._coordinator.worker))
        self.unsure = False
