"""ScheduleClient: create, change, list, pause, trigger and delete schedules.

Every change is a compare-and-set of the schedule's document, repeated when another process changed it in between. The
rules are those of `perdure.schedules`; worker and client start runs in the same way (`SlotStarter`).
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from perdure.client.schedule_views import ScheduleDescription, describe_schedule
from perdure.client.session import ClientSession
from perdure.client.starts import StartClient
from perdure.errors import (
    InvalidArgument,
    QueueFull,
    QueueNotFound,
    RunConflict,
    ScheduleConflict,
    ScheduleNotFound,
    StoreError,
)
from perdure.execution.backfill import BACKFILL, BACKFILL_OVERLAPS
from perdure.execution.queue_arrivals import raise_for_place
from perdure.execution.schedule_trigger import OpenSchedule, put_schedule
from perdure.execution.slot_starts import SlotStarter, missed_letter
from perdure.model.ids import new_creation_id, new_token, shard_of
from perdure.model.queries import MAX_LIMIT
from perdure.model.records import RunRecord
from perdure.model.schedule_records import (
    KIND,
    OVERLAPS,
    SCHEDULE_TAG,
    MissedSlots,
    SchedulePause,
    ScheduleTarget,
    StoredSchedule,
    decode_schedule,
)
from perdure.model.tags import encode_tags
from perdure.model.validation import check_count, check_name, check_public_name, check_time, describe_value
from perdure.schedules.schedule_plan import (
    SlotPlan,
    due_time,
    edit_schedule,
    new_schedule,
    pause_schedule,
    resume_schedule,
)
from perdure.schedules.slot_rule import MICROSECONDS
from perdure.stores.results import Committed, Created, IdTaken, Joined, LimitReached, QueueMissing
from perdure.stores.writes import CreateRun, PutDocument
from perdure.workflows.definition import BoundWorkflow, Workflow
from perdure.workflows.internal import INTERNAL, INTERNAL_POOL
from perdure.workflows.schedules import QUEUED_OVERLAPS, Schedule, check_fires
from perdure.workflows.start_request import StartRequest

MAX_ATTEMPTS = 50  # another process may change the schedule between the read and the write of a change
MAX_ID = 480  # characters, so that the ids of runs fit
Change = Callable[[StoredSchedule, float, str], SlotPlan | None]  # of a schedule, now, token; None: no change


class ScheduleClient:
    """The calls of a client about schedules; `Client` documents them."""

    def __init__(self, session: ClientSession, starts: StartClient) -> None:
        self._session = session
        self._starts = starts
        self._starter: SlotStarter | None = None

    async def schedule(
        self,
        schedule_id: str,
        wf: Any,
        args: tuple[Any, ...],
        rule: Schedule,
        payload: Mapping[str, Any],
        *,
        declared_by: str | None = None,
    ) -> tuple[bool, bool]:
        """Create the schedule, or change it if it differs. Return whether it was created, and whether changed."""
        schedule_id = check_schedule_id(schedule_id)
        request = await self._build_request(schedule_id, wf, args, rule, payload)
        spec, target = rule.to_spec(), self._build_target(request, rule)
        await self._check_queue(target)
        for _ in range(MAX_ATTEMPTS):
            existing, now, token = await self._find(schedule_id), self._session.clock.now(), new_token()
            if existing is None:
                check_fires(spec, now)
                created = replace(new_schedule(spec, target, now), declared_by=declared_by)
                if rule.paused:
                    created = replace(created, paused=SchedulePause(self._caller(), "", now))
                due_at = due_time(schedule_id, created, now, self._sweep)
                if await self._put(OpenSchedule(schedule_id, 0, created), SlotPlan(created, due_at), token):
                    return True, False
                continue
            stored = existing.schedule
            _check_owner(schedule_id, stored, declared_by)
            if spec == stored.spec and self._is_same_target(request, target, stored.target):
                return False, False
            if spec != stored.spec:
                check_fires(spec, now)
            plan = edit_schedule(schedule_id, stored, spec, target, now, token=token, sweep=self._sweep)
            if await self._put(existing, plan, token):
                return False, True
        raise self._changed_too_often(schedule_id)

    async def describe(self, schedule_id: str) -> ScheduleDescription:
        found = await self._get(check_name("a schedule's id", schedule_id))
        return describe_schedule(found.id, found.schedule, self._session.codec)

    async def schedules(self, after: str | None, limit: int) -> list[ScheduleDescription]:
        after = None if after is None else check_name("after", after)
        check_count("limit", limit, maximum=MAX_LIMIT)
        page = await self._session.read(lambda: self._session.store.documents(KIND, after, limit))
        return [describe_schedule(each.id, decode_schedule(each.body), self._session.codec) for each in page]

    async def pause(self, schedule_id: str, reason: str) -> None:
        text = check_name("a reason", reason) if reason else ""

        def change(schedule: StoredSchedule, now: float, token: str) -> SlotPlan | None:
            if schedule.paused is not None:
                return None
            pause = SchedulePause(self._caller(), text, now)
            return pause_schedule(schedule_id, schedule, pause, token=token, sweep=self._sweep)

        await self._change(schedule_id, change)

    async def resume(self, schedule_id: str, catch_up: bool) -> None:
        if not isinstance(catch_up, bool):
            raise InvalidArgument(f"catch_up must be True or False, not {describe_value(catch_up)}")

        def change(schedule: StoredSchedule, now: float, token: str) -> SlotPlan | None:
            if schedule.paused is None:
                return None
            return resume_schedule(schedule_id, schedule, now, catch_up=catch_up, token=token, sweep=self._sweep)

        await self._change(schedule_id, change)

    async def trigger(self, schedule_id: str, overlap: str | None) -> tuple[str, bool]:
        """Start a run now. Return its id, or that of the run that it was not started for, and whether it is new."""
        found, token = await self._get(check_name("a schedule's id", schedule_id)), new_token()[:12]
        overlap = found.schedule.spec.overlap if overlap is None else check_overlap(overlap)
        starter, last_run, target = self._slot_starter(), found.schedule.last_run, found.schedule.target
        if last_run is not None and overlap in ("latest", "cancel", "terminate"):
            await starter.end_runs([(last_run, overlap, token)])
        write = starter.build_run(
            schedule_id,
            f"{schedule_id}/now-{token}",
            target,
            overlap,
            await starter.live_versions(),
            created_by=new_creation_id(),
            tags={},
        )
        (result,) = await starter.create([write])
        match result:
            case Joined():
                return result.run_id, False
            case QueueMissing():
                raise QueueNotFound(write.place.queue if write.place else "")
            case LimitReached():
                raise QueueFull(f"the queue of schedule {schedule_id!r} holds {result.pending} runs and takes no more")
            case StoreError():
                raise result
            case IdTaken():
                raise RunConflict(write.record.id, "")
            case _:
                assert isinstance(result, Created)
        run_id = write.record.id

        def note(schedule: StoredSchedule, now: float, token: str) -> SlotPlan:
            counts = replace(schedule.counts, triggered=schedule.counts.triggered + 1)
            noted = replace(schedule, counts=counts, last_run=run_id)
            return SlotPlan(noted, due_time(schedule_id, noted, now, self._sweep))

        await self._change(schedule_id, note)
        return run_id, True

    async def backfill(self, schedule_id: str, start: datetime, end: datetime, overlap: str) -> str:
        """Start an internal run that starts the slots of [start, end), and return its id."""
        schedule_id = check_name("a schedule's id", schedule_id)
        if overlap not in BACKFILL_OVERLAPS:
            choices = ", ".join(map(repr, BACKFILL_OVERLAPS))
            raise InvalidArgument(f"overlap of a backfill must be one of {choices}, not {describe_value(overlap)}")
        first, last = _check_datetime("start", start), _check_datetime("end", end)
        if last <= first:
            raise InvalidArgument(f"end must be after start: {end!r} is not after {start!r}")
        if last > self._session.clock.now():
            raise InvalidArgument(f"end of a backfill must not be in the future: {end!r}")
        await self._get(schedule_id)
        return await self._start_backfill(f"{BACKFILL}/{new_token()[:16]}", schedule_id, first, last, overlap)

    async def backfill_missed(self, dead_letter_id: str, value: bytes) -> str:
        """Start an internal run that starts the missed slots of a dead letter, and return its id."""
        missed = msgspec.json.decode(value, type=MissedSlots)
        found = await self._get(missed.schedule)
        overlap = found.schedule.spec.overlap if found.schedule.spec.overlap in BACKFILL_OVERLAPS else "queue"
        run_id = f"{BACKFILL}/{dead_letter_id}"
        end = missed.last + 1 / MICROSECONDS
        return await self._start_backfill(run_id, missed.schedule, missed.first, end, overlap)

    async def _start_backfill(self, run_id: str, schedule_id: str, start: float, end: float, overlap: str) -> str:
        session, workflow = self._session, INTERNAL.latest(BACKFILL)
        assert workflow is not None
        now = session.clock.now()
        record = RunRecord(
            id=run_id,
            workflow=workflow.name,
            version=workflow.version,
            input=workflow.parameters.encode(session.codec, (schedule_id, start, end, overlap), {}, what="a backfill"),
            created_at=now,
            created_by=new_creation_id(),
            seed=random.getrandbits(31),
            pool=INTERNAL_POOL,
            shard=shard_of(run_id, session.config.shards),
            tags={SCHEDULE_TAG: schedule_id},
            updated_at=now,
            wake_at=now,
            retention=workflow.settings.retention,
        )
        await session.committer.write(CreateRun(record))
        session.local_worker.run_has_messages(run_id)
        return run_id

    async def delete(self, schedule_id: str) -> bool:
        schedule_id, starter = check_name("a schedule's id", schedule_id), self._slot_starter()
        for _ in range(MAX_ATTEMPTS):
            found = await self._find(schedule_id)
            if found is None:
                return False
            (started,) = await starter.start([(schedule_id, found.schedule)])
            if len(started.outcomes) < len(found.schedule.pending):
                raise StoreError(
                    f"schedule {schedule_id!r} has a pending time slot whose run cannot be started now; try again",
                    retryable=True,
                )
            write = PutDocument(
                kind=KIND,
                id=schedule_id,
                base=found.version,
                body=None,
                write_id=new_token(),
                dead_letters=started.dead_letters,
            )
            if isinstance(await self._session.committer.write(write), Committed):
                return True
        raise self._changed_too_often(schedule_id)

    async def declare(self, workflows: list[Workflow[Any, Any]]) -> None:
        """Create or change the schedules that these workflows declare. Raises `ScheduleConflict`."""
        for workflow in workflows:
            rule = workflow.settings.schedule
            if rule is not None:
                await self.schedule(workflow.name, workflow, (), rule, {}, declared_by=".".join(workflow.origin))

    # --- documents

    async def _change(self, schedule_id: str, change: Change) -> None:
        """Change a schedule. Raises `ScheduleNotFound`."""
        schedule_id = check_name("a schedule's id", schedule_id)
        for _ in range(MAX_ATTEMPTS):
            found, token = await self._get(schedule_id), new_token()
            plan = change(found.schedule, self._session.clock.now(), token)
            if plan is None or await self._put(found, plan, token):
                return
        raise self._changed_too_often(schedule_id)

    async def _put(self, read: OpenSchedule, plan: SlotPlan, token: str) -> bool:
        """Store a schedule with its missed slots; return False if another process has changed it."""
        letters, now = [], self._session.clock.now()
        if plan.missed is not None:
            letters.append(missed_letter(plan.missed, token, now))
        due_at = now if plan.schedule.pending else plan.due_at  # a worker starts the runs of pending slots at once
        write = put_schedule(read, plan.schedule, due_at, token, letters)
        return isinstance(await self._session.committer.write(write), Committed)

    async def _find(self, schedule_id: str) -> OpenSchedule | None:
        document = await self._session.read(lambda: self._session.store.document(KIND, schedule_id))
        if document is None:
            return None
        return OpenSchedule(schedule_id, document.version, decode_schedule(document.body))

    async def _get(self, schedule_id: str) -> OpenSchedule:
        found = await self._find(schedule_id)
        if found is None:
            raise ScheduleNotFound(schedule_id)
        return found

    def _slot_starter(self) -> SlotStarter:
        if self._starter is None:
            self._starter = SlotStarter(self._session.store_session, lambda: self._session.local_worker)
        return self._starter

    @property
    def _sweep(self) -> float:
        return self._session.config.seconds("sweep_interval")

    def _caller(self) -> str:
        return f"{self._session.client_name} on {platform.node() or 'unknown host'}"

    def _changed_too_often(self, schedule_id: str) -> StoreError:
        message = f"schedule {schedule_id!r} was changed during each of {MAX_ATTEMPTS} attempts to change it; try again"
        return StoreError(message, retryable=True)

    # --- targets

    async def _build_request(
        self, schedule_id: str, wf: Any, args: tuple[Any, ...], rule: Schedule, payload: Mapping[str, Any]
    ) -> StartRequest:
        if isinstance(wf, BoundWorkflow):
            raise InvalidArgument("schedule takes its options itself, so use the workflow and not wf.options(...)")
        options: dict[str, Any] = {"id": schedule_id, "tags": rule.tags, "retention": rule.retention}
        if rule.queue is not UNSET:
            options["queue"] = rule.queue
        for name in ("priority", "partition"):
            if getattr(rule, name) is not None:
                options[name] = getattr(rule, name)
        return await self._starts.build_request(wf, args, {**options, **payload})

    def _build_target(self, request: StartRequest, rule: Schedule) -> ScheduleTarget:
        record, place = request.record, request.place
        if place is not None and rule.overlap in QUEUED_OVERLAPS:
            raise InvalidArgument(
                f"overlap={rule.overlap!r} starts runs through the schedule's own queue, but workflow "
                f"{record.workflow!r} has queue {place.queue!r}; use queue=None to bypass it, or overlap 'skip', "
                "'terminate' or 'allow'"
            )
        return ScheduleTarget(
            workflow=record.workflow,
            version=record.version,
            input=record.input,
            pool=record.pool,
            tags=encode_tags(record.tags),
            retention=record.retention,
            timeout=None if record.deadline_at is None else round(record.deadline_at - record.created_at, 6),
            place=place,
        )

    async def _check_queue(self, target: ScheduleTarget) -> None:
        """Raise `InvalidArgument` if the store does not have the queue of a target."""
        if target.place is not None:
            queues = await self._session.read(self._session.store.queues)
            if target.place.queue not in {queue.name for queue in queues}:
                raise_for_place(target.place, QueueMissing())

    def _is_same_target(self, request: StartRequest, new: ScheduleTarget, old: ScheduleTarget) -> bool:
        """Return whether two targets start the same. The version does not count: a run gets that of a live worker."""
        if replace(new, version=0, input=b"") != replace(old, version=0, input=b""):
            return False
        if request.workflow is not None:
            return request.workflow.parameters.equal(self._session.codec, new.input, old.input)
        codec = self._session.codec
        return codec.canonical(codec.decode(new.input)) == codec.canonical(codec.decode(old.input))


def check_schedule_id(schedule_id: object) -> str:
    """Return a valid id of a new schedule. Raises `InvalidArgument`."""
    checked = check_public_name("a schedule's id", schedule_id)
    if len(checked) > MAX_ID:
        raise InvalidArgument(f"a schedule's id has {len(checked)} characters; {MAX_ID} is the maximum")
    return checked


def _check_datetime(what: str, time: object) -> float:
    if not isinstance(time, datetime):
        raise InvalidArgument(f"{what} must be an aware datetime, not {describe_value(time)}")
    return check_time(what, time)


def check_overlap(overlap: object) -> str:
    """Return a valid overlap rule. Raises `InvalidArgument`."""
    if not isinstance(overlap, str) or overlap not in OVERLAPS:
        choices = ", ".join(map(repr, OVERLAPS))
        raise InvalidArgument(f"overlap must be one of {choices}, not {describe_value(overlap)}")
    return str.__str__(overlap)


def _check_owner(schedule_id: str, stored: StoredSchedule, declared_by: str | None) -> None:
    """Raise `ScheduleConflict` if code declares a schedule that a call has created, or the other way round."""
    if (stored.declared_by is None) == (declared_by is None):
        return
    if declared_by is not None:
        reason = f"was created by a call of schedule(), and {declared_by} declares it; delete it, or use another name"
    else:
        reason = f"is declared by {stored.declared_by}; change it there, or use another id"
    raise ScheduleConflict(schedule_id, reason)
