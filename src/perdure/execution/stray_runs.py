"""StrayRunFinder: finds runs that this worker owns in the store and that are not in its memory.

Every known way to lose a run from memory releases, holds or loads it. This periodic task is the safety net for the
others: a run with a live owner that does not execute it would otherwise wait until the owner dies.
"""

from __future__ import annotations

import logging

from perdure.execution.coordinator import Coordinator
from perdure.stores.protocol import Store

LOGGER = logging.getLogger("perdure.execution")
CHECK_INTERVAL_SECONDS = 30.0


class StrayRunFinder:
    """Loads runs that two consecutive checks found: a run between two states is missing in one check at most."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._suspects: frozenset[str] = frozenset()

    async def tick(self, now: float) -> float | None:
        worker = self._coordinator.worker
        owned = await self._store.owned(worker)
        missing = frozenset(run_id for run_id in owned if not self._coordinator.has_run(run_id))
        strays = sorted(missing & self._suspects)
        self._suspects = missing
        if strays and not self._coordinator.draining:
            LOGGER.error(
                "%d runs of worker %s were not in its memory; loading them: %s",
                len(strays),
                worker,
                ", ".join(strays[:10]),
                extra={"worker": worker},
            )
            self._coordinator.on_runs_found(strays)
        return now + CHECK_INTERVAL_SECONDS
