"""Topics of the SQLite store: events find subscriptions, and subscriptions events, in one order.

All of it happens within a transaction of the only writer, and straight on the connection: what a batch has gathered
must have been written before. An event is never both queued and withheld from a subscription that may have it, except
while it is unfinished: a page of subscriptions is looked at per commit, and later events of the topic wait for it.

Why an event and a run that waits for it cannot miss each other: of a publish and a subscription one is first, and
leaves behind what the other looks for, the queued event or the place in line. A receive that is given up leaves the
line and returns what it was assigned in one transaction: before it the event is the run's, after it the next one's.
"""

from __future__ import annotations

from collections.abc import Iterable

import apsw
from msgspec import Struct
from msgspec.structs import replace

from perdure.model.records import Message, Subscription, TopicEvent
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.results import EventPublished, LimitReached, WriteResult
from perdure.stores.sqlite import rows as sqlite_rows
from perdure.stores.sqlite.run_state_cache import CachedRunState, read_standing
from perdure.stores.writes import FanOut, PublishEvent

EVENT_COLUMNS = "topic, id, body, sent_at, delivery, consume, expires_at, sender, place, event_id"
_STORED = f"SELECT {EVENT_COLUMNS}, bound, fan_out_cursor, assigned_to FROM topic_events"

# publishing
PLACE_OF_ID = "SELECT place, fan_out_cursor IS NOT NULL FROM topic_events WHERE topic = ? AND id = ?"
NEXT_PLACE = """
    INSERT INTO topics (name, last_offset) VALUES (?, 1)
    ON CONFLICT (name) DO UPDATE SET last_offset = last_offset + 1 RETURNING last_offset"""
LAST_PLACE = "SELECT last_offset FROM topics WHERE name = ?"
LAST_SUBSCRIPTION = "SELECT max(no) FROM subscriptions WHERE topic = ?"
QUEUED_COUNT = """
    SELECT count(*) FROM topic_events WHERE topic = ? AND queued = 1 AND (expires_at IS NULL OR expires_at > ?)"""
ADD_EVENT = f"""
    INSERT INTO topic_events ({EVENT_COLUMNS}, bound, fan_out_cursor, queued, deleted_at)
    VALUES ({",".join("?" * 14)})"""
FIRST_UNFINISHED = f"{_STORED} WHERE topic = ? AND fan_out_cursor IS NOT NULL ORDER BY place LIMIT 1"
STANDING_PAGE = """
    SELECT standing.no, run_no, target, created_at,
           EXISTS (SELECT 1 FROM inbox WHERE inbox.run_no = standing.run_no AND inbox.id = ?)
    FROM subscriptions AS standing CROSS JOIN runs ON runs.no = run_no
    WHERE topic = ? AND standing.no > ? AND standing.no <= ? ORDER BY standing.no LIMIT ?"""
ANY_STANDING = "SELECT 1 FROM subscriptions WHERE topic = ? AND no > ? AND no <= ? LIMIT 1"
FAN_ON = "UPDATE topic_events SET fan_out_cursor = ? WHERE topic = ? AND place = ?"

# assigning
EVENT = f"{_STORED} WHERE topic = ? AND place = ? AND deleted_at IS NULL"
ASSIGN = "UPDATE topic_events SET assigned_to = ?, queued = 0, fan_out_cursor = NULL WHERE topic = ? AND place = ?"
QUEUE = "UPDATE topic_events SET assigned_to = NULL, queued = 1, fan_out_cursor = NULL WHERE topic = ? AND place = ?"
LEAVE = """
    UPDATE topic_events SET assigned_to = NULL, queued = 0, fan_out_cursor = NULL, body = NULL, deleted_at = ?
    WHERE topic = ? AND place = ?"""
FIRST_IN_LINE = """
    SELECT run_no, target FROM subscriptions AS standing CROSS JOIN runs ON runs.no = run_no
    WHERE topic = ?1 AND standing.no <= ?2 AND created_at <= ?3
          AND NOT EXISTS (SELECT 1 FROM inbox WHERE inbox.run_no = standing.run_no AND inbox.id = ?4)
    ORDER BY standing.no LIMIT 1"""
OWN_IN_LINE = """
    SELECT run_no, target FROM subscriptions WHERE topic = ? AND run_no = ? AND no <= ? ORDER BY no LIMIT 1"""
LIES_UNREAD = "SELECT 1 FROM inbox WHERE kind = 'assignment' AND name = ? AND place = ? AND consumed_at IS NULL LIMIT 1"
ADD_MESSAGE = f"INSERT INTO inbox (run_no, {rows.MESSAGE_COLUMNS}) VALUES ({','.join('?' * 14)})"
COUNT_MESSAGE = "UPDATE runs SET last_message_no = ?, wake_at = ?, mailed = ? WHERE no = ?"
CONSUME = """
    UPDATE inbox SET consumed_at = ?, body = NULL WHERE run_no = ? AND number = ? AND consumed_at IS NULL
    RETURNING kind, run_no, name, place, consumed_at"""
GIVE_BACK = """
    DELETE FROM inbox WHERE run_no = ? AND number = ? AND kind = 'assignment' AND consumed_at IS NULL
    RETURNING name, place"""

# subscribing
_FREE = f"""
    {_STORED} AS event
    WHERE topic = ?1 AND queued = 1 AND (expires_at IS NULL OR expires_at > ?2)
          AND (delivery <> 'after_create' OR sent_at >= (SELECT created_at FROM runs WHERE no = ?3))
          AND NOT EXISTS (SELECT 1 FROM inbox WHERE run_no = ?3 AND id = 'topic/' || event.topic || '/' || event.place)
    ORDER BY place LIMIT 1"""
FIRST_TO_TAKE = _FREE.replace("ORDER BY", "AND consume = 1 AND fan_out_cursor IS NULL ORDER BY")
FIRST_TO_READ = _FREE.replace(
    "ORDER BY",
    """AND consume = 0
          AND place > coalesce((SELECT place FROM topic_cursors WHERE run_no = ?3 AND topic_cursors.topic = ?1), 0)
    ORDER BY""",
)
RAISE_FLOOR = """
    INSERT INTO topic_cursors (run_no, topic, place) VALUES (?, ?, ?)
    ON CONFLICT (run_no, topic) DO UPDATE SET place = max(place, excluded.place)"""
LOWER_FLOOR = "UPDATE topic_cursors SET place = ?3 - 1 WHERE run_no = ?1 AND topic = ?2 AND place >= ?3"
STANDS = "SELECT 1 FROM subscriptions WHERE run_no = ? AND target = ? LIMIT 1"
SUBSCRIBE = "INSERT OR IGNORE INTO subscriptions (topic, run_no, target) VALUES (?, ?, ?)"
UNSUBSCRIBE = "DELETE FROM subscriptions WHERE run_no = ? AND target = ?"
UNSUBSCRIBE_ALL = "DELETE FROM subscriptions WHERE run_no = ?"
LISTENS = "UPDATE runs SET listens = 1 WHERE no = ? AND listens = 0"

_ANY = 2**63 - 1


class _Stored(Struct, frozen=True):
    """An event that a topic holds. `fan_out_cursor` is set while it is unfinished."""

    event: TopicEvent
    bound: int = 0
    fan_out_cursor: int | None = None
    assigned_to: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.event.topic, self.event.offset


class Topics:
    """Topics within one transaction. `touched`: the ids of runs that were given mail."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self.touched: set[str] = set()

    # events that come

    def publish(self, write: PublishEvent) -> WriteResult:
        event = write.event
        known = self._connection.execute(PLACE_OF_ID, (event.topic, event.id)).fetchone()
        if known is not None:
            return EventPublished(known[0], 0, more=bool(known[1]), fresh=False)
        if rules.expired(event.expires_at, write.now):
            return EventPublished(self._add(_Stored(event), deleted_at=write.now).event.offset, 0)
        bound = self._connection.execute(LAST_SUBSCRIPTION, (event.topic,)).get or 0
        earlier = self._connection.execute(FIRST_UNFINISHED, (event.topic,)).fetchone() is not None
        stored = _Stored(event, bound, fan_out_cursor=0 if earlier else None)
        pending = self._pending_if_full(write)
        if pending is not None and (earlier or not event.consume or self._first_in_line(stored) is None):
            return LimitReached(pending)
        stored = self._add(stored)
        woken, more = (0, True) if earlier else self._offer(stored, write.page, write.now)
        return EventPublished(stored.event.offset, woken, more)

    def knows(self, event: TopicEvent) -> bool:
        """Whether an event with this id was accepted before."""
        return self._connection.execute(PLACE_OF_ID, (event.topic, event.id)).fetchone() is not None

    def fan_out(self, write: FanOut) -> WriteResult:
        asked = self._held(write.topic, write.offset)
        if asked is None or asked.fan_out_cursor is None:
            return EventPublished(write.offset, 0)
        first = _stored_of_row(self._connection.execute(FIRST_UNFINISHED, (write.topic,)).get)
        woken, more = self._offer(first, write.page, write.now)
        if first.key != asked.key:
            return EventPublished(write.offset, 0, more=True)
        return EventPublished(write.offset, woken, more)

    def _pending_if_full(self, write: PublishEvent) -> int | None:
        """How many events wait in the topic, if this one could not wait there too."""
        event, limit = write.event, write.limit
        if limit is None or not rules.is_queueable(event):
            return None
        if (self._connection.execute(LAST_PLACE, (event.topic,)).get or 0) < limit:  # it cannot hold that many
            return None
        pending: int = self._connection.execute(QUEUED_COUNT, (event.topic, write.now)).get
        return pending if pending >= limit else None

    def _add(self, stored: _Stored, deleted_at: float | None = None) -> _Stored:
        """Give the event its place: queued at first, unless nobody who comes later may have it."""
        place = self._connection.execute(NEXT_PLACE, (stored.event.topic,)).get
        event = replace(stored.event, offset=place)
        queued = deleted_at is None and rules.is_queueable(event)
        body = sqlite_rows.pack(event.body) if deleted_at is None else None
        columns = (event.topic, event.id, body, event.sent_at, event.delivery, event.consume, event.expires_at)
        row = (*columns, event.sender, place, event.event_id, stored.bound, stored.fan_out_cursor, queued, deleted_at)
        self._connection.execute(ADD_EVENT, row)
        return replace(stored, event=event)

    def _offer(self, stored: _Stored, page: int, now: float) -> tuple[int, bool]:
        """Assign the event to those whose turn it is; to how many, and whether there are more to come."""
        if rules.expired(stored.event.expires_at, now):
            self._leave(stored, now)
            return 0, False
        if not stored.event.consume:
            return self._offer_page(stored, page, now)
        first = self._first_in_line(stored)
        self._offer_to(stored, first, now)
        return int(first is not None), False

    def _offer_page(self, stored: _Stored, page: int, now: float) -> tuple[int, bool]:
        """An event for all: those of the next subscriptions get it that may have it and have not seen it."""
        event, last = stored.event, stored.fan_out_cursor or 0
        where = (rules.assignment_id(event.topic, event.offset), event.topic, last, stored.bound, page)
        standing: list[rows.Row] = [*self._connection.execute(STANDING_PAGE, where)]
        given: set[int] = set()
        for no, run_no, target, created_at, seen in standing:
            last = no
            if not seen and run_no not in given and rules.may_read(event, created_at):
                self._assign(stored, run_no, target, now)
                given.add(run_no)
        more = self._connection.execute(ANY_STANDING, (event.topic, last, stored.bound)).get is not None
        self._connection.execute(FAN_ON, (last if more else None, *stored.key))
        if not more:
            self._delete_if_unreferenced(stored, now)
        return len(given), more

    # events that go

    def consume(self, consumed: Iterable[rows.Row]) -> int:
        """Mark mail as read, given as (when, run, number); an assignment's event is gone then, or seen. How many were
        unread."""
        read: list[rows.Row] = [*self._connection.executemany(CONSUME, list(consumed))]
        for kind, run_no, topic, place, now in read:
            if kind != "assignment":
                continue
            stored = self._held(topic, place)
            if stored is None:
                continue
            if not stored.event.consume:
                self._delete_if_unreferenced(stored, now)
            elif stored.assigned_to == run_no:
                self._leave(stored, now)
        return len(read)

    def release(self, run_no: int, numbers: Iterable[int], now: float) -> None:
        """Take unread assignments out of an inbox and offer their events to the next in line."""
        for number in numbers:
            returned = self._connection.execute(GIVE_BACK, (run_no, number)).fetchone()
            stored = self._held(*returned) if returned is not None else None
            if stored is None:
                continue
            if stored.event.consume:
                if stored.assigned_to == run_no:  # else it is a copy, in the inbox of a fork
                    self._offer_to(stored, self._first_in_line(stored), now)
            else:
                self._connection.execute(LOWER_FLOOR, (run_no, *stored.key))
                bound = stored.bound if not rules.is_queueable(stored.event) else _ANY
                own = self._connection.execute(OWN_IN_LINE, (stored.event.topic, run_no, bound)).fetchone()
                self._offer_to(stored, own, now)

    def _offer_to(self, stored: _Stored, to: rows.Row | None, now: float) -> None:
        """Assign an event that is free to the subscription whose turn it is; without one it waits, if it may."""
        event = stored.event
        if rules.expired(event.expires_at, now):
            self._leave(stored, now)
        elif to is not None:
            run_no, target = to
            self._assign(stored, run_no, target, now)
        elif not event.consume:
            self._delete_if_unreferenced(stored, now)
        elif rules.is_queueable(event):
            self._connection.execute(QUEUE, stored.key)
        else:
            self._leave(stored, now)

    def _first_in_line(self, stored: _Stored) -> rows.Row | None:
        event = stored.event
        bound = stored.bound if not rules.is_queueable(event) else _ANY
        created = event.sent_at if event.delivery == "after_create" else float("inf")
        where = (event.topic, bound, created, rules.assignment_id(event.topic, event.offset))
        found: rows.Row | None = self._connection.execute(FIRST_IN_LINE, where).fetchone()
        return found

    def _delete_if_unreferenced(self, stored: _Stored, now: float) -> None:
        """An event for all who waited is gone once none of them is still to get it or to read it."""
        if rules.is_queueable(stored.event):
            return
        current = self._held(*stored.key)
        finished = current is not None and current.fan_out_cursor is None
        if finished and self._connection.execute(LIES_UNREAD, stored.key).get is None:
            self._leave(stored, now)

    def _leave(self, stored: _Stored, now: float) -> None:
        self._connection.execute(LEAVE, (now, *stored.key))

    def _held(self, topic: str, place: int) -> _Stored | None:
        row = self._connection.execute(EVENT, (topic, place)).fetchone()
        return _stored_of_row(row) if row is not None else None

    # subscriptions

    def subscribe(self, run_no: int, subscription: Subscription, now: float) -> None:
        """Assign the first event that waits in one of the topics; if there is none, stand in line in all of them."""
        if self._connection.execute(STANDS, (run_no, subscription.target)).get is not None:
            return
        found = [self._first_for(run_no, topic, now) for topic in subscription.topics]
        waiting = [stored for stored in found if stored is not None]
        if waiting:
            self._assign(min(waiting, key=lambda stored: stored.event.sent_at), run_no, subscription.target, now)
            return
        standing = [(topic, run_no, subscription.target) for topic in subscription.topics]
        self._connection.executemany(SUBSCRIBE, standing)
        self._connection.execute(LISTENS, (run_no,))

    def _first_for(self, run_no: int, topic: str, now: float) -> _Stored | None:
        """The first event of the topic that waits for this run, whether to be taken away or only read."""
        found = [self._connection.execute(sql, (topic, now, run_no)).get for sql in (FIRST_TO_TAKE, FIRST_TO_READ)]
        free = [_stored_of_row(row) for row in found if row is not None]
        return min(free, key=lambda stored: stored.event.offset, default=None)

    def unsubscribe(self, run_no: int, targets: Iterable[str]) -> None:
        self._connection.executemany(UNSUBSCRIBE, [(run_no, target) for target in targets])

    # assigning

    def _assign(self, stored: _Stored, run_no: int, target: str, now: float) -> None:
        """Put the event into the run's inbox; that uses up the subscription in all its topics."""
        id, run = read_standing(self._connection, run_no)
        message, count = mail_rows(run, rules.assignment(stored.event, target), now)
        self._connection.execute(ADD_MESSAGE, message)
        self._connection.execute(COUNT_MESSAGE, count)
        self._connection.execute(UNSUBSCRIBE, (run_no, target))
        if stored.event.consume:
            self._connection.execute(ASSIGN, (run_no, *stored.key))
        else:
            self._connection.execute(RAISE_FLOOR, (run_no, *stored.key))
        self.touched.add(id)


def mail_rows(run: CachedRunState, message: Message, now: float) -> tuple[rows.Row, rows.Row]:
    """What `ADD_MESSAGE` and `COUNT_MESSAGE` take to put a message into a run's inbox and wake the run."""
    number = run.last_message_no + 1
    woken = rules.wakes(message, run)
    wake_at = rules.earliest(run.wake_at, now) if woken else run.wake_at
    return sqlite_rows.message_row(run.no, number, message), (number, wake_at, woken and run.owner is not None, run.no)


def _stored_of_row(row: rows.Row) -> _Stored:
    return _Stored(rows.event_of_row(row), *row[10:])
