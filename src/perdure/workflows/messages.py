"""ctx.receive, ctx.receive_batch, ctx.receive_request, ctx.send and ctx.broadcast: build commands, decode results.

The runner matches messages to receives (`perdure.runner.mailbox`). This module knows the run only as a host protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from perdure.codec import Codec
from perdure.errors import InvalidArgument, WorkflowMisuse
from perdure.model.records import Entry, Message, PublishedValue
from perdure.model.turns import BroadcastEvent, ExternalAction, SendEvent
from perdure.model.validation import check_count, check_name, check_seconds, describe_value
from perdure.workflows.children import ChildHost
from perdure.workflows.commands import Command, ReceiveFilter
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.events import build_message, build_topic_event, encode_event, event_name
from perdure.workflows.replies import build_rejection, build_reply, rejection_error, request_id
from perdure.workflows.steps import Step

T = TypeVar("T")
Accept = Callable[[Any], Any]
"""Function of a workflow that rejects an event: it raises or returns False."""


class ReceiveHost(Protocol):
    """The run, as receives use it."""

    @property
    def codec(self) -> Codec: ...

    def escape(self, name: str) -> str: ...

    def now(self) -> float: ...

    def next_number(self) -> int: ...

    def next_recorded(self) -> Entry | None: ...

    def issue(self, command: Command) -> Any: ...


class OutputHost(ChildHost, ReceiveHost, Protocol):
    """The run, as sends, broadcasts, published values and streams use it."""


class Request(Generic[T]):
    """A received event to which the workflow responds once: with `reply` or with `fail`."""

    def __init__(self, run: ReceiveHost, value: T, message: Message) -> None:
        self._run = run
        self._message = message
        self._response: Any = None  # the future of the first response
        self.value = value
        self.event_id = request_id(message)

    def reply(self, value: Any = None) -> Coroutine[None, None, None]:
        """Reply to the caller. The reply is durable when the call returns; the caller can fetch it for seven days.

        Raises `WorkflowMisuse` after another `reply` or `fail`.
        """

        def build() -> tuple[bytes, PublishedValue]:
            encoded = self._run.codec.encode(value, what=f"the reply to {self._message.name!r}")
            return encoded, build_reply(self._message, encoded, self._run.now())

        return self._respond("reply", build)

    def fail(self, error: BaseException | str) -> Coroutine[None, None, None]:
        """Reject the request: its caller gets `RequestRejected` with the type and message of the error.

        The rejection is durable when the call returns. The caller can fetch it for seven days. Raises `WorkflowMisuse`
        after another `reply` or `fail`.
        """
        record = rejection_error(error, self._run.codec)

        def build() -> tuple[bytes, PublishedValue]:
            shown = self._run.codec.encode({"type": record.type, "message": record.message})
            return shown, build_rejection(self._message, record, self._run.now())

        return self._respond("reject", build)

    def _respond(self, kind: str, build: Callable[[], tuple[bytes, PublishedValue]]) -> Coroutine[None, None, None]:
        """Return a durable call that publishes a response for the caller."""
        run, name = self._run, self._message.name

        def request() -> Any:
            self._check_open(kind)
            recorded_value, published = build()
            self._response = run.issue(
                Command(
                    kind=kind,
                    name=name,
                    segment=run.escape(f"{name}:{kind}"),
                    immediate_value=recorded_value,
                    publishes=published if self._message.wants_reply else None,
                    detail=self.event_id.encode(),
                )
            )
            return self._response

        return CommandCall(kind, request, run.next_number())

    def _check_open(self, kind: str) -> None:
        """Raise `WorkflowMisuse` if the workflow has responded already. A response that was cancelled does not count.

        Earlier versions accepted a second reply, and recorded replies without a detail: such a record is replayed.
        """
        if self._response is None or self._response.cancelled():
            return
        recorded = self._run.next_recorded()
        if recorded is None or recorded.kind != "reply" or kind != "reply" or recorded.detail is not None:
            raise WorkflowMisuse(
                f"request {self._message.name!r} ({self.event_id}) has its response already: "
                "call reply or fail once for each request"
            )

    def __repr__(self) -> str:
        return f"<request {self._message.name} {self.event_id}>"


def receive(run: ReceiveHost, kinds: Sequence[Any], timeout: Any) -> Any:
    """Return a durable call that receives the next event of any of these types or names."""
    return _receive_call(run, "receive", kinds, timeout, 1, lambda values, messages: values[0])


def receive_batch(run: ReceiveHost, kinds: Sequence[Any], max_messages: int, timeout: Any) -> Any:
    """Return a durable call that receives 1 to `max_messages` events, or [] on timeout."""
    check_count("max", max_messages)
    return _receive_call(run, "receive_batch", kinds, timeout, max_messages, lambda values, messages: values)


def receive_request(run: ReceiveHost, kinds: Sequence[Any], timeout: Any, accept: Accept | None) -> Any:
    """Return a durable call that receives the next event that `accept` does not reject as a `Request`."""
    return _receive_call(
        run,
        "receive_request",
        kinds,
        timeout,
        1,
        lambda values, messages: Request(run, values[0], messages[0]),
        None if accept is None else _check_accept(accept),
    )


def _check_accept(accept: Any) -> Accept:
    if not callable(accept) or inspect.iscoroutinefunction(accept) or isinstance(accept, Step):
        raise WorkflowMisuse(f"accept must be a plain function of the event, not {describe_value(accept)}")
    return accept  # type: ignore[no-any-return]


def _receive_call(
    run: ReceiveHost,
    kind: str,
    kinds: Sequence[Any],
    timeout: Any,
    max_messages: int,
    build_result: Callable[[list[Any], list[Message]], Any],
    accept: Accept | None = None,
) -> CommandCall[Any]:
    if not kinds:
        raise InvalidArgument(f"{kind} must be given at least one event type or name")
    types = {event_name(each): Any if isinstance(each, str) else each for each in kinds}
    seconds = None if timeout is None else check_seconds("timeout", timeout)
    name = ",".join(types)

    def read(entry: Entry) -> Any:
        messages = received_messages(entry)
        values = [_decode_event(run, each, types[each.name]) for each in messages]
        return build_result(values, messages)

    def request() -> Any:
        return run.issue(
            Command(
                kind=kind,
                name=name,
                segment=run.escape(name),
                read=read,
                fail=lambda entry: TimeoutError(f"no {name} arrived within {seconds} seconds"),
                wants=ReceiveFilter(types, max_messages, kind == "receive_batch", accept),
                due_at=None if seconds is None else run.now() + seconds,
            )
        )

    return CommandCall(kind, request, run.next_number())


def _decode_event(run: ReceiveHost, message: Message, kind: Any) -> Any:
    return run.codec.decode(message.body or b"null", kind, what=f"event {message.name!r}")


def received_messages(entry: Entry) -> list[Message]:
    """Return the messages that completed a receive, from the detail of its entry."""
    return [] if entry.detail is None else msgspec.json.decode(entry.detail, type=list[Message])


def send(run: OutputHost, run_id: str, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, None]:
    """Return a durable call that sends an event to a run. Idempotent: the id is derived from the entry."""
    receiver = check_name("a run's id", run_id)
    options, body = encode_event(event, payload, run.codec)
    chosen_id = None if event_id is None else check_name("an event's id", event_id)

    def build_action(target: str) -> ExternalAction:
        event_id, id = _event_ids(run, chosen_id, target)
        return SendEvent(
            receiver, build_message(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id)
        )

    return _external_call(run, "send", options.name, build_action, None)


def broadcast(run: OutputHost, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, int]:
    """Return a durable call that broadcasts an event. Idempotent: the id is derived from the entry."""
    options, body = encode_event(event, payload, run.codec)
    chosen_id = None if event_id is None else check_name("an event's id", event_id)

    def build_action(target: str) -> ExternalAction:
        event_id, id = _event_ids(run, chosen_id, target)
        return BroadcastEvent(
            build_topic_event(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id)
        )

    return _external_call(
        run, "broadcast", options.name, build_action, lambda entry: run.codec.decode(entry.value or b"0", int)
    )


def _event_ids(run: OutputHost, chosen_id: str | None, target: str) -> tuple[str, str | None]:
    """Return event id and delivery id: derived from the entry, unless the workflow chose an event id."""
    derived_id = f"{run.origin}/{target}"
    return (derived_id, f"sent/{derived_id}") if chosen_id is None else (chosen_id, None)


def _external_call(
    run: OutputHost,
    kind: str,
    name: str,
    build_action: Callable[[str], ExternalAction],
    read: Callable[[Entry], Any] | None,
) -> CommandCall[Any]:
    def request() -> Any:
        return run.issue(Command(kind=kind, name=name, segment=run.escape(name), effect=build_action, read=read))

    return CommandCall(kind, request, run.next_number())
