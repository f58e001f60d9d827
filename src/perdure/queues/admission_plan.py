"""The admission plan: which partitions of a queue may admit how many runs now, and what limits the queue.

A pure function of a `QueueView`, the live workers and the time. The store applies the plan only to the version of the
queue that the view had, so the limits hold whichever worker plans. This module reads no clock and calls no store.

Partitions are served in the order of their turns, `weight` runs per turn. A partition whose turn is complete moves to
the end. A turn that ends early because the queue may admit no more continues with the next admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from perdure.model.queue_records import PartitionView, QueueSettings, QueueView, RateLimit, Take
from perdure.model.records import WorkerRecord
from perdure.queues.effective_settings import PartitionLimits, effective_settings, partition_limits
from perdure.queues.rate_window import SUB_WINDOWS, RateWindow
from perdure.stores.writes import Admit

MAX_ADMISSIONS = 500  # of one queue and pass, so that queues take turns
MAX_SLACK_SECONDS = 1.0
RECENT = RateLimit(2**31, 60.0)  # the window of the admissions that a description counts
SCAN_PLACES = 200  # of a partition, examined for runs that a live worker can execute

LIMITS = ("concurrency", "partition", "rate", "workers", "no_worker", "paused", "idle")
"""What limits a queue now. "idle": no eligible run waits, or all that wait are being admitted."""


class AdmissionPlan(Struct, frozen=True, kw_only=True):
    """The write of an admission, or None if nothing is to be stored; and what limits the queue.

    `planned` is the number of runs that it may take, `next_at` when time alone allows more. `may_continue`: more runs
    may be admitted at once after this plan, because it is limited by its own size.
    """

    admit: Admit | None
    planned: int
    limited_by: str  # one of LIMITS
    next_at: float | None
    may_continue: bool = False


class _QueueState(Struct, frozen=True, array_like=True):
    """The stored state of a queue: the window of its rate, the last turn of a partition, and recent admissions."""

    window: bytes = b""
    turn: int = 0
    recent: bytes = b""


class _PartitionState(Struct, frozen=True, array_like=True):
    """The stored state of a partition. `served`: the runs of its current turn, without the last admission."""

    window: bytes = b""
    served: int = 0


_QUEUE_STATE = msgspec.msgpack.Decoder(_QueueState)
_PARTITION_STATE = msgspec.msgpack.Decoder(_PartitionState)


def plan(
    view: QueueView,
    workers: Sequence[WorkerRecord],
    now: float,
    *,
    serving: int | None = None,
    waiting: int = 0,
    was_full: bool = False,
    slack: float | None = None,
) -> AdmissionPlan:
    """Return the plan of the next admission.

    `workers` are the live workers. `serving` is how many of them execute runs of this queue, if that is known.
    `waiting` is the number of places if the caller knows more than the view has, and `was_full` whether new places are
    refused now. `slack` is by how much the store's clock may differ from `now`; see `default_slack`.
    """
    settings = effective_settings(view.declared, view.override)
    slack = default_slack(view) if slack is None else slack
    state = _QUEUE_STATE.decode(view.state) if view.state else _QueueState()
    window = None if settings.rate is None else RateWindow(settings.rate, state.window, view.taken, now, slack)
    serves = _serves(workers)
    capacity = _capacity(settings, workers, serving)
    budget, limited_by = _budget(view, settings, window, capacity, has_workers=bool(serves))
    rotation = _Rotation([_Partition(each, settings, now, slack) for each in view.partitions], state.turn)
    planned = rotation.serve(budget)
    takes = rotation.takes(now, partitioned=settings.partitioned)
    full = _is_full(settings, max(waiting, sum(each.waiting for each in view.partitions)) - planned)
    admit = None
    if takes or view.eligible or full != was_full:
        recent = RateWindow(RECENT, state.recent, view.taken, now)
        new_state = _QueueState(b"" if window is None else window.encode(), rotation.last_turn, recent.encode())
        admit = Admit(
            queue=view.name,
            base=view.version,
            now=now,
            state=msgspec.msgpack.encode(new_state),
            takes=takes,
            serves=serves,
            gate=settings.worker_concurrency is not None,
            full=full,
            promote=view.eligible,
            scan=SCAN_PLACES,
            tolerance=slack if _has_rate(view, settings) else None,
        )
    remaining = rotation.has_waiting
    if not remaining:
        limited_by = "idle"
    elif limited_by is None or budget > planned:
        limited_by = "partition"
    next_at = _earliest((view.next_at, None if window is None else window.free_at(planned), rotation.ready_at))
    may_continue = budget == MAX_ADMISSIONS == planned or view.eligible > 0
    return AdmissionPlan(
        admit=admit, planned=planned, limited_by=limited_by, next_at=next_at, may_continue=may_continue
    )


def recent_admissions(view: QueueView, now: float) -> int:
    """Return the number of admissions of the last minute, and up to 1 % more."""
    if not view.state:
        return 0
    return RateWindow(RECENT, _QUEUE_STATE.decode(view.state).recent, view.taken, now).count


def default_slack(view: QueueView) -> float:
    """Return by how much the store's clock may differ from the time of a plan: 1 % of the shortest interval of a rate.

    Rates are exact for any slack, and later by twice the slack.
    """
    settings = effective_settings(view.declared, view.override)
    limits = (partition_limits(settings, each.override).rate for each in view.partitions)
    shortest = min((rate.per for rate in (settings.rate, *limits) if rate is not None), default=MAX_SLACK_SECONDS)
    return min(MAX_SLACK_SECONDS, shortest / SUB_WINDOWS)


def _has_rate(view: QueueView, settings: QueueSettings) -> bool:
    limits = (partition_limits(settings, each.override).rate for each in view.partitions)
    return any(rate is not None for rate in (settings.rate, *limits))


def _serves(workers: Iterable[WorkerRecord]) -> tuple[tuple[str, int, str], ...]:
    """Return what the live workers execute: workflow, version and pool."""
    return tuple(sorted({(workflow, version, each.pool) for each in workers for workflow, version in each.workflows}))


def _capacity(settings: QueueSettings, workers: Sequence[WorkerRecord], serving: int | None) -> int | None:
    """Return how many runs the workers execute at once; None without a limit per worker."""
    if settings.worker_concurrency is None:
        return None
    count = sum(1 for each in workers if each.workflows) if serving is None else serving
    return settings.worker_concurrency * count


def _budget(
    view: QueueView, settings: QueueSettings, window: RateWindow | None, capacity: int | None, *, has_workers: bool
) -> tuple[int, str | None]:
    """Return how many runs the queue as a whole may admit, and the limit that says so, if there is one."""
    if view.paused is not None:
        return 0, "paused"
    if not has_workers:
        return 0, "no_worker"
    limits: list[tuple[int, str]] = []
    if settings.concurrency is not None:
        limits.append((settings.concurrency - view.held, "concurrency"))
    if window is not None:
        limits.append((window.free, "rate"))
    if capacity is not None:
        limits.append((capacity - view.active, "workers"))
    budget, limited_by = min(limits, key=lambda limit: limit[0], default=(MAX_ADMISSIONS, None))
    if budget > MAX_ADMISSIONS:
        return MAX_ADMISSIONS, None
    return max(0, budget), limited_by


def _is_full(settings: QueueSettings, waiting: int) -> bool:
    return settings.max_waiting is not None and waiting >= settings.max_waiting


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((each for each in times if each is not None), default=None)


class _Partition:
    """One partition while it is planned. `available` is how many more runs its own limits allow."""

    def __init__(self, view: PartitionView, settings: QueueSettings, now: float, slack: float) -> None:
        self.view = view
        self.limits: PartitionLimits = partition_limits(settings, view.override)
        state = _PARTITION_STATE.decode(view.state) if view.state else _PartitionState()
        rate = self.limits.rate
        self.window = None if rate is None else RateWindow(rate, state.window, view.taken, now, slack)
        self.served = (state.served + view.taken) % self.limits.weight  # in the current turn
        self.turn = view.turn
        self.count = 0
        self.available = view.waiting
        if self.limits.concurrency is not None:
            self.available = min(self.available, self.limits.concurrency - view.held)
        if self.window is not None:
            self.available = min(self.available, self.window.free)
        self.is_blocked = view.waiting > 0 and self.available <= 0  # by its own limits

    @property
    def ready_at(self) -> float | None:
        """When the partition's rate allows another run after the planned ones; None if it allows one now."""
        return None if self.window is None else self.window.free_at(self.count)

    def take(self, now: float, *, partitioned: bool) -> Take:
        """Return what the admission does with this partition."""
        if not partitioned:
            return Take(partition=self.view.partition, count=self.count)
        window = b"" if self.window is None else self.window.encode()
        weight = self.limits.weight
        served = (self.served - self.count) % weight  # the store adds the number of runs that it takes
        state = msgspec.msgpack.encode(_PartitionState(window, served)) if window or weight > 1 else b""
        return Take(
            partition=self.view.partition,
            count=self.count,
            turn=self.turn,
            state=state,
            limit=self.limits.concurrency,
            # A plan to take runs says nothing about readiness, because fewer may be taken.
            ready_at=None if self.window is None or self.count else self.window.free_at(),
            keep_until=self._keep_until(now) if state else None,
        )

    def _keep_until(self, now: float) -> float:
        """Return when the stored state has no effect any more."""
        return now if self.window is None else self.window.empty_at(self.count)


class _Rotation:
    """Serves partitions in turn. `last_turn` is the last turn that an admission gave to a partition."""

    def __init__(self, partitions: Sequence[_Partition], last_turn: int) -> None:
        self._partitions = partitions
        self.last_turn = max((last_turn, *(each.turn for each in partitions)))
        self._next_turn = self.last_turn + 2  # a partition that has joined since has the turn between

    def serve(self, budget: int) -> int:
        """Plan up to this number of runs, and return the number."""
        left = budget
        waiting = deque(each for each in self._partitions if each.available > 0)
        while left > 0 and waiting:
            each = waiting[0]
            count = min(each.limits.weight - each.served, each.available, left)
            each.count += count
            each.available -= count
            each.served += count
            left -= count
            if each.served < each.limits.weight and each.available > 0:
                break  # the budget is used up within its turn, which continues with the next admission
            waiting.popleft()
            each.served = 0
            each.turn = self.last_turn = self._next_turn
            self._next_turn += 1
            if each.available > 0:
                waiting.append(each)
        return budget - left

    def takes(self, now: float, *, partitioned: bool) -> tuple[Take, ...]:
        """Return the takes of partitions that admit runs, and of those that their own limits block."""
        changed = (each for each in self._partitions if each.count or (partitioned and each.is_blocked))
        return tuple(each.take(now, partitioned=partitioned) for each in changed)

    @property
    def has_waiting(self) -> bool:
        """Whether runs wait that this plan does not admit."""
        return any(each.view.waiting > each.count for each in self._partitions)

    @property
    def ready_at(self) -> float | None:
        """When the rate of a partition allows another of its waiting runs."""
        blocked = (each for each in self._partitions if each.view.waiting > each.count)
        return _earliest(each.ready_at for each in blocked)
