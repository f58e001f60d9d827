"""Public views of work queues: descriptions, limits, places, and the reason why a run waits in one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from msgspec import UNSET

from perdure.client.views import Reason
from perdure.clock import to_datetime
from perdure.model.queue_records import PlaceRecord, QueueOverride, QueuePause, QueueSettings, RateLimit
from perdure.model.records import RunRecord, RunStatus
from perdure.queues.effective_settings import LIMIT_NAMES
from perdure.workflows.work_queues import Rate

MAX_AHEAD = 1_000


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue; None: no limit."""

    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: Rate | None = None
    partition_concurrency: int | None = None
    partition_rate: Rate | None = None
    max_waiting: int | None = None


@dataclass(frozen=True, slots=True)
class QueuePauseView:
    """Who paused a queue, why and when."""

    by: str
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """A run that waits in a queue. `position` counts from 1 in a page; `cursor` is the `after` of the next page.

    `eligible_at` is set for a delayed or debounced run, `expires_at` for one that is not admitted after that time.
    """

    run_id: str
    partition: str
    priority: int
    since: datetime
    position: int
    cursor: str
    eligible_at: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SlotHolders:
    """The runs that hold the slots of a queue, by state. A held run keeps its slot until it ends or is released."""

    executing: int = 0
    suspended: int = 0
    held: int = 0
    held_runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueDescription:
    """A work queue: its limits, what waits, and what limits it now.

    `declared` is what code declares, `override` what an operator has set instead, `effective` what applies. `waiting`
    and `held` are capped at 10,001. `limited_by` is "concurrency", "partition", "rate", "workers", "no_worker",
    "paused" or "idle" (no run waits that could be admitted). `oldest` is the first waiting run of the most urgent
    priority, over all partitions. `admissions_last_minute` may include up to 1 % more.
    """

    name: str
    declared: QueueLimits
    override: Mapping[str, Any]
    effective: QueueLimits
    partitioned: bool
    paused: QueuePauseView | None
    waiting: int
    held: int
    partitions_waiting: int
    oldest: WaitingRun | None
    next_admission_at: datetime | None
    admissions_last_minute: int
    limited_by: str
    holders: SlotHolders = field(default_factory=SlotHolders)


@dataclass(frozen=True, slots=True)
class QueueReason(Reason):
    """Why a run waits in a queue. `ahead` is counted up to 1,000; `held` and `limit` are those of what limits it."""

    queue: str = ""
    partition: str = ""
    priority: int = 0
    ahead: int = 0
    held: int = 0
    limit: int | None = None
    limited_by: str = ""
    next_at: datetime | None = None


def limits_view(settings: QueueSettings) -> QueueLimits:
    """Return limits as callers see them."""
    return QueueLimits(**{name: _shown(getattr(settings, name)) for name in LIMIT_NAMES})


def override_view(override: QueueOverride) -> dict[str, Any]:
    """Return the limits that an operator has set."""
    return {name: _shown(limit) for name in LIMIT_NAMES if (limit := getattr(override, name)) is not UNSET}


def pause_view(paused: QueuePause | None) -> QueuePauseView | None:
    """Return a pause as callers see it."""
    return None if paused is None else QueuePauseView(paused.by, paused.reason, to_datetime(paused.since))


def waiting_run(place: PlaceRecord, position: int) -> WaitingRun:
    """Return a place as callers see it."""
    return WaitingRun(
        run_id=place.run_id,
        partition=place.partition,
        priority=place.priority,
        since=to_datetime(place.since),
        position=position,
        cursor=encode_cursor(place),
        eligible_at=None if place.eligible_at is None else to_datetime(place.eligible_at),
        expires_at=None if place.expires_at is None else to_datetime(place.expires_at),
    )


def encode_cursor(place: PlaceRecord) -> str:
    """Return the cursor of a page that ends with this place."""
    return f"{place.priority}/{place.number}/{place.partition}"


def slot_holders(records: Sequence[RunRecord]) -> SlotHolders:
    """Count these runs, which hold slots, by state."""
    held = [each.id for each in records if each.current_hold is not None]
    suspended = sum(each.status is RunStatus.SUSPENDED for each in records) - len(held)
    return SlotHolders(len(records) - suspended - len(held), suspended, len(held), tuple(held[:10]))


def _shown(limit: Any) -> Any:
    return Rate(limit.limit, limit.per) if isinstance(limit, RateLimit) else limit
