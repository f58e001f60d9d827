"""Command: a durable operation requested by workflow code, as data. Steps and sleeps are requested directly.

Receives, sends, children and loops differ in how they complete; requesting, matching against history and cancelling
are shared. The modules of this package build commands; the runner executes them. This module knows no runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from perdure.model.records import Entry, PublishedValue, StreamItem
from perdure.model.tags import TagChanges
from perdure.model.turns import ExternalAction


class ReceiveFilter(Struct, frozen=True):
    """Which messages an open receive accepts: event names with their payload types, and the maximum number.

    `accept` is a function of the workflow that may reject the value of a message.
    """

    types: dict[str, Any]
    max_messages: int = 1
    empty_on_timeout: bool = False  # On timeout a batch receive returns []; a single receive raises.
    accept: Callable[[Any], Any] | None = None


class Command(Struct, frozen=True, kw_only=True):
    """One requested operation. The optional fields define how it completes:

    effect           an external action; its result completes the entry, or a message does (`turns.AwaitingResult`)
    wants            a matching message from the mailbox or a topic
    deferred         the completion of the deferred with this name
    immediate_value  the value itself: the entry completes at once, as a separate completion
    due_at           the timeout

    `read` converts the recorded entry to the value that the workflow sees, `fail` a recorded failure to an exception.
    A command with `fixed_location` uses `segment` as its location and has no order in its scope.
    """

    kind: str
    name: str
    segment: str
    read: Callable[[Entry], Any] | None = None
    fail: Callable[[Entry], BaseException] | None = None
    effect: Callable[[str], ExternalAction] | None = None  # Called with the target of the entry.
    describe: Callable[[ExternalAction], bytes] | None = None  # Encodes the entry detail.
    wants: ReceiveFilter | None = None
    deferred: str | None = None
    immediate_value: bytes | None = None
    publishes: PublishedValue | StreamItem | None = None  # Stored with the commit that completes the entry.
    tags: TagChanges | None = None  # Applied with the commit that completes the entry.
    due_at: float | None = None
    detail: bytes | None = None  # Of the entry, if neither `describe` nor a message gives it.
    fixed_location: bool = False
