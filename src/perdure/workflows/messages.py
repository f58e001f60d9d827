"""ctx.receive and its relatives: what events a workflow waits for, and what it gets.

Which message answers which receive is the runner's business (its mailroom); here are the questions and their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from perdure.codec import Codec
from perdure.errors import InvalidArgument
from perdure.model.records import Entry, Message, PublishedValue
from perdure.model.turns import BroadcastEvent, ExternalAction, SendEvent
from perdure.model.validation import check_count, check_name, check_seconds
from perdure.workflows.children import ChildHost
from perdure.workflows.commands import Command, ReceiveFilter
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.events import build_message, build_topic_event, encode_event, event_name

T = TypeVar("T")

REPLY_RETENTION_SECONDS = 7 * 86_400.0  # seconds for which an answer can be fetched


class ReceiveHost(Protocol):
    """What receiving asks of the run."""

    @property
    def codec(self) -> Codec: ...

    def escape(self, name: str) -> str: ...

    def now(self) -> float: ...

    def next_number(self) -> int: ...

    def issue(self, question: Command) -> Any: ...


class OutputHost(ChildHost, ReceiveHost, Protocol):
    """What sending and showing ask of the run."""


class Request(Generic[T]):
    """A received event that its sender may wait for an answer to."""

    def __init__(self, run: ReceiveHost, value: T, message: Message) -> None:
        self._run = run
        self._message = message
        self.value = value
        self.event_id = message.event_id or message.id

    def reply(self, value: Any = None) -> Coroutine[None, None, None]:
        """Answer it: durable once it returns, and given to the sender whenever it asks."""
        run, name = self._run, self._message.name

        def ask() -> Any:
            encoded = run.codec.encode(value, what=f"the reply to {name!r}")
            shown = PublishedValue(f"~reply/{self.event_id}", encoded, run.now() + REPLY_RETENTION_SECONDS)
            return run.issue(
                Command(
                    kind="reply",
                    name=name,
                    segment=run.escape(f"{name}:reply"),
                    immediate_value=encoded,
                    publishes=shown if self._message.wants_reply else None,
                )
            )

        return CommandCall("reply", ask, run.next_number())

    def __repr__(self) -> str:
        return f"<request {self._message.name} {self.event_id}>"


def receive(run: ReceiveHost, kinds: Sequence[Any], timeout: Any) -> Any:
    """The next event of any of these types or names."""
    return _receive_call(run, "receive", kinds, timeout, 1, lambda values, messages: values[0])


def receive_batch(run: ReceiveHost, kinds: Sequence[Any], most: int, timeout: Any) -> Any:
    """What is there, at least one and at most so many; nothing once the time is over."""
    check_count("max", most)
    return _receive_call(run, "receive_batch", kinds, timeout, most, lambda values, messages: values)


def receive_request(run: ReceiveHost, kinds: Sequence[Any], timeout: Any) -> Any:
    """The next event, as something that can be answered."""
    return _receive_call(
        run, "receive_request", kinds, timeout, 1, lambda values, messages: Request(run, values[0], messages[0])
    )


def _receive_call(
    run: ReceiveHost,
    kind: str,
    kinds: Sequence[Any],
    timeout: Any,
    most: int,
    give: Callable[[list[Any], list[Message]], Any],
) -> CommandCall[Any]:
    if not kinds:
        raise InvalidArgument(f"{kind} takes at least one event type or name")
    types = {event_name(each): Any if isinstance(each, str) else each for each in kinds}
    seconds = None if timeout is None else check_seconds("timeout", timeout)
    name = ",".join(types)

    def read(entry: Entry) -> Any:
        messages = messages_of(entry)
        values = [_value_of(run, each, types[each.name]) for each in messages]
        return give(values, messages)

    def ask() -> Any:
        return run.issue(
            Command(
                kind=kind,
                name=name,
                segment=run.escape(name),
                read=read,
                fail=lambda entry: TimeoutError(f"no {name} came within {seconds} seconds"),
                wants=ReceiveFilter(types, most, kind == "receive_batch"),
                due_at=None if seconds is None else run.now() + seconds,
            )
        )

    return CommandCall(kind, ask, run.next_number())


def _value_of(run: ReceiveHost, message: Message, kind: Any) -> Any:
    return run.codec.decode(message.body or b"null", kind, what=f"event {message.name!r}")


def messages_of(entry: Entry) -> list[Message]:
    """What a receive was answered with, as its entry keeps it."""
    return [] if entry.detail is None else msgspec.json.decode(entry.detail, type=list[Message])


def send(run: OutputHost, run_id: str, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, None]:
    """An event into a run's mailbox, under an id that is the same however often it is tried."""
    check_name("a run's id", run_id)
    options, body = encode_event(event, payload, run.codec)
    given = None if event_id is None else check_name("an event's id", event_id)

    def work(target: str) -> ExternalAction:
        event_id, id = _ids(run, given, target)
        return SendEvent(
            run_id, build_message(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id)
        )

    return _external_call(run, "send", options.name, work, None)


def broadcast(run: OutputHost, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, int]:
    """An event into its topic, under an id that is the same however often it is tried."""
    options, body = encode_event(event, payload, run.codec)
    given = None if event_id is None else check_name("an event's id", event_id)

    def work(target: str) -> ExternalAction:
        event_id, id = _ids(run, given, target)
        return BroadcastEvent(
            build_topic_event(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id)
        )

    return _external_call(
        run, "broadcast", options.name, work, lambda entry: run.codec.decode(entry.value or b"0", int)
    )


def _ids(run: OutputHost, given: str | None, target: str) -> tuple[str, str | None]:
    """An event's own id, and the one under which it is taken once: as the workflow says, or those of the entry."""
    made = f"{run.id}/{target}"
    return (made, f"sent/{made}") if given is None else (given, None)


def _external_call(
    run: OutputHost, kind: str, name: str, work: Callable[[str], ExternalAction], read: Callable[[Entry], Any] | None
) -> CommandCall[Any]:
    def ask() -> Any:
        return run.issue(Command(kind=kind, name=name, segment=run.escape(name), effect=work, read=read))

    return CommandCall(kind, ask, run.next_number())
