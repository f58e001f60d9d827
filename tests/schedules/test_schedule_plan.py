"""The plan of a schedule, by table: due, late, missed and excluded slots; limits; edits; pauses; clocks that jump."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.model.records import RunRecord, RunStatus
from perdure.model.schedule_records import (
    PendingSlot,
    ScheduleCounts,
    SchedulePause,
    ScheduleSpec,
    ScheduleTarget,
    SlotOutcome,
    StoredSchedule,
    decode_schedule,
    encode_schedule,
)
from perdure.schedules import schedule_plan
from perdure.schedules.schedule_plan import (
    edit_schedule,
    is_finished,
    new_schedule,
    pause_schedule,
    plan_slots,
    record_dropped,
    record_outcomes,
    resume_schedule,
)
from perdure.schedules.slot_rule import jitter_of

T0 = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()
SWEEP = 5.0
TARGET = ScheduleTarget(workflow="report", version=1, input=b"{}")


def schedule(now=T0, **spec) -> StoredSchedule:
    return new_schedule(ScheduleSpec(**{"every": 60.0, **spec}), TARGET, now)


def plan(stored, now, **options):
    return plan_slots("s", stored, now, **{"token": f"t{now}", "sweep": SWEEP, **options})


def pending(stored) -> list[float]:
    """The pending slots, in seconds after the start of the test."""
    return [each.slot - T0 for each in stored.pending]


def fire(stored) -> StoredSchedule:
    """Return the schedule after the runs of its pending slots were started."""
    outcomes = [SlotOutcome(each.slot, "started", run_id=f"s/{each.slot}") for each in stored.pending]
    return record_outcomes(stored, outcomes)


def test_a_new_schedule_waits_for_the_first_slot_after_now():
    stored = schedule(now=T0 + 1)
    assert stored.next_slot == T0 + 60
    assert plan(stored, T0 + 2).due_at == T0 + 60
    assert plan(stored, T0 + 2).schedule.pending == ()


def test_a_due_slot_becomes_pending_and_the_document_is_due_again_soon():
    planned = plan(schedule(), T0 + 60.2)
    assert pending(planned.schedule) == [60]
    assert planned.schedule.next_slot == T0 + 120
    assert planned.due_at == T0 + 60.2 + SWEEP
    assert planned.missed is None


def test_the_document_is_due_for_the_next_slot_when_nothing_is_pending():
    stored = fire(plan(schedule(), T0 + 60.2).schedule)
    assert plan(stored, T0 + 61).due_at == T0 + 120
    assert stored.counts == ScheduleCounts(started=1)
    assert stored.last_run == f"s/{T0 + 60}"


def test_a_slot_within_the_sweep_interval_is_due_at_its_time():
    assert plan(schedule(every=2.0), T0 + 2).due_at == T0 + 4


@pytest.mark.parametrize(
    ("catch_up", "started", "missed"),
    [
        # The slots at 60, 120, 180 and 240 s; the plan is made at 245 s.
        (0.0, [240], (60, 180, 3)),
        (60.0, [240], (60, 180, 3)),
        (70.0, [180, 240], (60, 120, 2)),
        (1e6, [60, 120, 180, 240], None),
        ("last", [240], (60, 180, 3)),
        ("all", [60, 120, 180, 240], None),
    ],
)
def test_catch_up(catch_up, started, missed):
    planned = plan(schedule(catch_up=catch_up), T0 + 245)
    assert pending(planned.schedule) == started
    assert _missed(planned) == missed
    assert planned.schedule.next_slot == T0 + 300
    assert planned.schedule.counts.missed == (missed[2] if missed else 0)


@pytest.mark.parametrize(
    ("catch_up", "started", "missed"),
    [
        # The plan is made at 290 s, when no slot is on time.
        (0.0, [], (60, 240, 4)),
        (49.0, [], (60, 240, 4)),
        (50.0, [240], (60, 180, 3)),
        ("last", [240], (60, 180, 3)),
        ("all", [60, 120, 180, 240], None),
    ],
)
def test_catch_up_when_no_slot_is_on_time(catch_up, started, missed):
    planned = plan(schedule(catch_up=catch_up), T0 + 290)
    assert (pending(planned.schedule), _missed(planned)) == (started, missed)


def _missed(planned):
    missed = planned.missed
    return None if missed is None else (missed.first - T0, missed.last - T0, missed.count)


def test_a_gap_is_one_outcome():
    stored = plan(schedule(catch_up=0.0), T0 + 290).schedule
    assert stored.recent == (SlotOutcome(T0 + 60, "missed", last=T0 + 240, count=4),)


def test_at_most_a_thousand_slots_are_caught_up_and_the_earlier_ones_are_missed():
    planned = plan(schedule(every=1.0, catch_up="all"), T0 + 1500)
    assert len(planned.schedule.pending) == schedule_plan.MAX_CAUGHT_UP
    assert (pending(planned.schedule)[0], pending(planned.schedule)[-1]) == (501, 1500)
    assert _missed(planned) == (1, 500, 500)


def test_the_count_of_missed_slots_is_bounded():
    planned = plan(schedule(every=1.0, catch_up=0.0), T0 + 365 * 86_400 + 0.5)
    assert planned.missed is not None
    assert planned.missed.count == schedule_plan.MAX_COUNTED
    assert planned.missed.first == T0 + 1
    assert planned.missed.last == T0 + 365 * 86_400 - 10


def test_slots_close_to_each_other_are_distinct():
    times = (T0 + 1, T0 + 1.000002, T0 + 1.000004)
    planned = plan(schedule(every=None, at=times), T0 + 2)
    assert [each.slot for each in planned.schedule.pending] == list(times)
    assert planned.schedule.next_slot is None
    assert is_finished(planned.schedule)


def test_each_slot_has_its_own_token():
    tokens = [each.token for each in plan(schedule(catch_up="all"), T0 + 245).schedule.pending]
    assert len(set(tokens)) == 4


# --- jitter -------------------------------------------------------------------------------------------------------


def test_a_slot_fires_after_its_jitter_and_keeps_its_time():
    stored = schedule(jitter=30.0)
    delay = jitter_of("s", T0 + 60, 30.0)
    assert plan(stored, T0).due_at == T0 + 60 + delay
    assert pending(plan(stored, T0 + 60 + delay - 0.01).schedule) == []
    assert pending(plan(stored, T0 + 60 + delay).schedule) == [60]


def test_lateness_counts_from_the_delayed_time():
    delay = jitter_of("s", T0 + 60, 30.0)
    assert pending(plan(schedule(jitter=30.0, catch_up=0.0), T0 + 60 + delay + 9.9).schedule) == [60]


def test_slots_fire_in_order_when_jitter_is_longer_than_their_distance():
    stored, fired, now = schedule(every=1.0, jitter=20.0, catch_up="all"), [], T0
    while now < T0 + 60:
        planned = plan(stored, now)
        fired += pending(planned.schedule)
        stored, now = fire(planned.schedule), now + 0.5
    assert fired == list(range(1, len(fired) + 1))
    assert len(fired) >= 39


# --- overlap ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["cancel", "terminate", "latest"])
def test_a_pending_slot_names_the_run_that_its_overlap_rule_ends(overlap):
    stored = replace(schedule(overlap=overlap), last_run="s/before")
    first = plan(stored, T0 + 61).schedule
    assert [each.previous for each in first.pending] == ["s/before"]
    second = plan(first, T0 + 121).schedule.pending[1]
    assert second.previous == "s/2026-11-18T12:01:00Z"


@pytest.mark.parametrize("overlap", ["skip", "queue", "allow"])
def test_other_overlap_rules_end_no_run(overlap):
    stored = replace(schedule(overlap=overlap, catch_up="all"), last_run="s/before")
    assert [each.previous for each in plan(stored, T0 + 125).schedule.pending] == [None, None]


@pytest.mark.parametrize("overlap", ["cancel", "terminate", "latest"])
def test_of_slots_that_are_due_at_once_the_last_replaces_the_others(overlap):
    planned = plan(schedule(overlap=overlap, catch_up="all"), T0 + 245).schedule
    assert pending(planned) == [240]
    assert planned.counts.skipped == 3
    assert planned.recent == (SlotOutcome(T0 + 60, "skipped", last=T0 + 180, count=3),)


def test_a_dropped_run_counts_as_skipped():
    stored = fire(plan(schedule(overlap="latest"), T0 + 61).schedule)
    dropped = record_dropped(stored, f"s/{T0 + 60}")
    assert dropped.counts == ScheduleCounts(started=0, skipped=1)
    assert [each.outcome for each in dropped.recent] == ["skipped"]


def test_ten_outcomes_are_stored():
    stored = schedule()
    for n in range(1, 15):
        stored = fire(plan(stored, T0 + 60 * n).schedule)
    assert [each.slot - T0 for each in stored.recent] == [60.0 * n for n in range(5, 15)]
    assert stored.counts.started == 14


# --- limit --------------------------------------------------------------------------------------------------------


def test_a_schedule_ends_after_its_limit():
    stored = fire(plan(schedule(limit=2, catch_up="all"), T0 + 245).schedule)
    assert stored.counts.started == 2
    assert is_finished(stored)
    planned = plan(stored, T0 + 1000)
    assert (planned.due_at, planned.schedule.pending, planned.missed) == (None, (), None)


def test_a_skipped_slot_does_not_count_for_the_limit():
    planned = plan(schedule(limit=1, catch_up="all"), T0 + 125)
    assert pending(planned.schedule) == [60]
    stored = record_outcomes(planned.schedule, [SlotOutcome(T0 + 60, "skipped")])
    assert not is_finished(stored)
    assert pending(plan(stored, T0 + 126).schedule) == [120]


# --- pause --------------------------------------------------------------------------------------------------------

PAUSE = SchedulePause("ann", "holidays", T0 + 90)


def paused():
    stored = fire(plan(schedule(), T0 + 61).schedule)
    return pause_schedule("s", stored, PAUSE, token="p", sweep=SWEEP).schedule


def test_a_paused_schedule_plans_nothing():
    planned = plan(paused(), T0 + 600)
    assert (planned.due_at, planned.schedule.pending, planned.missed) == (None, (), None)


def test_resume_ignores_the_slots_of_the_pause():
    planned = resume_schedule("s", paused(), T0 + 290, catch_up=False, token="r", sweep=SWEEP)
    assert planned.schedule.paused is None
    assert planned.schedule.pending == ()
    assert planned.schedule.next_slot == planned.due_at == T0 + 300
    assert planned.schedule.counts.missed == 0


def test_resume_with_catch_up_starts_the_slots_of_the_pause():
    planned = resume_schedule("s", paused(), T0 + 290, catch_up=True, token="r", sweep=SWEEP)
    assert pending(planned.schedule) == [120, 180, 240]


def test_a_slot_that_is_due_when_the_schedule_is_paused_is_started():
    planned = pause_schedule("s", schedule(), SchedulePause("ann", "", T0 + 61), token="p", sweep=SWEEP)
    assert pending(planned.schedule) == [60]
    assert planned.schedule.paused is not None
    assert planned.due_at == T0 + 61 + SWEEP


def test_a_second_pause_keeps_the_first_reason():
    again = pause_schedule("s", paused(), SchedulePause("bob", "", T0 + 99), token="p", sweep=SWEEP)
    assert again.schedule.paused == PAUSE


def failed(run_id) -> RunRecord:
    return RunRecord(
        id=run_id, workflow="w", version=1, input=b"", created_at=T0, created_by="", seed=0, status=RunStatus.FAILED
    )


def test_a_failed_run_pauses_the_schedule_once():
    stored = fire(plan(schedule(pause_on_failure=True), T0 + 61).schedule)
    planned = plan(stored, T0 + 120, last_run=failed(stored.last_run))
    assert planned.schedule.pending == ()
    assert planned.schedule.paused == SchedulePause("perdure", f"run {stored.last_run} failed", T0 + 120)
    resumed = resume_schedule("s", planned.schedule, T0 + 130, catch_up=False, token="r", sweep=SWEEP).schedule
    assert pending(plan(resumed, T0 + 180, last_run=failed(stored.last_run)).schedule) == [180]


def test_a_failed_run_does_not_matter_without_pause_on_failure():
    stored = fire(plan(schedule(), T0 + 61).schedule)
    assert pending(plan(stored, T0 + 120, last_run=failed(stored.last_run)).schedule) == [120]


# --- edit ---------------------------------------------------------------------------------------------------------


def edit(stored, now, target=TARGET, **spec):
    changed = ScheduleSpec(**{"every": 60.0, **spec})
    return edit_schedule("s", stored, changed, target, now, token="e", sweep=SWEEP)


def test_an_edit_starts_slots_that_are_due_under_the_old_rule_with_the_old_target():
    other = replace(TARGET, input=b'{"n":1}')
    planned = edit(schedule(), T0 + 61, other, every=45.0)
    assert pending(planned.schedule) == [60]
    assert planned.schedule.pending[0].target == TARGET
    assert planned.schedule.target == other
    assert planned.schedule.next_slot == T0 + 90


def test_an_edit_keeps_pending_slots_and_their_targets():
    older = replace(TARGET, workflow="older")
    slot = PendingSlot(slot=T0 + 1, token="x", overlap="skip", target=older)
    stored = replace(schedule(), pending=(slot,))
    assert edit(stored, T0 + 30, replace(TARGET, version=2)).schedule.pending == (slot,)


def test_an_edit_of_other_options_keeps_the_next_slot():
    planned = edit(schedule(), T0 + 30, jitter=0.0, note="x", catch_up="all")
    assert planned.schedule.next_slot == T0 + 60
    assert planned.schedule.spec.note == "x"


def test_an_edit_can_extend_a_schedule_that_has_ended():
    ended = schedule(every=None, at=(T0 + 1,))
    ended = fire(plan(ended, T0 + 2).schedule)
    assert is_finished(ended)
    assert edit(ended, T0 + 3).schedule.next_slot == T0 + 60


# --- clocks -------------------------------------------------------------------------------------------------------


def test_a_clock_that_steps_back_a_little_changes_nothing():
    stored = fire(plan(schedule(), T0 + 121).schedule)
    planned = plan(stored, T0 + 70)
    assert (planned.schedule.pending, planned.schedule.next_slot) == ((), T0 + 180)


def test_a_clock_that_was_far_ahead_fires_later_slots_and_no_slot_twice():
    ahead = T0 + 86_400
    stored = fire(plan(schedule(), T0 + 61).schedule)
    stored = fire(plan(stored, ahead + 0.5).schedule)  # the clock is a day ahead: that slot fires, others are missed
    assert stored.counts == ScheduleCounts(started=2, missed=1438)
    back = plan(stored, T0 + 70)
    assert back.schedule.next_slot == T0 + 120
    stored = back.schedule
    fired = []
    for n in range(2, 1443):
        planned = plan(stored, T0 + 60 * n)
        fired += pending(planned.schedule)
        stored = fire(planned.schedule)
    assert fired == [60.0 * n for n in range(2, 1443) if n != 1440]


def test_slots_before_a_step_back_do_not_fire_again():
    stored = schedule()
    for n in range(1, 6):
        stored = fire(plan(stored, T0 + 60 * n).schedule)
    back = plan(stored, T0 + 100)
    assert back.schedule.next_slot == T0 + 360


def test_ranges_of_fired_slots_are_merged():
    stored = schedule()
    for n in range(1, 30):
        stored = fire(plan(stored, T0 + 60 * n).schedule)
    assert stored.fired == ((T0 + 60, T0 + 60 * 29),)


# --- properties ---------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.floats(0.0, 400.0), st.sampled_from(["fire", "plan", "pause", "resume", "edit"])), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([0.0, 90.0, "last", "all"]), st.sampled_from([0.0, 25.0]))
def test_every_slot_is_planned_once_missed_or_in_a_pause(steps, catch_up, jitter):
    """Guarantee 11, for the plan: between the first and the next slot each slot has exactly one outcome."""
    stored, now, started, missed, ignored = schedule(catch_up=catch_up, jitter=jitter), T0, [], [], set()
    for delay, action in steps:
        now += delay
        before = {each.slot for each in stored.pending}
        if action == "pause":
            planned = pause_schedule("s", stored, SchedulePause("x", "", now), token=f"{now}", sweep=SWEEP)
        elif action == "resume":
            if stored.paused is not None:
                first = stored.next_slot or 0.0
                ignored |= {first + 60 * n for n in range(1000) if first + 60 * n <= now}
            planned = resume_schedule("s", stored, now, catch_up=False, token=f"{now}", sweep=SWEEP)
        elif action == "edit":
            planned = edit(stored, now, catch_up=catch_up, jitter=jitter, note=f"note {now}")
        else:
            planned = plan(stored, now)
        started += [each.slot for each in planned.schedule.pending if each.slot not in before]
        if planned.missed is not None:
            missed += [planned.missed.first + 60 * n for n in range(planned.missed.count)]
            assert missed[-1] == planned.missed.last
        stored = fire(planned.schedule) if action == "fire" else planned.schedule
        assert decode_schedule(encode_schedule(stored)) == stored
    outcomes = sorted([*started, *missed, *ignored])
    assert len(set(started) & set(missed)) == 0
    assert outcomes == [T0 + 60 * (n + 1) for n in range(len(outcomes))]
    assert stored.next_slot == T0 + 60 * (len(outcomes) + 1)
