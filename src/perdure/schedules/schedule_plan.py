"""Plan a schedule: which time slots are due, caught up or missed, and what is stored before their runs are started.

    plan_slots       make due slots pending, or missed; compute the next slot
    record_outcomes  remove pending slots whose runs were started, skipped or refused
    edit_schedule    another rule or target; slots that are due under the old rule become pending first
    pause, resume    while a schedule is paused no slot is planned

Pure functions from one `StoredSchedule` to the next. The caller writes it by compare-and-set, and starts the runs of
pending slots after that. This module knows no store and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from perdure.model.records import RunRecord, RunStatus
from perdure.model.schedule_records import (
    RECENT,
    MissedSlots,
    PendingSlot,
    ScheduleCounts,
    SchedulePause,
    ScheduleSpec,
    ScheduleTarget,
    SlotOutcome,
    StoredSchedule,
)
from perdure.schedules.slot_rule import MICROSECONDS, SlotRule, jitter_of, slot_name, slot_run_id

MAX_CAUGHT_UP = 1000  # slots that one plan starts late; earlier ones are missed
MAX_COUNTED = 10_000  # missed slots; more are reported as this number
MAX_FIRED_RANGES = 8
CLOCK_TOLERANCE_SECONDS = 60.0
MAX_RECHECK_SECONDS = 60.0  # while slots are pending
MAX_TOLERANCE_SECONDS = 10.0  # of a slot that is on time; two sweeps if those are shorter
# A slot ends the run of the slot before it, so of several slots that are due at once only the last one is started.
REPLACING_OVERLAPS = ("latest", "cancel", "terminate")
ENGINE = "perdure"  # who pauses a schedule after a failure


class SlotPlan(Struct, frozen=True):
    """The result of a plan: the schedule to store, when it is due next, and the slots that were missed, if any."""

    schedule: StoredSchedule
    due_at: float | None
    missed: MissedSlots | None = None


def plan_slots(
    schedule_id: str,
    schedule: StoredSchedule,
    now: float,
    *,
    token: str,
    sweep: float,
    last_run: RunRecord | None = None,
    catch_up: float | str | None = None,
) -> SlotPlan:
    """Return the schedule after planning the slots that are due by `now`.

    `token` is unique to this plan. A slot is late if it fires more than two sweeps after its time. `last_run` is the
    row of the schedule's last run, needed for `pause_on_failure`. `catch_up` replaces that of the schedule.
    """
    rule = SlotRule(schedule.spec)
    schedule = _pause_after_failure(schedule, last_run, now)
    if (
        schedule.paused is None
        and schedule.next_slot is not None
        and schedule.planned_at - now > CLOCK_TOLERANCE_SECONDS
    ):
        schedule = replace(schedule, next_slot=_skip_fired(rule, rule.next_after(now), schedule.fired))
    missed = None
    if schedule.paused is None and schedule.next_slot is not None:
        schedule, missed = _plan_due(
            schedule_id, schedule, rule, now, token, min(2 * sweep, MAX_TOLERANCE_SECONDS), catch_up
        )
    schedule = replace(schedule, planned_at=now)
    return SlotPlan(schedule, due_time(schedule_id, schedule, now, sweep), missed)


def due_time(schedule_id: str, schedule: StoredSchedule, now: float, sweep: float) -> float | None:
    """Return when the schedule's document is due: for its next slot, and soon while slots are pending."""
    due_at = None
    if schedule.paused is None and schedule.next_slot is not None and not is_at_limit(schedule):
        due_at = schedule.next_slot + jitter_of(schedule_id, schedule.next_slot, schedule.spec.jitter)
    if not schedule.pending:
        return due_at
    recheck_at = now + min(sweep, MAX_RECHECK_SECONDS)
    return recheck_at if due_at is None else min(due_at, recheck_at)


def is_at_limit(schedule: StoredSchedule) -> bool:
    """Return whether the schedule may not make further slots pending, because of `limit`."""
    return _runs_left(schedule) <= 0


def is_finished(schedule: StoredSchedule) -> bool:
    """Return whether no further slot will fire."""
    limit = schedule.spec.limit
    return schedule.next_slot is None or (limit is not None and schedule.counts.started >= limit)


def _plan_due(
    schedule_id: str,
    schedule: StoredSchedule,
    rule: SlotRule,
    now: float,
    token: str,
    tolerance: float,
    catch_up: float | str | None,
) -> tuple[StoredSchedule, MissedSlots | None]:
    """Make the due slots pending or missed, and set the next slot."""
    spec, first = schedule.spec, schedule.next_slot
    assert first is not None
    last = _last_due(schedule_id, spec, rule, first, now)
    if last is None or is_at_limit(schedule):
        return schedule, None
    before_first = _before(first)
    caught = _select(schedule_id, spec, rule, before_first, last, now, tolerance, catch_up)
    missed = _missed_slots(schedule_id, rule, before_first, _before(caught[0]) if caught else last)
    outcomes = []
    if missed is not None:
        outcomes.append(SlotOutcome(missed.first, "missed", last=missed.last, count=missed.count))
    if len(caught) > 1 and spec.overlap in REPLACING_OVERLAPS:
        outcomes.append(SlotOutcome(caught[0], "skipped", last=caught[-2], count=len(caught) - 1))
        caught = caught[-1:]
    started = caught[: int(min(len(caught), _runs_left(schedule)))]
    next_slot = rule.next_after(started[-1] if len(started) < len(caught) else last)
    schedule = _with_outcomes(schedule, outcomes)
    schedule = replace(
        schedule,
        next_slot=_skip_fired(rule, next_slot, schedule.fired),
        pending=(*schedule.pending, *_new_pending(schedule_id, schedule, started, token)),
        fired=_add_range(schedule.fired, rule, started),
    )
    return schedule, missed


def _last_due(schedule_id: str, spec: ScheduleSpec, rule: SlotRule, first: float, now: float) -> float | None:
    """Return the last slot from `first` on that fires by now. A slot waits for the ones before it."""
    if not spec.jitter:
        latest = rule.latest(_before(first), now, 1) if first <= now else []
        return latest[-1] if latest else None
    certain = rule.latest(_before(first), now - spec.jitter, 1)
    last = certain[-1] if certain else None
    for slot in rule.between(_before(first) if last is None else last, now):
        if slot + jitter_of(schedule_id, slot, spec.jitter) > now:
            break
        last = slot
    return last


def _select(
    schedule_id: str,
    spec: ScheduleSpec,
    rule: SlotRule,
    after: float,
    last: float,
    now: float,
    tolerance: float,
    catch_up: float | str | None,
) -> list[float]:
    """Return the slots of (after, last] that are started: those on time, and late ones that `catch_up` includes."""
    catch_up = spec.catch_up if catch_up is None else catch_up
    if catch_up == "all":
        return rule.latest(after, last, MAX_CAUGHT_UP)
    lateness = tolerance if isinstance(catch_up, str) else max(tolerance, catch_up)
    since = now - lateness
    recent = rule.latest(max(after, since - spec.jitter - 1), last, MAX_CAUGHT_UP)
    for at, slot in enumerate(recent):
        if slot + jitter_of(schedule_id, slot, spec.jitter) >= since:
            return recent[at:]
    return [last] if catch_up == "last" else []


def _missed_slots(schedule_id: str, rule: SlotRule, after: float, until: float) -> MissedSlots | None:
    """Return the slots of (after, until] as missed; None if there are none."""
    count = rule.count(after, until, MAX_COUNTED)
    if not count:
        return None
    first, last = rule.next_after(after), rule.latest(after, until, 1)[0]
    assert first is not None
    return MissedSlots(schedule_id, first, last, count)


def _new_pending(schedule_id: str, schedule: StoredSchedule, slots: Sequence[float], token: str) -> list[PendingSlot]:
    """Return the pending form of these slots. Each one names the run before it, if its overlap rule ends that."""
    overlap = schedule.spec.overlap
    previous = slot_run_id(schedule_id, schedule.pending[-1].slot) if schedule.pending else schedule.last_run
    pending = []
    for slot in slots:
        pending.append(
            PendingSlot(
                slot=slot,
                token=f"{token}/{slot_name(slot)}",
                overlap=overlap,
                previous=previous if overlap in REPLACING_OVERLAPS else None,
            )
        )
        previous = slot_run_id(schedule_id, slot)
    return pending


def _runs_left(schedule: StoredSchedule) -> float:
    limit = schedule.spec.limit
    return float("inf") if limit is None else limit - schedule.counts.started - len(schedule.pending)


def _before(slot: float) -> float:
    """Return the time before this slot, after all slots before it."""
    return slot - 1 / MICROSECONDS


# --- slots that have fired ----------------------------------------------------------------------------------------


def _add_range(
    fired: tuple[tuple[float, float], ...], rule: SlotRule, slots: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """Return the ranges of fired slots with these slots, which follow each other, added."""
    if not slots:
        return fired
    start, end = slots[0], slots[-1]
    if fired and fired[-1][1] < start and rule.next_after(fired[-1][1]) == start:
        return (*fired[:-1], (fired[-1][0], end))
    return (*fired, (start, end))[-MAX_FIRED_RANGES:]


def _skip_fired(rule: SlotRule, slot: float | None, fired: tuple[tuple[float, float], ...]) -> float | None:
    """Return the first slot from this one on that is in no range of fired slots."""
    for start, end in sorted(fired):
        if slot is not None and start <= slot <= end:
            slot = rule.next_after(end)
    return slot


# --- outcomes -----------------------------------------------------------------------------------------------------


def record_outcomes(schedule: StoredSchedule, outcomes: Sequence[SlotOutcome]) -> StoredSchedule:
    """Return the schedule without the pending slots of these outcomes, and with the outcomes recorded."""
    done = {outcome.slot for outcome in outcomes}
    schedule = replace(schedule, pending=tuple(each for each in schedule.pending if each.slot not in done))
    started = [outcome.run_id for outcome in outcomes if outcome.outcome == "started"]
    if started:
        schedule = replace(schedule, last_run=started[-1])
    return _with_outcomes(schedule, outcomes)


def record_dropped(schedule: StoredSchedule, run_id: str) -> StoredSchedule:
    """Return the schedule after the run of a slot was ended before it began: that slot counts as skipped."""
    at = next(
        (at for at, each in enumerate(schedule.recent) if (each.run_id, each.outcome) == (run_id, "started")), None
    )
    if at is None:  # a triggered run, which is not counted as a slot
        return schedule
    recent = list(schedule.recent)
    recent[at] = replace(recent[at], outcome="skipped")
    counts = replace(schedule.counts, started=schedule.counts.started - 1, skipped=schedule.counts.skipped + 1)
    return replace(schedule, recent=tuple(recent), counts=counts)


def _with_outcomes(schedule: StoredSchedule, outcomes: Sequence[SlotOutcome]) -> StoredSchedule:
    counts = schedule.counts
    for outcome in outcomes:
        field = "conflicts" if outcome.outcome == "conflict" else outcome.outcome
        counts = replace(counts, **{field: getattr(counts, field) + outcome.count})
    return replace(schedule, counts=counts, recent=(*schedule.recent, *outcomes)[-RECENT:])


# --- edit, pause, resume -------------------------------------------------------------------------------------------


def new_schedule(spec: ScheduleSpec, target: ScheduleTarget, now: float) -> StoredSchedule:
    """Return a schedule whose first slot is the first one after now."""
    return StoredSchedule(
        spec=spec,
        target=target,
        created_at=now,
        next_slot=SlotRule(spec).next_after(now),
        planned_at=now,
        counts=ScheduleCounts(),
    )


def edit_schedule(
    schedule_id: str,
    schedule: StoredSchedule,
    spec: ScheduleSpec,
    target: ScheduleTarget,
    now: float,
    *,
    token: str,
    sweep: float,
) -> SlotPlan:
    """Return the schedule with another spec and target.

    Slots that are due now under the old rule become pending, with the old target. Pending slots keep theirs.
    """
    planned = plan_slots(schedule_id, schedule, now, token=token, sweep=sweep)
    old = planned.schedule
    pending = old.pending
    if target != old.target:
        pending = tuple(each if each.target is not None else replace(each, target=old.target) for each in pending)
    next_slot = old.next_slot
    if _rule_of(spec) != _rule_of(old.spec) or next_slot is None:
        rule = SlotRule(spec)
        next_slot = _skip_fired(rule, rule.next_after(now), old.fired)
    edited = replace(old, spec=spec, target=target, pending=pending, next_slot=next_slot)
    return SlotPlan(edited, due_time(schedule_id, edited, now, sweep), planned.missed)


def _rule_of(spec: ScheduleSpec) -> ScheduleSpec:
    """Return the part of a spec that determines its slots."""
    return ScheduleSpec(
        cron=spec.cron,
        every=spec.every,
        at=spec.at,
        tz=spec.tz,
        start_at=spec.start_at,
        end_at=spec.end_at,
        exclude=spec.exclude,
    )


def pause_schedule(
    schedule_id: str, schedule: StoredSchedule, pause: SchedulePause, *, token: str, sweep: float
) -> SlotPlan:
    """Return the schedule paused. Slots that are due before the pause become pending or missed first."""
    planned = plan_slots(schedule_id, schedule, pause.since, token=token, sweep=sweep)
    paused = replace(planned.schedule, paused=planned.schedule.paused or pause)
    return SlotPlan(paused, due_time(schedule_id, paused, pause.since, sweep), planned.missed)


def resume_schedule(
    schedule_id: str, schedule: StoredSchedule, now: float, *, catch_up: bool, token: str, sweep: float
) -> SlotPlan:
    """Return the schedule resumed. With `catch_up` the slots of the pause are started; otherwise they are ignored."""
    if schedule.paused is None:
        return plan_slots(schedule_id, schedule, now, token=token, sweep=sweep)
    resumed = replace(schedule, paused=None)
    if catch_up:
        return plan_slots(schedule_id, resumed, now, token=token, sweep=sweep, catch_up="all")
    if resumed.next_slot is not None and resumed.next_slot <= now:
        rule = SlotRule(resumed.spec)
        resumed = replace(resumed, next_slot=_skip_fired(rule, rule.next_after(now), resumed.fired))
    resumed = replace(resumed, planned_at=now)
    return SlotPlan(resumed, due_time(schedule_id, resumed, now, sweep))


def _pause_after_failure(schedule: StoredSchedule, last_run: RunRecord | None, now: float) -> StoredSchedule:
    """Return the schedule paused if its last run failed, unless that failure has paused it before."""
    if not schedule.spec.pause_on_failure or schedule.paused is not None or last_run is None:
        return schedule
    if last_run.status is not RunStatus.FAILED or last_run.id == schedule.failed_run:
        return schedule
    pause = SchedulePause(ENGINE, f"run {last_run.id} failed", now)
    return replace(schedule, paused=pause, failed_run=last_run.id)
