"""A slow model of cron rules, to compare with: it looks at every minute of real time, or at every local day."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

MINUTE = timedelta(minutes=1)


def matches_between(text: str, zone: ZoneInfo, start: datetime, end: datetime) -> list[datetime]:
    """Return the matches of a five-field expression in [start, end), in UTC."""
    fields = text.split()
    is_fixed = not fields[0].startswith("*") and not fields[1].startswith("*")
    rule = CronSim(text, datetime(2000, 1, 1, tzinfo=UTC))
    found = _fixed_times(rule, zone, start, end) if is_fixed else _real_times(rule, zone, start, end)
    return sorted({at for at in found if start <= at < end})


def _real_times(rule: CronSim, zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[datetime]:
    at = start
    while at < end:
        local = at.astimezone(zone)
        if local.minute in rule.minutes and local.hour in rule.hours and _is_day(rule, local.date()):
            yield at
        at += MINUTE


def _fixed_times(rule: CronSim, zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[datetime]:
    day, last = start.astimezone(zone).date() - timedelta(days=2), end.astimezone(zone).date()
    while day <= last:
        if _is_day(rule, day):
            for hour in rule.hours:
                for minute in rule.minutes:
                    yield _instant(datetime(day.year, day.month, day.day, hour, minute), zone)  # noqa: DTZ001
        day += timedelta(days=1)


def _instant(local: datetime, zone: ZoneInfo) -> datetime:
    """Return the first time with this local time; if there is none, the first local time after the gap."""
    while True:
        at = local.replace(tzinfo=zone).astimezone(UTC)
        if at.astimezone(zone).replace(tzinfo=None) == local:
            return at
        local += MINUTE


def _is_day(rule: CronSim, day: date) -> bool:
    return day.month in rule.months and rule.match_day(day)
