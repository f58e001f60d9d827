"""Awaited: what a suspended run waits for, as a query names it. Parses its text form; knows no store."""

from __future__ import annotations

from msgspec import Struct

from perdure.errors import InvalidArgument
from perdure.model.records import HOLD_KINDS, RunRecord, RunStatus, Wait
from perdure.model.validation import check_name, describe_value

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


def parse_awaited(text: object, what: str = "waiting_for") -> Awaited:
    """Return what `waiting_for` selects; `what` is its name in messages.

    Raises `InvalidArgument` if the text is not KIND or KIND:NAME.
    """
    kind, separator, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in WAIT_KINDS:
        kinds = ", ".join(WAIT_KINDS)
        raise InvalidArgument(
            f"{what} must be one of {kinds}, alone or with a name as in 'event:Approved', not {describe_value(text)}"
        )
    if not separator:
        return Awaited(kind)
    if kind == "timer":
        raise InvalidArgument(f"a timer has no name: use {what} 'timer' alone, not {describe_value(text)}")
    name = check_name(f"the name in {what}={describe_value(text)}", name)
    if kind == "held" and name not in HOLD_KINDS:
        raise InvalidArgument(f"{what}={describe_value(text)} must name a kind of hold: {', '.join(HOLD_KINDS)}")
    return Awaited(kind, name)
