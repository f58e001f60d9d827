"""`@event`: the type of a message that runs can receive."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, overload

import msgspec

from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.names import check_name, check_seconds

Delivery = Literal["after_wait", "after_create", "all", "first"]
OnTargetTerminated = Literal["discard", "broadcast", "dead_letter"]
C = TypeVar("C", bound=type)


@dataclass(frozen=True, slots=True)
class EventOptions:
    """How events of a type are delivered."""

    name: str
    delivery: Delivery = "all"
    consume: bool = True
    expire_after: float | None = None
    on_target_terminated: OnTargetTerminated = "discard"


class EventDecorator(Protocol):
    """What `event(...)` with options returns."""

    def __call__(self, cls: C, /) -> C: ...


@overload
def event(cls: C, /) -> C: ...
@overload
def event(
    *,
    name: str | None = None,
    delivery: Delivery = "all",
    consume: bool = True,
    expire_after: float | timedelta | None = None,
    on_target_terminated: OnTargetTerminated = "discard",
) -> EventDecorator: ...
def event(
    cls: Any = None,
    /,
    *,
    name: str | None = None,
    delivery: Delivery = "all",
    consume: bool = True,
    expire_after: float | timedelta | None = None,
    on_target_terminated: OnTargetTerminated = "discard",
) -> Any:
    """Make a class an event type; a plain class becomes a dataclass."""
    if delivery not in ("after_wait", "after_create", "all", "first"):
        raise InvalidArgument(f"delivery must be after_wait, after_create, all or first, not {delivery!r}")
    if on_target_terminated not in ("discard", "broadcast", "dead_letter"):
        raise InvalidArgument(
            f"on_target_terminated must be discard, broadcast or dead_letter, not {on_target_terminated!r}"
        )
    expiry = None if expire_after is None else check_seconds("expire_after", expire_after)

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            raise WorkflowMisuse(f"@event goes on a class, not on {cls!r}")
        if not (dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct) or hasattr(cls, "model_validate")):
            cls = dataclass(cls)
        called = check_name("an event's name", name or cls.__name__)
        cls.__perdure_event__ = EventOptions(called, delivery, consume, expiry, on_target_terminated)
        return cls

    return decorate if cls is None else decorate(cls)
