"""What callers see of a schedule: its rule as text, its next time slots, and what became of the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from perdure.clock import to_datetime
from perdure.codec import Codec
from perdure.model.schedule_records import SlotOutcome, StoredSchedule
from perdure.model.tags import TagValue, decode_tags
from perdure.schedules.schedule_plan import is_finished
from perdure.schedules.slot_rule import MICROSECONDS, SlotRule, describe_rule
from perdure.schedules.time_zones import load_zone

SHOWN_SLOTS = 5


@dataclass(frozen=True, slots=True)
class SlotView:
    """What became of a time slot: "started", "skipped", "missed" or "conflict". `run_id` is the run, if there is one.

    Successive slots with one outcome, such as missed ones, are one view: `count` slots up to `last`.
    """

    slot: datetime
    outcome: str
    run_id: str | None = None
    last: datetime | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class SchedulePauseView:
    """Who paused a schedule, why and when."""

    by: str
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class ScheduleDescription:
    """A schedule: what it starts and when, its next time slots, its last outcomes, and counters.

    `finished`: no further slot will fire. `pending` are slots whose runs are being started. `conflicts` counts slots
    whose run id was taken by another run.
    """

    id: str
    workflow: str
    input: Any
    rule: str
    tz: str
    overlap: str
    catch_up: float | str
    next_slots: list[datetime]
    recent: list[SlotView]
    pending: list[datetime]
    paused: SchedulePauseView | None
    finished: bool
    started: int
    skipped: int
    missed: int
    conflicts: int
    triggered: int
    last_run: str | None
    declared_by: str | None
    created_at: datetime
    tags: Mapping[str, TagValue]
    queue: str | None
    note: str
    pause_on_failure: bool
    limit: int | None


def describe_schedule(schedule_id: str, schedule: StoredSchedule, codec: Codec) -> ScheduleDescription:
    """Return the description of a stored schedule. Times are in UTC, time slots in the zone of the schedule."""
    spec, target, counts, paused = schedule.spec, schedule.target, schedule.counts, schedule.paused
    zone = load_zone(spec.tz)

    def in_zone(slot: float) -> datetime:
        return datetime.fromtimestamp(slot, UTC).astimezone(zone)

    return ScheduleDescription(
        id=schedule_id,
        workflow=target.workflow,
        input=codec.decode(target.input),
        rule=describe_rule(spec),
        tz=spec.tz,
        overlap=spec.overlap,
        catch_up=spec.catch_up,
        next_slots=[in_zone(slot) for slot in _next_slots(schedule)],
        recent=[_view_outcome(each, in_zone) for each in schedule.recent],
        pending=[in_zone(each.slot) for each in schedule.pending],
        paused=None if paused is None else SchedulePauseView(paused.by, paused.reason, to_datetime(paused.since)),
        finished=is_finished(schedule),
        started=counts.started,
        skipped=counts.skipped,
        missed=counts.missed,
        conflicts=counts.conflicts,
        triggered=counts.triggered,
        last_run=schedule.last_run,
        declared_by=schedule.declared_by,
        created_at=to_datetime(schedule.created_at),
        tags=decode_tags(target.tags),
        queue=None if target.place is None else target.place.queue,
        note=spec.note,
        pause_on_failure=spec.pause_on_failure,
        limit=spec.limit,
    )


def _next_slots(schedule: StoredSchedule) -> list[float]:
    if schedule.next_slot is None or is_finished(schedule):
        return []
    count = SHOWN_SLOTS
    if schedule.spec.limit is not None:
        count = min(count, schedule.spec.limit - schedule.counts.started)
    slots = SlotRule(schedule.spec).between(schedule.next_slot - 1 / MICROSECONDS, float("inf"))
    return [slot for slot, _ in zip(slots, range(count), strict=False)]


def _view_outcome(outcome: SlotOutcome, in_zone: Any) -> SlotView:
    last = None if outcome.last is None else in_zone(outcome.last)
    return SlotView(in_zone(outcome.slot), outcome.outcome, outcome.run_id, last, outcome.count)
