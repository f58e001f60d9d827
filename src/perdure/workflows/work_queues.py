"""Work queues as code declares them: `WorkQueue`, its `Rate`, and the `Debounce` of a start.

A definition is a value. It is stored when an engine or worker of a process that has imported it opens a store. This
module knows no store and no rule of admission.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

from perdure.errors import InvalidArgument
from perdure.model.queue_records import QueueSettings, RateLimit
from perdure.model.validation import (
    check_count,
    check_name,
    check_optional_count,
    check_public_name,
    check_seconds,
    describe_value,
)

MAX_RATE = 1_000_000
MAX_PRIORITY = 100
IMPLICIT = "~"  # begins the name of a workflow's implicit queue
_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3_600.0, "hour": 3_600.0, "d": 86_400.0, "day": 86_400.0}
_RATE = re.compile(r"\s*([0-9]{1,9})\s*/\s*([a-z]+)\s*")

Keep = Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `limit` admissions in any `per` seconds. As text: "100/min", with s, min, h or day."""

    limit: int
    per: float | timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", check_count("Rate.limit", self.limit, maximum=MAX_RATE))
        object.__setattr__(self, "per", check_seconds("Rate.per", self.per, zero=False))

    @property
    def stored(self) -> RateLimit:
        """The rate as stores keep it."""
        assert isinstance(self.per, float)
        return RateLimit(self.limit, self.per)


def check_rate(what: str, rate: Rate | str | None) -> RateLimit | None:
    """Return a rate as stores keep it, from a `Rate` or its text. Raises `InvalidArgument` for anything else."""
    if rate is None:
        return None
    if isinstance(rate, Rate):
        return rate.stored
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None or found[2] not in _UNITS:
        raise InvalidArgument(
            f"{what} must be a Rate or text such as '100/min' (s, min, h, day), not {describe_value(rate)}"
        )
    return Rate(int(found[1]), _UNITS[found[2]]).stored


@dataclass(frozen=True, slots=True)
class Debounce:
    """Delay a start until no further one of the same key has come for `quiet` seconds.

    All starts of a key become one run, with the payload of the last one (`keep="last"`) or the first. The run is not
    delayed by more than `max_wait` seconds from the first start; None: without a bound.
    """

    key: str
    quiet: float | timedelta = 5.0
    max_wait: float | timedelta | None = 60.0
    keep: Keep = "last"

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", check_name("Debounce.key", self.key))
        object.__setattr__(self, "quiet", check_seconds("Debounce.quiet", self.quiet))
        if self.max_wait is not None:
            object.__setattr__(self, "max_wait", check_seconds("Debounce.max_wait", self.max_wait))
        if self.keep not in get_args(Keep):
            raise InvalidArgument(f"Debounce.keep must be 'first' or 'last', not {describe_value(self.keep)}")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class WorkQueue:
    """A named limit before runs, across all workers: concurrency, rate, order and fairness.

    `concurrency` limits the runs that hold a slot, from their admission to their end. `worker_concurrency` limits the
    runs of the queue that one worker executes at once. `rate` limits admissions. `partition_key` is called with the
    arguments of the workflow and returns the partition of a run (None: the partition ""); partitions take turns, and
    each has the limits `partition_concurrency` and `partition_rate`. When about `max_waiting` runs wait, a start raises
    `QueueFull`. None means no limit.
    """

    name: str
    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: Rate | str | None = None
    partition_key: Callable[..., str | None] | None = None
    partition_concurrency: int | None = None
    partition_rate: Rate | str | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_public_name("a queue's name", self.name))
        for limit in ("concurrency", "worker_concurrency", "partition_concurrency", "max_waiting"):
            check_optional_count(f"WorkQueue.{limit}", getattr(self, limit))
        if self.partition_key is not None and not callable(self.partition_key):
            raise InvalidArgument(
                f"WorkQueue.partition_key must be a function of the workflow's arguments, not "
                f"{describe_value(self.partition_key)}"
            )
        check_settings(f"queue {self.name!r}", self.settings)
        QUEUES.add(self)

    @property
    def settings(self) -> QueueSettings:
        """The limits as stores keep them."""
        options = (self.partition_key, self.partition_concurrency, self.partition_rate)
        return QueueSettings(
            concurrency=self.concurrency,
            worker_concurrency=self.worker_concurrency,
            rate=check_rate("WorkQueue.rate", self.rate),
            partitioned=any(option is not None for option in options),
            partition_concurrency=self.partition_concurrency,
            partition_rate=check_rate("WorkQueue.partition_rate", self.partition_rate),
            max_waiting=self.max_waiting,
        )

    @property
    def partitioned(self) -> bool:
        """Whether a start needs a partition: by `partition_key` or `partition=`."""
        return self.settings.partitioned


def check_settings(what: str, settings: QueueSettings) -> None:
    """Raise `InvalidArgument` if a limit of a part is larger than that of the whole queue."""
    whole = settings.concurrency
    for limit in ("worker_concurrency", "partition_concurrency"):
        part = getattr(settings, limit)
        if whole is not None and part is not None and part > whole:
            raise InvalidArgument(
                f"{what}: {limit}={part} is larger than concurrency={whole}; use a smaller {limit}, or a larger "
                "concurrency"
            )


def check_partition(what: str, partition: object) -> str:
    """Return a valid name of a partition; it may be empty."""
    return "" if partition == "" and isinstance(partition, str) else check_name(what, partition)


def implicit_queue(workflow: str) -> str:
    """Return the name of the queue, without limits, that a start with `dedupe` or `debounce` uses if it has none."""
    return f"{IMPLICIT}{workflow}"


class QueueRegistry:
    """The queues that this process has imported, by name. A later definition of a name replaces the earlier one."""

    def __init__(self) -> None:
        self._queues: WeakValueDictionary[str, WorkQueue] = WeakValueDictionary()

    def add(self, queue: WorkQueue) -> None:
        """Register a definition. It is forgotten when the program drops it."""
        self._queues[queue.name] = queue

    def find(self, name: str) -> WorkQueue | None:
        """Return the definition of this name, or None."""
        return self._queues.get(name)

    def all(self) -> list[WorkQueue]:
        """Return all definitions, in order of name."""
        return sorted(self._queues.values(), key=lambda each: each.name)


QUEUES = QueueRegistry()


def check_queues(queues: Iterable[Any] | None) -> tuple[WorkQueue, ...] | None:
    """Return the queues of a list. Raises `InvalidArgument` if it has anything else, or a name twice."""
    if queues is None:
        return None
    if not isinstance(queues, Iterable) or isinstance(queues, str):
        raise InvalidArgument(f"queues must be a list of WorkQueue, not {describe_value(queues)}")
    found: dict[str, WorkQueue] = {}
    for queue in queues:
        if not isinstance(queue, WorkQueue):
            raise InvalidArgument(f"queues must be a list of WorkQueue, not {describe_value(queue)}")
        if found.setdefault(queue.name, queue) is not queue:
            raise InvalidArgument(f"queue {queue.name!r} is in the list twice; name one")
    return tuple(found.values())
