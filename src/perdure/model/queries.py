"""RunQuery: filters for listing runs. Validates its values; executing the query is the task of the stores."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import cast

from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidArgument
from perdure.model.awaited import WAIT_KINDS as WAIT_KINDS
from perdure.model.awaited import Awaited as Awaited
from perdure.model.awaited import parse_awaited as parse_awaited
from perdure.model.filter_parser import check_filter, parse_filter
from perdure.model.filters import Filter
from perdure.model.records import HOLD_KINDS, RunStatus
from perdure.model.tags import Tags
from perdure.model.validation import check_count, check_name, check_tags, check_text, check_time, describe_value

MAX_LIMIT = 1_000_000  # runs of one page
STATUSES = frozenset(RunStatus)


class RunQuery(Struct, frozen=True, kw_only=True):
    """Filters for listing runs, newest first. `after` is the `next` cursor of the previous page.

    Statuses may be given by name, and times as aware datetimes; they are converted to statuses and seconds. `held`
    selects held runs: True all of them, a kind of hold those of that kind. `waiting_for` selects suspended runs by a
    reason why they wait (`Awaited`). `where` is a filter (`perdure.model.filter_parser`), given as text or parsed; the
    attribute is the parsed one. Internal runs, whose workflow's name begins with a tilde, are listed only with
    `internal`.
    """

    status: RunStatus | str | tuple[RunStatus | str, ...] | None = None
    workflow: str | None = None
    tags: Tags | None = None
    parent: str | None = None
    id_prefix: str | None = None
    created_after: datetime | float | None = None  # Inclusive.
    created_before: datetime | float | None = None  # Exclusive.
    held: bool | str | None = None
    waiting_for: str | None = None
    where: Filter | str | None = None
    internal: bool = False
    limit: int = 100
    after: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.status, str):
            force_setattr(self, "status", _parse_status(self.status))
        elif self.status is not None:
            force_setattr(self, "status", _parse_statuses(self.status))
        if self.tags is not None:
            force_setattr(self, "tags", check_tags(self.tags))
        for name in ("workflow", "parent", "id_prefix"):
            text = getattr(self, name)
            if text is not None and text != "":
                force_setattr(self, name, check_name(f"RunQuery.{name}", text))
        for name in ("created_after", "created_before"):
            time = getattr(self, name)
            if time is not None:
                force_setattr(self, name, check_time(f"RunQuery.{name}", time))
        check_count("RunQuery.limit", self.limit, minimum=0, maximum=MAX_LIMIT)  # stores refuse 0
        if self.after is not None and self.after != "":  # stores refuse what is not a cursor
            force_setattr(self, "after", check_text("RunQuery.after", self.after))
        if self.held is not None and self.held is not True and self.held not in HOLD_KINDS:
            kinds = ", ".join(HOLD_KINDS)
            raise InvalidArgument(f"RunQuery.held must be True or one of {kinds}, not {describe_value(self.held)}")
        if self.waiting_for is not None:
            awaited = parse_awaited(self.waiting_for)
            force_setattr(self, "waiting_for", str(awaited))
        if not isinstance(self.internal, bool):
            raise InvalidArgument(f"RunQuery.internal must be True or False, not {describe_value(self.internal)}")
        if self.where is not None:
            where = parse_filter(self.where) if isinstance(self.where, str) else check_filter(self.where)
            force_setattr(self, "where", where)

    @property
    def filter(self) -> Filter | None:
        """The parsed filter."""
        return cast("Filter | None", self.where)

    @property
    def awaited(self) -> Awaited | None:
        """What the selected runs wait for: `waiting_for`, parsed."""
        return None if self.waiting_for is None else parse_awaited(self.waiting_for)


def _parse_statuses(names: object) -> tuple[RunStatus, ...]:
    if not isinstance(names, Iterable):
        raise InvalidArgument(f"RunQuery.status must be a run status or several, not {describe_value(names)}")
    return tuple(_parse_status(each) for each in names)


def _parse_status(name: object) -> RunStatus:
    if not isinstance(name, str) or name not in STATUSES:
        raise InvalidArgument(f"{describe_value(name)} is not a run status; use one of {', '.join(RunStatus)}")
    return RunStatus(name)
