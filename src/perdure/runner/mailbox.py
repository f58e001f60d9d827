"""Mailbox: messages that a run has seen and not yet received, and which open receive gets which of them.

No race can lose or duplicate an event. Messages and timers both reach a run as inputs of a turn, one turn at a time.
What a receive gets, and that the message is consumed, are in the same commit (`Turn.consumed`). Therefore:

- A message that arrives while a run suspends is not seen by that commit, which leaves the run due.
- The turn decides between a timeout and a message: in one turn messages come first. A message of a later turn stays in
  the mailbox for the next receive.
- A cancelled receive has consumed nothing, and an event that a topic has assigned to it is released.
- A rejected commit has consumed nothing either.
- A message that a receive rejects (`accept`) is consumed by the commit that publishes the rejection for its sender.

A receive takes from the mailbox first, in order of sending, then what a topic has assigned to it. Of several open
receives, the one that the earliest message is for is completed first; if the message is for more than one, the one that
was requested first.

Completions of a deferred are checked in the turn in which they arrive, or in which the run declares the type. If none
fits, each becomes a dead letter, and the commit that stores it releases the completion: the deferred is open again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import Context as VariableContext
from heapq import heappop, heappush
from typing import Any

import msgspec

from perdure.codec import Codec
from perdure.errors import InvalidPayload
from perdure.model.records import DeadLetter, ErrorRecord, Message, RunResult
from perdure.runner.acceptance import find_rejection
from perdure.runner.open_receives import OpenReceives
from perdure.runner.pending import PendingEntry
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import ReceiveFilter
from perdure.workflows.context import RunInfo
from perdure.workflows.deferreds import find_mismatch
from perdure.workflows.events import message_key
from perdure.workflows.replies import build_rejection, describe_rejection, rejection_error, request_id

LOGGER = logging.getLogger("perdure.workflow")
DROP_MARKERS_EVERY = 64  # messages; Redis reads all entries of the run to drop some
_Head = tuple[int, int, str]
"""A message that may have an open receive: its number, its kind, and its event name, target or deferred."""
EVENT, ASSIGNED, DEFERRED = range(3)
NO_ENTRIES = "~rejected"
"""A location without entries: dropping it only deletes the markers of turns without entries."""


class Mailbox:
    """See the module's docstring. `consumed` are the numbers that the turn removes from the inbox.

    `assigned` are events that topics have assigned to open receives, by target. `unchecked` are the names of deferreds
    whose completions have arrived, or whose type was declared, since they were last checked.
    """

    __slots__ = (
        "_blocked",
        "_by_name",
        "_codec",
        "_deferred_types",
        "_deferreds",
        "_extras",
        "_heads",
        "_info",
        "_variables",
        "assigned",
        "consumed",
        "unchecked",
    )

    def __init__(self, info: RunInfo, codec: Codec, extras: TurnExtrasBuilder, variables: VariableContext) -> None:
        self._info = info
        self._codec = codec
        self._extras = extras
        self._variables = variables
        self._by_name: dict[str, deque[Message]] = {}
        self.assigned: dict[str, Message] = {}
        self._deferreds: dict[str, list[Message]] = {}  # completions in order: the first one that fits wins
        self._deferred_types: dict[str, list[Any]] = {}  # the types that the run has declared, by name
        self._heads: list[_Head] = []  # a heap of messages that may have an open receive
        self._blocked: list[_Head] = []  # assigned events whose receive has messages in the mailbox
        self.consumed: list[int] = []
        self.unchecked: dict[str, None] = {}

    def add(self, message: Message) -> None:
        """Keep a message until a receive takes it."""
        if message.kind == "event":
            queue = self._by_name.setdefault(message.name, deque())
            queue.append(message)
            if len(queue) == 1:
                heappush(self._heads, (message.number, EVENT, message.name))
        elif message.kind == "assignment" and message.target is not None:
            self.assigned[message.target] = message
            heappush(self._heads, (message.number, ASSIGNED, message.target))
        elif message.kind == "deferred":
            self._deferreds.setdefault(message.name, []).append(message)
            self.unchecked[message.name] = None
            heappush(self._heads, (message.number, DEFERRED, message.name))

    def discard(self, message: Message) -> None:
        """Consume a message that no receive takes."""
        self.consumed.append(message.number)

    def consume(self, messages: Iterable[Message]) -> None:
        """Remove messages from the inbox with this turn's commit."""
        self.consumed.extend(message.number for message in messages)

    def take_consumed(self) -> tuple[int, ...]:
        """Return the numbers that this turn's commit removes from the inbox."""
        consumed = tuple(self.consumed)
        self.consumed.clear()
        return consumed

    def next_receiver(self, receives: OpenReceives) -> PendingEntry | None:
        """Return the first of the open receives that waits for the earliest message.

        A message that no receive waits for leaves the heap, and returns when a receive for it is opened.
        """
        for pending in receives.take_opened():
            self._offer(pending)
        heads = self._heads
        while heads:
            receiver = self._receiver_of(heads[0], receives)
            if receiver is not None:
                return receiver
            heappop(heads)
        return None

    def _offer(self, pending: PendingEntry) -> None:
        """Add the messages to the heap that a receive which was just opened may get."""
        command = pending.command
        assert command is not None
        if command.deferred is not None:
            if (number := self._first_fitting(command.deferred)) is not None:
                heappush(self._heads, (number, DEFERRED, command.deferred))
            return
        for name in command.wants.types if command.wants is not None and self._by_name else ():
            if (queue := self._by_name.get(name)) is not None:
                heappush(self._heads, (queue[0].number, EVENT, name))
        if self.assigned and (assigned := self.assigned.get(pending.target)) is not None:
            heappush(self._heads, (assigned.number, ASSIGNED, pending.target))

    def _receiver_of(self, head: _Head, receives: OpenReceives) -> PendingEntry | None:
        """Return the receive that a message is for. None if the message was taken, or none waits for it."""
        number, kind, key = head
        if kind == EVENT:
            queue = self._by_name.get(key)
            return receives.first_for_event(key) if queue is not None and queue[0].number == number else None
        if kind == DEFERRED:
            return receives.first_for_deferred(key) if self._first_fitting(key) == number else None
        found = self.assigned.get(key)
        if found is None or found.number != number:
            return None
        receive = receives.at(key)
        wants = receive.command.wants if receive is not None and receive.command is not None else None
        if wants is not None and any(name in self._by_name for name in wants.types):
            self._blocked.append(head)  # the mailbox comes first
            return None
        return receive

    def take_for(self, pending: PendingEntry, now: float) -> list[Message]:
        """Remove and return the messages that an open receive gets."""
        command = pending.command
        assert command is not None
        if command.deferred is not None:
            return self._take_completion(command.deferred, now)
        if command.wants is None:
            return []
        found: list[Message] = []
        while len(found) < command.wants.max_messages and (message := self._next(command.wants)) is not None:
            if self._usable(message, command.wants, now):
                found.append(message)
            elif not found:
                return []  # one at a time, so that a turn with many such messages can be paused
        return found or self._next_assigned(pending, command.wants, now)

    def release_unwanted(self, pending: Mapping[str, PendingEntry]) -> None:
        """Release assigned events whose receive was completed otherwise, cancelled or timed out."""
        for target, message in list(self.assigned.items()):
            receive = pending.get(target.partition("/")[2])
            if receive is None or receive.target != target:
                del self.assigned[target]
                self._extras.release_assignment(message.number)

    def _next(self, wants: ReceiveFilter) -> Message | None:
        """Remove and return the earliest event of the names that a filter has."""
        queues = [queue for name in wants.types if (queue := self._by_name.get(name))]
        if not queues:
            return None
        queue = min(queues, key=lambda queue: queue[0].number)
        message = queue.popleft()
        if queue:
            heappush(self._heads, (queue[0].number, EVENT, message.name))
        else:
            del self._by_name[message.name]
            while self._blocked:
                heappush(self._heads, self._blocked.pop())
        return message

    def _next_assigned(self, pending: PendingEntry, wants: ReceiveFilter, now: float) -> list[Message]:
        message = self.assigned.pop(pending.target, None)
        if message is None:
            return []
        if self._usable(message, wants, now):
            return [message]
        if pending.due_at is None or pending.due_at > now:  # the receive does not time out in this turn
            self._extras.subscribe(pending.target, tuple(wants.types))  # the assignment ended its subscription
        return []

    def _usable(self, message: Message, wants: ReceiveFilter, now: float) -> bool:
        """Return whether a receive gets a message. Otherwise consume it.

        The sender of a request gets a rejection. An event of another type becomes a dead letter, and so does a rejected
        one whose sender does not wait.
        """
        if message.expires_at is not None and message.expires_at <= now:
            self.consumed.append(message.number)
            return False
        try:
            kind = wants.types[message.name]
            value = self._codec.decode(message.body or b"null", kind, what=f"event {message.name!r}")
        except InvalidPayload as mismatch:
            self._extras.add_dead_letter(self._dead_letter(message, str(mismatch), now))
            self._reject(message, rejection_error(mismatch, self._codec), now)
            return False
        if wants.accept is not None:
            error = find_rejection(wants.accept, value, self._codec, self._variables)
            if error is not None:
                if not message.wants_reply:
                    reason = f"rejected by the run: {describe_rejection(error)}"
                    self._extras.add_dead_letter(self._dead_letter(message, reason, now))
                self._reject(message, error, now)
                return False
        return True

    def _reject(self, message: Message, error: ErrorRecord, now: float) -> None:
        """Consume a message, and publish for its sender why it was rejected."""
        self.consumed.append(message.number)
        if message.wants_reply:
            self._extras.publish(build_rejection(message, error, now))
        if message.number % DROP_MARKERS_EVERY == 0:
            # A turn that only rejects writes a marker. A receive that rejects for months must not pile them up.
            self._extras.drop(NO_ENTRIES)
        info, id = self._info, request_id(message)
        LOGGER.info(
            "Run %s rejected event %s (%s): %s",
            info.id,
            message.name,
            id,
            error.type,
            extra={"run_id": info.id, "workflow": info.workflow, "event": message.name, "event_id": id},
        )

    # --- deferreds

    def declare(self, name: str, kind: Any) -> tuple[Any, ...]:
        """Note a type that the run awaits a deferred with. Return all its types.

        Without any other type, `Any` accepts every value.
        """
        kinds = self._deferred_types.setdefault(name, [])
        if kind is not Any and kind not in kinds:
            kinds.append(kind)
            if name in self._deferreds:
                self.unchecked[name] = None
        return tuple(kinds)

    def check_completions(self, now: float) -> list[str]:
        """Reject the completions of each deferred of which none fits. Return the names of those with one that fits.

        A rejected completion is released with its id, so that the store accepts the next one. If one fits, the ones
        before it are consumed together with it, and their id stays taken.
        """
        names, self.unchecked = [each for each in self.unchecked if each in self._deferreds], {}
        fitting = [name for name in names if self._first_fitting(name) is not None]
        for name in names:
            if name not in fitting:
                for message in self._deferreds.pop(name):
                    self._extras.release_assignment(message.number)
                    self._add_rejected(message, self._mismatch(message), now)
        return fitting

    def _first_fitting(self, name: str) -> int | None:
        """Return the number of the first completion that fits, or None."""
        completions = self._deferreds.get(name, ())
        return next((each.number for each in completions if self._mismatch(each) is None), None)

    def _take_completion(self, name: str, now: float) -> list[Message]:
        """Remove the completions of a deferred, and return the first one that fits. The others are consumed."""
        first, found = self._first_fitting(name), []
        for message in self._deferreds.pop(name, ()):
            if message.number == first:
                found = [message]
                continue
            self.consumed.append(message.number)
            mismatch = self._mismatch(message)
            if mismatch is not None:
                self._add_rejected(message, mismatch, now)
        return found

    def _mismatch(self, message: Message) -> InvalidPayload | None:
        """Return why a completion fits none of the declared types; a failure always fits."""
        value = msgspec.json.decode(message.body or b"{}", type=RunResult).result
        if value is None:
            return None
        return find_mismatch(self._codec, value, message.name, self._deferred_types.get(message.name, ()))

    def _add_rejected(self, message: Message, mismatch: InvalidPayload | None, now: float) -> None:
        self._extras.add_dead_letter(
            DeadLetter(
                id=f"misfit/{self._info.id}/{message.number}/{message.id}",
                kind="misfit",
                at=now,
                reason=str(mismatch),
                event_name=message.name,
                value=msgspec.json.decode(message.body or b"{}", type=RunResult).result,
                original_target=self._info.id,
                target_status="running",
                sent_at=message.sent_at,
            )
        )

    def _dead_letter(self, message: Message, reason: str, now: float) -> DeadLetter:
        return DeadLetter(
            id=f"misfit/{self._info.id}/{message_key(message)}",
            kind="event",
            at=now,
            reason=reason,
            event_id=message.event_id,
            event_name=message.name,
            value=message.body,
            original_target=self._info.id,
            target_status="running",
            sent_at=message.sent_at,
        )
