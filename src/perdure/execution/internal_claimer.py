"""InternalClaimer: claims the internal runs that are due. Every worker serves their pool, beside its own.

Internal runs are few, so that any worker claims all of them. Without one, a sweep costs one query.
"""

from __future__ import annotations

from perdure.execution.coordinator import Coordinator
from perdure.stores.protocol import Claim, Store
from perdure.workflows.internal import INTERNAL, INTERNAL_POOL

PAGE = 10


class InternalClaimer:
    """Claims internal runs for one worker."""

    def __init__(self, store: Store, coordinator: Coordinator, sweep_seconds: float) -> None:
        self._store = store
        self._coordinator = coordinator
        self._sweep = sweep_seconds

    async def tick(self, now: float) -> float | None:
        """Claim due runs, and return when the next one is due."""
        if self._coordinator.draining:
            return None
        next_at = await self._store.next_wake(INTERNAL_POOL)
        limit = min(PAGE, self._coordinator.free_slots)
        if next_at is None or next_at > now or limit <= 0:
            return now + self._sweep if next_at is None or limit <= 0 else min(next_at, now + self._sweep)
        claim = Claim(
            worker=self._coordinator.worker,
            now=now,
            workflows=tuple(INTERNAL.unambiguous()),
            pool=INTERNAL_POOL,
            limit=limit,
        )
        claimed = await self._store.claim(claim)
        self._coordinator.on_runs_claimed(claimed, now)
        return now if claimed else now + self._sweep  # without a claim: of a version that another worker has
