"""Topics of the memory store: events find subscriptions, and subscriptions events, in one order.

Why no event and no run that waits for it can miss each other: one write at a time is carried out, and each leaves
behind what the other looks for. A publish that comes first finds nobody and queues the event, which the subscription
then finds; a subscription that comes first stands in line, where the publish finds it. (An `after_wait` event that
comes first is not for that run.) A receive that is given up unsubscribes, and returns what it was assigned, in one
write: before it the event is the run's, after it the next one's.

An event that a topic holds is withheld from no subscription that may have it, except while it is unfinished: then a
page of those that stood when it came is looked at per commit, and later events of the topic wait for that.
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
from perdure.stores.results import EventPublished, LimitReached, WriteResult
from perdure.stores.writes import FanOut, PublishEvent


class StoredEvent(Struct):
    """An event in its place. `bound` is the last subscription that stood when it came; up to `fanned` they have been
    looked at, None: all of them. `readers` are the runs in whose inbox it lies unread."""

    event: TopicEvent
    bound: int
    fanned: int | None = None
    readers: set[str] = field(default_factory=set)

    @property
    def queued(self) -> bool:
        """Whether it waits for somebody who comes later."""
        return rules.is_queueable(self.event) and not (self.event.consume and self.readers)

    @property
    def reserved(self) -> bool:
        """Whether it is for one reader, and those who stand in line have not been asked yet."""
        return self.event.consume and self.fanned is not None


class Topic(Struct):
    """The events of one name by place, the ids that are remembered, and who waits, longest first."""

    last_offset: int = 0
    events: dict[int, StoredEvent] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # by id, of events that are gone too
    standing: dict[int, ActiveSubscription] = field(default_factory=dict)
    unfinished: dict[int, StoredEvent] = field(default_factory=dict)


class Topics:
    """All topics. What they assign is mail in the inbox of a run."""

    def __init__(self, runs: MemoryRuns) -> None:
        self._runs = runs
        self._topics: dict[str, Topic] = defaultdict(Topic)
        self._last_standing = 0
        self._expiring: list[tuple[float, str, int]] = []  # when, topic and place
        self._gone: list[tuple[float, str, str]] = []  # since when, topic and id

    # events that come

    def publish(self, write: PublishEvent) -> WriteResult:
        topic, event = self._topics[write.event.topic], write.event
        if event.id in topic.places:
            place = topic.places[event.id]
            return EventPublished(place, 0, more=place in topic.unfinished, fresh=False)
        if rules.expired(event.expires_at, write.now):
            held = self._add(topic, event)
            self._leave(topic, held, write.now)
            return EventPublished(held.event.offset, 0)
        must_wait = bool(topic.unfinished)
        pending = _pending_if_full(topic, write)
        if pending is not None and (must_wait or not event.consume or self._first_in_line(topic, event, None) is None):
            return LimitReached(pending)
        held = self._add(topic, event)
        if must_wait:
            _begin(topic, held)
            return EventPublished(held.event.offset, 0, more=True)
        woken = self._fan_out(topic, held, write.page, write.now)
        return EventPublished(held.event.offset, woken, more=held.fanned is not None)

    def knows(self, event: TopicEvent) -> bool:
        """Whether an event with this id was accepted before."""
        return event.topic in self._topics and event.id in self._topics[event.topic].places

    def fan_out(self, write: FanOut) -> WriteResult:
        topic = self._topics.get(write.topic)
        if topic is None or write.offset not in topic.unfinished:
            return EventPublished(write.offset, 0)
        first = next(iter(topic.unfinished.values()))
        woken = self._fan_out(topic, first, write.page, write.now)
        asked = first.event.offset == write.offset
        return EventPublished(write.offset, woken if asked else 0, more=write.offset in topic.unfinished)

    def _add(self, topic: Topic, event: TopicEvent) -> StoredEvent:
        topic.last_offset += 1
        held = StoredEvent(replace(event, offset=topic.last_offset), bound=self._last_standing)
        topic.events[topic.last_offset] = held
        topic.places[event.id] = topic.last_offset
        if event.expires_at is not None:
            heapq.heappush(self._expiring, (event.expires_at, event.topic, topic.last_offset))
        return held

    def _fan_out(self, topic: Topic, held: StoredEvent, page: int, now: float) -> int:
        """Give the event to the one, or to the next page of those, who wait for it; how many."""
        if rules.expired(held.event.expires_at, now):
            self._leave(topic, held, now)
            return 0
        if held.event.consume:
            _finish(topic, held)
            return self._offer(topic, held, self._first_in_line(topic, held.event, held.bound), now)
        return self._fan_page(topic, held, page, now)

    def _fan_page(self, topic: Topic, held: StoredEvent, page: int, now: float) -> int:
        after, woken = held.fanned or 0, 0
        rest = (each for each in topic.standing.values() if after < each.number <= held.bound)
        looked_at = list(islice(rest, page + 1))
        for standing in looked_at[:page]:
            if self._may_have(standing, held.event):
                self._assign(held, standing, now)
                woken += 1
        if len(looked_at) > page:
            _begin(topic, held, looked_at[page - 1].number)
        else:
            _finish(topic, held)
            self._delete_if_unreferenced(topic, held, now)
        return woken

    # events that go

    def read(self, run: MemoryRun, name: str, place: int, now: float) -> None:
        """The run has read its assignment of this event: it is gone, or at least seen."""
        topic, held = self._held(name, place)
        if held is None or run.record.id not in held.readers:
            return
        held.readers.discard(run.record.id)
        if held.event.consume:
            self._leave(topic, held, now)
        else:
            self._delete_if_unreferenced(topic, held, now)

    def release(self, run: MemoryRun, number: int, now: float) -> None:
        """Take an unread assignment out of the run's inbox, and offer its event to the next in line."""
        message = run.inbox.get(number)
        if message is None or message.kind != rules.ASSIGNMENT:
            return
        del run.inbox[number], run.numbers[message.id]
        topic, held = self._held(message.name, message.offset)
        if held is None or run.record.id not in held.readers:
            return
        held.readers.discard(run.record.id)
        if rules.expired(held.event.expires_at, now):
            self._leave(topic, held, now)
        elif held.event.consume:
            self._offer(topic, held, self._first_in_line(topic, held.event, held.bound), now)
        else:
            self._offer(topic, held, _own(run, held), now)

    def _offer(self, topic: Topic, held: StoredEvent, standing: ActiveSubscription | None, now: float) -> int:
        if standing is not None:
            self._assign(held, standing, now)
            return 1
        self._delete_if_unreferenced(topic, held, now)
        return 0

    def _delete_if_unreferenced(self, topic: Topic, held: StoredEvent, now: float) -> None:
        """What is not queued for those who come later is gone once nobody has it before them."""
        if not rules.is_queueable(held.event) and not held.readers and held.fanned is None:
            self._leave(topic, held, now)

    def _leave(self, topic: Topic, held: StoredEvent, now: float) -> None:
        """The event is gone; its id is remembered."""
        _finish(topic, held)
        del topic.events[held.event.offset]
        heapq.heappush(self._gone, (now, held.event.topic, held.event.id))

    def _held(self, name: str, place: int) -> tuple[Topic, StoredEvent | None]:
        topic = self._topics[name]
        return topic, topic.events.get(place)

    # those who wait

    def subscribe(self, run: MemoryRun, subscription: Subscription, now: float) -> None:
        """Let the run wait at this target, unless it does, or give it the event that it may have at once."""
        if subscription.target in run.standing:
            return
        topics = tuple(dict.fromkeys(subscription.topics))
        standing = ActiveSubscription(self._last_standing + 1, run.record.id, subscription.target, topics)
        found = [held for name in topics if (held := self._first_for(run, name, now)) is not None]
        if found:
            self._assign(min(found, key=lambda held: held.event.sent_at), standing, now)
            return
        self._last_standing = standing.number
        run.standing[standing.target] = standing
        for name in topics:
            self._topics[name].standing[standing.number] = standing

    def unsubscribe(self, run: MemoryRun, target: str) -> None:
        standing = run.standing.pop(target, None)
        if standing is not None:
            for name in standing.topics:
                del self._topics[name].standing[standing.number]

    def unsubscribe_all(self, run: MemoryRun) -> None:
        for target in tuple(run.standing):
            self.unsubscribe(run, target)

    def _first_for(self, run: MemoryRun, name: str, now: float) -> StoredEvent | None:
        topic = self._topics.get(name)
        for held in topic.events.values() if topic is not None else ():
            if not held.queued or held.reserved or rules.expired(held.event.expires_at, now):
                continue
            if _may_have(run, held.event):
                return held
        return None

    def _first_in_line(self, topic: Topic, event: TopicEvent, bound: int | None) -> ActiveSubscription | None:
        """Who has waited longest of those that may have the event; `bound` is of importance to after_wait only."""
        for standing in topic.standing.values():
            if not rules.is_queueable(event) and bound is not None and standing.number > bound:
                return None
            if self._may_have(standing, event):
                return standing
        return None

    def _may_have(self, standing: ActiveSubscription, event: TopicEvent) -> bool:
        return _may_have(self._runs[standing.run_id], event)

    def _assign(self, held: StoredEvent, standing: ActiveSubscription, now: float) -> None:
        """Put the event into the run's inbox; that uses up the subscription in all its topics."""
        run = self._runs[standing.run_id]
        self.unsubscribe(run, standing.target)
        held.readers.add(standing.run_id)
        self._runs.mail(run, rules.assignment(held.event, standing.target), now)

    # asking and forgetting

    def held(self, name: str, limit: int, after: int) -> list[TopicEvent]:
        topic = self._topics.get(name)
        places = [place for place in topic.events if place > after] if topic is not None else []
        return [topic.events[place].event for place in places[:limit]] if topic is not None else []

    def unfinished(self, limit: int) -> list[TopicEvent]:
        names = sorted(name for name, topic in self._topics.items() if topic.unfinished)
        found = (held.event for name in names for held in self._topics[name].unfinished.values())
        return list(islice(found, limit))

    def forget(self, now: float, keep_ids_for: float) -> None:
        """Drop events that have expired, and forget the ids of those that have been gone for that long."""
        while self._expiring and self._expiring[0][0] <= now:
            _, name, place = heapq.heappop(self._expiring)
            topic, held = self._held(name, place)
            if held is not None:
                self._leave(topic, held, now)
        while self._gone and self._gone[0][0] + keep_ids_for <= now:
            _, name, id = heapq.heappop(self._gone)
            del self._topics[name].places[id]


def _may_have(run: MemoryRun, event: TopicEvent) -> bool:
    """Whether the run may have this event and has not had it."""
    seen = event.offset and rules.assignment_id(event.topic, event.offset) in run.numbers
    return not seen and rules.may_read(event, run.record.created_at)


def _own(run: MemoryRun, held: StoredEvent) -> ActiveSubscription | None:
    """The run's own other subscription that may have an event which all may have: everybody else has been asked."""
    mine = [each for each in run.standing.values() if held.event.topic in each.topics]
    if not rules.is_queueable(held.event):
        mine = [each for each in mine if each.number <= held.bound]
    return min(mine, key=lambda each: each.number, default=None)


def _pending_if_full(topic: Topic, write: PublishEvent) -> int | None:
    """How many events wait in a topic that has no room for another; None: there is room, or no need of any."""
    if write.limit is None or not rules.is_queueable(write.event) or len(topic.events) < write.limit:
        return None
    waiting = (each for each in topic.events.values() if not rules.expired(each.event.expires_at, write.now))
    pending = sum(each.queued for each in waiting)
    return pending if pending >= write.limit else None


def _begin(topic: Topic, held: StoredEvent, fanned: int = 0) -> None:
    held.fanned = fanned
    topic.unfinished[held.event.offset] = held


def _finish(topic: Topic, held: StoredEvent) -> None:
    held.fanned = None
    topic.unfinished.pop(held.event.offset, None)
