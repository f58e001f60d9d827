"""Backfill: start the runs of a schedule's past time slots, in pages, as an internal run that can be watched.

A slot whose run exists is skipped, so a backfill can be repeated. Its steps read the services of the worker from
`current_step().state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from perdure.errors import ScheduleNotFound, StoreError
from perdure.execution.slot_starts import SlotStarter
from perdure.execution.store_session import StoreSession
from perdure.model.ids import child_creation_id
from perdure.model.schedule_records import KIND, SLOT_TAG, decode_schedule
from perdure.schedules.slot_rule import MICROSECONDS, SlotRule, slot_name, slot_run_id
from perdure.stores.results import Created, IdTaken, Joined
from perdure.workflows.context import Context
from perdure.workflows.internal import internal_workflow
from perdure.workflows.step_context import current_step
from perdure.workflows.steps import step

BACKFILL = "~backfill"
PAGE = 200  # slots of one step
BACKFILL_OVERLAPS = ("queue", "skip", "allow")


class InternalServices(Struct, frozen=True):
    """What steps of internal runs use of their worker."""

    session: StoreSession
    starter: SlotStarter


@dataclass(frozen=True, slots=True)
class BackfillResult:
    """How many runs a backfill started, how many existed before, and how many slots its overlap rule skipped."""

    started: int = 0
    existing: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class BackfillPage:
    """The result of one page. `last` is its last slot; None if there are no more."""

    started: int
    existing: int
    skipped: int
    last: float | None


@internal_workflow(BACKFILL)
async def backfill(ctx: Context, schedule: str, start: float, end: float, overlap: str) -> BackfillResult:
    """Start the runs of all slots in [start, end) that have none."""
    started = existing = skipped = 0
    after: float | None = start - 1 / MICROSECONDS
    while after is not None:
        page = await start_page(schedule, after, end, overlap)
        started, existing, skipped = started + page.started, existing + page.existing, skipped + page.skipped
        await ctx.publish("progress", {"started": started, "existing": existing, "skipped": skipped})
        after = page.last
    return BackfillResult(started, existing, skipped)


@step(name="start_page")
async def start_page(schedule_id: str, after: float, end: float, overlap: str) -> BackfillPage:
    """Start the runs of the next slots after this time and before `end`."""
    current = current_step()
    services: InternalServices = current.state
    session, starter = services.session, services.starter
    document = await session.read(lambda: session.store.document(KIND, schedule_id))
    if document is None:
        raise ScheduleNotFound(schedule_id)
    schedule = decode_schedule(document.body)
    slots = [slot for slot, _ in zip(SlotRule(schedule.spec).between(after, end), range(PAGE), strict=False)]
    slots = [slot for slot in slots if slot < end]
    ids = [slot_run_id(schedule_id, slot) for slot in slots]
    found = await session.read(lambda: session.store.records(ids))
    versions = await starter.live_versions()
    writes = [
        starter.build_run(
            schedule_id,
            run_id,
            schedule.target,
            overlap,
            versions,
            created_by=child_creation_id(current.run_id, "backfill", slot_name(slot)),
            tags={SLOT_TAG: datetime.fromtimestamp(slot, UTC)},
        )
        for slot, run_id, record in zip(slots, ids, found, strict=True)
        if record is None
    ]
    results: list[Any] = await starter.create(writes) if writes else []
    counts = [sum(isinstance(result, kind) for result in results) for kind in (Created, IdTaken, Joined)]
    if sum(counts) < len(writes):
        refused = next(result for result in results if not isinstance(result, Created | IdTaken | Joined))
        raise StoreError(f"a time slot of schedule {schedule_id!r} could not be started: {refused}", retryable=True)
    existing = len(slots) - len(writes) + counts[1]
    return BackfillPage(counts[0], existing, counts[2], slots[-1] if len(slots) == PAGE else None)
