"""Time zones by name, with an error message for a zone that is unknown or whose data is not installed."""

from __future__ import annotations

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from perdure.errors import InvalidArgument
from perdure.model.validation import describe_value


def load_zone(name: str, what: str = "tz") -> tzinfo:
    """Return the time zone of this name. Raises `InvalidArgument` if it is unknown here."""
    if name == "UTC":  # also without any time zone data
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a directory, such as "Europe"
        pass
    if available_timezones():
        remedy = "use a name such as 'Europe/Berlin'; if the name is right, install a newer tzdata package"
    else:
        remedy = "this system has no time zone data: install the package tzdata"
    raise InvalidArgument(f"{what} {describe_value(name)} is not a known time zone; {remedy}")


def zone_name(zone: object, what: str = "tz") -> str:
    """Return the name of a time zone, given as a name or a `ZoneInfo`. Raises `InvalidArgument` for anything else."""
    if zone is UTC:
        return "UTC"
    name = zone.key if isinstance(zone, ZoneInfo) else zone
    if not isinstance(name, str):
        raise InvalidArgument(
            f"{what} must be the name of a time zone, such as 'Europe/Berlin', not {describe_value(zone)}"
        )
    load_zone(name, what)
    return str.__str__(name)
