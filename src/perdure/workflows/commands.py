"""Question: what a workflow asks of its run besides steps and sleeps, as data.

A receive, a send, a child, a loop ... differ in how they come to an answer; asking for one, finding it on record and
being cancelled is the same for all. The context says what it wants in these terms; the runner carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from perdure.model.records import Entry, PublishedValue, StreamItem
from perdure.model.turns import ExternalAction


class ReceiveFilter(Struct, frozen=True):
    """What an open receive takes: event names with the types of their payloads, and how many at once."""

    types: dict[str, Any]
    max_messages: int = 1
    empty_on_timeout: bool = False  # a batch that ran out of time is empty; a single receive raises


class Command(Struct, frozen=True, kw_only=True):
    """One ask. Each of the optional parts says how an answer comes about:

    work       an errand that the engine runs; its result is the answer, or mail is (`records.Standing`)
    wants      events of the mailbox and of topics
    deferred   the completion of the deferred of this name
    instant    the answer itself: settled at once, as a completion of its own
    due_at     when it ends by itself

    `read` turns the recorded entry into what the workflow sees, `fail` a recorded failure. `outside` asks have a fixed
    location and stand outside of the order of their scope.
    """

    kind: str
    name: str
    segment: str
    read: Callable[[Entry], Any] | None = None
    fail: Callable[[Entry], BaseException] | None = None
    effect: Callable[[str], ExternalAction] | None = None  # given its target
    describe: Callable[[ExternalAction], bytes] | None = None  # what the entry keeps of the work
    wants: ReceiveFilter | None = None
    deferred: str | None = None
    immediate_value: bytes | None = None
    publishes: PublishedValue | StreamItem | None = None  # shown to others from the commit on that settles it
    due_at: float | None = None
    fixed_location: bool = False
