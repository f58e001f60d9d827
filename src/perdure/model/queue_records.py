"""Stored records of work queues: settings, places of waiting runs, and what an admission is planned from.

A run of a queue has one row, its place, from its creation to its end. The place waits until an admission takes it;
from then on it holds a slot. All records are frozen. This module knows no rule of admission.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class RateLimit(Struct, frozen=True):
    """At most `limit` admissions in any interval of `per` seconds."""

    limit: int
    per: float


class QueueSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a queue as code declares them. None: no limit. `partitioned`: a start needs a partition."""

    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: RateLimit | None = None
    partitioned: bool = False
    partition_concurrency: int | None = None
    partition_rate: RateLimit | None = None
    max_waiting: int | None = None


class QueueOverride(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits that an operator has set. An unset field leaves the declared limit; None removes it."""

    concurrency: int | UnsetType | None = UNSET
    worker_concurrency: int | UnsetType | None = UNSET
    rate: RateLimit | UnsetType | None = UNSET
    partition_concurrency: int | UnsetType | None = UNSET
    partition_rate: RateLimit | UnsetType | None = UNSET
    max_waiting: int | UnsetType | None = UNSET


class PartitionOverride(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one partition that an operator has set, and how many runs it is served per turn."""

    concurrency: int | UnsetType | None = UNSET
    rate: RateLimit | UnsetType | None = UNSET
    weight: int = 1


class QueuePause(Struct, frozen=True):
    """Who paused a queue, why and when."""

    by: str
    reason: str
    since: float


class Place(Struct, frozen=True, kw_only=True):
    """The place that a new run requests in a queue.

    A lower `priority` goes first within a partition. The run is not admitted before `eligible_at` and is not admitted
    any more after `expires_at`. `dedupe` is a key: of the runs with one key in a queue at most one waits.
    `on_duplicate` says what a start does if the key is taken. "existing" and "refuse" match a run that waits or holds a
    slot; the store returns that run, and the caller decides. "replace" matches only a run that waits; that run gets the
    new payload. With `debounce` only a run that waits matches; its `eligible_at` moves to that of this place, but not
    beyond its own `latest_at`. It gets the new payload if `on_duplicate` is "replace".
    """

    queue: str
    partition: str = ""
    priority: int = 0
    eligible_at: float | None = None
    expires_at: float | None = None
    dedupe: str | None = None
    on_duplicate: str = "existing"  # one of ON_DUPLICATE
    debounce: bool = False
    latest_at: float | None = None  # debounce: the run is eligible at this time at the latest


ON_DUPLICATE = ("existing", "refuse", "replace")


class PlaceRecord(Struct, frozen=True, kw_only=True):
    """The place of a run that waits in a queue or holds a slot of it.

    `number` orders the places of one partition and priority. `since` is when the run got the place, `admitted_at` when
    it got its slot; `held` says which of the two applies.
    """

    run_id: str
    queue: str
    partition: str
    priority: int
    number: int
    since: float
    held: bool = False
    admitted_at: float | None = None
    eligible_at: float | None = None
    expires_at: float | None = None
    dedupe: str | None = None

    @property
    def cursor(self) -> PlaceCursor:
        """The cursor of the page that follows this place."""
        return PlaceCursor(self.partition, self.priority, self.number)


class PlaceCursor(Struct, frozen=True):
    """The last place of a page; the next page begins behind it. Pages are ordered by these fields."""

    partition: str
    priority: int
    number: int


class PartitionView(Struct, frozen=True, kw_only=True):
    """A partition that may admit runs. Counts are of eligible waiting runs and of slots held, capped.

    `turn` orders partitions: the lowest was served least recently. A partition that gets its first place gets the turn
    `first_turn(since)` of that place, so that it joins at the end. `state` is what the last admission stored for the
    partition, and `taken` how many runs it took from it.
    """

    partition: str
    waiting: int
    held: int
    turn: int = 0
    state: bytes = b""
    taken: int = 0
    override: PartitionOverride | None = None


class QueueView(Struct, frozen=True, kw_only=True):
    """The input of an admission, of one snapshot of the store.

    `partitions` are those that may be ready, in the order of their turns, up to a limit. A queue that is not
    partitioned has one, named "". `held` and `active` count slots of the whole queue: all of them, and those whose run
    has an owner or is due. `eligible` counts the delayed places whose time has come, `expired` are runs whose place has
    expired, both up to a limit. `next_at` is when the next delayed or expiring place, or a partition that is not ready
    until a time, needs an admission.
    """

    name: str
    version: int
    state: bytes
    declared: QueueSettings
    override: QueueOverride
    paused: QueuePause | None
    held: int
    active: int
    taken: int  # by the last admission, over all partitions
    partitions: tuple[PartitionView, ...] = ()
    eligible: int = 0
    expired: tuple[str, ...] = ()
    next_at: float | None = None


class QueueSummary(Struct, frozen=True, kw_only=True):
    """A queue in a list. `next_at`: as in `QueueView`.

    `waiting` and `held` are counted up to `COUNT_CAP`; `waiting` up to `max_waiting` if that is larger.
    `needs_admission`: a place waits that an admission may take now; places in partitions that are at their limit or
    not ready do not count. `full`: the last admission found `max_waiting` places; a start is refused until it clears.
    """

    name: str
    version: int
    state: bytes
    declared: QueueSettings
    override: QueueOverride
    paused: QueuePause | None
    waiting: int
    held: int
    needs_admission: bool
    full: bool = False
    next_at: float | None = None


COUNT_CAP = 10_001


def first_turn(since: float) -> int:
    """Return the turn of a partition whose first place is of this time. Admissions give turns on the same scale."""
    return int(since * 1_000_000)


class Take(Struct, frozen=True, kw_only=True):
    """What an admission does with one partition: take up to `count` runs and store the partition's state.

    The store derives whether the partition is ready after it: it has eligible waiting runs, holds fewer slots than
    `limit`, and `ready_at` has passed. A partition that is not ready becomes ready when a slot of it is returned, when
    `ready_at` comes, or when a run arrives and the limit allows it.
    """

    partition: str
    count: int
    turn: int = 0
    state: bytes = b""
    limit: int | None = None
    ready_at: float | None = None
