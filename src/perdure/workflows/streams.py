"""ctx.publish and ctx.stream: values and streams that a run publishes for readers outside of the workflow.

This module knows the run only as an `OutputHost`.
"""

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
    """Return a durable call that publishes a value under a key."""
    key = check_name("a published key", key)
    if key.startswith("~"):
        raise InvalidArgument(f"a published key must not start with a tilde: {key!r}")
    encoded = run.codec.encode(value, what=f"published value {key!r}")

    def request() -> Any:
        published = PublishedValue(key, encoded)
        return run.issue(
            Command(kind="publish", name=key, segment=run.escape(key), immediate_value=encoded, publishes=published)
        )

    return CommandCall("publish", request, run.next_number())


class Stream:
    """An append-only stream of the run."""

    def __init__(self, run: OutputHost, name: str) -> None:
        self._run = run
        self.name = check_name("a stream's name", name)

    def write(self, item: Any) -> Coroutine[None, None, None]:
        """Return a durable call that appends an item, exactly once."""
        run, name = self._run, self.name
        encoded = run.codec.encode(item, what=f"an item of stream {name!r}")

        def request() -> Any:
            written = StreamItem(stream=name, value=encoded, location="", at=run.now())
            return run.issue(
                Command(kind="stream", name=name, segment=run.escape(name), immediate_value=encoded, publishes=written)
            )

        return CommandCall("stream", request, run.next_number())
