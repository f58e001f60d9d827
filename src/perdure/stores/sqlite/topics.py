"""Topics of the SQLite store: events are assigned to subscriptions, oldest subscription first.

All methods write directly to the connection within the caller's transaction. The caller flushes the rows that its
batch has collected before it calls them.

An event and a run that waits for it cannot miss each other. SQLite has one writer at a time, so either the publish or
the subscribe is committed first. It leaves what the other one looks for: the queued event or the subscription. A
receive that is cancelled removes its subscription and releases its assignment in one transaction. Before it the event
belongs to the run, after it to the next subscription.

An event is never both queued and withheld from a subscription that may receive it, except while its fan-out is
unfinished: one commit offers it to one page of subscriptions, and later events of the topic wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import apsw
from msgspec import Struct
from msgspec.structs import replace

from perdure.model.records import Message, Subscription, TopicEvent
from perdure.stores import semantics as rules
from perdure.stores import sql_rows
from perdure.stores.results import EventPublished, LimitReached, WriteResult
from perdure.stores.sqlite import rows
from perdure.stores.sqlite.run_state_cache import CachedRunState, read_run_state
from perdure.stores.writes import FanOut, PublishEvent

EVENT_COLUMNS = "topic, id, body, sent_at, delivery, consume, expires_at, sender, event_offset, event_id"
_STORED = f"SELECT {EVENT_COLUMNS}, last_subscription, fan_out_cursor, assigned_to FROM topic_events"

# publishing
OFFSET_OF_ID = "SELECT event_offset, fan_out_cursor IS NOT NULL FROM topic_events WHERE topic = ? AND id = ?"
NEXT_OFFSET = """
    INSERT INTO topics (name, last_offset) VALUES (?, 1)
    ON CONFLICT (name) DO UPDATE SET last_offset = last_offset + 1 RETURNING last_offset"""
LAST_OFFSET = "SELECT last_offset FROM topics WHERE name = ?"
LAST_SUBSCRIPTION = "SELECT max(pk) FROM subscriptions WHERE topic = ?"
QUEUED_COUNT = """
    SELECT count(*) FROM topic_events WHERE topic = ? AND queued = 1 AND (expires_at IS NULL OR expires_at > ?)"""
ADD_EVENT = f"""
    INSERT INTO topic_events ({EVENT_COLUMNS}, last_subscription, fan_out_cursor, queued, deleted_at)
    VALUES ({",".join("?" * 14)})"""
FIRST_UNFINISHED = f"{_STORED} WHERE topic = ? AND fan_out_cursor IS NOT NULL ORDER BY event_offset LIMIT 1"
SUBSCRIPTION_PAGE = """
    SELECT subscription.pk, run_pk, target, created_at,
           EXISTS (SELECT 1 FROM inbox WHERE inbox.run_pk = subscription.run_pk AND inbox.id = ?)
    FROM subscriptions AS subscription CROSS JOIN runs ON runs.pk = run_pk
    WHERE topic = ? AND subscription.pk > ? AND subscription.pk <= ? ORDER BY subscription.pk LIMIT ?"""
ANY_SUBSCRIPTION = "SELECT 1 FROM subscriptions WHERE topic = ? AND pk > ? AND pk <= ? LIMIT 1"
SET_FAN_OUT_CURSOR = "UPDATE topic_events SET fan_out_cursor = ? WHERE topic = ? AND event_offset = ?"

# assigning
EVENT = f"{_STORED} WHERE topic = ? AND event_offset = ? AND deleted_at IS NULL"
ASSIGN = """
    UPDATE topic_events SET assigned_to = ?, queued = 0, fan_out_cursor = NULL WHERE topic = ? AND event_offset = ?"""
QUEUE = """
    UPDATE topic_events SET assigned_to = NULL, queued = 1, fan_out_cursor = NULL
    WHERE topic = ? AND event_offset = ?"""
DELETE_EVENT = """
    UPDATE topic_events SET assigned_to = NULL, queued = 0, fan_out_cursor = NULL, body = NULL, deleted_at = ?
    WHERE topic = ? AND event_offset = ?"""
OLDEST_SUBSCRIPTION = """
    SELECT run_pk, target FROM subscriptions AS subscription CROSS JOIN runs ON runs.pk = run_pk
    WHERE topic = ?1 AND subscription.pk <= ?2 AND created_at <= ?3
          AND NOT EXISTS (SELECT 1 FROM inbox WHERE inbox.run_pk = subscription.run_pk AND inbox.id = ?4)
    ORDER BY subscription.pk LIMIT 1"""
OLDEST_SUBSCRIPTION_OF_RUN = """
    SELECT run_pk, target FROM subscriptions WHERE topic = ? AND run_pk = ? AND pk <= ? ORDER BY pk LIMIT 1"""
ANY_UNREAD_ASSIGNMENT = """
    SELECT 1 FROM inbox WHERE kind = 'assignment' AND name = ? AND topic_offset = ? AND consumed_at IS NULL LIMIT 1"""
ADD_MESSAGE = f"INSERT INTO inbox (run_pk, {sql_rows.MESSAGE_COLUMNS}) VALUES ({','.join('?' * 14)})"
COUNT_MESSAGE = "UPDATE runs SET last_message_no = ?, wake_at = ?, has_new_messages = ? WHERE pk = ?"
CONSUME = """
    UPDATE inbox SET consumed_at = ?, body = NULL WHERE run_pk = ? AND number = ? AND consumed_at IS NULL
    RETURNING kind, run_pk, name, topic_offset, consumed_at"""
RELEASE_ASSIGNMENT = """
    DELETE FROM inbox WHERE run_pk = ? AND number = ? AND kind IN ('assignment', 'deferred') AND consumed_at IS NULL
    RETURNING kind, name, topic_offset"""

# subscribing
_FIRST_QUEUED = f"""
    {_STORED} AS event
    WHERE topic = ?1 AND queued = 1 AND (expires_at IS NULL OR expires_at > ?2)
          AND (delivery <> 'after_create' OR sent_at >= (SELECT created_at FROM runs WHERE pk = ?3))
          AND NOT EXISTS (
              SELECT 1 FROM inbox WHERE run_pk = ?3 AND id = 'topic/' || event.topic || '/' || event.event_offset)
    ORDER BY event_offset LIMIT 1"""
FIRST_TO_CONSUME = _FIRST_QUEUED.replace("ORDER BY", "AND consume = 1 AND fan_out_cursor IS NULL ORDER BY")
FIRST_TO_READ = _FIRST_QUEUED.replace(
    "ORDER BY",
    """AND consume = 0 AND event_offset > coalesce(
              (SELECT read_offset FROM topic_cursors WHERE run_pk = ?3 AND topic_cursors.topic = ?1), 0)
    ORDER BY""",
)
RAISE_CURSOR = """
    INSERT INTO topic_cursors (run_pk, topic, read_offset) VALUES (?, ?, ?)
    ON CONFLICT (run_pk, topic) DO UPDATE SET read_offset = max(read_offset, excluded.read_offset)"""
LOWER_CURSOR = "UPDATE topic_cursors SET read_offset = ?3 - 1 WHERE run_pk = ?1 AND topic = ?2 AND read_offset >= ?3"
IS_SUBSCRIBED = "SELECT 1 FROM subscriptions WHERE run_pk = ? AND target = ? LIMIT 1"
SUBSCRIBE = "INSERT OR IGNORE INTO subscriptions (topic, run_pk, target) VALUES (?, ?, ?)"
UNSUBSCRIBE = "DELETE FROM subscriptions WHERE run_pk = ? AND target = ?"
UNSUBSCRIBE_ALL = "DELETE FROM subscriptions WHERE run_pk = ?"
SET_HAS_SUBSCRIPTIONS = "UPDATE runs SET has_subscriptions = 1 WHERE pk = ? AND has_subscriptions = 0"

_ANY = 2**63 - 1


class _StoredEvent(Struct, frozen=True):
    """An event that is not deleted. `fan_out_cursor` is set while its fan-out is unfinished."""

    event: TopicEvent
    last_subscription: int = 0
    fan_out_cursor: int | None = None
    assigned_to: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.event.topic, self.event.offset


class Topics:
    """The topics within one transaction. `touched` collects the ids of runs that received an assignment."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self.touched: set[str] = set()

    # publishing

    def publish(self, write: PublishEvent) -> WriteResult:
        """Store an event and offer it to the first page of subscriptions. Idempotent by the event's id."""
        event = write.event
        known = self._connection.execute(OFFSET_OF_ID, (event.topic, event.id)).fetchone()
        if known is not None:
            return EventPublished(known[0], 0, more=bool(known[1]), fresh=False)
        if rules.expired(event.expires_at, write.now):
            return EventPublished(self._add(_StoredEvent(event), deleted_at=write.now).event.offset, 0)
        last_subscription = self._connection.execute(LAST_SUBSCRIPTION, (event.topic,)).get or 0
        earlier = self._connection.execute(FIRST_UNFINISHED, (event.topic,)).fetchone() is not None
        stored = _StoredEvent(event, last_subscription, fan_out_cursor=0 if earlier else None)
        pending = self._pending_if_full(write)
        if pending is not None and (earlier or not event.consume or self._oldest_subscription(stored) is None):
            return LimitReached(pending)
        stored = self._add(stored)
        woken, more = (0, True) if earlier else self._offer(stored, write.page, write.now)
        return EventPublished(stored.event.offset, woken, more)

    def has_event(self, event: TopicEvent) -> bool:
        """Return whether an event with this id was accepted before."""
        return self._connection.execute(OFFSET_OF_ID, (event.topic, event.id)).fetchone() is not None

    def fan_out(self, write: FanOut) -> WriteResult:
        """Offer the first unfinished event of the topic to its next page of subscriptions."""
        requested = self._stored(write.topic, write.offset)
        if requested is None or requested.fan_out_cursor is None:
            return EventPublished(write.offset, 0)
        first = _stored_of_row(self._connection.execute(FIRST_UNFINISHED, (write.topic,)).get)
        woken, more = self._offer(first, write.page, write.now)
        if first.key != requested.key:
            return EventPublished(write.offset, 0, more=True)
        return EventPublished(write.offset, woken, more)

    def _pending_if_full(self, write: PublishEvent) -> int | None:
        """Return the number of queued events if the limit leaves no space for this one, otherwise None."""
        event, limit = write.event, write.limit
        if limit is None or not rules.is_queueable(event):
            return None
        # Counting queued events scans them. A topic that never had `limit` events cannot be full.
        if (self._connection.execute(LAST_OFFSET, (event.topic,)).get or 0) < limit:
            return None
        pending: int = self._connection.execute(QUEUED_COUNT, (event.topic, write.now)).get
        return pending if pending >= limit else None

    def _add(self, stored: _StoredEvent, deleted_at: float | None = None) -> _StoredEvent:
        """Insert the event with the next offset of its topic. It is queued if a later subscription may receive it."""
        offset = self._connection.execute(NEXT_OFFSET, (stored.event.topic,)).get
        event = replace(stored.event, offset=offset)
        queued = deleted_at is None and rules.is_queueable(event)
        body = rows.pack(event.body) if deleted_at is None else None
        columns = (event.topic, event.id, body, event.sent_at, event.delivery, event.consume, event.expires_at)
        state = (stored.last_subscription, stored.fan_out_cursor, queued, deleted_at)
        self._connection.execute(ADD_EVENT, (*columns, event.sender, offset, event.event_id, *state))
        return replace(stored, event=event)

    def _offer(self, stored: _StoredEvent, page: int, now: float) -> tuple[int, bool]:
        """Assign the event. Return the number of runs that received it, and whether more pages follow."""
        if rules.expired(stored.event.expires_at, now):
            self._delete(stored, now)
            return 0, False
        if not stored.event.consume:
            return self._offer_page(stored, page, now)
        oldest = self._oldest_subscription(stored)
        self._offer_to(stored, oldest, now)
        return int(oldest is not None), False

    def _offer_page(self, stored: _StoredEvent, page: int, now: float) -> tuple[int, bool]:
        """Assign an event that every run may read to one page of subscriptions.

        Runs that have seen the event, or that its delivery rule excludes, are skipped.
        """
        event, last = stored.event, stored.fan_out_cursor or 0
        where = (rules.assignment_id(event.topic, event.offset), event.topic, last, stored.last_subscription, page)
        subscriptions: list[sql_rows.Row] = [*self._connection.execute(SUBSCRIPTION_PAGE, where)]
        assigned: set[int] = set()
        for pk, run_pk, target, created_at, seen in subscriptions:
            last = pk
            if not seen and run_pk not in assigned and rules.may_read(event, created_at):
                self._assign(stored, run_pk, target, now)
                assigned.add(run_pk)
        remaining = (event.topic, last, stored.last_subscription)
        more = self._connection.execute(ANY_SUBSCRIPTION, remaining).get is not None
        self._connection.execute(SET_FAN_OUT_CURSOR, (last if more else None, *stored.key))
        if not more:
            self._delete_if_unreferenced(stored, now)
        return len(assigned), more

    # consuming and releasing

    def consume(self, consumed: Iterable[sql_rows.Row]) -> int:
        """Mark messages as read, given as (time, run_pk, number). Return how many of them were unread.

        The event of a consumed assignment is deleted, unless other runs may still read it.
        """
        read: list[sql_rows.Row] = [*self._connection.executemany(CONSUME, list(consumed))]
        for kind, run_pk, topic, offset, now in read:
            if kind != "assignment":
                continue
            stored = self._stored(topic, offset)
            if stored is None:
                continue
            if not stored.event.consume:
                self._delete_if_unreferenced(stored, now)
            elif stored.assigned_to == run_pk:
                self._delete(stored, now)
        return len(read)

    def release(self, run_pk: int, numbers: Iterable[int], now: float) -> None:
        """Remove unread assignments from an inbox and offer their events to the next subscription.

        Completions of deferreds are removed with their ids.
        """
        for number in numbers:
            released = self._connection.execute(RELEASE_ASSIGNMENT, (run_pk, number)).fetchone()
            stored = self._stored(*released[1:]) if released is not None and released[0] == "assignment" else None
            if stored is None:
                continue
            if stored.event.consume:
                if stored.assigned_to == run_pk:  # else this is a copy in the inbox of a fork
                    self._offer_to(stored, self._oldest_subscription(stored), now)
            else:
                self._connection.execute(LOWER_CURSOR, (run_pk, *stored.key))
                where = (stored.event.topic, run_pk, _last_eligible_subscription(stored))
                own = self._connection.execute(OLDEST_SUBSCRIPTION_OF_RUN, where).fetchone()
                self._offer_to(stored, own, now)

    def _offer_to(self, stored: _StoredEvent, subscription: sql_rows.Row | None, now: float) -> None:
        """Assign a free event to this subscription. Without one, queue the event if its delivery allows it."""
        event = stored.event
        if rules.expired(event.expires_at, now):
            self._delete(stored, now)
        elif subscription is not None:
            run_pk, target = subscription
            self._assign(stored, run_pk, target, now)
        elif not event.consume:
            self._delete_if_unreferenced(stored, now)
        elif rules.is_queueable(event):
            self._connection.execute(QUEUE, stored.key)
        else:
            self._delete(stored, now)

    def _oldest_subscription(self, stored: _StoredEvent) -> sql_rows.Row | None:
        """Return (run_pk, target) of the oldest subscription that may receive the event and has not seen it."""
        event = stored.event
        created_until = event.sent_at if event.delivery == "after_create" else float("inf")
        assignment = rules.assignment_id(event.topic, event.offset)
        where = (event.topic, _last_eligible_subscription(stored), created_until, assignment)
        found: sql_rows.Row | None = self._connection.execute(OLDEST_SUBSCRIPTION, where).fetchone()
        return found

    def _delete_if_unreferenced(self, stored: _StoredEvent, now: float) -> None:
        """Delete an event that is not queueable when its fan-out is finished and no assignment of it is unread."""
        if rules.is_queueable(stored.event):
            return
        current = self._stored(*stored.key)
        finished = current is not None and current.fan_out_cursor is None
        if finished and self._connection.execute(ANY_UNREAD_ASSIGNMENT, stored.key).get is None:
            self._delete(stored, now)

    def _delete(self, stored: _StoredEvent, now: float) -> None:
        self._connection.execute(DELETE_EVENT, (now, *stored.key))

    def _stored(self, topic: str, offset: int) -> _StoredEvent | None:
        row = self._connection.execute(EVENT, (topic, offset)).fetchone()
        return _stored_of_row(row) if row is not None else None

    # subscribing

    def subscribe(self, run_pk: int, subscription: Subscription, now: float) -> None:
        """Assign the earliest event that is queued in one of the topics. If there is none, subscribe to all of them.

        Idempotent by the subscription's target.
        """
        if self._connection.execute(IS_SUBSCRIBED, (run_pk, subscription.target)).get is not None:
            return
        found = [self._first_for(run_pk, topic, now) for topic in subscription.topics]
        queued = [stored for stored in found if stored is not None]
        if queued:
            self._assign(min(queued, key=lambda stored: stored.event.sent_at), run_pk, subscription.target, now)
            return
        added = [(topic, run_pk, subscription.target) for topic in subscription.topics]
        self._connection.executemany(SUBSCRIBE, added)
        self._connection.execute(SET_HAS_SUBSCRIPTIONS, (run_pk,))

    def _first_for(self, run_pk: int, topic: str, now: float) -> _StoredEvent | None:
        """Return the first queued event of the topic that this run may consume or read."""
        found = [self._connection.execute(sql, (topic, now, run_pk)).get for sql in (FIRST_TO_CONSUME, FIRST_TO_READ)]
        free = [_stored_of_row(row) for row in found if row is not None]
        return min(free, key=lambda stored: stored.event.offset, default=None)

    def unsubscribe(self, run_pk: int, targets: Iterable[str]) -> None:
        self._connection.executemany(UNSUBSCRIBE, [(run_pk, target) for target in targets])

    # assigning

    def _assign(self, stored: _StoredEvent, run_pk: int, target: str, now: float) -> None:
        """Put the event into the run's inbox. This removes the subscription from all its topics."""
        id, run = read_run_state(self._connection, run_pk)
        message, count = message_rows(run, rules.assignment(stored.event, target), now)
        self._connection.execute(ADD_MESSAGE, message)
        self._connection.execute(COUNT_MESSAGE, count)
        self._connection.execute(UNSUBSCRIBE, (run_pk, target))
        if stored.event.consume:
            self._connection.execute(ASSIGN, (run_pk, *stored.key))
        else:
            self._connection.execute(RAISE_CURSOR, (run_pk, *stored.key))
        self.touched.add(id)


def message_rows(run: CachedRunState, message: Message, now: float) -> tuple[sql_rows.Row, sql_rows.Row]:
    """Return the values of `ADD_MESSAGE` and `COUNT_MESSAGE` that put a message into a run's inbox and wake the run."""
    number = run.last_message_no + 1
    woken = rules.wakes(message, run)
    wake_at = rules.earliest(run.wake_at, now) if woken else run.wake_at
    return rows.message_row(run.pk, number, message), (number, wake_at, woken and run.owner is not None, run.pk)


def _last_eligible_subscription(stored: _StoredEvent) -> int:
    """Return the newest subscription that may receive the event: any if it can be queued, else those at publishing."""
    return _ANY if rules.is_queueable(stored.event) else stored.last_subscription


def _stored_of_row(row: sql_rows.Row) -> _StoredEvent:
    return _StoredEvent(sql_rows.event_of_row(row), *row[10:])
