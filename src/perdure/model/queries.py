"""RunQuery: filters for listing runs. Validates its values; executing the query is the task of the stores."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct
from msgspec.structs import force_setattr

from perdure.errors import InvalidArgument
from perdure.model.filters import Filter
from perdure.model.records import HOLD_KINDS, RunRecord, RunStatus, Wait
from perdure.model.tags import Tags
from perdure.model.validation import check_count, check_name, check_tags, check_text, check_time, describe_value

MAX_LIMIT = 1_000_000  # runs of one page
STATUSES = frozenset(RunStatus)


WAIT_KINDS = ("event", "child", "deferred", "timer", "retry", "held")
"""Kinds of waits that a query can select, as in the reasons of `describe`."""


class Awaited(Struct, frozen=True):
    """What a run waits for: a kind of wait and, if given, a name.

    event[:NAME]       an event of this name
    child[:ID]         the end of the run with this id
    deferred[:NAME]    the completion of this deferred
    timer              a sleep or another timer
    retry[:STEP]       the next attempt of a step, or of the run
    held[:KIND]        a person: the run is held for this reason
    """

    kind: str
    name: str | None = None

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    def matches(self, record: RunRecord) -> bool:
        """Return whether the run is suspended and waits for this, alone or beside other things."""
        if self.kind == "held":
            return record.current_hold is not None and self.name in (None, record.current_hold.kind)
        waits = record.waits if record.status is RunStatus.SUSPENDED else ()
        return any(wait.kind == self.kind and self._is_named(wait) for wait in waits)

    def _is_named(self, wait: Wait) -> bool:
        if self.name is None or wait.name == self.name:
            return True
        return self.kind == "event" and self.name in (wait.name or "").split(",")  # a receive of several events


class RunQuery(Struct, frozen=True, kw_only=True):
    """Filters for listing runs, newest first. `after` is the `next` cursor of the previous page.

    Statuses may be given by name, and times as aware datetimes; they are converted to statuses and seconds. `held`
    selects held runs: True all of them, a kind of hold those of that kind. `waiting_for` selects suspended runs by a
    reason why they wait (`Awaited`). `where` is a filter, given as text or parsed. Internal runs, whose workflow's name
    begins with a tilde, are listed only with `internal`.
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
    where: Filter | None = None
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


def parse_awaited(text: object) -> Awaited:
    """Return what `waiting_for` selects. Raises `InvalidArgument` if the text is not KIND or KIND:NAME."""
    kind, separator, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in WAIT_KINDS:
        kinds = ", ".join(WAIT_KINDS)
        raise InvalidArgument(
            f"waiting_for must be one of {kinds}, alone or with a name as in 'event:Approved', "
            f"not {describe_value(text)}"
        )
    if not separator:
        return Awaited(kind)
    if kind == "timer":
        raise InvalidArgument(f"a timer has no name: use waiting_for='timer', not {describe_value(text)}")
    name = check_name(f"the name in waiting_for={describe_value(text)}", name)
    if kind == "held" and name not in HOLD_KINDS:
        raise InvalidArgument(f"waiting_for={describe_value(text)} must name a kind of hold: {', '.join(HOLD_KINDS)}")
    return Awaited(kind, name)
