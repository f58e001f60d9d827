"""RunQuery: filters for listing runs. Validates its values; executing the query is the task of the stores."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidArgument
from perdure.model.records import HOLD_KINDS, RunStatus


class RunQuery(Struct, frozen=True, kw_only=True):
    """Filters for listing runs, newest first. `after` is the `next` cursor of the previous page.

    Statuses may be given by name, and times as aware datetimes; they are converted to statuses and seconds. `held`
    selects held runs: True all of them, a kind of hold those of that kind.
    """

    status: RunStatus | str | tuple[RunStatus | str, ...] | None = None
    workflow: str | None = None
    tags: Mapping[str, str] | None = None
    parent: str | None = None
    id_prefix: str | None = None
    created_after: datetime | float | None = None  # Inclusive.
    created_before: datetime | float | None = None  # Exclusive.
    held: bool | str | None = None
    limit: int = 100
    after: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.status, str):
            force_setattr(self, "status", _parse_status(self.status))
        elif self.status is not None:
            force_setattr(self, "status", tuple(_parse_status(each) for each in self.status))
        for name in ("created_after", "created_before"):
            time = getattr(self, name)
            if isinstance(time, datetime):
                if time.tzinfo is None:
                    raise InvalidArgument(f"RunQuery.{name} must be an aware datetime (with a timezone), not {time!r}")
                force_setattr(self, name, time.timestamp())
        if self.held not in (None, True, *HOLD_KINDS):
            raise InvalidArgument(f"RunQuery.held must be True or one of {', '.join(HOLD_KINDS)}, not {self.held!r}")


def _parse_status(name: str) -> RunStatus:
    try:
        return RunStatus(name)
    except ValueError:
        raise InvalidArgument(f"{name!r} is not a run status; use one of {', '.join(RunStatus)}") from None
