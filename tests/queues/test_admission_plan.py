"""The admission plan: limits, turns, and what limits a queue."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from perdure.model.queue_records import (
    PartitionOverride,
    QueueOverride,
    QueuePause,
    QueueSettings,
    RateLimit,
)
from perdure.queues.admission_plan import MAX_ADMISSIONS, default_slack, plan
from perdure.queues.effective_settings import partition_limits
from tests.queues.queue_model import WORKER, QueueModel

LIMIT = st.one_of(st.none(), st.integers(1, 6))
RATE = st.one_of(st.none(), st.builds(RateLimit, st.integers(1, 6), st.sampled_from([1.0, 10.0])))
SETTINGS = st.builds(
    QueueSettings,
    concurrency=LIMIT,
    rate=RATE,
    partitioned=st.just(True),
    partition_concurrency=LIMIT,
    partition_rate=RATE,
)
OVERRIDE = st.one_of(
    st.none(), st.builds(PartitionOverride, concurrency=LIMIT, weight=st.integers(1, 4)), st.builds(PartitionOverride)
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 3), st.integers(1, 5)),
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("pass"), st.floats(0, 4)),
        st.tuples(st.just("admit"), st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        st.tuples(
            st.just("stale"),
        ),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(SETTINGS, st.lists(OVERRIDE, min_size=4, max_size=4), ACTIONS)
def test_no_limit_is_ever_exceeded_and_free_slots_are_used(declared, overrides, actions):
    """The model checks each limit at each admission."""
    queue = QueueModel(declared)
    for action in actions:
        match action:
            case ("start", number, count):
                queue.start(count, f"p{number}")
                queue.partitions[f"p{number}"].override = overrides[number]
            case ("end", number, count) if f"p{number}" in queue.partitions:
                queue.end(count, f"p{number}")
            case ("pass", seconds):
                queue.now += seconds
            case ("admit", share):
                queue.admit(share=share)
            case ("stale",):  # two workers plan from one view; only the first is applied
                first, second = queue.plan().admit, queue.plan().admit
                if first is not None and second is not None:
                    queue.apply(first, queue.now)
                    assert queue.apply(second, queue.now) == 0
    queue.admit()
    _check_nothing_more_fits(queue)


def _check_nothing_more_fits(queue: QueueModel) -> None:
    """Check against the exact rules that each partition that waits is at a limit. Windows may be 1 % late."""
    limits = queue.settings
    if limits.concurrency is not None and queue.held >= limits.concurrency:
        return
    if limits.rate is not None and _recent(queue.log, queue.now, limits.rate) >= limits.rate.limit:
        return
    for partition in queue.partitions.values():
        own = partition_limits(limits, partition.override)
        concurrency, rate = own.concurrency, own.rate
        is_full = concurrency is not None and partition.held >= concurrency
        is_limited = rate is not None and _recent(partition.log, queue.now, rate) >= rate.limit
        assert partition.waiting == 0 or is_full or is_limited


def _recent(log: list[float], now: float, rate: RateLimit) -> int:
    return sum(1 for at in log if at > now - rate.per * 1.0101)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("partitions", [1, 3, 7])
def test_partitions_that_always_wait_are_served_equally(slots, partitions):
    queue = QueueModel(QueueSettings(concurrency=slots, partitioned=True))
    names = [f"p{number}" for number in range(partitions)]
    for name in names:
        queue.start(100, name)
    for _ in range(20):
        queue.admit()
        counts = Counter(queue.served)
        shares = [counts[name] for name in names]
        assert max(shares) - min(shares) <= 1
        for name in names:
            queue.end(slots, name)


def test_a_large_partition_does_not_delay_a_new_one_by_more_than_one_turn():
    queue = QueueModel(QueueSettings(concurrency=1, partitioned=True))
    queue.start(1_000, "large")
    for _ in range(5):
        queue.admit()
        queue.end(1, "large")
    queue.start(1, "new")
    for _ in range(2):
        queue.admit()
        queue.end(1, "large")
        queue.end(1, "new")
    assert queue.served[-2:].count("new") == 1


def test_new_partition_joins_at_the_end():
    queue = QueueModel(QueueSettings(concurrency=1, partitioned=True))
    queue.start(9, "a")
    queue.start(9, "b")
    for at in range(4):
        queue.admit()
        queue.end(1, queue.served[-1])
        if at == 0:
            queue.start(9, "c")
    assert queue.served == ["a", "b", "a", "c"]


@pytest.mark.parametrize("slots", [1, 2, 4, 10])
def test_weights_decide_how_many_runs_a_turn_serves(slots):
    queue = QueueModel(QueueSettings(concurrency=slots, partitioned=True))
    for name, weight in (("a", 3), ("b", 1)):
        queue.start(500, name)
        queue.partitions[name].override = PartitionOverride(weight=weight)
    for _ in range(40):
        queue.admit()
        for name in ("a", "b"):
            queue.end(slots, name)
    counts = Counter(queue.served)
    assert counts["a"] == pytest.approx(3 * counts["b"], abs=3)


def test_a_turn_continues_with_the_next_admission():
    queue = QueueModel(QueueSettings(concurrency=1, partitioned=True))
    for name, weight in (("a", 3), ("b", 1)):
        queue.start(9, name)
        queue.partitions[name].override = PartitionOverride(weight=weight)
    for _ in range(8):
        queue.admit()
        queue.end(1, queue.served[-1])
    assert "".join(queue.served) == "aaabaaab"


def test_a_blocked_partition_leaves_the_view_until_a_slot_is_returned():
    queue = QueueModel(QueueSettings(partitioned=True, partition_concurrency=1))
    queue.start(5, "a")
    assert queue.admit() == 1
    assert queue.view().partitions == ()
    assert queue.plan().admit is None
    queue.end(1, "a")
    assert queue.admit() == 1


def test_a_rate_limited_partition_leaves_the_view_until_its_time():
    queue = QueueModel(QueueSettings(partitioned=True, partition_rate=RateLimit(2, 10.0)))
    queue.start(5, "a")
    assert queue.admit() == 2
    planned = queue.plan()
    assert (planned.planned, planned.limited_by) == (0, "partition")
    assert planned.next_at is not None
    queue.admit()  # stores that it is not ready
    assert queue.view().partitions == ()
    queue.now = planned.next_at
    assert queue.admit() == 2


def test_override_replaces_the_declared_limit_and_may_remove_it():
    queue = QueueModel(QueueSettings(concurrency=2), QueueOverride(concurrency=5))
    queue.start(10)
    assert queue.admit() == 5
    queue = QueueModel(QueueSettings(concurrency=2), QueueOverride(concurrency=None))
    queue.start(10)
    assert queue.admit() == 10


def test_a_lower_limit_admits_nothing_until_it_fits():
    queue = QueueModel(QueueSettings(concurrency=5))
    queue.start(20)
    queue.admit()
    queue.configure(QueueSettings(concurrency=2))
    queue.end(2)
    assert queue.plan().admit is None
    queue.end(2)
    assert queue.admit() == 1


def test_workers_limit_how_far_admission_runs_ahead():
    queue = QueueModel(QueueSettings(worker_concurrency=2))
    queue.workers = (WORKER, replace(WORKER, id="w2"), replace(WORKER, id="stopping", workflows=()))
    queue.start(10)
    planned = queue.plan()
    assert (planned.planned, planned.limited_by) == (4, "workers")
    assert planned.admit is not None
    assert planned.admit.gate


def test_suspended_holders_do_not_count_for_the_workers():
    queue = QueueModel(QueueSettings(worker_concurrency=2))
    queue.start(10)
    queue.admit()
    view = replace(queue.view(), active=0)
    assert plan(view, queue.workers, queue.now).planned == 2


@pytest.mark.parametrize(
    ("declared", "held", "limited_by"),
    [
        (QueueSettings(concurrency=2), 2, "concurrency"),
        (QueueSettings(rate=RateLimit(2, 60.0)), 2, "rate"),
        (QueueSettings(concurrency=9, worker_concurrency=2), 2, "workers"),
        (QueueSettings(), 0, "idle"),
    ],
)
def test_plan_names_the_limit(declared, held, limited_by):
    queue = QueueModel(declared)
    queue.start(max(held, 1))
    queue.admit()
    if held:
        queue.start(1)
    assert queue.plan().limited_by == limited_by


def test_paused_queue_admits_nothing():
    queue = QueueModel(QueueSettings())
    queue.start(3)
    queue.paused = QueuePause("op", "", 0.0)
    planned = queue.plan()
    assert (planned.admit, planned.limited_by) == (None, "paused")


def test_queue_without_a_worker_admits_nothing():
    queue = QueueModel(QueueSettings())
    queue.workers = ()
    queue.start(3)
    planned = queue.plan()
    assert (planned.admit, planned.limited_by) == (None, "no_worker")


def test_delayed_places_are_promoted_also_in_a_paused_queue():
    queue = QueueModel(QueueSettings())
    queue.paused = QueuePause("op", "", 0.0)
    planned = plan(replace(queue.view(), eligible=3), queue.workers, queue.now)
    assert planned.admit is not None
    assert (planned.admit.promote, planned.admit.takes) == (3, ())


def test_full_queue_is_marked_and_unmarked():
    queue = QueueModel(QueueSettings(concurrency=1, max_waiting=3))
    queue.start(10)
    first = queue.plan().admit
    assert first is not None
    assert first.full
    queue.apply(first, queue.now)
    queue.partitions[""].waiting = 2
    assert plan(queue.view(), queue.workers, queue.now, was_full=False).admit is None
    second = plan(queue.view(), queue.workers, queue.now, was_full=True).admit
    assert second is not None
    assert not second.full
    third = plan(queue.view(), queue.workers, queue.now, waiting=50_000).admit  # the caller has counted more
    assert third is not None
    assert third.full


def test_an_admission_is_bounded_and_continues():
    queue = QueueModel(QueueSettings())
    queue.start(MAX_ADMISSIONS + 10)
    planned = queue.plan()
    assert (planned.planned, planned.may_continue) == (MAX_ADMISSIONS, True)
    queue.admit()
    assert queue.plan().planned == 10


def test_a_rate_is_refused_by_a_store_whose_clock_differs():
    queue = QueueModel(QueueSettings(rate=RateLimit(5, 10.0)))
    queue.start(3)
    admit = plan(queue.view(), queue.workers, queue.now).admit
    assert admit is not None
    assert admit.tolerance == pytest.approx(0.1)
    assert default_slack(QueueModel(QueueSettings(rate=RateLimit(5, 86_400.0))).view()) == 1.0


def test_plan_without_a_rate_has_no_tolerance():
    queue = QueueModel(QueueSettings(concurrency=5))
    queue.start(3)
    admit = queue.plan().admit
    assert admit is not None
    assert admit.tolerance is None


def test_runs_that_were_not_taken_are_returned_to_the_rate():
    queue = QueueModel(QueueSettings(rate=RateLimit(4, 60.0)))
    queue.start(8)
    assert queue.admit(share=0.5) == 2
    assert queue.plan().planned == 2
