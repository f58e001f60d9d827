"""Small periodic tasks: record slow steps as running, prune ended runs, resume broadcasts of crashed publishers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from perdure.config import EngineConfig
from perdure.execution.coordinator import Coordinator
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import raise_for_publish
from perdure.model.records import TopicEvent
from perdure.model.turns import RecordProgress
from perdure.stores.protocol import Store
from perdure.stores.writes import FanOut

LOGGER = logging.getLogger("perdure.execution")
RECORD_RUNNING_AFTER_SECONDS = 1.0
PRUNE_INTERVAL_SECONDS = 60.0
PRUNE_PAGE = 500


class SlowStepRecorder:
    """Writes an entry for each step that has been running for a second, so that people see what is running.

    A step without `at_most_once` has no entry before it ends otherwise.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def tick(self, now: float) -> float | None:
        slow: dict[str, list[str]] = {}
        for attempt in self._coordinator.executor.running_since(now - RECORD_RUNNING_AFTER_SECONDS):
            attempt.recorded = True
            if attempt.since is None:
                slow.setdefault(attempt.run_id, []).append(attempt.step.location)
            else:  # the time for all attempts counts from here, also after a crash
                notes = attempt.encode_notes() or b""
                progress = RecordProgress(attempt.location, attempt.attempt, notes)
                self._coordinator.on_step_progress(attempt.run_id, progress)
        for run_id, locations in slow.items():
            self._coordinator.on_slow_steps(run_id, tuple(locations))
        return now + RECORD_RUNNING_AFTER_SECONDS


class RetentionPruner:
    """Deletes ended runs whose retention time is over, in pages, so that the store does not grow without bound."""

    def __init__(self, store: Store, config: EngineConfig) -> None:
        self._store = store
        self._event_retention = config.seconds("event_retention")

    async def tick(self, now: float) -> float | None:
        while len(await self._store.prune(now, PRUNE_PAGE, keep_ids_for=self._event_retention)) >= PRUNE_PAGE:
            pass
        return now + PRUNE_INTERVAL_SECONDS


class BroadcastResumer:
    """Completes the fan-out of events whose publisher crashed, one page of subscriptions at a time.

    `runs_may_be_due` is called when runs have received an event.
    """

    def __init__(self, session: StoreSession, runs_may_be_due: Callable[[], None]) -> None:
        self._session = session
        self._runs_may_be_due = runs_may_be_due

    async def tick(self, now: float) -> float | None:
        session = self._session
        for event in await session.store.unfinished_broadcasts():
            # A publisher in this process completes its own fan-out, because it returns the number of receivers.
            if (event.topic, event.id) not in session.active_broadcasts:
                try:
                    await self._fan_out(event)
                except Exception as error:  # the events of other topics do not depend on this one
                    LOGGER.warning("Fan-out of event %s failed, will retry: %r", event.id, error)
        return now + session.config.seconds("sweep_interval")

    async def _fan_out(self, event: TopicEvent) -> None:
        session, more = self._session, True
        while more:
            write = FanOut(topic=event.topic, offset=event.offset, now=session.clock.now())
            published = raise_for_publish(event.topic, await session.committer.write(write))
            more = published.more
            if published.woken:
                self._runs_may_be_due()
