"""RunQuery: which runs to list."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidArgument
from perdure.model.records import RunStatus


class RunQuery(Struct, frozen=True, kw_only=True):
    """Which runs to list, newest first. `after` is the `next` of the page before.

    Statuses may be given by their names, and times as aware datetimes; they read back as statuses and seconds.
    """

    status: RunStatus | str | tuple[RunStatus | str, ...] | None = None
    workflow: str | None = None
    tags: Mapping[str, str] | None = None
    parent: str | None = None
    id_prefix: str | None = None
    created_after: datetime | float | None = None  # from this moment on
    created_before: datetime | float | None = None  # until just before it
    limit: int = 100
    after: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.status, str):
            force_setattr(self, "status", _status_named(self.status))
        elif self.status is not None:
            force_setattr(self, "status", tuple(_status_named(each) for each in self.status))
        for name in ("created_after", "created_before"):
            moment = getattr(self, name)
            if isinstance(moment, datetime):
                if moment.tzinfo is None:
                    raise InvalidArgument(
                        f"RunQuery.{name} must be an aware datetime (with a timezone), not {moment!r}"
                    )
                force_setattr(self, name, moment.timestamp())


def _status_named(name: str) -> RunStatus:
    try:
        return RunStatus(name)
    except ValueError:
        raise InvalidArgument(f"{name!r} is no status of a run; there are {', '.join(RunStatus)}") from None
