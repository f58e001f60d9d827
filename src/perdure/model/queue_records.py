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

    A lower `priority` goes first within a partition. With `eligible_at` the place is delayed, until an `Admit` at or
    after that time promotes it. The run is not admitted any more from `expires_at` on. `dedupe` is a key: of the runs
    with one key in a queue at most one waits. `on_duplicate` says what a start does if the key is taken. "existing" and
    "refuse" match a run that waits or holds a slot; the store returns that run (the one that waits, else the latest),
    and the caller decides. "replace" matches only a run that waits; that run gets the new payload: workflow, version,
    pool and input. All else stays as it was.

    With `debounce` only a run that waits matches. If its place is delayed, `eligible_at` moves to that of this place,
    but not beyond its own `latest_at`. It gets the new payload if `on_duplicate` is "replace". A debounced place needs
    `dedupe` and `eligible_at`.
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
    it got its slot; `held` says which of the two applies. `eligible_at` is set while the place is delayed: an `Admit`
    that promotes it clears it and gives the place a new number.
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
    """A partition that may admit runs.

    `waiting` counts its waiting places that are not delayed, up to `COUNT_CAP`; expired ones and those of held runs
    count. `held` is the exact number of its slots. `turn` orders partitions: the lowest was served least recently. A
    new partition gets the turn after the highest that the takes of the queue have set (1 in a new queue). `state` is
    what the last take of the partition stored, and `taken` how many runs it took.
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

    `partitions` are those that are ready (see `Take`), in the order of (turn, partition), up to a limit. In a queue
    that is not partitioned the only one is named "". `held` and `active` are the exact numbers of slots of the whole
    queue: all of them, and those whose run has an owner or is due. `eligible` counts the delayed places whose time has
    come, `expired` are the waiting runs whose place has expired, in the order of (expires_at, run id), both up to a
    limit. `next_at` is the earliest of three times: `eligible_at` of a delayed place, `expires_at` of a waiting place,
    and `ready_at` of a partition that lacks nothing else to be ready. A time that has passed counts, too.
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
    `needs_admission`: a partition is ready and has no `ready_at` (see `Take`); one with a `ready_at` counts in
    `next_at`. Neither considers whether the queue is paused or at its limits. `full`: the last admission found
    `max_waiting` places; a start is refused until it clears.
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


class Take(Struct, frozen=True, kw_only=True):
    """What an admission does with one partition: take up to `count` runs and store the partition's state.

    `limit` and `ready_at` stay stored with the partition. At any time it is ready if it has waiting places that are not
    delayed, holds fewer slots than `limit` (None: any number), and `ready_at` has passed (None: at once). So it becomes
    ready when a slot is returned, when a run arrives, or when `ready_at` comes. A change of the queue's or the
    partition's settings removes both. A store may keep a flag instead of computing this.

    The row of a partition without places and override may be pruned, which deletes `state`, from `keep_until` on (None:
    only if `state` is empty).
    """

    partition: str
    count: int
    turn: int = 0
    state: bytes = b""
    limit: int | None = None
    ready_at: float | None = None
    keep_until: float | None = None
