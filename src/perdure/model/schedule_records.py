"""Stored records of schedules: the rule, what it starts, and the state of its time slots. The body of a document.

A time slot is a point in time, in seconds since the epoch, at which a schedule starts a run. All records are frozen.
This module knows no rule of time: `perdure.schedules` plans.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from perdure.model.queue_records import Place

KIND = "schedule"  # of the documents, and of the dead letters of missed slots
SCHEDULE_TAG, SLOT_TAG = "perdure.schedule", "perdure.slot"
OVERLAPS = ("skip", "queue", "latest", "cancel", "terminate", "allow")
OUTCOMES = ("started", "skipped", "missed", "conflict")
RECENT = 10  # outcomes that a schedule stores


class ScheduleSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a schedule fires, and what it does about overlapping and missed slots.

    Exactly one of `cron`, `every` and `at` is set. `catch_up` is a number of seconds, "last" or "all". Slots are on or
    after `start_at` and before `end_at`. `exclude` are cron expressions and dates in the zone `tz`.
    """

    cron: tuple[str, ...] = ()
    every: float | None = None
    at: tuple[float, ...] = ()
    tz: str = "UTC"
    start_at: float | None = None
    end_at: float | None = None
    exclude: tuple[str, ...] = ()
    jitter: float = 0.0
    overlap: str = "skip"  # one of OVERLAPS
    catch_up: float | str = 60.0
    limit: int | None = None
    pause_on_failure: bool = False
    note: str = ""


class ScheduleTarget(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a schedule starts. A live worker with a higher version, or in another pool, takes precedence."""

    workflow: str
    version: int
    input: bytes
    pool: str = "default"
    tags: bytes = b"{}"  # by `perdure.model.tags.encode_tags`
    retention: float | None = None
    timeout: float | None = None
    place: Place | None = None


class PendingSlot(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A slot whose run is started next. Everything that its start depends on is stored here, before the start.

    `token` is unique to this firing of the slot. `previous` is the run that `overlap` ends first, if any. Without a
    `target` the slot starts that of the schedule.
    """

    slot: float
    token: str
    overlap: str
    previous: str | None = None
    target: ScheduleTarget | None = None


class SlotOutcome(Struct, frozen=True, omit_defaults=True):
    """What became of a slot, or of all slots from `slot` to `last` if they were missed."""

    slot: float
    outcome: str  # one of OUTCOMES
    run_id: str | None = None
    last: float | None = None
    count: int = 1


class SchedulePause(Struct, frozen=True):
    """Who paused a schedule, why and when."""

    by: str
    reason: str
    since: float


class ScheduleCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many slots of a schedule had which outcome, and how many runs were triggered beside the rule."""

    started: int = 0
    skipped: int = 0
    missed: int = 0
    conflicts: int = 0
    triggered: int = 0


class StoredSchedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule: its definition and its state.

    `next_slot` is the next slot to plan; None: the schedule has ended. `planned_at` is the store's time of the last
    plan. `fired` are ranges of slots that were planned and not missed: they are not planned again, whatever the clock
    does. `last_run` is the latest run of the schedule, `failed_run` the run whose failure has paused it. `declared_by`
    names the code that declares the schedule, if code does.
    """

    spec: ScheduleSpec
    target: ScheduleTarget
    created_at: float
    next_slot: float | None
    planned_at: float
    pending: tuple[PendingSlot, ...] = ()
    fired: tuple[tuple[float, float], ...] = ()
    recent: tuple[SlotOutcome, ...] = ()
    counts: ScheduleCounts = ScheduleCounts()
    last_run: str | None = None
    failed_run: str | None = None
    paused: SchedulePause | None = None
    declared_by: str | None = None


class MissedSlots(Struct, frozen=True):
    """The value of the dead letter of missed slots. `count` is exact up to a limit, then a lower bound."""

    schedule: str
    first: float
    last: float
    count: int


def encode_schedule(schedule: StoredSchedule) -> bytes:
    """Return the body of a schedule's document."""
    return msgspec.json.encode(schedule)


def decode_schedule(body: bytes) -> StoredSchedule:
    """Return a schedule from its document. Raises `msgspec.MsgspecError` if the body is damaged."""
    return msgspec.json.decode(body, type=StoredSchedule)
