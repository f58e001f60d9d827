"""The handle of a work queue: describe, pause, resize, waiting, move, release, clear; and why a run waits."""

from datetime import timedelta

import pytest

from perdure import (
    Context,
    InvalidArgument,
    QueueNotFound,
    Rate,
    RunNotFound,
    RunStatus,
    WorkQueue,
    workflow,
)
from perdure.admin.health_check import check_health
from perdure.client.queue_views import QueueReason
from tests.engine.store_matrix import on_every_store


@workflow(name="queues.waiter")
async def waiter(ctx: Context, item: str) -> str:
    return str(await ctx.receive("go"))


async def start_all(engine, queue, *items, **options):
    return [await engine.start(waiter, item, queue=queue, id=item, **options) for item in items]


async def reason_of(engine, run_id) -> QueueReason:
    [reason] = (await engine.describe(run_id)).waiting_for
    assert isinstance(reason, QueueReason)
    return reason


@on_every_store
async def test_description(h):
    queue = WorkQueue("h-describe", 2, rate=Rate(100, per=60), partition_key=lambda item: item[0], max_waiting=50)
    engine = await h.engine(queues=[queue])
    began = h.clock.now()
    await start_all(engine, queue, "a1", "a2", "a3", "b1")
    await h.settle()
    await h.clock.advance(10.0)
    await engine.start(waiter, "c1", queue=queue, priority=-1, id="c1")
    described = await engine.queue("h-describe").describe()
    assert (described.name, described.waiting, described.held, described.limited_by) == (
        "h-describe",
        3,
        2,
        "concurrency",
    )
    assert described.declared == described.effective
    assert (described.declared.concurrency, described.declared.rate) == (2, Rate(100, per=60.0))
    assert (described.partitioned, described.paused, described.override) == (True, None, {})
    assert described.partitions_waiting == 3
    assert described.admissions_last_minute == 2
    assert (described.holders.suspended, described.holders.executing, described.holders.held) == (2, 0, 0)
    assert described.oldest is not None
    assert (described.oldest.run_id, described.oldest.priority) == ("c1", -1)
    assert described.oldest.since.timestamp() == began + 10.0
    [listed] = [each for each in await engine.queues() if each.name == "h-describe"]
    assert (listed.waiting, listed.limited_by, listed.oldest) == (3, "concurrency", described.oldest)


@on_every_store
async def test_idle_queue_is_described(h):
    queue = WorkQueue("h-idle", 1)
    engine = await h.engine(queues=[queue])
    described = await engine.queue("h-idle").describe()
    assert (described.limited_by, described.oldest, described.next_admission_at) == ("idle", None, None)


@on_every_store
async def test_unknown_queue(h):
    engine = await h.engine(queues=[])
    handle = engine.queue("h-unknown")
    for call in (
        handle.describe,
        handle.pause,
        handle.resume,
        lambda: handle.resize(concurrency=1),
        lambda: handle.partition("p").resize(concurrency=1),
        handle.waiting,
        handle.clear,
    ):
        with pytest.raises(QueueNotFound, match="h-unknown"):
            await call()
    with pytest.raises(RunNotFound):
        await handle.move("missing", priority=1)
    with pytest.raises(RunNotFound):
        await handle.release("missing")
    with pytest.raises(InvalidArgument, match="queue's name"):
        engine.queue("")


@on_every_store
async def test_pause_and_resume(h):
    queue = WorkQueue("h-pause", 1)
    engine = await h.engine(queues=[queue])
    handle = engine.queue("h-pause")
    await handle.pause("the bank is closed", by="ada")
    await start_all(engine, queue, "p1")
    await h.clock.advance(20.0)
    described = await handle.describe()
    assert (described.limited_by, described.held, described.waiting) == ("paused", 0, 1)
    assert described.paused is not None
    assert (described.paused.by, described.paused.reason) == ("ada", "the bank is closed")
    assert str(await reason_of(engine, "p1")) == (
        "waits for a slot of queue h-pause: the queue is paused: the bank is closed, 0 before it"
    )
    await handle.resume()
    await h.settle()
    assert (await handle.describe()).held == 1
    assert (await handle.describe()).paused is None


@on_every_store
async def test_resize_overrides_until_it_is_reset(h):
    queue = WorkQueue("h-resize", 1, rate="100/min")
    engine = await h.engine(queues=[queue])
    handle = engine.queue("h-resize")
    await start_all(engine, queue, "r1", "r2", "r3", "r4")
    await h.settle()
    await handle.resize(concurrency=2)
    await h.settle()
    described = await handle.describe()
    assert (described.held, described.override) == (2, {"concurrency": 2})
    await handle.resize(rate=None, max_waiting=10)
    described = await handle.describe()
    assert described.override == {"concurrency": 2, "rate": None, "max_waiting": 10}
    assert (described.effective.rate, described.effective.concurrency) == (None, 2)
    await h.engine(queues=[WorkQueue("h-resize", 3, rate="100/min")])  # a new declaration keeps the override
    described = await handle.describe()
    assert (described.declared.concurrency, described.effective.concurrency) == (3, 2)
    await handle.resize(reset=True)
    await h.settle()
    described = await handle.describe()
    assert (described.override, described.effective.concurrency, described.held) == ({}, 3, 3)


@on_every_store
async def test_a_lower_limit_admits_nothing_until_it_fits(h):
    queue = WorkQueue("h-lower", 2)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, queue, "l1", "l2", "l3", "l4")
    await h.settle()
    await engine.queue("h-lower").resize(concurrency=1)
    for number in (0, 1):
        await runs[number].send("go", "x")
        await h.run_to_end(runs[number])
        await h.settle()
    assert [await run.status() for run in runs[2:]] == [RunStatus.SUSPENDED, RunStatus.PENDING]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to change"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"rate": "x"}, "rate must be a Rate"),
        ({"concurrency": 2, "worker_concurrency": 3}, "worker_concurrency=3 is larger than concurrency=2"),
        ({"partition_concurrency": 1}, "is not partitioned"),
    ],
)
@on_every_store
async def test_invalid_resizes_are_refused(h, options, message):
    engine = await h.engine(queues=[WorkQueue("h-invalid", 5)])
    with pytest.raises(InvalidArgument, match=message):
        await engine.queue("h-invalid").resize(**options)
    assert (await engine.queue("h-invalid").describe()).override == {}


@on_every_store
async def test_partition_limits(h):
    queue = WorkQueue("h-partition", partition_key=lambda item: item[0], partition_concurrency=1)
    engine = await h.engine(queues=[queue])
    handle = engine.queue("h-partition")
    await handle.partition("a").resize(concurrency=2, weight=2)
    await start_all(engine, queue, "a1", "a2", "a3", "b1", "b2")
    await h.settle()
    assert [each.run_id for each in await handle.waiting()] == ["a3", "b2"]
    reason = await reason_of(engine, "a3")
    assert (reason.limited_by, reason.partition, reason.held) == ("partition", "a", 2)
    await handle.partition("a").resize(reset=True)
    for wrong in ({"weight": 0}, {"weight": 101}, {"concurrency": 0}, {"concurrency": 1, "reset": True}):
        with pytest.raises(InvalidArgument):
            await handle.partition("a").resize(**wrong)
    plain = WorkQueue("h-plain", 1)
    await h.engine(queues=[plain])
    with pytest.raises(InvalidArgument, match="is not partitioned"):
        await engine.queue("h-plain").partition("a").resize(concurrency=1)


@on_every_store
async def test_waiting_runs_in_pages(h):
    queue = WorkQueue("h-waiting", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "w0", "w1", "w2", "w3", "w4")
    await h.settle()
    handle = engine.queue("h-waiting")
    first = await handle.waiting(limit=3)
    assert [(each.run_id, each.position) for each in first] == [("w1", 1), ("w2", 2), ("w3", 3)]
    assert [each.run_id for each in await handle.waiting(after=first[-1].cursor)] == ["w4"]
    for wrong in ("x", "1/2", 3):
        with pytest.raises(InvalidArgument, match="after must be the cursor"):
            await handle.waiting(after=wrong)


@on_every_store
async def test_move_changes_the_order(h):
    queue = WorkQueue("h-move", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "m0", "m1", "m2")
    await h.settle()
    handle = engine.queue("h-move")
    await handle.move("m2", priority=-10)
    assert [each.run_id for each in await handle.waiting()] == ["m2", "m1"]
    with pytest.raises(InvalidArgument, match="'m0' does not wait in queue 'h-move'"):
        await handle.move("m0", priority=5)
    with pytest.raises(InvalidArgument, match="at most 100"):
        await handle.move("m1", priority=1000)


@on_every_store
async def test_release_gives_up_a_slot_or_lets_a_waiting_run_begin(h):
    queue = WorkQueue("h-release", 1)
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, queue, "e0", "e1", "e2")
    await h.settle()
    handle = engine.queue("h-release")
    await handle.release("e2")
    await h.settle()
    assert await runs[2].status() is RunStatus.SUSPENDED
    assert [each.run_id for each in await handle.waiting()] == ["e1"]
    await handle.release("e0")
    await h.settle()
    assert await handle.waiting() == []
    with pytest.raises(InvalidArgument, match="has no place or slot"):
        await handle.release("e0")
    for run in runs:
        await run.send("go", "x")
        assert await h.run_to_end(run) == "x"
    assert (await handle.describe()).held == 0


@on_every_store
async def test_clear_cancels_waiting_runs(h):
    queue = WorkQueue("h-clear", 1, partition_key=lambda item: item[0])
    engine = await h.engine(queues=[queue])
    runs = await start_all(engine, queue, "a1", "a2", "b1", "b2")
    await h.settle()
    handle = engine.queue("h-clear")
    assert await handle.clear("b") == 2
    assert await handle.clear() == 1
    assert [await run.status() for run in runs] == [RunStatus.SUSPENDED, *[RunStatus.CANCELLED] * 3]
    assert await handle.clear() == 0


@on_every_store
async def test_reason_names_what_the_oldest_slot_waits_for(h):
    queue = WorkQueue("h-reason", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "first", "second", "third")
    await h.settle()
    await h.clock.advance(3 * 3600.0)
    reason = await reason_of(engine, "third")
    assert (reason.kind, reason.queue, reason.ahead, reason.held, reason.limit) == ("queue", "h-reason", 1, 1, 1)
    assert reason.limited_by == "concurrency"
    assert str(reason) == (
        "waits for a slot of queue h-reason: 1 of 1 held, 1 before it; "
        "oldest slot: first, suspended on event go since 3 h"
    )
    polled = await engine.describe("third")
    assert (polled.queue, polled.partition, polled.priority) == ("h-reason", "", 0)


@on_every_store
async def test_reason_of_a_rate_names_the_time(h):
    queue = WorkQueue("h-rate-reason", rate=Rate(1, per=timedelta(minutes=1)))
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "first", "second")
    await h.settle()
    reason = await reason_of(engine, "second")
    assert reason.limited_by == "rate"
    assert reason.next_at is not None
    assert 60.0 <= reason.next_at.timestamp() - h.clock.now() <= 62.0


@on_every_store
async def test_reason_of_a_delayed_run(h):
    queue = WorkQueue("h-delay-reason")
    engine = await h.engine(queues=[queue])
    await engine.start(waiter, "x", queue=queue, id="x", delay=60.0)
    reason = await reason_of(engine, "x")
    assert reason.limited_by == "delay"
    assert "waits for its time in queue h-delay-reason" in str(reason)


@on_every_store
async def test_reason_of_a_paused_run_in_a_queue(h):
    queue = WorkQueue("h-held-reason", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "first", "second")
    await engine.pause("second")
    kinds = [reason.kind for reason in (await engine.describe("second")).waiting_for]
    assert kinds == ["held", "queue"]


# --- health check --------------------------------------------------------------------------------------------------


@on_every_store
async def test_waiting_runs_are_healthy(h):
    queue = WorkQueue("h-healthy", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "x", "y")
    await h.settle()
    report = await check_health(engine)
    assert report.findings == ()
    assert report.progress_reasons == {"queue": 1, "event": 1}


@on_every_store
async def test_queue_whose_slots_are_those_of_held_runs_is_a_finding(h):
    queue = WorkQueue("h-stalled", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "x", "y")
    await h.settle()
    await engine.pause("x")
    await h.settle()
    findings = {each.kind: each for each in (await check_health(engine)).findings}
    assert "all 1 slots are those of held runs (x)" in findings["stalled_queue"].text
    assert "perdure queues release h-stalled x" in findings["stalled_queue"].advice


@on_every_store
async def test_queue_that_no_live_worker_declares_is_a_finding(h):
    queue = WorkQueue("h-undeclared", 1)
    engine = await h.engine(queues=[queue])
    await start_all(engine, queue, "x", "y")
    await h.settle()
    assert (await check_health(engine)).findings == ()
    await h.crash(engine)
    await h.clock.advance(300.0)
    second = await h.engine(queues=[])
    await h.clock.advance(60.0)
    kinds = [each.kind for each in (await check_health(second)).findings]
    assert kinds == ["undeclared_queue"]


@on_every_store
async def test_run_that_waits_for_the_slot_of_its_ancestor_is_a_finding(h):
    queue = WorkQueue("h-cycle")

    @workflow(name="queues.cycle")
    async def cycle(ctx: Context) -> str:
        return await ctx.run_child(waiter, "x", queue=queue)

    engine = await h.engine(waiter, cycle, queues=[queue])
    await engine.queue("h-cycle").pause()
    run = await engine.start(cycle, queue=queue)
    await engine.queue("h-cycle").release(run.id)
    await h.settle()
    await engine.queue("h-cycle").resize(concurrency=1)
    findings = {each.kind: each for each in (await check_health(engine)).findings}
    assert "its own ancestor" in findings["queue_cycle"].text
