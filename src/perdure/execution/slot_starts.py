"""SlotStarter: start the runs of pending time slots, and find out what became of each slot.

The slots are stored as pending before this. All ids are derived from what is stored, so a repeat by any process is
safe: it finds the run that was created, or creates it.

Overlap rules other than "allow" and "terminate" start runs through the queue `~schedule`, in which each schedule is a
partition with one slot. This module plans nothing; it knows no document.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from perdure.errors import StoreError
from perdure.execution.local_worker import LocalWorker
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, cancel_message
from perdure.model.ids import child_creation_id, shard_of
from perdure.model.queue_records import Place, QueueSettings
from perdure.model.records import DeadLetter, RunRecord, WorkerRecord
from perdure.model.schedule_records import (
    KIND,
    SCHEDULE_TAG,
    SLOT_TAG,
    MissedSlots,
    PendingSlot,
    ScheduleTarget,
    SlotOutcome,
    StoredSchedule,
)
from perdure.model.tags import TagValue, decode_tags
from perdure.schedules.schedule_plan import REPLACING_OVERLAPS, record_dropped, record_outcomes
from perdure.schedules.slot_rule import slot_name, slot_run_id
from perdure.stores.results import Committed, Created, IdTaken, Joined, QueueMissing, WriteResult
from perdure.stores.writes import ConfigureQueue, CreateRun, DeliverMessage, Write

LOGGER = logging.getLogger("perdure.execution")
SCHEDULE_QUEUE = "~schedule"
QUEUED_OVERLAPS = ("skip", "queue", "latest", "cancel")
MIN_RETENTION_LEASES = 10  # so that a worker which was paused cannot start the run of a slot again

Result = WriteResult | StoreError


class StartedSlots(Struct, frozen=True):
    """What became of the pending slots of a schedule. A slot without an outcome stays pending."""

    outcomes: tuple[SlotOutcome, ...] = ()
    dropped: tuple[str, ...] = ()  # runs of earlier slots that were ended before they began
    dead_letters: tuple[DeadLetter, ...] = ()

    def record(self, schedule: StoredSchedule) -> StoredSchedule:
        """Return the schedule with these outcomes."""
        schedule = record_outcomes(schedule, self.outcomes)
        for run_id in self.dropped:
            schedule = record_dropped(schedule, run_id)
        return schedule


class _Item(Struct, frozen=True):
    """One pending slot of the schedule with this index and id."""

    index: int
    id: str
    schedule: StoredSchedule
    slot: PendingSlot

    @property
    def target(self) -> ScheduleTarget:
        return self.slot.target or self.schedule.target


class SlotStarter:
    """Starts runs for one process. `worker` returns the id of its worker, or None in a client."""

    def __init__(
        self,
        session: StoreSession,
        local_worker: Callable[[], LocalWorker],
        worker: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._session = session
        self._local_worker = local_worker
        self._worker = worker
        self._has_queue = False

    async def start(self, schedules: Sequence[tuple[str, StoredSchedule]]) -> list[StartedSlots]:
        """Start the runs of all pending slots. Return what became of them, in the order of the schedules."""
        started = [StartedSlots() for _ in schedules]
        rounds = [_rounds(schedule.pending) for _, schedule in schedules]
        if not any(rounds):
            return started
        versions = await self.live_versions()
        for number in range(max(map(len, rounds))):
            items = [
                _Item(index, *schedules[index], slot)
                for index, each in enumerate(rounds)
                if number < len(each)
                for slot in each[number]
            ]
            for item, run_id in await self._end_previous(items):
                so_far = started[item.index]
                started[item.index] = replace(so_far, dropped=(*so_far.dropped, run_id))
            results = await self.create([self._build(item, versions) for item in items])
            for item, result in zip(items, results, strict=True):
                started[item.index] = self._add_result(started[item.index], item, result)
        return started

    async def live_versions(self) -> dict[str, tuple[int, str]]:
        """Return the highest version of each workflow that a live worker executes, and the pool of that worker."""
        workers, now = await self._session.read(self._session.store.workers), self._session.clock.now()
        return highest_versions(worker for worker in workers if not worker.fenced and worker.lease_until >= now)

    async def create(self, writes: Sequence[CreateRun]) -> list[Result]:
        """Create runs. Creates the queue of schedules first if one of them needs it."""
        committer = self._session.committer
        needs_queue = any(write.place is not None and write.place.queue == SCHEDULE_QUEUE for write in writes)
        if needs_queue and not self._has_queue:
            (created,) = await committer.write_all([configure_queue()])
            self._has_queue = not isinstance(created, StoreError)
        results = await committer.write_all(writes)
        if any(isinstance(result, QueueMissing) for result in results):
            self._has_queue = False  # the queue of schedules was removed
        if any(isinstance(result, Created) for result in results):
            self._local_worker().runs_may_be_due()
        return results

    async def end_runs(self, ends: Sequence[tuple[str, str, str]]) -> list[Result]:
        """End runs, given as (run id, overlap rule, token), as their rule says.

        Return the results of the writes that end them: at once, or if they have not begun.
        """
        writes: list[Write] = []
        last: list[int] = []
        for run_id, overlap, token in ends:
            writes += self._build_end(run_id, overlap, token)
            last.append(len(writes) - 1)
        results = await self._session.committer.write_all(writes)
        ended = [results[index] for index in last]
        for (run_id, _, _), result in zip(ends, ended, strict=True):
            if isinstance(result, Committed):
                self._local_worker().run_ended_externally(run_id)
            else:
                self._local_worker().run_has_messages(run_id)
        return ended

    async def _end_previous(self, items: Sequence[_Item]) -> list[tuple[_Item, str]]:
        """End the runs that slots replace. Return those that had not begun, of schedules with "latest"."""
        replacing = [(item, item.slot.previous) for item in items if item.slot.previous is not None]
        if not replacing:
            return []
        results = await self.end_runs([(previous, item.slot.overlap, item.slot.token) for item, previous in replacing])
        return [
            (item, previous)
            for (item, previous), result in zip(replacing, results, strict=True)
            if isinstance(result, Committed) and item.slot.overlap == "latest"
        ]

    def _build_end(self, run_id: str, overlap: str, token: str) -> list[Write]:
        now, config = self._session.clock.now(), self._session.config
        end = build_end_run(
            run_id,
            f"schedule/{token}",
            now,
            config,
            retention=None,
            only_if_not_started=overlap != "terminate",
        )
        if overlap != "cancel":
            return [end]
        # The message keeps the reason, also for a run that has not begun. Both writes are in one batch.
        reason = self._session.codec.encode("the next time slot of its schedule replaces it")
        message = cancel_message(f"cancel/schedule/{token}", now, reason)
        return [DeliverMessage(run_id=run_id, message=message, now=now), end]

    def _build(self, item: _Item, versions: Mapping[str, tuple[int, str]]) -> CreateRun:
        slot = datetime.fromtimestamp(item.slot.slot, UTC)
        return self.build_run(
            item.id,
            slot_run_id(item.id, item.slot.slot),
            item.target,
            item.slot.overlap,
            versions,
            created_by=child_creation_id(f"schedule/{item.id}", "slot", item.slot.token),
            tags={SLOT_TAG: slot},
        )

    def build_run(
        self,
        schedule_id: str,
        run_id: str,
        target: ScheduleTarget,
        overlap: str,
        versions: Mapping[str, tuple[int, str]],
        *,
        created_by: str,
        tags: Mapping[str, TagValue],
    ) -> CreateRun:
        """Return the write that creates a run of a schedule, in a live worker's version and pool if there is one."""
        config, now = self._session.config, self._session.clock.now()
        version, pool = versions.get(target.workflow, (target.version, target.pool))
        retention = target.retention
        if retention is not None:
            retention = max(retention, MIN_RETENTION_LEASES * config.seconds("lease"))
        record = RunRecord(
            id=run_id,
            workflow=target.workflow,
            version=version,
            input=target.input,
            created_at=now,
            created_by=created_by,
            seed=random.getrandbits(31),
            pool=pool,
            shard=shard_of(run_id, config.shards),
            tags={**decode_tags(target.tags), SCHEDULE_TAG: schedule_id, **tags},
            updated_at=now,
            wake_at=now,
            deadline_at=None if target.timeout is None else now + target.timeout,
            retention=retention,
        )
        return CreateRun(record, place=place_of(schedule_id, overlap, target), by=self._worker())

    def _add_result(self, started: StartedSlots, item: _Item, result: Result) -> StartedSlots:
        """Return the results with that of one slot. Errors that may pass leave the slot pending."""
        slot, run_id = item.slot.slot, slot_run_id(item.id, item.slot.slot)
        match result:
            case Created():
                outcome = SlotOutcome(slot, "started", run_id=run_id)
            case Joined():
                outcome = SlotOutcome(slot, "skipped", run_id=result.run_id)
            case IdTaken() if is_run_of_slot(result.record, item.id, slot):
                outcome = SlotOutcome(slot, "started", run_id=run_id)
            case IdTaken():
                outcome = SlotOutcome(slot, "conflict", run_id=run_id)
                letter = conflict_letter(item.id, slot, result.record, item.slot.token, self._session.clock.now())
                started = replace(started, dead_letters=(*started.dead_letters, letter))
            case _:
                LOGGER.warning("Slot %s could not be started, will retry: %s", run_id, result, extra={"run_id": run_id})
                return started
        return replace(started, outcomes=(*started.outcomes, outcome))


def _rounds(pending: Sequence[PendingSlot]) -> list[list[PendingSlot]]:
    """Return the slots that can be started together; a slot that replaces the one before it starts after that."""
    if any(slot.overlap in REPLACING_OVERLAPS for slot in pending):
        return [[slot] for slot in pending]
    return [list(pending)] if pending else []


def highest_versions(workers: Iterable[WorkerRecord]) -> dict[str, tuple[int, str]]:
    """Return the highest version of each workflow, and the pool of a worker that executes it."""
    found: dict[str, tuple[int, str]] = {}
    for worker in workers:
        for workflow, version in worker.workflows:
            found[workflow] = max(found.get(workflow, (0, "")), (version, worker.pool))
    return found


def place_of(schedule_id: str, overlap: str, target: ScheduleTarget) -> Place | None:
    """Return the place in a queue that a run of a schedule gets."""
    if overlap not in QUEUED_OVERLAPS:
        return target.place
    place = (target.place if overlap == "skip" else None) or Place(queue=SCHEDULE_QUEUE, partition=schedule_id)
    # One key: of the runs of a schedule with "skip" at most one is open.
    return replace(place, dedupe=f"schedule/{schedule_id}") if overlap == "skip" else place


def configure_queue() -> ConfigureQueue:
    """Return the write that creates the queue of schedules; it has no effect if the queue exists."""
    return ConfigureQueue(
        name=SCHEDULE_QUEUE, base=0, declared=QueueSettings(partitioned=True, partition_concurrency=1)
    )


def is_run_of_slot(record: RunRecord, schedule_id: str, slot: float) -> bool:
    """Return whether a run was started for this slot of this schedule."""
    started_for = record.tags.get(SLOT_TAG)
    at = started_for.timestamp() if isinstance(started_for, datetime) else None
    return record.tags.get(SCHEDULE_TAG) == schedule_id and at == slot


def missed_letter(missed: MissedSlots, token: str, now: float) -> DeadLetter:
    """Return the dead letter of the slots that a schedule missed: one per gap."""
    first, last = slot_name(missed.first), slot_name(missed.last)
    what = f"time slot {first} was" if missed.count == 1 else f"{missed.count} time slots from {first} to {last} were"
    return _schedule_letter(missed, token, now, f"{what} missed: no worker fired the schedule in time")


def conflict_letter(schedule_id: str, slot: float, taken_by: RunRecord, token: str, now: float) -> DeadLetter:
    """Return the dead letter of a slot whose run id belongs to another run."""
    reason = (
        f"time slot {slot_name(slot)} was not started: its run id is taken by a run of workflow {taken_by.workflow}"
    )
    return _schedule_letter(MissedSlots(schedule_id, slot, slot, 1), token, now, reason)


def _schedule_letter(slots: MissedSlots, token: str, now: float, reason: str) -> DeadLetter:
    name = hashlib.sha256(f"{slots.schedule}\0{slot_name(slots.first)}\0{token}".encode()).hexdigest()[:24]
    return DeadLetter(
        id=f"schedule/{name}",
        kind=KIND,
        at=now,
        reason=reason,
        value=msgspec.json.encode(slots),
        original_target=slots.schedule,
    )
