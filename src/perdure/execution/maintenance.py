"""Small duties: showing steps that take long, and deleting finished runs whose retention is over."""

from __future__ import annotations

from collections.abc import Callable

from perdure.config import EngineConfig
from perdure.execution.coordinator import Coordinator
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import raise_for_publish
from perdure.stores.protocol import Store
from perdure.stores.writes import FanOut

RECORD_RUNNING_AFTER_SECONDS = 1.0
PRUNE_EVERY = 60.0
PRUNE_PAGE = 500


class SlowStepRecorder:
    """A plain step that has run for a second is written as pending, so that people see what is running."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def tick(self, now: float) -> float | None:
        slow: dict[str, list[str]] = {}
        for attempt in self._coordinator.executor.running_since(now - RECORD_RUNNING_AFTER_SECONDS):
            attempt.exposed = True
            slow.setdefault(attempt.run_id, []).append(attempt.step.location)
        for run_id, locations in slow.items():
            self._coordinator.record_running_steps(run_id, tuple(locations))
        return now + RECORD_RUNNING_AFTER_SECONDS


class RetentionPruner:
    """Finished runs go when their time is over, in pages, so that a store does not grow without bound."""

    def __init__(self, store: Store, config: EngineConfig) -> None:
        self._store = store
        self._remember = config.seconds("event_retention")

    async def tick(self, now: float) -> float | None:
        while await self._store.prune(now, PRUNE_PAGE, keep_ids_for=self._remember) >= PRUNE_PAGE:
            pass
        return now + PRUNE_EVERY


class BroadcastResumer:
    """The duty that finishes them, a page of subscriptions at a time. `woken` is told that runs have mail."""

    def __init__(self, link: StoreSession, woken: Callable[[], None]) -> None:
        self._link = link
        self._woken = woken

    async def tick(self, now: float) -> float | None:
        link = self._link
        for event in await link.store.unfinished_broadcasts():
            more = (
                event.topic,
                event.id,
            ) not in link.active_broadcasts  # else whoever publishes it counts who was woken
            while more:
                write = FanOut(topic=event.topic, offset=event.offset, now=link.clock.now())
                answer = raise_for_publish(event.topic, await link.committer.write(write))
                more = answer.more
                if answer.woken:
                    self._woken()
        return now + link.config.seconds("sweep_interval")
