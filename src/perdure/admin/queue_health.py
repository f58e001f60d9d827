"""Health check of work queues: queues that admit nothing, that no code declares, and runs that wait for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.admin.findings import Findings
from perdure.admin.run_progress import StoreState
from perdure.client.client import Client
from perdure.execution.queue_declarations import declaration_times
from perdure.model.queue_records import PlaceRecord, QueueSummary
from perdure.model.records import RunRecord
from perdure.queues.admission_plan import plan
from perdure.queues.effective_settings import effective_settings

HOLDERS = 1_000  # slots of a queue that are examined
HEADS = 20  # first places of a queue that are examined
SHOWN_RUNS = 5
STALLED_AFTER_SECONDS = 60.0  # a run that could be admitted and waits for longer is reported
DECLARED_BEFORE_SECONDS = 60.0  # a worker declares its queues a little before it joins
IMPLICIT = "~"


class QueueCheck:
    """Checks all queues of a store, and the waiting runs that the health check passes to it."""

    def __init__(self, client: Client, findings: Findings, state: StoreState, queues: Sequence[QueueSummary]) -> None:
        self._session = client._session
        self._findings = findings
        self._state = state
        self._queues = queues
        self._limited = {each.name for each in queues if _limits_concurrency(each)}

    def check_run(self, record: RunRecord) -> None:
        """Find a waiting run whose own ancestor holds a slot of its queue."""
        if record.waiting and record.queue in record.ancestor_queues and record.queue in self._limited:
            text = f"Run {record.id} waits in queue {record.queue}, of which its own ancestor holds a slot"
            advice = f"let it begin without a slot: perdure queues release {record.queue} {record.id}"
            self._findings.add("queue_cycle", "error", text, advice, record.id)

    async def check_queues(self) -> None:
        """Find queues that admit nothing though runs wait, and queues that no live worker has declared."""
        for queue in self._queues:
            if queue.waiting and queue.paused is None:
                await self._check_admission(queue)
            if queue.held:
                await self._check_slots(queue.name)
        await self._check_declarations()

    async def _check_admission(self, queue: QueueSummary) -> None:
        session, store = self._session, self._session.store
        settings = effective_settings(queue.declared, queue.override)
        if settings.concurrency is not None and queue.held >= settings.concurrency:
            places = await session.read(partial(store.places, queue.name, limit=HOLDERS, held=True))
            holders = await self._records(places)
            if holders and all(each.current_hold is not None for each in holders):
                names = ", ".join(each.id for each in holders[:SHOWN_RUNS])
                text = f"Queue {queue.name} admits nothing: all {queue.held} slots are those of held runs ({names})"
                advice = (
                    f"resume or terminate them, or free a slot: perdure queues release {queue.name} {holders[0].id}"
                )
                self._findings.add("stalled_queue", "error", text, advice, queue.name)
            return
        await self._check_delay(queue)

    async def _check_delay(self, queue: QueueSummary) -> None:
        """Find a queue whose first runs could be admitted, and have not been."""
        session, store, now = self._session, self._session.store, self._state.now
        view = await session.read(partial(store.queue_view, queue.name, now))
        workers = [each for each in self._state.workers.values() if self._state.is_alive(each.id)]
        if view is None or not plan(view, workers, now).planned:
            return
        places = await session.read(partial(store.places, queue.name, limit=HEADS))
        late = [each for each in places if each.eligible_at is None and each.since < now - STALLED_AFTER_SECONDS]
        for record in await self._records(late):
            if record.waiting and record.held is None and self._state.serves(record):
                text = f"Run {record.id} could be admitted to queue {queue.name}, and no worker admits it"
                advice = "look for errors of the periodic task `admission` in the logs of the workers"
                self._findings.add("stalled_queue", "error", text, advice, queue.name)
                return

    async def _check_slots(self, queue: str) -> None:
        """Find slots of runs that have ended: the commit of an end returns the slot, unless rows are damaged."""
        session, store, after = self._session, self._session.store, None
        while places := await session.read(partial(store.places, queue, after=after, limit=HOLDERS, held=True)):
            after = places[-1].cursor
            for record in await self._records(places):
                if record.status.terminal:
                    text = f"Run {record.id} ({record.workflow}) has ended and still holds a slot of queue {queue}"
                    self._findings.add("leaked_slot", "error", text, "return the slot", record.id, "return_slot")

    async def _records(self, places: Sequence[PlaceRecord]) -> list[RunRecord]:
        session = self._session
        records = await session.read(partial(session.store.records, [each.run_id for each in places]))
        return [each for each in records if isinstance(each, RunRecord)]

    async def _check_declarations(self) -> None:
        """Find queues that were last declared before all live workers have started."""
        live = [each for each in self._state.workers.values() if self._state.is_alive(each.id) and each.workflows]
        used = [each for each in self._queues if each.waiting or each.held]
        if not live or not used:
            return
        first_start = min(each.started_at for each in live)
        declared = await self._session.read(partial(declaration_times, self._session.store))
        for queue in used:
            declared_at = declared.get(queue.name, 0.0)
            if not queue.name.startswith(IMPLICIT) and declared_at < first_start - DECLARED_BEFORE_SECONDS:
                text = f"Queue {queue.name} has {queue.waiting} waiting runs, and no live worker declares it"
                advice = "its stored settings apply; import the WorkQueue in a worker, or clear the queue"
                self._findings.add("undeclared_queue", "warning", text, advice, queue.name)


def _limits_concurrency(queue: QueueSummary) -> bool:
    settings = effective_settings(queue.declared, queue.override)
    return settings.concurrency is not None or settings.partition_concurrency is not None
