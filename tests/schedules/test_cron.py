"""Cron expressions: what is refused and how, and every match around changes of clocks, compared with a slow model."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from perdure.errors import InvalidArgument
from perdure.schedules.cron import check_cron, check_crons, explain_cron, load_cron
from tests.schedules.cron_model import matches_between

EXPRESSIONS = """
* * * * *
*/5 * * * *
*/15 * * * *
*/30 * * * *
0 * * * *
30 * * * *
5,35 * * * *
*/7 */2 * * *
0 */3 * * *
15 */6 * * *
0 */12 * * *
*/20 1-3 * * *
*/10 2 * * *
*/10 0 * * *
0 0 * * *
30 0 * * *
30 1 * * *
0 2 * * *
30 2 * * *
15 2,3 * * *
0-59/20 2 * * *
0 3 * * *
0 12 * * *
45 1,2,3 * * *
59 23 * * *
0 0 * * 0
0 0 * * 7
30 9 * * mon-fri
0 9 * * 1#2
0 9 * * 5L
0 0 1 * *
0 0 L * *
0 9 LW * *
0 0 1,15 * *
0 0 31 * *
0 0 29 2 *
0 0 13 * 5
0 0 */2 * 1
0 6 1 jan,jul *
30 2 8-14 mar *
""".strip().splitlines()

# Zone and first days of periods with a change of clocks: by an hour, by half an hour, at midnight, over a whole day.
PERIODS = [
    ("UTC", (2026, 3, 27)),
    ("America/New_York", (2026, 3, 6)),
    ("America/New_York", (2026, 10, 30)),
    ("Europe/Berlin", (2026, 3, 27)),
    ("Europe/Berlin", (2026, 10, 23)),
    ("Australia/Lord_Howe", (2026, 4, 3)),
    ("Australia/Lord_Howe", (2026, 10, 2)),
    ("Pacific/Apia", (2011, 12, 28)),
    ("Pacific/Apia", (2011, 9, 22)),
    ("Pacific/Apia", (2012, 3, 30)),
    ("America/Sao_Paulo", (2018, 2, 15)),
    ("America/Sao_Paulo", (2018, 11, 2)),
    ("Africa/Cairo", (2026, 4, 22)),
    ("Africa/Cairo", (2026, 10, 28)),
    ("Asia/Kathmandu", (1985, 12, 30)),
]


@pytest.mark.parametrize(("zone", "first_day"), PERIODS)
def test_matches_equal_those_of_the_model(zone, first_day):
    start = datetime(first_day[0], first_day[1], first_day[2], tzinfo=UTC)
    end = start + timedelta(days=5)
    differences = [text for text in EXPRESSIONS if found(text, zone, start, end) != model(text, zone, start, end)]
    assert differences == []


def found(text: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    cron, at, matches = load_cron(text, zone), start.timestamp() - 1, []
    while (following := cron.next_after(at)) is not None and following < end.timestamp():
        assert following > at
        matches.append(datetime.fromtimestamp(following, UTC))
        at = following
    return matches


def model(text: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    return matches_between(text, ZoneInfo(zone), start, end)


@pytest.mark.parametrize(
    ("text", "zone", "start", "expected"),
    [
        # 02:30 does not exist on March 8th: it fires right after the gap, once.
        ("30 2 * * *", "America/New_York", "2026-03-07 12:00", ["03-08 03:00", "03-09 02:30"]),
        # 01:30 exists twice on November 1st: it fires at the first only.
        ("30 1 * * *", "America/New_York", "2026-10-31 12:00", ["11-01 01:30", "11-02 01:30"]),
        ("30 * * * *", "America/New_York", "2026-11-01 00:45", ["11-01 01:30", "11-01 01:30", "11-01 02:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["03-29 03:00", "03-30 02:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24 12:00", ["10-25 02:30", "10-26 02:30"]),
        ("*/30 * * * *", "Europe/Berlin", "2026-10-25 02:15", ["10-25 02:30", "10-25 02:00", "10-25 02:30"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00", ["10-04 02:30", "10-05 02:15"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04 12:00", ["04-05 01:45", "04-06 01:45"]),
        ("0 */12 * * *", "Australia/Lord_Howe", "2026-10-04 00:30", ["10-04 12:00", "10-05 00:00"]),
        # December 30th 2011 does not exist in Samoa.
        ("0 12 * * *", "Pacific/Apia", "2011-12-29 13:00", ["12-31 00:00", "12-31 12:00"]),
        ("0 * * * *", "Pacific/Apia", "2011-12-29 22:30", ["12-29 23:00", "12-31 00:00"]),
        ("30 2 29 2 *", "UTC", "2026-01-01 00:00", ["02-29 02:30"]),
        ("0 0 L * *", "UTC", "2026-01-31 12:00", ["02-28 00:00", "03-31 00:00"]),
        ("0 9 LW * *", "UTC", "2026-05-01 00:00", ["05-29 09:00", "06-30 09:00"]),
        ("0 9 * * 1#2", "UTC", "2026-11-01 00:00", ["11-09 09:00", "12-14 09:00"]),
        ("0 9 * * 5L", "UTC", "2026-11-01 00:00", ["11-27 09:00", "12-25 09:00"]),
        ("* * * * * */20", "UTC", "2026-11-01 00:00", ["11-01 00:00", "11-01 00:00", "11-01 00:01"]),
    ],
)
def test_next_matches(text, zone, start, expected):
    cron, at = load_cron(check_cron(text), zone), local_time(start, zone)
    matches = []
    for _ in expected:
        following = cron.next_after(at)
        assert following is not None
        matches.append(datetime.fromtimestamp(following, ZoneInfo(zone)).strftime("%m-%d %H:%M"))
        at = following
    assert matches == expected


def local_time(text: str, zone: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def test_seconds_are_the_last_field():
    cron = load_cron(check_cron("30 9 * * * 15"), "UTC")
    assert datetime.fromtimestamp(cron.next_after(0) or 0, UTC) == datetime(1970, 1, 1, 9, 30, 15, tzinfo=UTC)


def test_a_rule_with_seconds_follows_real_time():
    """With five fields, the second 01:30 of the day would be left out."""
    start, cron = local_time("2026-11-01 00:45", "America/New_York"), load_cron("30 1 * * * 0", "America/New_York")
    first = cron.next_after(start) or 0
    assert (cron.next_after(first) or 0) - first == 3600


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@YEARLY", "0 0 1 1 *"),
        ("  0   2 * *  * ", "0 2 * * *"),
    ],
)
def test_expressions_are_stored_in_one_form(name, text):
    assert check_cron(name) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("61 * * * *", "invalid field minute: '61'"),
        ("* 24 * * *", "invalid field hour: '24'"),
        ("0 0 0 * *", "invalid field day-of-month: '0'"),
        ("0 0 1 13 *", "invalid field month: '13'"),
        ("0 0 * * mon#6", "invalid field day-of-week: 'mon#6'"),
        ("0 0 * * * 60", "invalid field second: '60'"),
        ("H * * * *", "invalid field minute: 'H'"),
        ("*/0 * * * *", "invalid field minute"),
        ("5-1 * * * *", "invalid field minute"),
        ("* * * *", "has 4 fields; use 5"),
        ("", "has 0 fields"),
        ("* * * * * * *", "has 7 fields"),
        ("0 0 30 2 *", "never fires: no month in field month '2' has day-of-month 30"),
        ("0 0 30-31 feb *", "never fires"),
        ("0 0 31 4,6,9 *", "never fires"),
        ("@dayly", "is not a short name"),
        ("@reboot", "is not a short name"),
        (5, "must be a cron expression, not 5"),
        (None, "must be a cron expression, not None"),
    ],
)
def test_refuses_an_expression_and_names_the_field(text, message):
    with pytest.raises(InvalidArgument, match=r"^exclude ") as refused:
        check_cron(text, "exclude")
    assert message in str(refused.value)


def test_a_list_is_checked_item_by_item():
    assert check_crons(["0 2 * * *", "@hourly", "0 2 * * *"]) == ("0 2 * * *", "0 * * * *")
    with pytest.raises(InvalidArgument, match="cron is an empty list"):
        check_crons([])
    with pytest.raises(InvalidArgument, match="cron '0 2' has 2 fields"):
        check_crons(["@daily", "0 2"])


def test_explains_an_expression():
    assert explain_cron("0 9 * * 1-5") == "At 09:00 on Monday through Friday"


def test_ends_at_the_last_year_of_a_datetime():
    assert load_cron("0 0 1 1 *", "Europe/Berlin").next_after(datetime(9999, 6, 1, tzinfo=UTC).timestamp()) is None


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Australia/Lord_Howe"])
@pytest.mark.parametrize("text", ["30 1 * * *", "*/15 * * * *", "0 0 L * *", "10 */3 * * * 30"])
def test_a_match_matches_and_others_do_not(text, zone):
    cron = load_cron(text, zone)
    at = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
    for _ in range(5):
        at = cron.next_after(at) or 0
        assert cron.matches(at)
        assert not cron.matches(at + 60)


def test_searches_agree_wherever_they_begin():
    zone = "America/New_York"
    cron = load_cron("*/15 * * * *", zone)
    start = local_time("2026-11-01 00:00", zone)
    all_matches = list(islice(walk(cron, start), 20))
    for at in range(0, 4 * 3600, 97):
        expected = next(each for each in all_matches if each > start + at)
        assert cron.next_after(start + at) == expected


def walk(cron, at):
    while True:
        at = cron.next_after(at)
        yield at
