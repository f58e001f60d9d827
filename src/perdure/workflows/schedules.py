"""`Schedule` and `Calendar`: when a workflow is started, and what happens to overlapping and missed time slots.

Everything is checked when the value is created. Pure: this module knows no store; only `preview` reads a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Literal, TypedDict, get_args

from msgspec import UNSET, UnsetType

from perdure.clock import SYSTEM_CLOCK
from perdure.errors import InvalidArgument
from perdure.model.schedule_records import ScheduleSpec
from perdure.model.tags import TagValue
from perdure.model.validation import check_count, check_name, check_seconds, check_tags, check_time, describe_value
from perdure.schedules.cron import check_cron, check_crons
from perdure.schedules.slot_rule import SlotRule, floor_to_microseconds, is_date
from perdure.schedules.time_zones import load_zone, zone_name
from perdure.workflows.work_queues import WorkQueue

Overlap = Literal["skip", "queue", "latest", "cancel", "terminate", "allow"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)
# Overlap rules for which a schedule has a queue of its own; its runs cannot be in another queue as well.
QUEUED_OVERLAPS = ("queue", "latest", "cancel")
MAX_SLOTS = 10_000  # of `at`, `exclude` and one preview
MIN_EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """A cron rule by field, `Calendar(hour=9, weekday="mon-fri")`. A field is a number, or text in cron's syntax.

    Fields that are not given match everything if they are larger than the smallest given one; otherwise they are 0.
    """

    second: int | str | None = None
    minute: int | str | None = None
    hour: int | str | None = None
    day: int | str = "*"
    month: int | str = "*"
    weekday: int | str = "*"

    def __post_init__(self) -> None:
        for name in ("second", "minute", "hour", "day", "month", "weekday"):
            given = getattr(self, name)
            is_text = isinstance(given, str) and given and not any(each.isspace() for each in given)
            is_number = isinstance(given, int) and not isinstance(given, bool)
            if not is_text and not is_number and not (given is None and name in ("second", "minute", "hour")):
                raise InvalidArgument(f"Calendar.{name} must be a number or text without spaces, not {given!r}")
        check_cron(self.to_cron(), "Calendar")

    def to_cron(self) -> str:
        """Return the cron expression of these fields."""
        by_day = (self.day, self.month, self.weekday) != ("*", "*", "*")
        hour = self._or_default(self.hour, smaller=(self.minute, self.second), by_larger=by_day)
        minute = self._or_default(self.minute, smaller=(self.second,), by_larger=by_day or self.hour is not None)
        fields = [minute, hour, str(self.day), str(self.month), str(self.weekday)]
        return " ".join(fields if self.second is None else [*fields, str(self.second)])

    @staticmethod
    def _or_default(given: int | str | None, smaller: tuple[int | str | None, ...], by_larger: bool) -> str:
        if given is not None:
            return str(given)
        if any(each is not None for each in smaller):
            return "*"
        return "0" if by_larger else "*"


CronRule = str | Calendar | Sequence[str | Calendar]


class ScheduleKeywords(TypedDict, total=False):
    """The options of a schedule as keyword arguments; see `Schedule`."""

    cron: CronRule | None
    every: float | timedelta | None
    at: datetime | Sequence[datetime] | None
    tz: str | tzinfo
    overlap: Overlap
    catch_up: float | timedelta | Literal["last", "all"]
    jitter: float | timedelta
    start_at: datetime | float | None
    end_at: datetime | float | None
    limit: int | None
    exclude: str | date | Calendar | Sequence[str | date | Calendar]
    tags: Mapping[str, TagValue] | None
    queue: WorkQueue | str | None
    priority: int | None
    partition: str | None
    retention: float | timedelta | None
    pause_on_failure: bool
    note: str
    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a workflow is started: by `cron`, `every` so many seconds, or `at` some times. One of the three is given.

    `overlap` says what a slot does while the last run is open, `catch_up` (seconds, "last" or "all") which slots are
    started late after an outage. Slots are on or after `start_at` and before `end_at`; `exclude` removes those that a
    cron expression matches, or of a date. `jitter` delays each slot by a part of so many seconds.
    """

    cron: CronRule | None = None
    every: float | timedelta | None = None
    at: datetime | Sequence[datetime] | None = None
    tz: str | tzinfo = "UTC"
    overlap: Overlap = "skip"
    catch_up: float | timedelta | Literal["last", "all"] = 60.0
    jitter: float | timedelta = 0.0
    start_at: datetime | float | None = None
    end_at: datetime | float | None = None
    limit: int | None = None
    exclude: str | date | Calendar | Sequence[str | date | Calendar] = ()
    tags: Mapping[str, TagValue] | None = None
    queue: WorkQueue | str | UnsetType | None = UNSET
    priority: int | None = None
    partition: str | None = None
    retention: float | timedelta | None = None
    pause_on_failure: bool = False
    note: str = ""
    paused: bool = False

    def __post_init__(self) -> None:
        self.to_spec()
        check_tags(self.tags)
        if self.retention is not None:
            check_seconds("retention", self.retention)
        if self.priority is not None:
            check_count("priority", self.priority, minimum=-100, maximum=100)
        has_queue = self.queue is not UNSET and self.queue is not None
        if has_queue and self.overlap in QUEUED_OVERLAPS:
            raise InvalidArgument(
                f"overlap={self.overlap!r} starts runs through the schedule's own queue, so queue= cannot be given; "
                "use overlap 'skip', 'terminate' or 'allow', or remove queue="
            )

    def to_spec(self) -> ScheduleSpec:
        """Return the stored form of the rule. Raises `InvalidArgument` with the name of an invalid field."""
        given = [name for name in ("cron", "every", "at") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidArgument(f"a schedule must have exactly one of cron, every and at, not {found}")
        tz = zone_name(self.tz)
        start_at, end_at = _time("start_at", self.start_at), _time("end_at", self.end_at)
        if start_at is not None and end_at is not None and end_at <= start_at:
            raise InvalidArgument(f"end_at must be after start_at: {self.end_at!r} is not after {self.start_at!r}")
        for name in ("pause_on_failure", "paused"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False, not {describe_value(getattr(self, name))}")
        if self.overlap not in OVERLAPS:
            choices = ", ".join(map(repr, OVERLAPS))
            raise InvalidArgument(f"overlap must be one of {choices}, not {describe_value(self.overlap)}")
        return ScheduleSpec(
            cron=() if self.cron is None else check_crons(_to_crons(self.cron)),
            every=None if self.every is None else _every(self.every),
            at=() if self.at is None else _times("at", self.at),
            tz=tz,
            start_at=start_at,
            end_at=end_at,
            exclude=_exclusions(self.exclude),
            jitter=check_seconds("jitter", self.jitter),
            overlap=str.__str__(self.overlap),
            catch_up=_catch_up(self.catch_up),
            limit=None if self.limit is None else check_count("limit", self.limit),
            pause_on_failure=self.pause_on_failure,
            note=check_name("note", self.note) if self.note else "",
        )

    def preview(self, count: int = 10, after: datetime | None = None) -> list[datetime]:
        """Return the next time slots after a time, now if none is given, in the schedule's zone. Without jitter."""
        check_count("count", count, maximum=MAX_SLOTS)
        start = SYSTEM_CLOCK.now() if after is None else check_time("after", after)
        return next_slots(self.to_spec(), start, count)


def preview(*, count: int = 10, after: datetime | None = None, **rule: Any) -> list[datetime]:
    """Return the next time slots of a rule, given as for a `Schedule`. Pure: it reads no store."""
    unknown = sorted(rule.keys() - {option.name for option in dataclasses.fields(Schedule)})
    if unknown:
        raise InvalidArgument(f"preview has no option {', '.join(unknown)}; use those of Schedule")
    return Schedule(**rule).preview(count, after)


def next_slots(spec: ScheduleSpec, after: float, count: int) -> list[datetime]:
    """Return up to `count` slots of a spec later than this time, as datetimes in its zone."""
    zone, slots = load_zone(spec.tz), SlotRule(spec).between(after, float("inf"))
    return [datetime.fromtimestamp(slot, UTC).astimezone(zone) for slot, _ in zip(slots, range(count), strict=False)]


def check_fires(spec: ScheduleSpec, now: float) -> None:
    """Raise `InvalidArgument` if the rule has no slot after now. Called for new and changed schedules."""
    if spec.end_at is not None and spec.end_at <= now:
        raise InvalidArgument(f"end_at is in the past: {datetime.fromtimestamp(spec.end_at, UTC).isoformat()}")
    if SlotRule(spec).next_after(now) is None:
        field = "cron" if spec.cron else "at" if spec.at else "every"
        why = "exclude removes all of its slots" if spec.exclude else "all of its slots are in the past"
        raise InvalidArgument(f"{field}: the schedule never fires; {why}, or end_at is before the first one")


def _to_crons(given: Any) -> Any:
    if isinstance(given, Calendar):
        return given.to_cron()
    if isinstance(given, list | tuple):
        return [_to_crons(each) for each in given]
    return given


def _every(given: Any) -> float:
    seconds = check_seconds("every", given, zero=False)
    if seconds < MIN_EVERY_SECONDS:
        raise InvalidArgument(f"every must be at least 1 second, not {seconds:g}")
    return floor_to_microseconds(seconds)


def _time(name: str, given: Any) -> float | None:
    return None if given is None else floor_to_microseconds(check_time(name, given))


def _times(name: str, given: Any) -> tuple[float, ...]:
    """Return aware datetimes as sorted times without repetitions."""
    items = [given] if isinstance(given, datetime) else given
    if not isinstance(items, list | tuple) or not items or len(items) > MAX_SLOTS:
        raise InvalidArgument(f"{name} must be an aware datetime or a list of 1 to {MAX_SLOTS}, not {items!r:.200}")
    for item in items:
        if not isinstance(item, datetime):
            raise InvalidArgument(f"{name} must be aware datetimes, not {describe_value(item)}")
    return tuple(sorted({floor_to_microseconds(check_time(name, item)) for item in items}))


def _catch_up(given: Any) -> float | str:
    if given in ("last", "all"):
        return str.__str__(given)
    if isinstance(given, str):
        raise InvalidArgument(f"catch_up must be seconds, 'last' or 'all', not {given!r}")
    return check_seconds("catch_up", given)


def _exclusions(given: Any) -> tuple[str, ...]:
    """Return `exclude` as cron expressions and ISO dates."""
    items = given if isinstance(given, list | tuple) else [given]
    if len(items) > MAX_SLOTS:
        raise InvalidArgument(f"exclude has {len(items)} items; {MAX_SLOTS} is the maximum")
    return tuple(dict.fromkeys(_exclusion(item) for item in items))


def _exclusion(item: Any) -> str:
    if isinstance(item, datetime):
        raise InvalidArgument(f"exclude must be dates or cron expressions, not the datetime {item!r}; use .date()")
    if isinstance(item, date):
        return item.isoformat()
    if isinstance(item, Calendar):
        return item.to_cron()
    if isinstance(item, str) and is_date(item):
        try:
            return date.fromisoformat(item).isoformat()
        except ValueError:
            raise InvalidArgument(f"exclude {item!r} is not a date") from None
    return check_cron(item, "exclude")
