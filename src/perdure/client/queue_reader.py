"""QueueReader: describe work queues, and why a run waits in one. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from perdure.client.queue_views import (
    MAX_AHEAD,
    QueueDescription,
    QueueReason,
    SlotHolders,
    WaitingRun,
    limits_view,
    override_view,
    pause_view,
    slot_holders,
    waiting_run,
)
from perdure.client.session import ClientSession
from perdure.client.views import Reason, waiting_reasons
from perdure.clock import to_datetime, to_datetime_or_none
from perdure.errors import QueueNotFound
from perdure.model.queue_records import PlaceRecord, QueueSettings, QueueSummary, QueueView
from perdure.model.records import RunRecord, WorkerRecord
from perdure.queues.admission_plan import AdmissionPlan, plan, recent_admissions
from perdure.queues.effective_settings import effective_settings, partition_limits

PARTITIONS = 100  # of a queue, examined for a description
HOLDERS = 1_000  # slots of a queue, examined for a description
HEADS = 20  # first places of a queue, whose workflows say whether a worker serves them
CONCURRENT_READS = 20


class QueueReader:
    """Reads queues for one client."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def summaries(self) -> list[QueueSummary]:
        return await self._session.read(self._session.store.queues)

    async def summary(self, name: str) -> QueueSummary:
        """Return a queue as lists have it. Raises `QueueNotFound`."""
        for each in await self.summaries():
            if each.name == name:
                return each
        raise QueueNotFound(name)

    async def describe(self, name: str) -> QueueDescription:
        return await self._describe(await self.summary(name), await self._live_workers(), with_holders=True)

    async def describe_all(self) -> list[QueueDescription]:
        """Return all queues, without the states of their slot holders."""
        summaries, workers = await self.summaries(), await self._live_workers()
        found: list[QueueDescription] = []
        for first in range(0, len(summaries), CONCURRENT_READS):
            page = summaries[first : first + CONCURRENT_READS]
            found += await asyncio.gather(*(self._describe(each, workers, with_holders=False) for each in page))
        return found

    async def _describe(
        self, summary: QueueSummary, workers: Sequence[WorkerRecord], *, with_holders: bool
    ) -> QueueDescription:
        session, now = self._session, self._session.clock.now()
        view = await session.read(lambda: session.store.queue_view(summary.name, now, PARTITIONS))
        if view is None:
            raise QueueNotFound(summary.name)
        places = await self._first_places(summary)
        planned = plan(view, workers, now, waiting=summary.waiting)
        eligible = [each for each in places if each.eligible_at is None or each.eligible_at <= now]
        settings = effective_settings(summary.declared, summary.override)
        return QueueDescription(
            name=summary.name,
            declared=limits_view(summary.declared),
            override=override_view(summary.override),
            effective=limits_view(settings),
            partitioned=summary.declared.partitioned,
            paused=pause_view(summary.paused),
            waiting=summary.waiting,
            held=summary.held,
            partitions_waiting=len({each.partition for each in places} | {each.partition for each in view.partitions}),
            oldest=_oldest(eligible),
            next_admission_at=to_datetime_or_none(planned.next_at),
            admissions_last_minute=recent_admissions(view, now),
            limited_by=await self._limit(view, planned, eligible, workers),
            holders=await self._holders(summary.name) if with_holders else SlotHolders(),
        )

    async def _first_places(self, summary: QueueSummary) -> list[PlaceRecord]:
        session = self._session
        if not summary.waiting:
            return []
        return await session.read(lambda: session.store.places(summary.name, limit=PARTITIONS))

    async def _limit(
        self,
        view: QueueView,
        planned: AdmissionPlan,
        waiting: Sequence[PlaceRecord],
        workers: Sequence[WorkerRecord],
    ) -> str:
        """Return what limits the queue. The plan does not know which runs the workers execute."""
        if not waiting:
            return planned.limited_by
        if planned.limited_by == "idle" and not view.partitions:
            return "partition"  # all that wait are in partitions that are not ready
        if planned.planned and not await self._is_any_served(waiting[:HEADS], workers):
            return "no_worker"
        return planned.limited_by

    async def _is_any_served(self, places: Sequence[PlaceRecord], workers: Sequence[WorkerRecord]) -> bool:
        session = self._session
        records = await session.read(lambda: session.store.records([each.run_id for each in places]))
        return any(isinstance(each, RunRecord) and _is_served(each, workers) for each in records)

    async def _holders(self, name: str) -> SlotHolders:
        session = self._session
        places = await session.read(lambda: session.store.places(name, limit=HOLDERS, held=True))
        records = await session.read(lambda: session.store.records([each.run_id for each in places]))
        return slot_holders([each for each in records if isinstance(each, RunRecord)])

    async def _live_workers(self) -> list[WorkerRecord]:
        session, now = self._session, self._session.clock.now()
        workers = await session.read(session.store.workers)
        return [each for each in workers if not each.fenced and each.lease_until >= now]

    # --- why a run waits

    async def reason(self, record: RunRecord) -> Reason:
        """Return why a run waits in its queue."""
        session, now, name = self._session, self._session.clock.now(), record.queue or ""
        place = await session.read(lambda: session.store.place(record.id))
        view = await session.read(lambda: session.store.queue_view(name, now, PARTITIONS))
        if place is None or place.held or view is None:  # admitted or ended since the record was read
            return Reason("start", "waits to be claimed by a worker")
        ahead = await session.read(lambda: session.store.places_ahead(record.id, MAX_AHEAD))
        workers = await self._live_workers()
        planned = plan(view, workers, now)
        settings = effective_settings(view.declared, view.override)
        limited_by = _limit_of_run(record, place, view, planned, workers, now)
        partition = record.partition if limited_by == "partition" else None
        held, limit = view.held, settings.concurrency
        if partition is not None:
            held, limit = await self._partition_slots(name, partition, view, settings)
        oldest = await self._oldest_slot(name, partition) if limited_by in ("concurrency", "partition") else ""
        next_at = place.eligible_at if limited_by == "delay" else planned.next_at
        return QueueReason(
            kind="queue",
            text=_text(record, view, limited_by, held, limit, ahead, next_at, oldest),
            name=name,
            until=to_datetime_or_none(next_at),
            queue=name,
            partition=record.partition,
            priority=place.priority,
            ahead=ahead,
            held=held,
            limit=limit,
            limited_by=limited_by,
            next_at=to_datetime_or_none(next_at),
        )

    async def _partition_slots(
        self, name: str, partition: str, view: QueueView, settings: QueueSettings
    ) -> tuple[int, int | None]:
        """Return the slots held in a partition, and their limit."""
        session = self._session
        for each in view.partitions:
            if each.partition == partition:
                return each.held, partition_limits(settings, each.override).concurrency
        held = await session.read(lambda: session.store.places(name, partition, limit=HOLDERS, held=True))
        return len(held), settings.partition_concurrency

    async def _oldest_slot(self, name: str, partition: str | None) -> str:
        """Return the run that has held a slot for the longest time, with what it does, as text."""
        session, now = self._session, self._session.clock.now()
        places = await session.read(lambda: session.store.places(name, partition, limit=HOLDERS, held=True))
        if not places:
            return ""
        oldest = min(places, key=lambda each: each.admitted_at or each.since)
        record = (await session.read(lambda: session.store.records([oldest.run_id])))[0]
        if not isinstance(record, RunRecord):
            return ""
        reasons = waiting_reasons(record, served=True)
        state = f"{record.status.value} on {reasons[0].text}" if reasons else record.status.value
        return f"oldest slot: {record.id}, {state} since {_duration(now - record.updated_at)}"


def _limit_of_run(
    record: RunRecord,
    place: PlaceRecord,
    view: QueueView,
    planned: AdmissionPlan,
    workers: Sequence[WorkerRecord],
    now: float,
) -> str:
    """Return what limits one run: its own delay or workflow first, then the queue, then its partition."""
    if place.eligible_at is not None:
        return "delay"
    if view.paused is not None:
        return "paused"
    if not _is_served(record, workers):
        return "no_worker"
    if record.partition not in {each.partition for each in view.partitions}:
        return "partition"
    return planned.limited_by


def _is_served(record: RunRecord, workers: Sequence[WorkerRecord]) -> bool:
    pair = (record.workflow, record.version)
    return any(each.pool == record.pool and pair in each.workflows for each in workers)


def _oldest(places: Sequence[PlaceRecord]) -> WaitingRun | None:
    first = min(places, key=lambda each: (each.priority, each.since), default=None)
    return None if first is None else waiting_run(first, 1)


def _text(
    record: RunRecord,
    view: QueueView,
    limited_by: str,
    held: int,
    limit: int | None,
    ahead: int,
    next_at: float | None,
    oldest: str,
) -> str:
    count = f"{ahead} or more" if ahead >= MAX_AHEAD else str(ahead)
    until = "" if next_at is None else f", next at {to_datetime(next_at):%Y-%m-%d %H:%M:%S} UTC"
    partition = f", partition {record.partition}" if record.partition else ""
    slots = f"{held} held" if limit is None else f"{held} of {limit} held"
    match limited_by:
        case "delay":
            return f"waits for its time in queue {view.name}{partition}{until}"
        case "paused":
            assert view.paused is not None
            reason = f": {view.paused.reason}" if view.paused.reason else ""
            state = f"the queue is paused{reason}"
        case "no_worker":
            state = f"no live worker has workflow {record.workflow} v{record.version}"
        case "rate":
            state = f"its rate is used up{until}"
        case "workers":
            state = f"all workers execute as many of its runs as they may ({slots})"
        case "partition":
            state = f"{slots} in partition {record.partition!r}{until}"
        case _:
            state = slots
    ending = f"; {oldest}" if oldest else ""
    return f"waits for a slot of queue {view.name}{partition}: {state}, {count} before it{ending}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
