"""Mailroom: mail that a run has seen and not yet received, and which open receive gets which of it.

Why no race can lose or double an event. Mail and timers both reach a run as inputs of a turn, one turn at a time; what
a receive is given, and that the message is consumed, are in the same commit (`Turn.consumed`), so that

- a message that arrives while a run suspends is unseen by that commit, which therefore leaves the run due;
- between a time-out and a message the turn decides: in one turn mail comes first, and a message that comes with a later
  turn stays in the mailbox for the next receive;
- a cancelled receive has consumed nothing, and an event of a topic that was assigned to it is given back;
- a commit that is refused has consumed nothing either.

A receive takes from the mailbox first, in order of sending, then what a topic has assigned to it. Of several open
receives that one is served first which the earliest message is for; if it is for more of them, the one that was asked
for first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from perdure.codec import Codec
from perdure.errors import InvalidPayload
from perdure.model.records import DeadLetter, Message
from perdure.runner.pending import PendingEntry
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import ReceiveFilter
from perdure.workflows.events import message_key


class Mailbox:
    """See the module's docstring. `consumed` gathers the numbers that the turn takes out of the inbox."""

    __slots__ = ("_by_name", "_codec", "_deferreds", "_extras", "_run_id", "assigned", "consumed")

    def __init__(self, run_id: str, codec: Codec, extras: TurnExtrasBuilder) -> None:
        self._run_id = run_id
        self._codec = codec
        self._extras = extras
        self._by_name: dict[str, deque[Message]] = {}
        self.assigned: dict[str, Message] = {}
        self._deferreds: dict[str, Message] = {}
        self.consumed: list[int] = []

    def add(self, message: Message) -> None:
        if message.kind == "event":
            self._by_name.setdefault(message.name, deque()).append(message)
        elif message.kind == "assignment" and message.target is not None:
            self.assigned[message.target] = message
        elif message.kind == "deferred":
            self._deferreds[message.name] = message

    def discard(self, message: Message) -> None:
        """It answers nothing that this run waits for."""
        self.consumed.append(message.number)

    def next_receiver(self, asked: Iterable[PendingEntry]) -> PendingEntry | None:
        """Of the open asks, in their order, the first one that waits for the earliest mail there is."""
        if not (self._by_name or self.assigned or self._deferreds):
            return None
        chosen, earliest = None, 0
        for pending in asked:
            number = self._earliest_for(pending)
            if number is not None and (chosen is None or number < earliest):
                chosen, earliest = pending, number
        return chosen

    def _earliest_for(self, pending: PendingEntry) -> int | None:
        question = pending.question
        assert question is not None
        if question.deferred is not None:
            completion = self._deferreds.get(question.deferred)
            return None if completion is None else completion.number
        wanted = question.wants.types if question.wants is not None else ()
        found = [self._by_name[name][0].number for name in wanted if name in self._by_name]
        if not found and pending.target in self.assigned:
            found = [self.assigned[pending.target].number]
        return min(found, default=None)

    def take_for(self, pending: PendingEntry, now: float) -> list[Message]:
        """What this open ask gets, if there is anything for it."""
        question = pending.question
        assert question is not None
        if question.deferred is not None:
            completion = self._deferreds.pop(question.deferred, None)
            return [completion] if completion is not None else []
        if question.wants is None:
            return []
        found: list[Message] = []
        while len(found) < question.wants.max_messages and (message := self._next(question.wants, now)) is not None:
            found.append(message)
        return found or self._next_assigned(pending, question.wants, now)

    def release_unwanted(self, pending: Mapping[str, PendingEntry]) -> None:
        """Assignments whose receive was answered otherwise, given up or timed out."""
        for target, message in list(self.assigned.items()):
            asked = pending.get(target.partition("/")[2])
            if asked is None or asked.target != target:
                del self.assigned[target]
                self._extras.release_assignment(message.number)

    def _next(self, wants: ReceiveFilter, now: float) -> Message | None:
        """The earliest unread event that it takes; those that are too old or do not fit their type go."""
        while True:
            queues = [queue for name in wants.types if (queue := self._by_name.get(name))]
            if not queues:
                return None
            queue = min(queues, key=lambda queue: queue[0].number)
            message = queue.popleft()
            if not queue:
                del self._by_name[message.name]
            if self._usable(message, wants, now):
                return message

    def _next_assigned(self, pending: PendingEntry, wants: ReceiveFilter, now: float) -> list[Message]:
        message = self.assigned.pop(pending.target, None)
        if message is None:
            return []
        if self._usable(message, wants, now):
            return [message]
        self._extras.subscribe(pending.target, tuple(wants.types))  # the assignment had used up its subscription
        return []

    def _usable(self, message: Message, wants: ReceiveFilter, now: float) -> bool:
        if message.expires_at is not None and message.expires_at <= now:
            self.consumed.append(message.number)
            return False
        try:
            self._codec.decode(message.body or b"null", wants.types[message.name], what=f"event {message.name!r}")
        except InvalidPayload as misfit:
            self.consumed.append(message.number)
            self._extras.add_dead_letter(self._letter(message, str(misfit), now))
            return False
        return True

    def _letter(self, message: Message, reason: str, now: float) -> DeadLetter:
        return DeadLetter(
            id=f"misfit/{self._run_id}/{message_key(message)}",
            kind="event",
            at=now,
            reason=reason,
            event_id=message.event_id,
            event_name=message.name,
            value=message.body,
            original_target=self._run_id,
            target_status="running",
            sent_at=message.sent_at,
        )
