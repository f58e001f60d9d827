"""What a workflow sends and shows to others: events to runs and topics, published values, streams. Each is an entry."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from perdure.errors import InvalidArgument
from perdure.model.records import PublishedValue, StreamItem
from perdure.model.validation import check_name
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall
from perdure.workflows.messages import OutputHost


def publish(run: OutputHost, key: str, value: Any) -> Coroutine[None, None, None]:
    """A value that callers can read under its key."""
    if check_name("a published key", key).startswith("~"):
        raise InvalidArgument(f"a published key cannot begin with a tilde, as {key!r} does")
    encoded = run.codec.encode(value, what=f"published value {key!r}")

    def ask() -> Any:
        shown = PublishedValue(key, encoded)
        return run.issue(
            Command(kind="publish", name=key, segment=run.escape(key), immediate_value=encoded, publishes=shown)
        )

    return CommandCall("publish", ask, run.next_number())


class Stream:
    """A named stream of the run."""

    def __init__(self, run: OutputHost, name: str) -> None:
        self._run = run
        self.name = check_name("a stream's name", name)

    def write(self, item: Any) -> Coroutine[None, None, None]:
        """Append an item, once, whatever crashes."""
        run, name = self._run, self.name
        encoded = run.codec.encode(item, what=f"an item of stream {name!r}")

        def ask() -> Any:
            shown = StreamItem(stream=name, value=encoded, location="", at=run.now())
            return run.issue(
                Command(kind="stream", name=name, segment=run.escape(name), immediate_value=encoded, publishes=shown)
            )

        return CommandCall("stream", ask, run.next_number())
