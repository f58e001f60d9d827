"""`@event`: the type of a message that runs can receive, and how one becomes a message or an event of a topic.

Callers and workflows send through the same few functions here, so that an event means the same whoever sends it.

An event has an id of its own, which callers choose as they like, and one under which a run or a topic takes it once.
The second says which way it came, so that what users choose cannot meet what is perdure's own:

    event/<its own id>               sent under an id that somebody chose, or a new one
    sent/<run>/<target>              sent by a workflow: the entry's, whatever crashes
    undelivered/<run>/<trace>        left unread by a run that has ended, on its way to its topic
    letter/<token>                   a dead letter that is replayed
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform, overload

import msgspec
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import Message, TopicEvent
from perdure.model.validation import check_name, check_seconds

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
@dataclass_transform()
def event(cls: C, /) -> C: ...
@overload
@dataclass_transform()
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


def options_of(event_type: Any) -> EventOptions | None:
    """The options of an `@event` class; None if it is none."""
    found = getattr(event_type, "__perdure_event__", None) if isinstance(event_type, type) else None
    return found if isinstance(found, EventOptions) else None


def event_name(what: Any) -> str:
    """The name that an event's type or a plain topic name stands for."""
    if isinstance(what, str):
        return check_name("an event's name", what)
    options = options_of(what)
    if options is None:
        raise WorkflowMisuse(f"an event is named by its @event class or by a string, not by {what!r}")
    return options.name


def encode_event(event: Any, payload: Any, codec: Codec) -> tuple[EventOptions, bytes]:
    """An event to be sent: an instance of an `@event` class, or a topic's name with a JSON value beside it."""
    if isinstance(event, str):
        options = EventOptions(check_name("an event's name", event))
        return options, codec.encode(payload, what=f"event {event!r}")
    found = options_of(type(event))
    if found is None:
        raise WorkflowMisuse(_not_an_event_message(event))
    if payload is not None:
        raise InvalidArgument(f"the event {found.name!r} is its own value; a payload goes with a plain topic name")
    return found, codec.encode(event, type(event), what=f"event {found.name!r}")


def build_message(
    options: EventOptions,
    body: bytes,
    *,
    event_id: str,
    id: str | None = None,
    sent_at: float,
    sender: str | None = None,
    wants_reply: bool = False,
) -> Message:
    """The event as mail for one run."""
    return Message(
        id=id or user_event_id(event_id),
        event_id=event_id,
        kind="event",
        name=options.name,
        body=body,
        sender=sender,
        sent_at=sent_at,
        expires_at=None if options.expire_after is None else sent_at + options.expire_after,
        policy=options.on_target_terminated,
        wants_reply=wants_reply,
    )


def build_topic_event(
    options: EventOptions,
    body: bytes,
    *,
    event_id: str,
    id: str | None = None,
    sent_at: float,
    sender: str | None = None,
) -> TopicEvent:
    """The event as one of its topic."""
    first = options.delivery == "first"
    return TopicEvent(
        topic=options.name,
        id=id or user_event_id(event_id),
        event_id=event_id,
        body=body,
        sent_at=sent_at,
        delivery="all" if first else options.delivery,
        consume=first or options.consume,
        expires_at=None if options.expire_after is None else sent_at + options.expire_after,
        sender=sender,
    )


def user_event_id(event_id: str) -> str:
    """The id under which an event is taken once that somebody has chosen an id for."""
    return f"event/{event_id}"


def message_key(message: Message) -> str:
    """Tells an event in the mail of a run from all others that it, or another run of this id, ever gets."""
    return f"{message.number}/{message.sent_at}"


def with_retention_limit(event: TopicEvent, retention: float) -> TopicEvent:
    """The event with an expiry: no topic keeps one for longer than the retention."""
    latest = event.sent_at + retention
    return replace(event, expires_at=latest if event.expires_at is None else min(latest, event.expires_at))


def _not_an_event_message(event: Any) -> str:
    if options_of(event) is not None:
        return f"{event.__name__} is the class of an event; send an instance of it: {event.__name__}(...)"
    kind = type(event).__name__
    return f"{kind} is no event: put @event on the class, or send the value with a name, as in send(id, 'paid', value)"
