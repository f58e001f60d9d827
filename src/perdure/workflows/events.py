"""`@event`: event types, and how an event becomes a message of a run or an event of a topic.

The client and the workflow API both use this module, so that events mean the same for every sender. This module knows
no run and no store.

An event has two ids: `event_id`, which the sender may choose, and `id`, which makes delivery to a run or topic
idempotent. Prefixes of `id` separate ids chosen by users from internal ones:

    event/<event_id>               sent by a client, with an id that the caller chose or a new one
    sent/<run>/<target>            sent by a workflow; derived from its entry, so that a repeated send is a duplicate
    undelivered/<run>/<key>        unread when its run ended, and moved to its topic
    letter/<token>                 replayed from a dead letter
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, cast, dataclass_transform, get_args, overload

import msgspec
from msgspec.structs import replace

from perdure.codec import Codec
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import Message, TopicEvent
from perdure.model.validation import check_name, check_seconds, describe_value

Delivery = Literal["after_wait", "after_create", "all", "first"]
OnTargetTerminated = Literal["discard", "broadcast", "dead_letter"]
POLICIES: tuple[OnTargetTerminated, ...] = get_args(OnTargetTerminated)
C = TypeVar("C", bound=type)


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Delivery options of an event type."""

    name: str
    delivery: Delivery = "all"
    consume: bool = True
    expire_after: float | None = None
    on_target_terminated: OnTargetTerminated = "discard"


class EventDecorator(Protocol):
    """The decorator that `event(...)` with options returns."""

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
    """Define an event type from a class. A plain class becomes a dataclass.

    The options belong to the event's name: they also apply to an event that is sent by this name with a plain value.
    """
    if delivery not in ("after_wait", "after_create", "all", "first"):
        raise InvalidArgument(f"delivery must be after_wait, after_create, all or first, not {delivery!r}")
    if on_target_terminated not in POLICIES:
        raise InvalidArgument(
            f"on_target_terminated must be discard, broadcast or dead_letter, not {on_target_terminated!r}"
        )
    expiry = None if expire_after is None else check_seconds("expire_after", expire_after)

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            raise WorkflowMisuse(f"@event must decorate a class, not {cls!r}")
        if not (dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct) or hasattr(cls, "model_validate")):
            cls = dataclass(cls)
        checked_name = check_name("an event's name", name or cls.__name__)
        cls.__perdure_event__ = EventOptions(checked_name, delivery, consume, expiry, on_target_terminated)
        _register(cls, checked_name)
        return cls

    return decorate if cls is None else decorate(cls)


_LOCAL = "<locals>"
_REGISTERED: dict[str, dict[str, type]] = {}
"""The event classes that this process has defined, by event name and origin, latest last."""


def _register(cls: type, name: str) -> None:
    """Register an event class by its name. It replaces an earlier one of the same origin.

    All classes that are defined in functions have one origin: such a function may define its class on every call.
    """
    origin = _LOCAL if _LOCAL in cls.__qualname__ else f"{cls.__module__}.{cls.__qualname__}"
    by_origin = _REGISTERED.setdefault(name, {})
    by_origin.pop(origin, None)
    by_origin[origin] = cls


def options_of_name(name: str) -> EventOptions | None:
    """Return the options of the event class of this name; None if this process has defined none.

    Raises `WorkflowMisuse` if two modules define such a class with different options.
    """
    defined = _definitions(name)
    options = {event_options(cls) for cls in defined.values()}
    if len(options) > 1:
        raise WorkflowMisuse(
            f"event {name!r} is defined with different options in {' and '.join(sorted(defined))}; give one of them "
            "another name, or send an instance of one"
        )
    return options.pop() if options else None


def event_class(name: str, module: str | None = None) -> type | None:
    """Return the event class of this name; None if this process has defined none, or more than one.

    If there are several, that of `module`, the module of the workflow that received it, is returned.
    """
    defined = list(_definitions(name).values())
    found = [cls for cls in defined if cls.__module__ == module] or defined
    return found[0] if len(found) == 1 else None


def _definitions(name: str) -> dict[str, type]:
    """Return the event classes of a name by origin. One that is defined in a function hides those defined before."""
    by_origin = _REGISTERED.get(name, {})
    if by_origin and [*by_origin][-1] == _LOCAL:
        return {_LOCAL: by_origin[_LOCAL]}
    return {origin: cls for origin, cls in by_origin.items() if origin != _LOCAL}


def event_options(event_type: Any) -> EventOptions | None:
    """Return the options of an `@event` class, or None if it is not one."""
    found = getattr(event_type, "__perdure_event__", None) if isinstance(event_type, type) else None
    return found if isinstance(found, EventOptions) else None


def event_name(event_type: Any) -> str:
    """Return the event name of an `@event` class or of a plain name."""
    if isinstance(event_type, str):
        return check_name("an event's name", event_type)
    options = event_options(event_type)
    if options is None:
        given = describe_value(event_type)
        raise WorkflowMisuse(f"an event must be given as its @event class or its name, not as {given}")
    return options.name


def encode_event(event: Any, payload: Any, codec: Codec) -> tuple[EventOptions, bytes]:
    """Return the options and the encoded payload of an event to send.

    The event is an instance of an `@event` class, or an event name together with a JSON payload. A name has the options
    of the class of that name, if this process has defined one.
    """
    if isinstance(event, str):
        name = check_name("an event's name", event)
        options = options_of_name(name) or EventOptions(name)
        return options, codec.encode(payload, what=f"event {options.name!r}")
    found = event_options(type(event))
    if found is None:
        raise WorkflowMisuse(_not_an_event_message(event))
    if payload is not None:
        raise InvalidArgument(f"event {found.name!r} is its own payload; use payload= only with a plain event name")
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
    """Return the event as a message for one run."""
    return Message(
        id=id or user_event_id(event_id),
        event_id=event_id,
        kind="event",
        name=options.name,
        body=body,
        sender=sender,
        sent_at=sent_at,
        expires_at=None if options.expire_after is None else sent_at + options.expire_after,
        policy=policy_text(options),
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
    """Return the event as an event of its topic."""
    delivery, consume = _topic_options(options)
    return TopicEvent(
        topic=options.name,
        id=id or user_event_id(event_id),
        event_id=event_id,
        body=body,
        sent_at=sent_at,
        delivery=delivery,
        consume=consume,
        expires_at=None if options.expire_after is None else sent_at + options.expire_after,
        sender=sender,
    )


def _topic_options(options: EventOptions) -> tuple[str, bool]:
    """Return delivery and consume of a topic's event: "first" is "all" with consume."""
    return ("all", True) if options.delivery == "first" else (options.delivery, options.consume)


def policy_text(options: EventOptions) -> str:
    """Return the policy of a message, with the delivery options if the event may move to its topic.

    The worker that moves it may not have the event class.
    """
    policy, (delivery, consume) = options.on_target_terminated, _topic_options(options)
    if policy != "broadcast" or (delivery, consume) == ("all", True):
        return policy
    return f"{policy}:{delivery}:{'consume' if consume else 'keep'}"


def parse_policy(name: str, text: str) -> EventOptions | None:
    """Return the options that the policy of a message contains, or None if it is not a policy."""
    policy, *delivery = text.split(":")
    if policy not in POLICIES or (delivery and policy != "broadcast"):
        return None
    match delivery:
        case []:
            return EventOptions(name, on_target_terminated=cast(Any, policy))
        case ["after_wait" | "after_create" | "all" as mode, "consume" | "keep" as use]:
            return EventOptions(name, mode, use == "consume", on_target_terminated="broadcast")
    return None


def user_event_id(event_id: str) -> str:
    """Return the delivery id of an event that was sent by a client."""
    return f"event/{event_id}"


def message_key(message: Message) -> str:
    """Return a key that is unique among all messages of this run and of later runs with the same id."""
    return f"{message.number}/{message.sent_at}"


def with_retention_limit(event: TopicEvent, retention: float) -> TopicEvent:
    """Return the event with an expiry that is at most `retention` seconds after it was sent."""
    latest = event.sent_at + retention
    return replace(event, expires_at=latest if event.expires_at is None else min(latest, event.expires_at))


def _not_an_event_message(event: Any) -> str:
    if event_options(event) is not None:
        return f"{event.__name__} is an event class; send an instance: {event.__name__}(...)"
    kind = type(event).__name__
    return (
        f"{kind} is not an event: decorate the class with @event, or use a name with a value: send(id, 'paid', value)"
    )
