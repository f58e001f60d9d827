"""What a workflow sends and shows to others: events to runs and topics, published values, streams. Each is an entry."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from perdure.errors import InvalidArgument
from perdure.model.records import BroadcastEvent, Entry, PublishedValue, SendEvent, StreamItem, Work
from perdure.model.validation import check_name
from perdure.workflows.children import Raises
from perdure.workflows.commands import Question
from perdure.workflows.durable_call import Asking
from perdure.workflows.events import message_of, outgoing, topic_event_of
from perdure.workflows.messages import Receives


class Shows(Raises, Receives, Protocol):
    """What sending and showing ask of the run."""


def send(run: Shows, run_id: str, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, None]:
    """An event into a run's mailbox, under an id that is the same however often it is tried."""
    check_name("a run's id", run_id)
    options, body = outgoing(event, payload, run.codec)
    given = None if event_id is None else check_name("an event's id", event_id)

    def work(target: str) -> Work:
        event_id, id = _ids(run, given, target)
        return SendEvent(run_id, message_of(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id))

    return _errand(run, "send", options.name, work, None)


def broadcast(run: Shows, event: Any, payload: Any, event_id: str | None) -> Coroutine[None, None, int]:
    """An event into its topic, under an id that is the same however often it is tried."""
    options, body = outgoing(event, payload, run.codec)
    given = None if event_id is None else check_name("an event's id", event_id)

    def work(target: str) -> Work:
        event_id, id = _ids(run, given, target)
        return BroadcastEvent(topic_event_of(options, body, event_id=event_id, id=id, sent_at=run.now(), sender=run.id))

    return _errand(run, "broadcast", options.name, work, lambda entry: run.codec.decode(entry.value or b"0", int))


def _ids(run: Shows, given: str | None, target: str) -> tuple[str, str | None]:
    """An event's own id, and the one under which it is taken once: as the workflow says, or those of the entry."""
    made = f"{run.id}/{target}"
    return (made, f"sent/{made}") if given is None else (given, None)


def _errand(
    run: Shows, kind: str, name: str, work: Callable[[str], Work], read: Callable[[Entry], Any] | None
) -> Asking[Any]:
    def ask() -> Any:
        return run.pose(Question(kind=kind, name=name, segment=run.escape(name), work=work, read=read))

    return Asking(kind, ask, run.next_number())


def publish(run: Shows, key: str, value: Any) -> Coroutine[None, None, None]:
    """A value that callers can read under its key."""
    if check_name("a published key", key).startswith("~"):
        raise InvalidArgument(f"a published key cannot begin with a tilde, as {key!r} does")
    encoded = run.codec.encode(value, what=f"published value {key!r}")

    def ask() -> Any:
        shown = PublishedValue(key, encoded)
        return run.pose(Question(kind="publish", name=key, segment=run.escape(key), instant=encoded, shows=shown))

    return Asking("publish", ask, run.next_number())


class Stream:
    """A named stream of the run."""

    def __init__(self, run: Shows, name: str) -> None:
        self._run = run
        self.name = check_name("a stream's name", name)

    def write(self, item: Any) -> Coroutine[None, None, None]:
        """Append an item, once, whatever crashes."""
        run, name = self._run, self.name
        encoded = run.codec.encode(item, what=f"an item of stream {name!r}")

        def ask() -> Any:
            shown = StreamItem(stream=name, value=encoded, location="", at=run.now())
            return run.pose(Question(kind="stream", name=name, segment=run.escape(name), instant=encoded, shows=shown))

        return Asking("stream", ask, run.next_number())
