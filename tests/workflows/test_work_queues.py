"""Declarations of work queues, and the places that starts request. Invalid ones are refused with what to do."""

import gc
from datetime import timedelta
from typing import Any

import pytest

from perdure import Context, Debounce, InvalidArgument, Rate, WorkQueue, workflow
from perdure.model.queue_records import Place, RateLimit
from perdure.workflows.queue_placement import Started, build_placement
from perdure.workflows.start_options import build_start_options
from perdure.workflows.work_queues import QUEUES, check_queues

NOW = 1_000.0


def place_of(queue: WorkQueue | str | None = None, /, *args: Any, delay: float = 0.0, **options: Any) -> Place | None:
    given = {**options, **({"delay": delay} if delay else {})}
    placement = build_placement(build_start_options(given), Started("wf", queue, args), NOW, delay)
    return None if placement is None else placement.place


def place(queue: WorkQueue | str | None = None, /, *args: Any, **options: Any) -> Place:
    found = place_of(queue, *args, **options)
    assert found is not None
    return found


def test_positional_order_of_a_queue():
    queue = WorkQueue("wq-positional", 50, 5, "100/min", lambda order: str(order))
    assert (queue.settings.concurrency, queue.settings.worker_concurrency) == (50, 5)
    assert queue.settings.rate == RateLimit(100, 60.0)
    assert queue.settings.partitioned


@pytest.mark.parametrize(
    ("rate", "stored"),
    [
        (Rate(5, per=1), RateLimit(5, 1.0)),
        (Rate(5, per=timedelta(minutes=2)), RateLimit(5, 120.0)),
        ("7/s", RateLimit(7, 1.0)),
        ("7 / min", RateLimit(7, 60.0)),
        ("7/h", RateLimit(7, 3_600.0)),
        ("7/day", RateLimit(7, 86_400.0)),
    ],
)
def test_rates(rate, stored):
    assert WorkQueue("wq-rates", rate=rate).settings.rate == stored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "is empty"),
        ({"name": "~mine"}, "must not begin with '~'"),
        ({"concurrency": 0}, "WorkQueue.concurrency must be at least 1, not 0"),
        ({"concurrency": True}, "must be a whole number"),
        ({"concurrency": 2.0}, "must be a whole number, not 2.0"),
        ({"concurrency": 2, "worker_concurrency": 3}, "worker_concurrency=3 is larger than concurrency=2"),
        ({"concurrency": 2, "partition_concurrency": 3}, "partition_concurrency=3 is larger than concurrency=2"),
        ({"max_waiting": -1}, "WorkQueue.max_waiting must be at least 1"),
        ({"rate": 5}, "'100/min'"),
        ({"rate": "5/fortnight"}, "'100/min'"),
        ({"rate": "0/s"}, "Rate.limit must be at least 1"),
        ({"rate": "1000001/s"}, "Rate.limit must be at most 1000000"),
        ({"partition_rate": "x"}, "WorkQueue.partition_rate must be a Rate"),
        ({"partition_key": "tenant"}, "must be a function of the workflow's arguments"),
    ],
)
def test_invalid_queues_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        WorkQueue(**{"name": "wq-invalid", **options})


@pytest.mark.parametrize("per", [0, -1, float("nan"), "1", None])
def test_invalid_intervals_are_refused(per):
    with pytest.raises(InvalidArgument, match=r"Rate\.per"):
        Rate(1, per=per)


def test_queues_are_registered_while_the_program_has_them():
    queue = WorkQueue("wq-registered")
    assert QUEUES.find("wq-registered") is queue
    replaced = WorkQueue("wq-registered", 5)
    assert QUEUES.find("wq-registered") is replaced
    del queue, replaced
    gc.collect()
    assert QUEUES.find("wq-registered") is None


def test_a_list_of_queues_is_checked():
    queue = WorkQueue("wq-list")
    assert check_queues([queue, queue]) == (queue,)
    assert check_queues(None) is None
    with pytest.raises(InvalidArgument, match="twice"):
        check_queues([queue, WorkQueue("wq-list")])
    for wrong in (["wq-list"], 3, "wq-list"):
        with pytest.raises(InvalidArgument, match="list of WorkQueue"):
            check_queues(wrong)  # type: ignore[arg-type]


def test_workflow_takes_a_queue_or_its_name():
    queue = WorkQueue("wq-workflow")

    @workflow(queue=queue)
    async def queued(ctx: Context) -> None: ...

    @workflow(queue="wq-workflow")
    async def queued_by_name(ctx: Context) -> None: ...

    assert queued.settings.queue is queue
    assert queued_by_name.settings.queue == "wq-workflow"
    for wrong in (3, "~x", ""):
        with pytest.raises(InvalidArgument, match="queue"):
            workflow(queue=wrong)  # type: ignore[arg-type]


def test_names_with_a_tilde_are_reserved():
    with pytest.raises(InvalidArgument, match="must not begin with '~'"):

        @workflow(name="~internal")
        async def internal(ctx: Context) -> None: ...

    with pytest.raises(InvalidArgument, match="must not begin with '~'"):
        workflow(pool="~pool")
    with pytest.raises(InvalidArgument, match="must not begin with '~'"):
        place(queue="~wf")


def test_options_choose_the_queue():
    default, other = WorkQueue("wq-default"), WorkQueue("wq-other")
    assert place(default).queue == "wq-default"
    assert place(default, queue=other).queue == "wq-other"
    assert place(default, queue="wq-other").queue == "wq-other"
    assert place_of(default, queue=None) is None
    assert place_of(None) is None


def test_dedupe_and_debounce_without_a_queue_use_the_implicit_queue():
    assert place(dedupe="k") == Place(queue="~wf", dedupe="k")
    assert place(debounce=Debounce("k")).queue == "~wf"
    assert place(WorkQueue("wq-bypassed"), queue=None, dedupe="k").queue == "~wf"


@pytest.mark.parametrize("option", [{"priority": 1}, {"partition": "a"}, {"max_wait": 5}, {"on_duplicate": "replace"}])
def test_options_of_a_place_need_a_queue(option):
    with pytest.raises(InvalidArgument, match="needs a queue"):
        place_of(**option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 101}, "at most 100"),
        ({"priority": -101}, "at least -100"),
        ({"priority": 1.5}, "whole number"),
        ({"max_wait": -1}, "zero or more"),
        ({"dedupe": ""}, "dedupe is empty"),
        ({"on_duplicate": "replace"}, "needs dedupe="),
        ({"dedupe": "k", "on_duplicate": "drop"}, "'existing', 'refuse', 'replace'"),
        ({"debounce": "k"}, "must be a Debounce"),
        ({"debounce": Debounce("k"), "id": "x"}, "exclude each other"),
        ({"debounce": Debounce("k"), "dedupe": "x"}, "exclude each other"),
        ({"debounce": Debounce("k"), "delay": 5}, "exclude each other"),
        ({"debounce": Debounce("k", max_wait=None), "max_wait": 5}, "need a Debounce with max_wait"),
        ({"partition": "a"}, "is not partitioned"),
        ({"partition": 3}, "partition must be a string"),
        ({"queue": 3}, "queue must be a WorkQueue or its name"),
    ],
)
def test_invalid_places_are_refused(options, message):
    queue = WorkQueue("wq-places")
    with pytest.raises(InvalidArgument, match=message):
        place_of(queue, **options)


@pytest.mark.parametrize("options", [{"key": ""}, {"key": "k", "quiet": -1}, {"key": "k", "keep": "all"}])
def test_invalid_debounces_are_refused(options):
    with pytest.raises(InvalidArgument, match=r"Debounce\."):
        Debounce(**options)


def test_debounce_of_a_workflow_with_a_key_is_refused():
    started = Started("wf", None, has_idempotency_key=True)
    with pytest.raises(InvalidArgument, match="idempotency_key names the run"):
        build_placement(build_start_options({"debounce": Debounce("k")}), started, NOW)


def test_partition_is_the_key_of_the_arguments():
    queue = WorkQueue("wq-key", partition_key=lambda order, size: order)
    assert place(queue, "acme", 1).partition == "acme"
    assert place(queue, None, 1).partition == ""
    assert place(queue, "acme", 1, partition="other").partition == "other"


@pytest.mark.parametrize("returned", [3, "", "a\n", "x" * 513])
def test_invalid_partition_keys_are_refused(returned):
    queue = WorkQueue("wq-key", partition_key=lambda order: order)
    with pytest.raises(InvalidArgument, match="queue 'wq-key'"):
        place(queue, returned)


def test_exception_of_a_partition_key_fails_the_start():
    queue = WorkQueue("wq-key", partition_key=lambda order: order["tenant"])
    with pytest.raises(KeyError):
        place(queue, {})


def test_partitioned_queue_without_a_key_needs_a_partition():
    queue = WorkQueue("wq-no-key", partition_concurrency=1)
    assert place(queue, partition="a").partition == "a"
    with pytest.raises(InvalidArgument, match="use partition="):
        place(queue)


def test_times_of_a_place():
    queue = WorkQueue("wq-times")
    assert place(queue, delay=5.0).eligible_at == NOW + 5
    assert place(queue).eligible_at is None
    assert place(queue, max_wait=60).expires_at == NOW + 60
    assert place(queue, max_wait=60, delay=5.0).expires_at == NOW + 65


def test_debounced_place():
    assert place(WorkQueue("wq-bounce"), debounce=Debounce("k", quiet=5, max_wait=60, keep="last")) == Place(
        queue="wq-bounce",
        eligible_at=NOW + 5,
        latest_at=NOW + 60,
        dedupe="k",
        on_duplicate="replace",
        debounce=True,
    )
    first = place(debounce=Debounce("k", quiet=90, max_wait=60, keep="first"))
    assert (first.eligible_at, first.on_duplicate) == (NOW + 60, "existing")
    assert place(debounce=Debounce("k", max_wait=None)).latest_at is None
