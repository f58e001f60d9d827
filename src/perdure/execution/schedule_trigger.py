"""ScheduleTrigger: fire the time slots of all schedules that are due.

One worker does this for all schedules: the one that rendezvous hashing selects among the live workers of all pools.
What stays due for two sweeps any worker fires. A slot is fired in three commits, each for a page of schedules:

    1. The plan is stored in the schedule's document, with the slots as pending. If the document has changed meanwhile,
       nothing is done: another worker has planned.
    2. The runs of pending slots are created, under ids that the slots determine.
    3. The outcomes are stored, and the document is due for its next slot.

After a crash between 1 and 3 the document is due again soon, and the next worker repeats 2. Without a schedule a sweep
costs one query.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from perdure.execution.membership import MembershipProtocol
from perdure.execution.slot_starts import SlotStarter, StartedSlots, missed_letter
from perdure.execution.store_session import StoreSession
from perdure.model.documents import Document
from perdure.model.ids import new_token
from perdure.model.records import DeadLetter, RunRecord
from perdure.model.schedule_records import KIND, StoredSchedule, decode_schedule, encode_schedule
from perdure.schedules.schedule_plan import CLOCK_TOLERANCE_SECONDS, due_time, plan_slots
from perdure.stores.results import Committed
from perdure.stores.writes import PutDocument

LOGGER = logging.getLogger("perdure.execution")
PAGE = 500
LATE_AFTER_SWEEPS = 2
PLANS_PER_ITERATION = 50  # of the event loop; a plan takes about 0.1 ms
REPEAT_SECONDS = 0.1  # before a schedule that is due again at once is planned again
DAMAGED_RECHECK_SECONDS = 60.0


class OpenSchedule(Struct, frozen=True):
    """A schedule as it was read or written, with the version of its document."""

    id: str
    version: int
    schedule: StoredSchedule


class ScheduleTrigger:
    """Fires schedules for one worker."""

    def __init__(
        self,
        session: StoreSession,
        member: MembershipProtocol,
        starter: SlotStarter,
        is_draining: Callable[[], bool],
    ) -> None:
        self._session = session
        self._member = member
        self._starter = starter
        self._is_draining = is_draining
        self._sweep = session.config.seconds("sweep_interval")
        self._latest: float | None = None  # the latest time of a tick since the clock was last set back

    async def tick(self, now: float) -> float | None:
        """Fire what is due, and return when the next schedule is."""
        tried: set[str] = set()
        while not self._is_draining():
            is_assigned = self._member.is_assigned(KIND)
            if is_assigned:
                await self._check_clock(now)
            due_by = now if is_assigned else now - LATE_AFTER_SWEEPS * self._sweep
            page = await self._session.store.documents(KIND, limit=PAGE, due_by=due_by + self._sweep)
            due = [document for document in page if document.due_at is not None and document.due_at <= due_by]
            fresh = [document for document in due if document.id not in tried]
            if not fresh:
                return self._next_tick(now, page, due) if is_assigned else now + self._sweep
            tried.update(document.id for document in fresh)
            await self._fire(fresh)
            now = self._session.clock.now()
        return None

    async def _check_clock(self, now: float) -> None:
        """Plan again the schedules that were planned by a clock that was ahead: they are due too late.

        Reads all schedules, when the clock has been set back and at the first tick of this worker.
        """
        if self._latest is not None and now >= self._latest - CLOCK_TOLERANCE_SECONDS:
            self._latest = max(self._latest, now)
            return
        after: str | None = None
        while True:
            page = await self._session.store.documents(KIND, after, PAGE)
            ahead = [document for document in page if _is_ahead(document, now)]
            if ahead:
                await self._fire(ahead)
            if len(page) < PAGE:
                break
            after = page[-1].id
        self._latest = now

    def _next_tick(self, now: float, page: Sequence[Document], due: Sequence[Document]) -> float:
        if due:
            return now + min(REPEAT_SECONDS, self._sweep)
        return min([now + self._sweep, *(document.due_at for document in page if document.due_at is not None)])

    async def _fire(self, documents: Sequence[Document]) -> None:
        """Fire the due slots of a page of schedules."""
        found = [each for document in documents if (each := await self._open(document)) is not None]
        planned = await self._plan(found, await self._start_all([each for each in found if each.schedule.pending]))
        started = await self._start_all([each for each in planned if each.schedule.pending])
        now, token = self._session.clock.now(), new_token()
        writes = []
        for each in planned:
            if each.id in started and started[each.id].outcomes:
                schedule = started[each.id].record(each.schedule)
                due_at = due_time(each.id, schedule, now, self._sweep)
                writes.append(put_schedule(each, schedule, due_at, token, started[each.id].dead_letters))
        await self._session.committer.write_all(writes)

    async def _start_all(self, schedules: Sequence[OpenSchedule]) -> dict[str, StartedSlots]:
        results = await self._starter.start([(each.id, each.schedule) for each in schedules])
        return {each.id: result for each, result in zip(schedules, results, strict=True)}

    async def _plan(self, schedules: Sequence[OpenSchedule], started: dict[str, StartedSlots]) -> list[OpenSchedule]:
        """Store the plans of these schedules, with the outcomes of slots that an earlier worker left pending.

        Return the schedules that were stored: those that no other process has changed.
        """
        token, last_runs = new_token(), await self._read_last_runs(schedules)
        plans: list[tuple[OpenSchedule, StoredSchedule]] = []
        writes: list[PutDocument] = []
        for number, each in enumerate(schedules):
            if number % PLANS_PER_ITERATION == PLANS_PER_ITERATION - 1:
                await asyncio.sleep(0)
            now, earlier = self._session.clock.now(), started.get(each.id, StartedSlots())
            plan = plan_slots(
                each.id,
                earlier.record(each.schedule),
                now,
                token=f"{token}/{number}",
                sweep=self._sweep,
                last_run=last_runs.get(each.schedule.last_run or ""),
            )
            letters = earlier.dead_letters
            if plan.missed is not None:
                letters = (*letters, missed_letter(plan.missed, token, now))
                LOGGER.warning(
                    "Schedule %s missed %d time slots", each.id, plan.missed.count, extra={"schedule": each.id}
                )
            plans.append((each, plan.schedule))
            writes.append(put_schedule(each, plan.schedule, plan.due_at, token, letters))
        results = await self._session.committer.write_all(writes)
        return [
            OpenSchedule(each.id, result.version, schedule)
            for (each, schedule), result in zip(plans, results, strict=True)
            if isinstance(result, Committed)
        ]

    async def _read_last_runs(self, schedules: Sequence[OpenSchedule]) -> dict[str, RunRecord]:
        """Return the last runs of schedules that a failed run pauses, by id."""
        ids = [each.schedule.last_run for each in schedules if each.schedule.spec.pause_on_failure]
        known = [run_id for run_id in ids if run_id is not None]
        found = await self._session.store.records(known) if known else []
        return {record.id: record for record in found if isinstance(record, RunRecord)}

    async def _open(self, document: Document) -> OpenSchedule | None:
        """Return the schedule of a document. Postpone one that cannot be decoded, so that it does not block others."""
        try:
            return OpenSchedule(document.id, document.version, decode_schedule(document.body))
        except msgspec.MsgspecError as error:
            LOGGER.error(
                "Schedule %s cannot be read and does not fire: %s", document.id, error, extra={"schedule": document.id}
            )
        postponed = PutDocument(
            kind=KIND,
            id=document.id,
            base=document.version,
            body=document.body,
            write_id=new_token(),
            due_at=self._session.clock.now() + DAMAGED_RECHECK_SECONDS,
        )
        await self._session.committer.write_all([postponed])
        return None


def _is_ahead(document: Document, now: float) -> bool:
    """Return whether a schedule was planned at a time that is still to come. One that cannot be decoded was not."""
    try:
        return decode_schedule(document.body).planned_at - now > CLOCK_TOLERANCE_SECONDS
    except msgspec.MsgspecError:
        return False


def put_schedule(
    read: OpenSchedule,
    schedule: StoredSchedule,
    due_at: float | None,
    token: str,
    dead_letters: Sequence[DeadLetter] = (),
) -> PutDocument:
    """Return the write that stores a schedule, unless its document has changed since it was read."""
    return PutDocument(
        kind=KIND,
        id=read.id,
        base=read.version,
        body=encode_schedule(schedule),
        write_id=f"{token}/{read.version}",
        due_at=due_at,
        dead_letters=tuple(dead_letters),
    )
