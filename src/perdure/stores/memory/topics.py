"""MemoryTopics of the memory store: assign events to subscriptions, in one order.

No event and no waiting run can miss each other, because one write at a time is applied. A publish that comes first
finds no subscription and queues the event, which the subscription then finds. A subscription that comes first is stored
and found by the publish. (An `after_wait` event that comes first is not for that run.) A receive that is given up
unsubscribes and releases its assignment in one write: before it the event is assigned to this run, after it to the
next.

A stored event is assigned to every eligible subscription, except while its fan-out is unfinished. Then each commit
processes a page of the subscriptions that existed when the event was published, and later events of the topic wait.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from perdure.model.records import Subscription, TopicEvent
from perdure.stores import semantics as rules
from perdure.stores.memory.runs import ActiveSubscription, MemoryRun, MemoryRuns
from perdure.stores.results import EventPublished, LimitReached, TopicSummary, WriteResult
from perdure.stores.writes import FanOut, PublishEvent


class StoredEvent(Struct):
    """An event at its offset in a topic.

    `last_subscription` is the number of the newest subscription that existed when the event was published.
    `fan_out_cursor` is the number of the last subscription processed, None when the fan-out is finished. `readers` are
    the runs with an unread assignment of the event.
    """

    event: TopicEvent
    last_subscription: int
    fan_out_cursor: int | None = None
    readers: set[str] = field(default_factory=set)

    @property
    def queued(self) -> bool:
        """True if later subscriptions may get the event."""
        return rules.is_queueable(self.event) and not (self.event.consume and self.readers)

    @property
    def reserved(self) -> bool:
        """True if the event is for one reader and existing subscriptions have not been processed."""
        return self.event.consume and self.fan_out_cursor is not None


class MemoryTopic(Struct):
    """One topic: events by offset, offsets by event id, and subscriptions, oldest first."""

    last_offset: int = 0
    events: dict[int, StoredEvent] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # by id, of deleted events too
    subscriptions: dict[int, ActiveSubscription] = field(default_factory=dict)
    unfinished: dict[int, StoredEvent] = field(default_factory=dict)


class MemoryTopics:
    """All topics. An assignment is a message in a run's inbox."""

    def __init__(self, runs: MemoryRuns) -> None:
        self._runs = runs
        self._topics: dict[str, MemoryTopic] = defaultdict(MemoryTopic)
        self._last_subscription = 0
        self._expiring: list[tuple[float, str, int]] = []  # time, topic and offset
        self._deleted: list[tuple[float, str, str]] = []  # time of deletion, topic and id

    # publishing

    def publish(self, write: PublishEvent) -> WriteResult:
        """Accept an event and assign a first page of it."""
        topic, event = self._topics[write.event.topic], write.event
        if event.id in topic.offsets:
            offset = topic.offsets[event.id]
            return EventPublished(offset, 0, more=offset in topic.unfinished, fresh=False)
        if rules.expired(event.expires_at, write.now):
            stored = self._add(topic, event)
            self._delete(topic, stored, write.now)
            return EventPublished(stored.event.offset, 0)
        must_wait = bool(topic.unfinished)
        pending = _pending_if_full(topic, write)
        if pending is not None and (
            must_wait or not event.consume or self._oldest_eligible(topic, event, None) is None
        ):
            return LimitReached(pending)
        stored = self._add(topic, event)
        if must_wait:
            _start_fan_out(topic, stored)
            return EventPublished(stored.event.offset, 0, more=True)
        woken = self._fan_out(topic, stored, write.page, write.now)
        return EventPublished(stored.event.offset, woken, more=stored.fan_out_cursor is not None)

    def is_known(self, event: TopicEvent) -> bool:
        """Return whether an event with this id was accepted before."""
        return event.topic in self._topics and event.id in self._topics[event.topic].offsets

    def fan_out(self, write: FanOut) -> WriteResult:
        """Process the next page of the topic's first unfinished event."""
        topic = self._topics.get(write.topic)
        if topic is None or write.offset not in topic.unfinished:
            return EventPublished(write.offset, 0)
        first = next(iter(topic.unfinished.values()))
        woken = self._fan_out(topic, first, write.page, write.now)
        is_first = first.event.offset == write.offset
        return EventPublished(write.offset, woken if is_first else 0, more=write.offset in topic.unfinished)

    def _add(self, topic: MemoryTopic, event: TopicEvent) -> StoredEvent:
        topic.last_offset += 1
        stored = StoredEvent(replace(event, offset=topic.last_offset), last_subscription=self._last_subscription)
        topic.events[topic.last_offset] = stored
        topic.offsets[event.id] = topic.last_offset
        if event.expires_at is not None:
            heapq.heappush(self._expiring, (event.expires_at, event.topic, topic.last_offset))
        return stored

    def _fan_out(self, topic: MemoryTopic, stored: StoredEvent, page: int, now: float) -> int:
        """Assign the event to one subscription, or to those of the next page; return how many."""
        if rules.expired(stored.event.expires_at, now):
            self._delete(topic, stored, now)
            return 0
        if stored.event.consume:
            _finish_fan_out(topic, stored)
            return self._offer(topic, stored, self._oldest_eligible(topic, stored.event, stored.last_subscription), now)
        return self._fan_out_page(topic, stored, page, now)

    def _fan_out_page(self, topic: MemoryTopic, stored: StoredEvent, page: int, now: float) -> int:
        after, woken = stored.fan_out_cursor or 0, 0
        remaining = (each for each in topic.subscriptions.values() if after < each.number <= stored.last_subscription)
        examined = list(islice(remaining, page + 1))
        for subscription in examined[:page]:
            if self._may_have(subscription, stored.event):
                self._assign(stored, subscription, now)
                woken += 1
        if len(examined) > page:
            _start_fan_out(topic, stored, examined[page - 1].number)
        else:
            _finish_fan_out(topic, stored)
            self._delete_if_unreferenced(topic, stored, now)
        return woken

    # consuming and releasing

    def consume(self, run: MemoryRun, name: str, offset: int, now: float) -> None:
        """Record that the run consumed its assignment: delete an event with `consume`, or mark it as seen."""
        topic, stored = self._find(name, offset)
        if stored is None or run.record.id not in stored.readers:
            return
        stored.readers.discard(run.record.id)
        if stored.event.consume:
            self._delete(topic, stored, now)
        else:
            self._delete_if_unreferenced(topic, stored, now)

    def release(self, run: MemoryRun, number: int, now: float) -> None:
        """Remove an unread assignment from the run's inbox and offer its event to the next subscription.

        A completion of a deferred is removed with its id.
        """
        message = run.inbox.get(number)
        if message is None or message.kind not in rules.RELEASABLE:
            return
        del run.inbox[number], run.numbers[message.id]
        if message.kind != rules.ASSIGNMENT:
            return
        topic, stored = self._find(message.name, message.offset)
        if stored is None or run.record.id not in stored.readers:
            return
        stored.readers.discard(run.record.id)
        if rules.expired(stored.event.expires_at, now):
            self._delete(topic, stored, now)
        elif stored.event.consume:
            self._offer(topic, stored, self._oldest_eligible(topic, stored.event, stored.last_subscription), now)
        else:
            self._offer(topic, stored, _own_subscription(run, stored), now)

    def _offer(
        self, topic: MemoryTopic, stored: StoredEvent, subscription: ActiveSubscription | None, now: float
    ) -> int:
        if subscription is not None:
            self._assign(stored, subscription, now)
            return 1
        self._delete_if_unreferenced(topic, stored, now)
        return 0

    def _delete_if_unreferenced(self, topic: MemoryTopic, stored: StoredEvent, now: float) -> None:
        """Delete an event that is not queued for later subscriptions when no run has it unread."""
        if not rules.is_queueable(stored.event) and not stored.readers and stored.fan_out_cursor is None:
            self._delete(topic, stored, now)

    def _delete(self, topic: MemoryTopic, stored: StoredEvent, now: float) -> None:
        """Delete the event. Its id is retained until it is pruned."""
        _finish_fan_out(topic, stored)
        del topic.events[stored.event.offset]
        heapq.heappush(self._deleted, (now, stored.event.topic, stored.event.id))

    def _find(self, name: str, offset: int) -> tuple[MemoryTopic, StoredEvent | None]:
        topic = self._topics[name]
        return topic, topic.events.get(offset)

    # subscribing

    def subscribers(self, name: str) -> set[str]:
        """Return the ids of runs with an open receive of this topic."""
        topic = self._topics.get(name)
        return set() if topic is None else {each.run_id for each in topic.subscriptions.values()}

    def subscribe(self, run: MemoryRun, subscription: Subscription, now: float) -> None:
        """Subscribe the run at `target`, or assign a queued event immediately. No-op if already subscribed."""
        if subscription.target in run.subscriptions:
            return
        topics = tuple(dict.fromkeys(subscription.topics))
        active = ActiveSubscription(self._last_subscription + 1, run.record.id, subscription.target, topics)
        found = [stored for name in topics if (stored := self._first_queued(run, name, now)) is not None]
        if found:
            self._assign(min(found, key=lambda stored: stored.event.sent_at), active, now)
            return
        self._last_subscription = active.number
        run.subscriptions[active.target] = active
        for name in topics:
            self._topics[name].subscriptions[active.number] = active

    def unsubscribe(self, run: MemoryRun, target: str) -> None:
        """Remove the run's subscription at `target`, if there is one."""
        active = run.subscriptions.pop(target, None)
        if active is not None:
            for name in active.topics:
                del self._topics[name].subscriptions[active.number]

    def unsubscribe_all(self, run: MemoryRun) -> None:
        """Remove all subscriptions of the run."""
        for target in tuple(run.subscriptions):
            self.unsubscribe(run, target)

    def _first_queued(self, run: MemoryRun, name: str, now: float) -> StoredEvent | None:
        topic = self._topics.get(name)
        for stored in topic.events.values() if topic is not None else ():
            if not stored.queued or stored.reserved or rules.expired(stored.event.expires_at, now):
                continue
            if _may_have(run, stored.event):
                return stored
        return None

    def _oldest_eligible(
        self, topic: MemoryTopic, event: TopicEvent, last_subscription: int | None
    ) -> ActiveSubscription | None:
        """Return the oldest subscription that may have the event. `last_subscription` limits an `after_wait` event."""
        for subscription in topic.subscriptions.values():
            is_late = last_subscription is not None and subscription.number > last_subscription
            if is_late and not rules.is_queueable(event):
                return None
            if self._may_have(subscription, event):
                return subscription
        return None

    def _may_have(self, subscription: ActiveSubscription, event: TopicEvent) -> bool:
        return _may_have(self._runs[subscription.run_id], event)

    def _assign(self, stored: StoredEvent, subscription: ActiveSubscription, now: float) -> None:
        """Put an assignment into the run's inbox and remove the subscription from all its topics."""
        run = self._runs[subscription.run_id]
        self.unsubscribe(run, subscription.target)
        stored.readers.add(subscription.run_id)
        self._runs.deliver(run, rules.assignment(stored.event, subscription.target), now)

    # reading and pruning

    def events(self, name: str, limit: int, after: int) -> list[TopicEvent]:
        """Return a page of the topic's stored events, in order of offset."""
        topic = self._topics.get(name)
        offsets = [offset for offset in topic.events if offset > after] if topic is not None else []
        return [topic.events[offset].event for offset in offsets[:limit]] if topic is not None else []

    def summaries(self, after: str | None, limit: int) -> list[TopicSummary]:
        """Return a page of the topics that have queued events or waiting runs, in order of name."""
        names = sorted(name for name in self._topics if after is None or name > after)
        found = (_summary(name, self._topics[name]) for name in names)
        return list(islice((each for each in found if each.queued or each.waiting), limit))

    def unfinished(self, limit: int) -> list[TopicEvent]:
        """Return events whose fan-out is unfinished, in order of topic and offset."""
        names = sorted(name for name, topic in self._topics.items() if topic.unfinished)
        found = (stored.event for name in names for stored in self._topics[name].unfinished.values())
        return list(islice(found, limit))

    def prune(self, now: float, keep_ids_for: float) -> None:
        """Delete expired events, and the ids of events that were deleted `keep_ids_for` seconds ago."""
        while self._expiring and self._expiring[0][0] <= now:
            _, name, offset = heapq.heappop(self._expiring)
            topic, stored = self._find(name, offset)
            if stored is not None:
                self._delete(topic, stored, now)
        while self._deleted and self._deleted[0][0] + keep_ids_for <= now:
            _, name, id = heapq.heappop(self._deleted)
            del self._topics[name].offsets[id]


def _summary(name: str, topic: MemoryTopic) -> TopicSummary:
    queued = sum(stored.queued for stored in topic.events.values())
    return TopicSummary(name, queued, len({each.run_id for each in topic.subscriptions.values()}))


def _may_have(run: MemoryRun, event: TopicEvent) -> bool:
    """Return whether the run is eligible for this event and has not got it before."""
    seen = event.offset and rules.assignment_id(event.topic, event.offset) in run.numbers
    return not seen and rules.may_read(event, run.record.created_at)


def _own_subscription(run: MemoryRun, stored: StoredEvent) -> ActiveSubscription | None:
    """Return the run's oldest other subscription for an event without `consume`; all other runs were offered it."""
    own = [each for each in run.subscriptions.values() if stored.event.topic in each.topics]
    if not rules.is_queueable(stored.event):
        own = [each for each in own if each.number <= stored.last_subscription]
    return min(own, key=lambda each: each.number, default=None)


def _pending_if_full(topic: MemoryTopic, write: PublishEvent) -> int | None:
    """Return how many events are queued in a topic that has reached its limit, or None if the event is admitted."""
    if write.limit is None or not rules.is_queueable(write.event) or len(topic.events) < write.limit:
        return None
    waiting = (each for each in topic.events.values() if not rules.expired(each.event.expires_at, write.now))
    pending = sum(each.queued for each in waiting)
    return pending if pending >= write.limit else None


def _start_fan_out(topic: MemoryTopic, stored: StoredEvent, fan_out_cursor: int = 0) -> None:
    stored.fan_out_cursor = fan_out_cursor
    topic.unfinished[stored.event.offset] = stored


def _finish_fan_out(topic: MemoryTopic, stored: StoredEvent) -> None:
    stored.fan_out_cursor = None
    topic.unfinished.pop(stored.event.offset, None)
