"""`Schedule`, `Calendar` and `preview`: what they store, which slots they have, and what they refuse by field."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from perdure.errors import InvalidArgument
from perdure.model.schedule_records import ScheduleSpec
from perdure.schedules.slot_rule import SlotRule, describe_rule, jitter_of, slot_name, slot_run_id
from perdure.workflows.schedules import Calendar, Schedule, check_fires, preview

START = datetime(2026, 11, 18, 12, tzinfo=UTC)


def slots(count=3, after=START, **rule):
    return [each.isoformat() for each in preview(count=count, after=after, **rule)]


def test_preview_of_a_cron_rule_in_a_zone():
    assert slots(cron="0 2 * * *", tz="Europe/Berlin", count=2) == [
        "2026-11-19T02:00:00+01:00",
        "2026-11-20T02:00:00+01:00",
    ]


def test_a_list_of_rules_is_a_union_without_repetitions():
    assert slots(cron=["0 13 * * *", "0 13,14 * * *"]) == [
        "2026-11-18T13:00:00+00:00",
        "2026-11-18T14:00:00+00:00",
        "2026-11-19T13:00:00+00:00",
    ]


def test_every_counts_from_the_epoch():
    assert slots(every=timedelta(hours=5), count=2) == ["2026-11-18T15:00:00+00:00", "2026-11-18T20:00:00+00:00"]


def test_every_counts_from_start_at():
    start = START + timedelta(minutes=7)
    assert slots(every=3600, start_at=start, count=2) == ["2026-11-18T12:07:00+00:00", "2026-11-18T13:07:00+00:00"]


def test_every_with_a_fraction_does_not_drift():
    spec = Schedule(every=1.1, start_at=0.0).to_spec()
    rule, at = SlotRule(spec), START.timestamp()
    first = rule.next_after(at) or 0.0
    for n in range(1, 2000):
        at = rule.next_after(at) or 0.0
        assert at == pytest.approx(first + (n - 1) * 1.1, abs=1e-5)
    assert round(at * 1e6) % 1_100_000 == 0


def test_at_fires_once_each_in_order():
    times = [START + timedelta(hours=2), START + timedelta(hours=1), START - timedelta(hours=1)]
    assert slots(at=times) == ["2026-11-18T13:00:00+00:00", "2026-11-18T14:00:00+00:00"]


def test_slots_are_on_or_after_start_and_before_end():
    bounds = {"start_at": START + timedelta(hours=1), "end_at": START + timedelta(hours=3)}
    assert slots(cron="@hourly", **bounds) == ["2026-11-18T13:00:00+00:00", "2026-11-18T14:00:00+00:00"]


def test_exclude_removes_dates_of_the_zone():
    rule = {"cron": "30 0 * * *", "tz": "Europe/Berlin", "exclude": [date(2026, 11, 19), "2026-11-20"]}
    assert slots(**rule, count=1) == ["2026-11-21T00:30:00+01:00"]


def test_exclude_removes_matches_of_cron_expressions():
    assert slots(cron="0 */6 * * *", exclude="0 12-23 * * *", count=2) == [
        "2026-11-19T00:00:00+00:00",
        "2026-11-19T06:00:00+00:00",
    ]
    assert slots(every=20, exclude=["1 12 * * *"], count=4)[2:] == [
        "2026-11-18T12:02:00+00:00",
        "2026-11-18T12:02:20+00:00",
    ]


@pytest.mark.parametrize(
    ("calendar", "cron"),
    [
        (Calendar(hour=9, minute=30, weekday="mon-fri", day="1,15", month="*"), "30 9 1,15 * mon-fri"),
        (Calendar(hour=9), "0 9 * * *"),
        (Calendar(minute=5), "5 * * * *"),
        (Calendar(second=7), "* * * * * 7"),
        (Calendar(day=1), "0 0 1 * *"),
        (Calendar(weekday="sun", hour="*/6"), "0 */6 * * sun"),
        (Calendar(), "* * * * *"),
    ],
)
def test_a_calendar_is_a_cron_expression(calendar, cron):
    assert calendar.to_cron() == cron
    assert Schedule(cron=calendar).to_spec().cron == (cron,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hour": 24}, "Calendar '0 24 \\* \\* \\*' has an invalid field hour"),
        ({"day": 30, "month": 2}, "never fires"),
        ({"hour": "1 2"}, r"Calendar.hour must be a number or text"),
        ({"minute": True}, r"Calendar.minute must be"),
        ({"day": None}, r"Calendar.day must be"),
        ({"month": ""}, r"Calendar.month must be"),
    ],
)
def test_a_calendar_refuses_bad_fields(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Calendar(**fields)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "exactly one of cron, every and at, not none"),
        ({"cron": "@daily", "every": 5}, "exactly one of cron, every and at, not cron and every"),
        ({"cron": "0 0 30 2 *"}, "^cron .* never fires"),
        ({"cron": []}, "^cron is an empty list"),
        ({"every": 0.5}, "^every must be at least 1 second"),
        ({"every": 0}, "^every must be more than zero"),
        ({"every": "5"}, "^every must be seconds or a timedelta"),
        ({"every": float("nan")}, "^every must be"),
        ({"at": datetime(2026, 1, 1)}, "^at must be an aware datetime"),  # noqa: DTZ001
        ({"at": [START, 5]}, "^at must be aware datetimes, not 5"),
        ({"at": []}, "^at must be an aware datetime or a list"),
        ({"every": 5, "start_at": datetime(2026, 1, 1)}, "^start_at must be an aware datetime"),  # noqa: DTZ001
        ({"every": 5, "end_at": datetime(2026, 1, 1)}, "^end_at must be an aware datetime"),  # noqa: DTZ001
        ({"every": 5, "start_at": START, "end_at": START}, "^end_at must be after start_at"),
        ({"cron": "@daily", "tz": "Mars/Phobos"}, "^tz 'Mars/Phobos' is not a known time zone.*tzdata"),
        ({"cron": "@daily", "tz": "Europe"}, "^tz 'Europe' is not a known time zone"),
        ({"cron": "@daily", "tz": "../etc/passwd"}, "^tz .* is not a known time zone"),
        ({"cron": "@daily", "tz": 3}, "^tz must be the name of a time zone"),
        ({"every": 5, "overlap": "wait"}, "^overlap must be one of 'skip', 'queue'"),
        ({"every": 5, "catch_up": "some"}, "^catch_up must be seconds, 'last' or 'all'"),
        ({"every": 5, "catch_up": -1}, "^catch_up must be zero or more"),
        ({"every": 5, "jitter": -1}, "^jitter must be zero or more"),
        ({"every": 5, "limit": 0}, "^limit must be at least 1"),
        ({"every": 5, "limit": True}, "^limit must be a whole number"),
        ({"every": 5, "exclude": "2026-02-30"}, "^exclude '2026-02-30' is not a date"),
        ({"every": 5, "exclude": [START]}, "^exclude must be dates or cron expressions, not the datetime"),
        ({"every": 5, "exclude": "tomorrow"}, "^exclude 'tomorrow' has 1 fields"),
        ({"every": 5, "tags": {"": "x"}}, "a tag's key is empty"),
        ({"every": 5, "retention": -1}, "^retention must be"),
        ({"every": 5, "priority": 101, "queue": "q"}, "^priority must be at most 100"),
        ({"every": 5, "queue": "q", "overlap": "latest"}, "^overlap='latest' starts runs through the schedule's own"),
        ({"every": 5, "note": "a\nb"}, "^note .* has control"),
        ({"every": 5, "paused": 1}, "^paused must be True or False"),
        ({"every": 5, "pause_on_failure": "yes"}, "^pause_on_failure must be"),
    ],
)
def test_refuses_bad_values_and_names_the_field(rule, message):
    with pytest.raises(InvalidArgument, match=message):
        Schedule(**rule)


def test_preview_refuses_unknown_options_and_counts():
    with pytest.raises(InvalidArgument, match="preview has no option evry"):
        preview(evry=5)
    with pytest.raises(InvalidArgument, match="count must be at least 1"):
        preview(every=5, count=0)
    with pytest.raises(InvalidArgument, match="after must be an aware datetime"):
        preview(every=5, after=datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"every": 5, "end_at": START - timedelta(days=1)}, "end_at is in the past"),
        ({"at": [START - timedelta(days=1)]}, "^at: the schedule never fires; all of its slots are in the past"),
        ({"cron": "@daily", "exclude": "0 0 * * *"}, "^cron: the schedule never fires; exclude removes all"),
        ({"cron": "0 0 1 1 *", "end_at": START + timedelta(days=1)}, "^cron: the schedule never fires"),
    ],
)
def test_refuses_a_new_rule_that_never_fires(rule, message):
    with pytest.raises(InvalidArgument, match=message):
        check_fires(Schedule(**rule).to_spec(), START.timestamp())


def test_a_zone_may_be_given_as_an_object():
    assert Schedule(cron="@daily", tz=ZoneInfo("Asia/Tokyo")).to_spec().tz == "Asia/Tokyo"
    assert Schedule(cron="@daily", tz=UTC).to_spec().tz == "UTC"


def test_unknown_zone_without_any_zone_data_names_the_package(monkeypatch):
    monkeypatch.setattr("perdure.schedules.time_zones.available_timezones", set)
    with pytest.raises(InvalidArgument, match="no time zone data: install the package tzdata"):
        Schedule(cron="@daily", tz="Mars/Olympus")


def test_names_of_slots_and_runs():
    at = START.timestamp()
    assert slot_name(at) == "2026-11-18T12:00:00Z"
    assert slot_name(at + 0.5) == "2026-11-18T12:00:00.500000Z"
    assert slot_run_id("nightly", at) == "nightly/2026-11-18T12:00:00Z"


def test_jitter_depends_on_schedule_and_slot_only():
    at = START.timestamp()
    delays = [jitter_of("nightly", at + n, 20.0) for n in range(200)]
    assert delays == [jitter_of("nightly", at + n, 20.0) for n in range(200)]
    assert all(0 <= delay < 20 for delay in delays)
    assert max(delays) > 15
    assert min(delays) < 5
    assert jitter_of("other", at, 20.0) != delays[0]
    assert jitter_of("nightly", at, 0.0) == 0.0


def test_describes_a_rule_as_text():
    spec = Schedule(cron="0 2 * * *", tz="Europe/Berlin", jitter=20, limit=3, exclude="2026-12-25").to_spec()
    assert describe_rule(spec) == (
        "cron '0 2 * * *' Europe/Berlin (At 02:00 every day), up to 20 s later, except '2026-12-25', 3 runs at most"
    )
    assert describe_rule(ScheduleSpec(every=90.0)) == "every 90 s"
    assert describe_rule(ScheduleSpec(every=7200.0)) == "every 2:00:00"
    assert describe_rule(ScheduleSpec(at=(0.0,))) == "at 1970-01-01T00:00:00Z"


def test_latest_slots_of_a_long_time_are_found_from_its_end():
    rule = SlotRule(Schedule(every=1).to_spec())
    start, end = 0.0, START.timestamp()
    assert rule.latest(start, end, 3) == [end - 2, end - 1, end]
    assert rule.latest(end - 2, end, 10) == [end - 1, end]
    assert rule.count(end - 50, end, 10) == 10
    assert SlotRule(Schedule(cron="0 0 29 2 *").to_spec()).latest(start, end, 1) == [
        datetime(2024, 2, 29, tzinfo=UTC).timestamp()
    ]
