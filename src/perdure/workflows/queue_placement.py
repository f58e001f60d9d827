"""Placement: the place in a queue that a start requests, from its options and the queue of its workflow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from perdure.errors import InvalidArgument
from perdure.model.queue_records import ON_DUPLICATE, Place
from perdure.model.validation import check_count, check_name, check_public_name, check_seconds, describe_value
from perdure.workflows.start_options import StartOptions
from perdure.workflows.work_queues import (
    MAX_PRIORITY,
    QUEUES,
    Debounce,
    WorkQueue,
    check_partition,
    implicit_queue,
)


class Started(Struct, frozen=True):
    """What a place depends on: name, queue and arguments of the workflow that is started, and whether it has a key."""

    workflow: str
    queue: WorkQueue | str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    has_idempotency_key: bool = False
    has_timeout: bool = False


class Placement(Struct, frozen=True):
    """A validated place. `starts_at` is when its run can be admitted at the earliest, without a wait for a slot.

    `queue` is the definition, if this process has imported it. Otherwise the caller compares `is_partition_given` with
    the settings in the store.
    """

    place: Place
    starts_at: float
    queue: WorkQueue | None
    is_partition_given: bool


def build_placement(options: StartOptions, started: Started, now: float, delay: float = 0.0) -> Placement | None:
    """Return the place that a start requests; None for a start without a queue. Raises `InvalidArgument`."""
    target = _choose_queue(options, started)
    if target is None:
        return None
    name = target.name if isinstance(target, WorkQueue) else target
    queue = target if isinstance(target, WorkQueue) else QUEUES.find(target)
    debounce = _check_debounce(options, started)
    starts_at, eligible_at, latest_at = now + delay, now + delay if delay > 0 else None, None
    if debounce is not None:
        assert isinstance(debounce.quiet, float)
        starts_at = eligible_at = now + debounce.quiet
        if debounce.max_wait is not None:
            assert isinstance(debounce.max_wait, float)
            latest_at = now + debounce.max_wait
            starts_at, eligible_at = latest_at, min(eligible_at, latest_at)
    expires_at = None if options.max_wait is None else starts_at + check_seconds("max_wait", options.max_wait)
    place = Place(
        queue=name,
        partition=_partition(name, queue, options, started),
        priority=_check_priority(options.priority),
        eligible_at=eligible_at,
        expires_at=expires_at,
        dedupe=_dedupe_key(options, debounce),
        on_duplicate=_on_duplicate(options, debounce),
        debounce=debounce is not None,
        latest_at=latest_at,
    )
    return Placement(place, starts_at, queue, options.partition is not None)


def check_partition_given(name: str, *, given: bool, partitioned: bool) -> None:
    """Raise `InvalidArgument` if a start has no partition for a partitioned queue, or one for another queue."""
    if partitioned and not given:
        raise InvalidArgument(
            f"queue {name!r} is partitioned and its partition_key is not imported in this process; use partition="
        )
    if given and not partitioned:
        raise InvalidArgument(f"queue {name!r} is not partitioned; remove partition=")


def _choose_queue(options: StartOptions, started: Started) -> WorkQueue | str | None:
    given = options.queue
    if not isinstance(given, WorkQueue | str | None):  # UNSET
        given = started.queue
    if isinstance(given, str):
        given = check_public_name("a queue's name", given)
    if given is None and (options.dedupe is not None or options.debounce is not None):
        return implicit_queue(started.workflow)
    if given is None:
        for option in ("priority", "partition", "max_wait", "on_duplicate"):
            if getattr(options, option) is not None:
                raise InvalidArgument(
                    f"{option}= needs a queue: use queue=, or @workflow(queue=) on workflow {started.workflow!r}"
                )
    return given


def _partition(name: str, queue: WorkQueue | None, options: StartOptions, started: Started) -> str:
    """Return the partition of the run. An exception of the queue's `partition_key` is raised to the caller."""
    given = None if options.partition is None else check_partition("partition", options.partition)
    if queue is None:
        return given or ""
    if given is not None or queue.partition_key is None:
        partitioned = queue.partitioned
        if partitioned and given is None:
            raise InvalidArgument(f"queue {name!r} is partitioned and has no partition_key; use partition=")
        check_partition_given(name, given=given is not None, partitioned=partitioned)
        return given or ""
    key = queue.partition_key(*started.args, **started.kwargs)
    if key is None:
        return ""
    if not isinstance(key, str):
        raise InvalidArgument(
            f"the partition_key of queue {name!r} returned {describe_value(key)}; it must return a string or None"
        )
    return check_name(f"the partition of queue {name!r}", key)


def _check_debounce(options: StartOptions, started: Started) -> Debounce | None:
    debounce = options.debounce
    if debounce is None:
        return None
    if not isinstance(debounce, Debounce):
        raise InvalidArgument(f"debounce must be a Debounce, not {describe_value(debounce)}")
    for option in ("id", "dedupe", "delay", "on_duplicate"):
        if getattr(options, option) is not None:
            raise InvalidArgument(f"debounce= and {option}= exclude each other; remove one of them")
    if started.has_idempotency_key:
        raise InvalidArgument(
            f"debounce= cannot be used with workflow {started.workflow!r}, whose idempotency_key names the run; "
            "remove one of them"
        )
    unbounded = debounce.max_wait is None
    if unbounded and (options.max_wait is not None or started.has_timeout):
        raise InvalidArgument("max_wait= and a timeout need a Debounce with max_wait; set it")
    return debounce


def _dedupe_key(options: StartOptions, debounce: Debounce | None) -> str | None:
    if debounce is not None:
        return debounce.key
    return None if options.dedupe is None else check_name("dedupe", options.dedupe)


def _on_duplicate(options: StartOptions, debounce: Debounce | None) -> str:
    if debounce is not None:
        return "replace" if debounce.keep == "last" else "existing"
    if options.on_duplicate is None:
        return "existing"
    if options.on_duplicate not in ON_DUPLICATE:
        given = describe_value(options.on_duplicate)
        raise InvalidArgument(f"on_duplicate must be one of {', '.join(map(repr, ON_DUPLICATE))}, not {given}")
    if options.dedupe is None:
        raise InvalidArgument("on_duplicate= needs dedupe=, the key that may be taken")
    return options.on_duplicate


def _check_priority(priority: int | None) -> int:
    return 0 if priority is None else check_count("priority", priority, minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
